"""How many requests at a time and tokens a step an engine takes by default, so that nobody tunes them.

Takes the cache and the model that there are; gives two numbers. Neither can make an engine run out: pages are asked for
at admission, and a step's activations are kept to a share of the free memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pagedkv.cache import PagedKVCache

if TYPE_CHECKING:
    import torch

    from pagedkv.backend import CacheBackend

MOST_BATCH: Final = 256
MOST_STEP_TOKENS: Final = 1024
LEAST_BATCH: Final = 8  # of a pool that has a page for each: samples and beams of one request must get in
BASELINE_BATCH: Final = 32
TOKENS_EACH: Final = 64  # a pool with less for each than this would only preempt
ACTIVATION_SHARE: Final = 8  # a step takes at most an eighth of what is free


def default_max_batch(backend: CacheBackend, max_step_tokens: int | None) -> int:
    """Return the most requests at a time: 64 tokens of pages each, 8 to 256; 32 for caches without pages.

    Never more than the cache's own ``max_batch``, or than ``max_step_tokens`` where that is given.
    """
    wanted = BASELINE_BATCH
    if isinstance(backend, PagedKVCache):
        allocator = backend.allocator
        blocks = (allocator.num_pages - 1) // len(allocator.groups)
        wanted = min(MOST_BATCH, blocks, max(LEAST_BATCH, blocks * backend.page_size // TOKENS_EACH))
    bounds = [wanted, getattr(backend, "max_batch", None), max_step_tokens]
    return max(1, min(bound for bound in bounds if bound is not None))


def default_max_step_tokens(config: Any, dtype: torch.dtype, free: int, max_batch: int) -> int:
    """Return the token budget of a step: 1,024, or what an eighth of ``free`` bytes bears; at least ``max_batch``."""
    return max(max_batch, min(MOST_STEP_TOKENS, free // ACTIVATION_SHARE // activation_bytes(config, dtype)))


def activation_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return about what one token of a step takes beside the cache: a layer's residual, norms, Q, K, V and MLP."""
    text = config.get_text_config(decoder=True)
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    return int(6 * hidden + 3 * inner) * dtype.itemsize

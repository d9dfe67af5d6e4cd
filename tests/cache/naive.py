"""A naive cache to hold the real one against: K and V are a function of a sequence's tokens, attention is dense."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.spec import KVSpec, LayerKV

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pagedkv.cache import PagedKVCache

NUM_Q_HEADS = 4
NUM_KV_HEADS = 2
K_DIM = 8
V_DIM = 6
NUM_LAYERS = 2
SHAPE = LayerKV(NUM_KV_HEADS, K_DIM, V_DIM)


def tiny_spec(*, window: int | None = None, max_len: int = 64) -> KVSpec:
    """Return two small layers, the second with ``window``."""
    layers = tuple(
        LayerKV(num_kv_heads=NUM_KV_HEADS, k_dim=K_DIM, v_dim=V_DIM, window=window if index else None)
        for index in range(NUM_LAYERS)
    )
    return KVSpec(layers=layers, max_len=max_len, vocab_size=16)


def poisoned(cache: PagedKVCache) -> PagedKVCache:
    """Fill every page with NaN (the largest number, where there is none), so that reading before writing shows."""
    for tensor in cache.page_tensors:
        tensor.fill_(math.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max)
    return cache


def poison_free(cache: PagedKVCache) -> None:
    """Fill every free page with NaN: nothing may read a page that nobody has."""
    free = cache.allocator.ledger.pool.free_pages.tolist()
    for tensor in cache.page_tensors:
        tensor[[0, *free]] = math.nan


def _features(tokens: Sequence[int], layer: int, salt: int, heads: int, dim: int) -> torch.Tensor:
    """Return ``[len(tokens), heads, dim]``: each row depends on all tokens up to its own."""
    rows = []
    state = 17 + salt
    wave = torch.arange(1, heads * dim + 1, dtype=torch.float64)
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
        rows.append(torch.sin(wave * (state % 997 + 1) * (0.37 + layer)).reshape(heads, dim))
    return torch.stack(rows).to(torch.float32) if rows else torch.empty(0, heads, dim)


def k_of(tokens: Sequence[int], layer: int, shape: LayerKV = SHAPE) -> torch.Tensor:
    """Return the K of a sequence, ``[len(tokens), num_kv_heads, k_dim]``."""
    return _features(tokens, layer, 0, shape.num_kv_heads, shape.k_dim)


def v_of(tokens: Sequence[int], layer: int, shape: LayerKV = SHAPE) -> torch.Tensor:
    """Return the V of a sequence, ``[len(tokens), num_kv_heads, v_dim]``."""
    return _features(tokens, layer, 1, shape.num_kv_heads, shape.v_dim)


def q_of(tokens: Sequence[int], layer: int, shape: LayerKV = SHAPE) -> torch.Tensor:
    """Return the queries of a sequence, ``[len(tokens), NUM_Q_HEADS, k_dim]``."""
    return _features(tokens, layer, 2, NUM_Q_HEADS, shape.k_dim)


def dense_attention(tokens: Sequence[int], layer: int, num_new: int, shape: LayerKV = SHAPE) -> torch.Tensor:
    """Return what the last ``num_new`` tokens attend to, ``[num_new, NUM_Q_HEADS, v_dim]``, in float64."""
    q = q_of(tokens, layer, shape).double()[len(tokens) - num_new :]
    group = NUM_Q_HEADS // shape.num_kv_heads
    k = k_of(tokens, layer, shape).double().repeat_interleave(group, dim=1)
    v = v_of(tokens, layer, shape).double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.k_dim**-0.5
    positions = torch.arange(len(tokens))
    distance = positions[len(tokens) - num_new :, None] - positions[None, :]
    visible = distance >= 0
    if shape.window is not None:
        visible &= (distance < shape.window) | (positions < shape.num_sink_tokens)
    scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def run_step(
    cache: PagedKVCache,
    rows: Mapping[Any, list[int]],
    histories: Mapping[Any, list[int]],
    *,
    counted: bool = False,
    tolerance: float = 2e-6,
) -> Any:
    """Begin a step with ``rows`` of new tokens, write and attend every layer, and hold the outputs against dense.

    ``histories[seq]`` are the tokens stored before; with ``counted`` the step is told how many tokens come, not which.
    Returns the batch, still in flight.
    """
    batch = cache.begin_step({seq: len(new) for seq, new in rows.items()} if counted else rows)
    whole = [histories[seq] + new for seq, new in rows.items()]
    new_lens = [len(new) for new in rows.values()]
    for layer, shape in enumerate(cache.spec.layers):
        if not shape.num_kv_heads:
            continue

        def last(of: Callable[..., torch.Tensor], layer: int = layer, shape: LayerKV = shape) -> torch.Tensor:
            return torch.cat([of(t, layer, shape)[len(t) - n :] for t, n in zip(whole, new_lens, strict=True)])

        cache.write(layer, last(k_of), last(v_of), batch)
        out = cache.attend(layer, last(q_of), batch)
        expected = torch.cat([dense_attention(t, layer, n, shape) for t, n in zip(whole, new_lens, strict=True)])
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=10 * tolerance)
    return batch

"""Shared by the tests of `PagedCache`: prompts, and `generate` on the stock cache and on ours side by side."""

from __future__ import annotations

from typing import Any

import torch

from pagedkv import PagedCache
from tests.tiny_models import VOCAB

NEW_TOKENS = 12


def prompts(num_rows: int = 3, columns: int = 14, *, seed: int = 0) -> torch.Tensor:
    """Return random prompts ``[num_rows, columns]`` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (num_rows, columns), generator=generator)


def left_padded(num_rows: int = 3, columns: int = 14, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return prompts of different lengths, padded on the left, with their mask."""
    ids = prompts(num_rows, columns, seed=seed)
    mask = torch.ones_like(ids)
    for row in range(1, num_rows):
        mask[row, : (5 * row) % (columns - 2)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def paged(model: Any, **options: Any) -> PagedCache:
    """Return a cache with small pages, whose tables are verified at every call."""
    return PagedCache(model, **{"num_pages": 300, "page_size": 4, "check": True, **options})


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """Run ``model.generate`` greedily unless told otherwise, never stopping early, from a fixed seed."""
    torch.manual_seed(0)
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**inputs, **{**defaults, **options})


def both(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Return what ``generate`` gives on the stock cache and on a paged one; the books are proved afterwards."""
    expected = generate(model, inputs, **options)
    before = implementations(model)
    with paged(model) as cache:
        got = generate(model, inputs, past_key_values=cache, **options)
        cache.store.allocator.check()
        cache.reset()
        assert (0, 0) == (cache.usage().tokens_stored, cache.usage().in_use)
    assert before == implementations(model)
    return expected, got


def implementations(model: Any) -> list[str]:
    """Return the attention implementation that each module's config names."""
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]

"""How many bytes K and V take, and what to keep of them: exact numbers, thresholds, and doors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import pagedkv
from pagedkv.cache import PagedKVCache
from pagedkv.strategy import choose_strategy, estimate_kv_bytes, strategy_for
from tests.tiny_models import WINDOW, tiny_config

GIB = 2**30


def test_the_guides_example_is_16_gib() -> None:
    """LLaMA-7B, 32 layers of 32 heads of 128, 8 texts of 4,096 tokens in fp16."""
    assert estimate_kv_bytes(LlamaConfig(), 8, 4096, torch.float16) == 16 * GIB
    assert pagedkv.estimate_kv_bytes is estimate_kv_bytes
    assert pagedkv.choose_strategy is choose_strategy


@pytest.mark.parametrize(
    ("name", "changes", "length", "dtype", "expected"),
    [
        # layers x KV heads x tokens x (K + V) x bytes
        ("llama", {}, 10, torch.float32, 2 * 2 * 10 * 16 * 4),
        ("llama_mha", {}, 10, torch.bfloat16, 2 * 4 * 10 * 16 * 2),
        ("qwen3", {}, 10, torch.float16, 2 * 2 * 10 * 32 * 2),
        ("mistral", {}, 100, torch.float32, 2 * 2 * WINDOW * 16 * 4),
        ("mistral", {}, 3, torch.float32, 2 * 2 * 3 * 16 * 4),
        ("gemma3", {}, 100, torch.float32, (5 * WINDOW + 100) * 2 * 16 * 4),
        ("llama", {}, 10, "int8", 2 * 2 * 10 * (16 + 8)),
        ("llama", {}, 10, "fp8_e4m3", 2 * 2 * 10 * (16 + 8)),
    ],
)
def test_estimates_are_exact(name: str, changes: dict[str, Any], length: int, dtype: Any, expected: int) -> None:
    """KV heads and not query heads, the model's own head_dim, windows, and the scales of quantised K and V."""
    assert estimate_kv_bytes(tiny_config(name, **changes), 3, length, dtype) == 3 * expected


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_an_estimate_is_what_the_cache_holds(kv_dtype: str | None) -> None:
    """For texts that fill their pages the estimate is the bytes that the paged cache says it holds."""
    config = tiny_config("llama")
    cache = PagedKVCache.from_config(config, num_pages=20, page_size=4, kv_dtype=kv_dtype)
    sequences = {cache.open([row] * 16): [row] * 16 for row in range(3)}
    cache.end_step(cache.begin_step(sequences))

    assert cache.usage().bytes_held == estimate_kv_bytes(config, 3, 16, kv_dtype or torch.float32)


@pytest.mark.parametrize(
    ("kv_bytes", "expected"),
    [(1, "full"), (499, "full"), (500, "sliding"), (799, "sliding"), (800, "recompute"), (5000, "recompute")],
)
def test_thresholds(kv_bytes: int, expected: str) -> None:
    """Full under 50 % of the limit, sliding under 80 %, else recompute: both bounds belong to the next one."""
    assert strategy_for(kv_bytes, 1000) == expected


@pytest.mark.parametrize(
    ("memory", "expected"), [("33GiB", "full"), ("32GiB", "sliding"), ("21GiB", "sliding"), ("20GiB", "recompute")]
)
def test_the_choice_for_the_guides_example(memory: str, expected: str) -> None:
    """16 GiB in 33, 32, 21 and 20."""
    assert choose_strategy(LlamaConfig(), 8, 4096, torch.float16, memory) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 1, torch.float16), ValueError, "batch_size must be at least 1, was 0"),
        ((1, 0, torch.float16), ValueError, "seq_len must be at least 1, was 0"),
        ((1, True, torch.float16), TypeError, "seq_len"),
        ((1, 1, "int4"), ValueError, "dtype must be a torch.dtype or one of .*, was 'int4'"),
        ((1, 1, torch.int8), TypeError, "dtype must be a floating point"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    """Each is named with what it must be and what it was."""
    with pytest.raises(error, match=message):
        estimate_kv_bytes(tiny_config("llama"), *arguments)

"""Captured decode steps, as far as a CPU allows: the same memory every time, padded shapes, the eager answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.cache import PagedKVCache
from pagedkv.transformers import ModelRunner
from pagedkv.transformers.graphs import DecodeGraphs, PaddingBackend, padded_rows
from tests.tiny_models import tiny

if TYPE_CHECKING:
    from collections.abc import Callable


class Recorder:
    """Stands for a CUDA graph: computes again what was captured, and notes the memory it reads."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Capture ``step``."""
        self.captured += 1
        step()
        return step


def build() -> tuple[PagedKVCache, ModelRunner, DecodeGraphs, Recorder]:
    """Return a cache, an eager runner on it and its graphs."""
    model = tiny("llama")
    cache = PagedKVCache.from_config(model.config, num_pages=64, page_size=4, max_batch=16, max_len=64, check=True)
    runner = ModelRunner(model, cache)
    recorder = Recorder()
    return cache, runner, DecodeGraphs(runner._forward, cache, runner.layer_specs, recorder), recorder


def decode(cache: PagedKVCache, run: Any, sequences: list[Any], tokens: list[int]) -> torch.Tensor:
    """Run one decode step and take it back, so that it can be run again another way."""
    batch = cache.begin_step({sequence: [token] for sequence, token in zip(sequences, tokens, strict=True)})
    logits: torch.Tensor = run(batch)
    cache.abandon_step(batch)
    return logits


def prefilled(cache: PagedKVCache, runner: ModelRunner, lengths: list[int]) -> list[Any]:
    """Return sequences of so many stored tokens."""
    prompts = [[(7 * row + i) % 90 + 1 for i in range(length)] for row, length in enumerate(lengths)]
    sequences = [cache.open(prompt) for prompt in prompts]
    batch = cache.begin_step(dict(zip(sequences, prompts, strict=True)))
    runner.forward(batch)
    cache.end_step(batch)
    return sequences


def test_padded_steps_give_the_eager_logits() -> None:
    """Batches of several sizes, grown and shrunk, through one captured step each: the logits of the step as it is."""
    cache, runner, graphs, recorder = build()
    sequences = prefilled(cache, runner, [3, 9, 17, 4, 30])
    for count in (3, 5, 4, 1, 3):
        tokens = [11 + count + i for i in range(count)]
        expected = decode(cache, runner.forward, sequences[:count], tokens)
        actual = decode(cache, graphs.run, sequences[:count], tokens)

        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    # 3 and 4 share the step of 4 rows, 5 takes that of 8, 1 its own.
    assert recorder.captured == 3


def test_addresses_stay_and_padding_is_null() -> None:
    """Every tensor that a captured step reads is where it was; rows past the batch are empty and name the null page."""
    cache, runner, _, _ = build()
    sequences = prefilled(cache, runner, [3, 9, 17])
    seen = []
    for count in (3, 2):
        batch = cache.begin_step({sequence: [5] for sequence in sequences[:count]})
        padded = cache.pad_step(batch, 4)
        attention = padded.attention
        tensors = [
            padded.input_ids, padded.position_ids, padded.last_rows, padded.slot_mapping,
            attention.block_tables, attention.kv_lens, attention.cu_q_lens,
        ]  # fmt: skip
        seen.append([(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors])

        assert attention.max_kv_len == 64
        assert attention.kv_lens.tolist() == [4, 10, 18, 0][:count] + [0] * (4 - count)
        assert (attention.block_tables[count:] == 0).all()
        assert (padded.slot_mapping[count:] == 0).all()
        assert padded.slot_mapping[:count].tolist() == batch.slot_mapping.tolist()
        q = torch.randn(4, 4, cache.spec.layers[0].k_dim)
        kv = torch.randn(4, cache.spec.layers[0].num_kv_heads, cache.spec.layers[0].k_dim)
        cache.write(0, kv, kv, padded)
        assert (cache.attend(0, q, padded)[count:] == 0).all()
        cache.abandon_step(batch)
        with pytest.raises(RuntimeError, match="batch must be the step in flight"):
            cache.attend(0, q, padded)
    assert seen[0] == seen[1]


def test_only_pure_decode_is_served() -> None:
    """A step with a chunk in it, and one of too many sequences, run as they are."""
    cache, runner, graphs, _ = build()
    (sequence,) = prefilled(cache, runner, [6])
    mixed = cache.begin_step({sequence: [5], cache.open([81, 82, 83]): [81, 82, 83]})
    assert not graphs.serves(mixed)
    with pytest.raises(ValueError, match=r"step must bring one token for each of at most 4 sequences, brings \[1, 3\]"):
        cache.pad_step(mixed, 4)
    cache.abandon_step(mixed)
    batch = cache.begin_step({sequence: [5]})
    assert graphs.serves(batch)
    batch.q_lens = [1] * 257
    assert not graphs.serves(batch)


def test_rows_are_padded_little() -> None:
    """At most twice the rows for few, at most seven more for many; larger steps never to fewer rows."""
    padded = [padded_rows(rows) for rows in range(1, 257)]
    assert padded == sorted(padded)
    for rows, to in enumerate(padded, start=1):
        assert rows <= to <= max(2 * rows - 1, rows + 7)
    assert len(set(padded)) == 35


def test_graphs_need_a_gpu_and_a_backend_that_pads() -> None:
    """On a CPU the runner has none, and says so when they are asked for."""
    model = tiny("llama")
    cache = PagedKVCache.from_config(model.config, num_pages=64, page_size=4, max_batch=16, max_len=64)
    assert isinstance(cache, PaddingBackend)
    assert ModelRunner(model, cache)._graphs is None
    with pytest.raises(ValueError, match="cuda_graphs must be None or False here, was True: the model is on cpu"):
        ModelRunner(model, cache, cuda_graphs=True)


def test_a_model_that_cannot_be_captured_says_what_to_do() -> None:
    """A capture that fails is told, never run around."""
    cache, runner, _, _ = build()

    def failing(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(runner._forward, cache, runner.layer_specs, failing)
    (sequence,) = prefilled(cache, runner, [6])
    batch = cache.begin_step({sequence: [5]})
    with pytest.raises(RuntimeError, match="use cuda_graphs=False: operation not permitted"):
        graphs.run(batch)

"""Captured decode steps, as far as a CPU allows: the same memory every time, padded shapes, the eager answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.cache import PagedKVCache
from pagedkv.spec import KVSpec
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


def build(name: str = "llama") -> tuple[PagedKVCache, ModelRunner, DecodeGraphs, Recorder]:
    """Return a cache, an eager runner on it and its graphs."""
    model = tiny(name)
    cache = PagedKVCache.from_config(model.config, num_pages=256, page_size=4, max_batch=16, max_len=64, check=True)
    runner = ModelRunner(model, cache)
    recorder = Recorder()
    return cache, runner, DecodeGraphs(runner._forward, cache, runner._routes, recorder), recorder


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


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_padded_steps_give_the_eager_logits(name: str) -> None:
    """Batches of several sizes, grown and shrunk, through one captured step each: the logits of the step as it is.

    The second model has several layer groups, whose windows have given pages back.
    """
    cache, runner, graphs, recorder = build(name)
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
    cache, runner, _, _ = build("gemma3")
    sequences = prefilled(cache, runner, [3, 9, 17])
    seen = []
    assert len(cache.allocator.groups) > 1
    for count in (3, 2):
        batch = cache.begin_step({sequence: [5] for sequence in sequences[:count]})
        padded = cache.pad_step(batch, 4)
        tensors = [padded.input_ids, padded.position_ids, padded.last_rows]
        for home, step in padded.groups.items():
            attention = step.attention
            tensors += [step.slot_mapping, attention.block_tables, attention.kv_lens, attention.cu_q_lens]

            assert attention.max_kv_len == 64
            assert attention.kv_lens.tolist() == [4, 10, 18, 0][:count] + [0] * (4 - count)
            assert (attention.block_tables[count:] == 0).all()
            assert (step.slot_mapping[count:] == 0).all()
            assert step.slot_mapping[:count].tolist() == batch.groups[home].slot_mapping.tolist()
        seen.append([(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors])
        q = torch.randn(4, 4, cache.spec.layers[0].k_dim)
        kv = torch.randn(4, cache.spec.layers[0].num_kv_heads, cache.spec.layers[0].k_dim)
        cache.write(0, kv, kv, padded)
        assert (cache.attend(0, q, padded)[count:] == 0).all()
        cache.abandon_step(batch)
        with pytest.raises(RuntimeError, match="batch must be the step in flight"):
            cache.attend(0, q, padded)
    assert seen[0] == seen[1]


def test_only_pure_decode_is_served() -> None:
    """A step with a chunk in it, one of tokens without ids, and one of too many sequences, run as they are."""
    cache, runner, graphs, _ = build()
    (sequence,) = prefilled(cache, runner, [6])
    mixed = cache.begin_step({sequence: [5], cache.open([81, 82, 83]): [81, 82, 83]})
    assert not graphs.serves(mixed)
    with pytest.raises(ValueError, match=r"step must bring one token, .* at most 4 sequences, brings \[1, 3\]"):
        cache.pad_step(mixed, 4)
    cache.abandon_step(mixed)
    nameless = cache.begin_step({sequence: 1})
    assert not graphs.serves(nameless)
    with pytest.raises(ValueError, match=r"step must bring one token, .*, brings \[1\] without ids"):
        cache.pad_step(nameless, 4)
    cache.abandon_step(nameless)
    batch = cache.begin_step({sequence: [5]})
    assert graphs.serves(batch)
    batch.q_lens = [1] * 257
    assert not graphs.serves(batch)


def test_layers_on_several_devices_are_not_padded() -> None:
    """Where layers live on more than one device no step is served, and padding is refused by name."""
    cache = PagedKVCache(
        KVSpec.from_config(tiny("llama").config), num_pages=8, max_batch=2, max_len=64, device_map={0: "cpu", 1: "meta"}
    )
    batch = cache.begin_step({cache.open([5]): [5]})

    assert not cache.can_pad(batch)
    with pytest.raises(ValueError, match="step must have its layers on one device to be padded"):
        cache.pad_step(batch, 2)


def test_a_runner_with_graphs_replays_decode_and_picks_the_rows_asked_for() -> None:
    """The runner hands decode to its graphs, and everything else to the model; ``rows`` choose among the logits."""
    cache, runner, graphs, recorder = build()
    sequences = prefilled(cache, runner, [3, 9, 17])
    whole = decode(cache, runner.forward, sequences, [5, 6, 7])
    runner._graphs = graphs
    some = decode(cache, lambda batch: runner.forward(batch, torch.tensor([2, 0])), sequences, [5, 6, 7])

    assert recorder.captured == 1
    torch.testing.assert_close(some, whole[[2, 0]], rtol=0, atol=1e-5)
    prefilled(cache, runner, [4])
    assert recorder.captured == 1


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

    graphs = DecodeGraphs(runner._forward, cache, runner._routes, failing)
    (sequence,) = prefilled(cache, runner, [6])
    batch = cache.begin_step({sequence: [5]})
    with pytest.raises(RuntimeError, match="use cuda_graphs=False: operation not permitted"):
        graphs.run(batch)

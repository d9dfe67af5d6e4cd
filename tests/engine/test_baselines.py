"""The baselines answer as the model alone does, keep their books, and refuse misuse before anything changes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.allocator import OutOfPages, SequenceClosed
from pagedkv.attention import LayerSpec
from pagedkv.engine.baselines import BASELINES, ConcatCache, NoCache, StaticCache
from pagedkv.engine.baselines.dense import attend_decode, attend_row, pad
from pagedkv.spec import KVSpec, LayerKV
from pagedkv.transformers import ModelRunner
from tests.engine.ragged import PROMPTS, SCHEDULE, prompts, run_schedule
from tests.tiny_models import SUPPORTED, stock_greedy, tiny

if TYPE_CHECKING:
    from collections.abc import Sequence

SPEC = KVSpec(layers=(LayerKV(2, 4, 6), LayerKV(2, 4, 6, window=3)), max_len=16, vocab_size=9)


def make(name: str, spec: KVSpec = SPEC, **options: Any) -> Any:
    """Return the baseline ``name``, its slabs short."""
    if name == "static":
        options = {"max_batch": 4, "max_len": 20, **options}
    return BASELINES[name](spec, **options)


def feed(cache: Any, inputs: dict[Any, int], *, value: float = 1.0, **end: Any) -> None:
    """Run a step of constant K and V: ``inputs[sequence]`` new tokens each."""
    batch = cache.begin_step({sequence: [1] * count for sequence, count in inputs.items()})
    total = sum(inputs.values())
    for layer, kv in enumerate(cache.spec.layers):
        k = torch.full((total, kv.num_kv_heads, kv.k_dim), value)
        v = torch.full((total, kv.num_kv_heads, kv.v_dim), value)
        cache.write(layer, k, v, batch)
        cache.attend(layer, torch.zeros(total, 4, kv.k_dim), batch)
    cache.end_step(batch, **end)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("model_name", SUPPORTED)
def test_ragged_steps_equal_the_model_alone(model_name: str, name: str) -> None:
    """Prompts whole and in chunks, joining while others decode, get the logits and tokens of single stock runs."""
    model = tiny(model_name)
    backend = make(name, KVSpec.from_config(model.config))
    texts, error = run_schedule(ModelRunner(model, backend), backend)

    expected = [
        text + stock_greedy(model, text, len(full) - len(text)) for text, full in zip(prompts(), texts, strict=True)
    ]
    assert expected == texts
    assert error < 2e-4
    assert backend.usage().in_use == 0


@pytest.mark.parametrize("name", ["concat", "static"])
def test_rolled_back_tokens_leave_no_trace(name: str) -> None:
    """A step abandoned, a step kept in part and a truncation give the same logits as never having happened."""
    model = tiny("llama")
    backend = make(name, KVSpec.from_config(model.config))
    runner = ModelRunner(model, backend)
    text = prompts()[0]
    sequence, other = backend.open(text), backend.open(text)

    runner.forward(abandoned := backend.begin_step({sequence: text[:4]}))
    backend.abandon_step(abandoned)
    assert sequence.num_tokens == 0
    runner.forward(batch := backend.begin_step({sequence: [*text[:5], 9, 9, 9], other: text[:3]}))
    backend.end_step(batch, keep={sequence: 5})
    assert (sequence.num_tokens, other.num_tokens) == (5, 3)
    runner.forward(batch := backend.begin_step({sequence: [8, 8, 8], other: text[3:8]}))
    backend.end_step(batch)
    sequence.truncate(5)
    logits = runner.forward(batch := backend.begin_step({sequence: text[5:], other: [text[8]]}))
    backend.end_step(batch)

    alone = ConcatCache(backend.spec)
    alone_runner = ModelRunner(model, alone)
    expected = [alone_runner.forward(alone.begin_step({alone.open(text): text}))]
    alone = ConcatCache(backend.spec)
    alone_runner = ModelRunner(model, alone)
    expected.append(alone_runner.forward(alone.begin_step({alone.open(text): text[:9]})))
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["concat", "static"])
def test_fork_goes_its_own_way(name: str) -> None:
    """A fork sees what was stored; what either then appends, the other never sees."""
    model = tiny("qwen2")
    backend = make(name, KVSpec.from_config(model.config))
    runner = ModelRunner(model, backend)
    text = prompts()[0]
    first = backend.open(text)
    runner.forward(batch := backend.begin_step({first: text}))
    backend.end_step(batch)
    second = first.fork()
    runner.forward(batch := backend.begin_step({first: [5], second: [6]}))
    backend.end_step(batch)
    logits = runner.forward(backend.begin_step({second: [7], first: [7]}))

    alone = NoCache(backend.spec)
    alone_runner = ModelRunner(model, alone)
    inputs = {alone.open([]): [*text, 6, 7], alone.open([]): [*text, 5, 7]}
    torch.testing.assert_close(logits, alone_runner.forward(alone.begin_step(inputs)), atol=1e-4, rtol=0)


def test_concat_counts_shared_tensors_once_and_keeps_its_budget() -> None:
    """Forks count once until they grow; a step beyond ``max_tokens`` is refused whole, with both numbers."""
    cache = make("concat", max_tokens=10)
    first = cache.open([1])
    feed(cache, {first: 4})
    second = first.fork()
    token_bytes = 2 * 2 * (4 + 6) * 4
    assert cache.usage() == (4, 4, 4 * token_bytes, 4 * token_bytes, 1)
    assert second.room(1) == (5, 6)
    assert cache.room([1, 2], growth=3) == (5, 6)
    feed(cache, {second: 1})
    assert cache.usage()[:2] == (9, 9)
    with pytest.raises(OutOfPages, match=r"2 .*1 ") as caught:
        cache.begin_step({first: [1], second: [1]})
    assert (caught.value.needed, caught.value.available) == (2, 1)
    assert cache.usage()[:2] == (9, 9)
    feed(cache, {first: 1})
    second.close()
    first.close()
    assert cache.usage() == (0, 0, 0, 0, 0)


def test_static_holds_whole_slabs_and_gives_them_back() -> None:
    """A slab is held from the first step to the close; with none free a step is refused whole."""
    cache = make("static", max_batch=2, max_len=8)
    first, second, third = cache.open([1]), cache.open([1]), cache.open([1])
    token_bytes = 2 * 2 * (4 + 6) * 4
    assert cache.room([1] * 3, growth=2) == (8, 16)
    feed(cache, {first: 3})
    assert cache.usage() == (3, 8, 3 * token_bytes, 8 * token_bytes, 1)
    with pytest.raises(OutOfPages):
        cache.begin_step({second: [1], third: [1]})
    assert cache.usage().in_use == 1
    feed(cache, {second: 1, first: 5})
    assert not third.room(1).fits
    with pytest.raises(OutOfPages):
        first.fork()
    with pytest.raises(OutOfPages):
        cache.begin_step({first: [1]})
    first.close()
    feed(cache, {third: 2})
    assert cache.usage().in_use == 2
    assert not cache.room([1] * 9).fits


def test_none_stores_nothing_between_steps() -> None:
    """`num_tokens` stays 0, nothing is held, everything fits, and the engine can tell that it must feed it all."""
    cache = make("none")
    sequence = cache.open([1, 2])
    feed(cache, {sequence: 2})
    assert (sequence.num_tokens, sequence.num_cached_tokens) == (0, 0)
    assert cache.usage() == (0, 0, 0, 0, 0)
    assert cache.room([1] * 1000).fits
    assert sequence.room(1000).fits
    assert [make(name).keeps_tokens for name in ("none", "concat", "static")] == [False, True, True]
    sequence.fork().close()


def test_static_never_passes_on_a_nan() -> None:
    """What a closed or truncated sequence left in a slab, even NaN, reaches nobody (fault 21: 0 times NaN)."""
    cache = make("static", max_batch=2, max_len=8)
    bad, good = cache.open([1]), cache.open([1])
    feed(cache, {bad: 6}, value=float("nan"))
    feed(cache, {good: 5})
    bad.close()
    fresh = cache.open([1])
    batch = cache.begin_step({fresh: [1], good: [1]})
    cache.write(0, torch.ones(2, 2, 4), torch.ones(2, 2, 6), batch)
    out = cache.attend(0, torch.zeros(2, 4, 4), batch)
    torch.testing.assert_close(out, torch.ones(2, 4, 6))


@pytest.mark.parametrize("name", BASELINES)
def test_misuse_is_refused_and_changes_nothing(name: str) -> None:
    """Empty steps, steps in flight, ended batches, closed handles, bad lengths and ALiBi raise by name."""
    cache = make(name)
    sequence = cache.open([1])
    with pytest.raises(ValueError, match="inputs must hold"):
        cache.begin_step({})
    with pytest.raises(ValueError, match="inputs must hold"):
        cache.begin_step({sequence: []})
    batch = cache.begin_step({sequence: [1, 2]})
    with pytest.raises(RuntimeError, match="in flight"):
        cache.begin_step({sequence: [1]})
    for call in (sequence.close, sequence.fork, lambda: sequence.truncate(0), lambda: sequence.room(1)):
        with pytest.raises(RuntimeError, match="in flight"):
            call()
    with pytest.raises(ValueError, match="keep must be 0 to 2"):
        cache.end_step(batch, keep={sequence: 3})
    with pytest.raises(ValueError, match="keep must name"):
        cache.end_step(batch, keep={cache.open([1]): 1})
    cache.abandon_step(batch)
    with pytest.raises(RuntimeError, match="batch must be the step in flight"):
        cache.end_step(batch)
    with pytest.raises(ValueError, match="num_tokens must be 0 to 0, was 1"):
        sequence.truncate(1)
    with pytest.raises(ValueError, match="alibi_slopes"):
        cache.bind_layer(0, LayerSpec(scale=1.0, alibi_slopes=torch.ones(4)))
    sequence.close()
    for call in (sequence.close, sequence.fork, lambda: cache.begin_step({sequence: [1]})):
        with pytest.raises(SequenceClosed):
            call()
    assert cache.usage().in_use == 0


def test_sizes_are_checked() -> None:
    """Budgets that hold nothing are refused by name."""
    with pytest.raises(ValueError, match="max_tokens must be None or at least 1, was 0"):
        ConcatCache(SPEC, max_tokens=0)
    with pytest.raises(ValueError, match="max_batch must be at least 1, was 0"):
        StaticCache(SPEC, max_batch=0)
    with pytest.raises(ValueError, match="max_len must be at least 1, was 0"):
        StaticCache(SPEC, max_len=0)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """Attend one query and head at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group, kv_len = q.shape[1] // k.shape[0], k.shape[1]
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    for i in range(q.shape[0]):
        position = kv_len - q.shape[0] + i
        seen = [
            j
            for j in range(position + 1)
            if spec.window is None or j > position - spec.window or j < spec.num_sink_tokens
        ]
        for head in range(q.shape[1]):
            scores = k[head // group, seen] @ q[i, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            weights = scores.exp()
            total = weights.sum()
            if spec.sink_logits is not None:
                total = total + spec.sink_logits[head].double().exp()
            out[i, head] = (weights / total) @ v[head // group, seen]
    return out


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SPECS = [
    LayerSpec(scale=0.7),
    LayerSpec(scale=0.7, window=1),
    LayerSpec(scale=0.7, window=4),
    LayerSpec(scale=0.7, window=4, num_sink_tokens=2),
    LayerSpec(scale=0.7, softcap=0.8, window=5),
    LayerSpec(scale=0.7, sink_logits=SINKS),
    LayerSpec(scale=0.7, softcap=0.8, sink_logits=SINKS, window=3, num_sink_tokens=1),
]


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (6, 6), (3, 9)])
def test_dense_attention_is_the_formula(spec: LayerSpec, q_len: int, kv_len: int) -> None:
    """A row attends as the formula says: scale, cap, mask, window, sink tokens and sink logits, grouped heads."""
    torch.manual_seed(q_len * 10 + kv_len)
    q, k, v = torch.randn(q_len, 4, 8), torch.randn(2, kv_len, 8), torch.randn(2, kv_len, 6)

    torch.testing.assert_close(reference(q, k, v, spec).float(), attend_row(q, k, v, spec), atol=1e-5, rtol=0)


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
@pytest.mark.parametrize("lengths", [(7, 7), (1, 9, 4)])
def test_padded_decode_is_row_by_row(spec: LayerSpec, lengths: Sequence[int]) -> None:
    """Decode rows padded to the longest attend as each row alone, whatever the batch."""
    torch.manual_seed(len(lengths))
    cache = ConcatCache(KVSpec(layers=(LayerKV(2, 8, 6, spec.window),), max_len=16, vocab_size=9))
    cache.bind_layer(0, spec)
    sequences = [cache.open([1]) for _ in lengths]
    k, v = torch.randn(sum(lengths), 2, 8), torch.randn(sum(lengths), 2, 6)
    batch = cache.begin_step({one: [1] * length for one, length in zip(sequences, lengths, strict=True)})
    cache.write(0, k, v, batch)
    cache.end_step(batch)
    q, new_k, new_v = torch.randn(len(lengths), 4, 8), torch.randn(len(lengths), 2, 8), torch.randn(len(lengths), 2, 6)
    batch = cache.begin_step({one: [1] for one in sequences})
    cache.write(0, new_k, new_v, batch)
    out = cache.attend(0, q, batch)

    expected = []
    for row, length in enumerate(lengths):
        old = slice(sum(lengths[:row]), sum(lengths[:row]) + length)
        all_k = torch.cat([k[old], new_k[row : row + 1]]).transpose(0, 1)
        all_v = torch.cat([v[old], new_v[row : row + 1]]).transpose(0, 1)
        expected.append(reference(q[row : row + 1], all_k, all_v, spec))
    torch.testing.assert_close(torch.cat(expected).float(), out, atol=1e-5, rtol=0)


def test_padding_is_zero_and_masked() -> None:
    """Padding is zeros behind each sequence, and what is masked adds nothing."""
    padded = pad([torch.ones(1, 2, 3), torch.ones(1, 1, 3)], 2)
    assert padded[:, 0, :, 0].tolist() == [[1.0, 1.0], [1.0, 0.0]]
    mask = torch.tensor([[True, True], [True, False]]).view(2, 1, 1, 2)
    out = attend_decode(torch.zeros(2, 1, 3), padded, padded, LayerSpec(scale=1.0), mask)
    assert out[:, 0, 0].tolist() == [1.0, 1.0]


def test_schedule_covers_what_it_says() -> None:
    """The schedule ends past every prompt, has a chunk, and mixes it with decode rows."""
    assert all(end > length for end, length in zip(SCHEDULE[-1], PROMPTS, strict=True))
    steps = list(pairwise(SCHEDULE))
    grown = [[b - a for a, b in zip(before, after, strict=True)] for before, after in steps]
    assert [1, 1, 6] in grown
    assert [1, 1, 7] in grown

"""Swap to host memory: bytes come back as they left, damage is found, and answers never change."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pagedkv.allocator import OutOfPages
from pagedkv.cache import PagedKVCache
from pagedkv.engine import Engine, EngineCore, SamplingParams
from pagedkv.engine.accounting import StepCost
from pagedkv.engine.outputs import EngineStats
from pagedkv.engine.preemption import ASSUMED_RATE, Preemption
from pagedkv.spec import KVSpec, LayerKV
from pagedkv.swap_space import DamagedPage, SwapSpace
from tests.engine.scripted import VOCAB, cold, drain, make_core, tokens_of
from tests.engine.test_on_paged_cache import SPEC, ContentRunner
from tests.tiny_models import tiny

WIDE = KVSpec(
    layers=(LayerKV(2, 4, 6), LayerKV(1, 8, 8), LayerKV(1, 4, 4, window=5, num_sink_tokens=2)),
    max_len=64,
    vocab_size=50,
)


def fill(cache: PagedKVCache, sequence: Any, tokens: list[int], value: float) -> None:
    """Store ``tokens`` with K and V drawn by ``value``."""
    generator = torch.Generator().manual_seed(int(value))
    batch = cache.begin_step({sequence: tokens})
    for layer, kv in enumerate(cache.spec.layers):
        k = torch.randn(len(tokens), kv.num_kv_heads, kv.k_dim, generator=generator)
        v = torch.randn(len(tokens), kv.num_kv_heads, kv.v_dim, generator=generator)
        cache.write(layer, k.to(cache.dtype), v.to(cache.dtype), batch)
    cache.end_step(batch)


def held(cache: PagedKVCache, sequence: Any) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Return by layer and block the raw bytes of all stored slots: K, V and scales."""
    parts: dict[tuple[int, int], list[torch.Tensor]] = {}
    for layer in range(cache.spec.num_layers):
        table = torch.from_numpy(sequence.block_table(cache._home(layer)[0]).astype("int64"))
        for block in torch.nonzero(table)[:, 0].tolist():
            used = min(cache.page_size, sequence.num_tokens - block * cache.page_size)
            tensors = (cache.k_pages[layer], cache.v_pages[layer], *(cache.kv_scales[layer] or ()))
            parts[layer, block] = [
                one[table[block], :, :used].contiguous().view(torch.uint8).clone() for one in tensors
            ]
    return parts


def same(cache: PagedKVCache, sequence: Any, before: dict[tuple[int, int], list[torch.Tensor]]) -> bool:
    """Whether a sequence holds what it held, every block of full attention among it."""
    now = held(cache, sequence)
    full = {place for place in before if cache.spec.layers[place[0]].window is None}
    return full <= now.keys() and all(
        torch.equal(x, y) for place, own in now.items() for x, y in zip(own, before[place], strict=True)
    )


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_back_byte_for_byte(dtype: torch.dtype, kv_dtype: str | None) -> None:
    """A goes out, B overwrites its pages, A comes back to others: K, V and scales of every layer are the same.

    Also with A and B out at once: they lie in different host pages (TensorRT-LLM#9056, vllm#546, vllm-ascend#8105).
    """
    cache = PagedKVCache(WIDE, num_pages=22, page_size=4, dtype=dtype, kv_dtype=kv_dtype, prefix_cache=False)
    space = SwapSpace(cache, "1MiB")
    a, b = cache.open(list(range(11))), cache.open(list(range(20, 33)))
    fill(cache, a, list(range(11)), 1)
    before = held(cache, a)
    size = space.bytes_of(a)
    space.swap_out(a)
    fill(cache, b, list(range(20, 33)), 2)
    before_b = held(cache, b)
    space.swap_out(b)
    owners = list(space.host_pool.owners.values())
    assert size == owners.count(a) * space.page_bytes
    moved = space.swap_in(b) + space.swap_in(a)

    assert moved == len(owners) * space.page_bytes
    assert space.host_pool.num_used == 0
    for sequence, expected in ((a, before), (b, before_b)):
        assert same(cache, sequence, expected)
    cache.allocator.check()


def test_a_damaged_page_never_comes_back() -> None:
    """One flipped bit in host memory is found; the sequence lies there still, and the device has what it had."""
    cache = PagedKVCache(WIDE, num_pages=22, page_size=4, prefix_cache=False)
    space = SwapSpace(cache, "1MiB")
    a = cache.open(list(range(11)))
    fill(cache, a, list(range(11)), 1)
    free = cache.allocator.stats().free
    space.swap_out(a)
    page = next(iter(space.host_pool.owners))
    space.pages[page, 17] ^= 4
    with pytest.raises(DamagedPage, match=f"host page {page}"):
        space.swap_in(a)

    assert a.swapped
    assert cache.usage().in_use == 0
    a.close()
    assert space.host_pool.num_used == 0
    assert cache.allocator.stats().free > free
    cache.allocator.check()


def test_a_full_host_pool_is_told() -> None:
    """Too few host pages: the sequence stays on the device, whole."""
    cache = PagedKVCache(WIDE, num_pages=22, page_size=4, prefix_cache=False)
    space = SwapSpace(cache, SwapSpace(cache, "1MiB").page_bytes)
    a = cache.open(list(range(11)))
    fill(cache, a, list(range(11)), 1)
    before = held(cache, a)
    with pytest.raises(OutOfPages):
        space.swap_out(a)

    assert same(cache, a, before)
    with pytest.raises(ValueError, match="memory must hold at least one page of"):
        SwapSpace(cache, 1)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_swaps_keep_the_books(count: int) -> None:
    """Opens, growth, swaps out and in, and closes at random: both tiers balance, and contents are what was written."""
    rng = random.Random(count)
    cache = PagedKVCache(SPEC, num_pages=30, page_size=4, prefix_cache=True)
    space = SwapSpace(cache, 12 * cache.page_bytes)
    live: dict[Any, dict[tuple[int, int], list[torch.Tensor]]] = {}
    for _ in range(count):
        verb = rng.choice(["open", "open", "out", "out", "in", "in", "close"])
        chosen = rng.choice(list(live)) if live else None
        try:
            if verb == "open":
                tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
                sequence = cache.open(tokens)
                marks = torch.tensor([[t, p] for p, t in enumerate(tokens)]).float()[:, None]
                try:
                    batch = cache.begin_step({sequence: tokens[sequence.num_tokens :]})
                except OutOfPages:
                    sequence.close()
                    continue
                cache.write(0, marks[sequence.num_tokens :], marks[sequence.num_tokens :], batch)
                cache.end_step(batch)
                live[sequence] = held(cache, sequence)
            elif chosen is None:
                continue
            elif verb == "out" and not chosen.swapped:
                space.swap_out(chosen)
            elif verb == "in" and chosen.swapped:
                space.swap_in(chosen)
                assert same(cache, chosen, live[chosen])
            elif verb == "close":
                chosen.close()
                del live[chosen]
        except OutOfPages:
            pass
        cache.allocator.check()
        assert space.host_pool.num_used + space.host_pool.num_free == 12
    for sequence in live:
        sequence.close()
    assert (cache.usage().in_use, space.host_pool.num_used) == (0, 0)


def swapping_core(usable: int, host_pages: int, **options: Any) -> tuple[EngineCore, PagedKVCache, SwapSpace]:
    """Return a core over real pages whose contents are checked, with a swap space."""
    cache = PagedKVCache(SPEC, num_pages=usable + 1, page_size=4, max_batch=8, check=True)
    space = SwapSpace(cache, host_pages * cache.page_bytes)
    given = {"max_batch": 4, "max_step_tokens": 32, "watermark": 0.0, "growth": 0, "seed": 0, "preemption": "swap"}
    core = EngineCore(
        ContentRunner(cache), cache, vocab_size=VOCAB, max_len=256, prefix_page_size=4, swap_space=space,
        **{**given, **options},
    )  # fmt: skip
    return core, cache, space


def squeeze(core: EngineCore) -> tuple[dict[Any, list[int]], dict[Any, Any]]:
    """Serve four requests of which two must leave; return their tokens and metrics."""
    for name in range(4):
        core.add_request(name, [name + 1] * 8, SamplingParams(max_new_tokens=20))
    outputs = drain(core)
    return tokens_of(outputs), {name: row[-1].metrics for name, row in outputs.items()}


EXPECTED = {name: cold([name + 1] * 8, SamplingParams(max_new_tokens=20)) for name in range(4)}


def test_swapped_requests_compute_nothing_again() -> None:
    """Token-equal, each token computed once, and both tiers empty at the end."""
    core, cache, space = swapping_core(14, 40)
    tokens, metrics = squeeze(core)

    assert tokens == EXPECTED
    assert core.stats.preemptions == core.stats.swapped_out == core.stats.swapped_in == 2
    assert [m.swaps for m in metrics.values()] == [0, 0, 1, 1]
    assert [m.prefill_tokens + m.refound_tokens for m in metrics.values()] == [8, 8, 8, 8]
    assert (cache.usage().in_use, space.host_pool.num_used) == (0, 0)


def test_a_full_host_pool_falls_back_to_computing() -> None:
    """Nothing stalls: with room for one of two, or for none, the rest is computed again."""
    for host_pages, swapped in ((5, 1), (1, 0)):
        core, cache, space = swapping_core(14, host_pages)
        tokens, _ = squeeze(core)

        assert tokens == EXPECTED
        assert (core.stats.preemptions, core.stats.swapped_out) == (2, swapped)
        assert (cache.usage().in_use, space.host_pool.num_used) == (0, 0)


def test_damage_in_host_memory_costs_time_and_no_answer() -> None:
    """A page that came to harm while its request waited: counted, computed again, and the same tokens."""
    core, cache, space = swapping_core(14, 40)
    inner = space.swap_out

    def swap_out(sequence: Any) -> None:
        inner(sequence)
        space.pages[next(page for page, owner in space.host_pool.owners.items() if owner is sequence), 0] ^= 1

    space.swap_out = swap_out  # type: ignore[method-assign]
    cache.allocator.reset_prefix_cache()
    tokens, metrics = squeeze(core)

    assert tokens == EXPECTED
    assert core.stats.damaged_swaps == core.stats.swapped_out - core.stats.swapped_in > 0
    assert sum(m.swaps for m in metrics.values()) == core.stats.swapped_in
    assert (cache.usage().in_use, space.host_pool.num_used) == (0, 0)


def test_aborting_a_swapped_request_frees_its_host_pages() -> None:
    """An abort while a request lies in host memory gives it back there."""
    core, cache, space = swapping_core(14, 40)
    for name in range(4):
        core.add_request(name, [name + 1] * 8, SamplingParams(max_new_tokens=20))
    while not space.host_pool.num_used:
        core.step()
    for name in range(4):
        core.abort(name)
    core.step()

    assert (cache.usage().in_use, space.host_pool.num_used) == (0, 0)
    assert not core.has_unfinished


@pytest.mark.parametrize(("seconds_per_token", "swaps"), [(1e-9, False), (1.0, True)])
def test_the_cheaper_way_is_taken(seconds_per_token: float, swaps: bool) -> None:
    """Bytes out and in at the measured rate against tokens at the measured cost of prefill; first nothing is known."""
    cache = PagedKVCache(SPEC, num_pages=9, page_size=4)
    space = SwapSpace(cache, 8 * cache.page_bytes)
    sequence = cache.open([1] * 10)
    batch = cache.begin_step({sequence: [1] * 10})
    cache.end_step(batch)
    chooser = Preemption(EngineStats(), space)

    assert not chooser._swaps(space, sequence)
    chooser.note_step(StepCost(tokens=8, prefill=3, kept=True), 1e6)  # mostly decode: teaches nothing
    assert not chooser._swaps(space, sequence)
    chooser.note_step(StepCost(tokens=8, prefill=8, kept=True), 8 * seconds_per_token)
    assert chooser._swaps(space, sequence) is swaps
    exact = 2 * space.bytes_of(sequence) / ASSUMED_RATE / 10
    for factor, expected in ((0.9, False), (1.1, True)):
        even = Preemption(EngineStats(), space)
        even.note_step(StepCost(tokens=1, prefill=1, kept=True), factor * exact)
        assert even._swaps(space, sequence) is expected


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_real_model_swaps_and_says_the_same(name: str) -> None:
    """Greedy and seeded draws through swap, windows among the pages: the tokens of a pool without pressure."""
    prompts = [[5, 9, 33, 40 + n] for n in range(4)]
    params = [SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=n % 2, seed=n) for n in range(4)]
    pages = 41 if name == "gpt_oss" else 30
    options: dict[str, Any] = {"page_size": 4, "max_batch": 4, "max_step_tokens": 16, "watermark": 0.0}
    small = Engine(tiny(name), num_pages=pages, swap_memory="1MiB", preemption="swap", **options)
    answers = small.generate(prompts, params)
    expected = Engine(tiny(name), num_pages=300, **options).generate(prompts, params)

    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    assert small.stats.swapped_in > 0
    assert small.backend.usage().in_use == 0


def test_bad_options() -> None:
    """Swap needs memory and pages; modes are known ones."""
    model = tiny("llama")
    with pytest.raises(ValueError, match="preemption must be one of auto, recompute, swap, was 'drop'"):
        Engine(model, num_pages=30, preemption="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="preemption 'swap' needs swap_memory, was None"):
        Engine(model, num_pages=30, preemption="swap")
    with pytest.raises(ValueError, match="swap_memory must be None for a cache without pages"):
        Engine(model, backend="concat", swap_memory="1MiB")
    core, _, _ = make_core()
    assert core.preemption.swap_space is None

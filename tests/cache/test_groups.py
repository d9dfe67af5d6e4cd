"""Layer groups in the cache: buffers, what windows give back, and where layers live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.attention import LayerSpec
from pagedkv.cache import PagedKVCache
from pagedkv.spec import KVSpec, LayerKV
from tests.cache.naive import k_of, poison_free, poisoned, run_step, v_of
from tests.tiny_models import tiny_config

FULL, WINDOW = LayerKV(2, 8, 6), LayerKV(2, 8, 6, window=5)
WIDE, MANY = LayerKV(2, 16, 16), LayerKV(4, 8, 8, window=5)


def make_cache(*layers: LayerKV, num_pages: int = 40, page_size: int = 4, **options: Any) -> PagedKVCache:
    """Return a poisoned cache for such layers."""
    spec = KVSpec(layers, max_len=options.pop("context", 256), vocab_size=16)
    return poisoned(PagedKVCache(spec, num_pages=num_pages, page_size=page_size, check=True, **options))


def grow(cache: PagedKVCache, sequence: Any, history: list[int], count: int) -> None:
    """Store so many tokens more, held against dense attention; what is given back is poisoned."""
    new = [(len(history) * 7 + n) % 5 for n in range(count)]
    cache.end_step(run_step(cache, {sequence: new}, {sequence: history}))
    history += new
    poison_free(cache)


@pytest.mark.parametrize("num_sink_tokens", [0, 3])
@given(steps=st.lists(st.integers(1, 9), min_size=1, max_size=14))
@settings(max_examples=8, deadline=None)
def test_a_window_group_keeps_a_window_and_a_step(num_sink_tokens: int, steps: list[int]) -> None:
    """Pages of a window group never exceed ceil((window - 1 + step) / page_size) + 1, sinks apart."""
    window, size = 6, 4
    cache = make_cache(FULL, LayerKV(2, 8, 6, window, num_sink_tokens), num_pages=120, page_size=size)
    sequence, history = cache.open([]), list[int]()
    for count in steps:
        grow(cache, sequence, history, count)
        full, near = (int((sequence.block_table(group) > 0).sum()) for group in (0, 1))
        assert full == -(-len(history) // size)
        assert near <= -(-(window - 1 + max(steps)) // size) + 1 + -(-num_sink_tokens // size)


def test_decoding_gives_window_pages_back() -> None:
    """Long after the window has passed, a hybrid holds its full layers' pages and a few more."""
    cache, whole = make_cache(FULL, WINDOW), make_cache(FULL, FULL, num_pages=80)
    held = []
    for one in (cache, whole):
        sequence, history = one.open([]), list[int]()
        for count in (30, *[1] * 34):
            grow(one, sequence, history, count)
        held.append(one.usage().bytes_held)
    assert 16 + 2 == cache.usage().in_use
    assert 16 == whole.usage().in_use
    assert 18 * cache.page_bytes == held[0] < 0.6 * held[1] == 0.6 * 16 * whole.page_bytes


def test_a_window_as_long_as_the_text_is_one_group() -> None:
    """Where no text outgrows the window there is one group of full attention, as for a single kind."""
    cache = make_cache(FULL, LayerKV(2, 8, 6, window=64), context=256, max_len=64)
    assert 1 == len(cache.allocator.groups)
    assert cache.bytes_per_token * 4 == cache.page_bytes == 2 * 2 * 14 * 4 * 4


def test_layers_of_equal_size_share_contiguous_pages() -> None:
    """Other heads and dims, as many bytes: one buffer of K and one of V, each layer's view contiguous."""
    cache = make_cache(WIDE, MANY)
    assert [(40, 2, 4, 16), (40, 4, 4, 8)] == [tuple(pages.shape) for pages in cache.k_pages]
    assert all(pages.is_contiguous() for pages in (*cache.k_pages, *cache.v_pages))
    assert cache.k_pages[0].data_ptr() == cache.k_pages[1].data_ptr()
    assert 2 == len(cache.page_tensors)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_layers_of_different_sizes_share_a_page(kv_dtype: str | None) -> None:
    """A page holds the widest layer of a position; both kinds attend to what they wrote, copies included."""
    narrow = LayerKV(1, 8, 6, window=5)
    cache = make_cache(WIDE, narrow, LayerKV(4, 8, 4), LayerKV(2, 8, 6, window=5), kv_dtype=kv_dtype)
    tolerance = 2e-6 if kv_dtype is None else 0.02
    assert sum(tensor.nbytes for tensor in cache.page_tensors) == 40 * cache.page_bytes
    assert cache.bytes_per_token == 2 * cache.page_bytes // 4
    sequence, text = cache.open([]), [1, 2, 0, 1, 2, 2, 1]
    cache.end_step(run_step(cache, {sequence: text[:6]}, {sequence: []}, tolerance=tolerance))
    twin = sequence.fork()
    batch = run_step(cache, {sequence: [1], twin: [0]}, dict.fromkeys((sequence, twin), text[:6]), tolerance=tolerance)
    for layer, shape in enumerate(cache.spec.layers):
        k, v = cache.gather(layer, batch)
        held = cache.held_positions(layer, batch)
        rows = [(0, text), (1, [*text[:6], 0])]
        expected_k = torch.cat([k_of(tokens, layer, shape)[held[at]] for at, tokens in rows])
        expected_v = torch.cat([v_of(tokens, layer, shape)[held[at]] for at, tokens in rows])
        torch.testing.assert_close(k, expected_k, rtol=0, atol=0 if kv_dtype is None else 0.005)
        torch.testing.assert_close(v, expected_v, rtol=0, atol=0 if kv_dtype is None else 0.005)
    cache.end_step(batch)


def test_gather_returns_what_a_window_still_holds() -> None:
    """Positions whose pages went back are missing from a window layer, and from no other."""
    cache = make_cache(FULL, WINDOW)
    sequence, history = cache.open([]), list[int]()
    for count in (9, 4, 1):
        grow(cache, sequence, history, count)
    batch = run_step(cache, {sequence: [3]}, {sequence: history})

    assert [list(range(15)), list(range(8, 15))] == [cache.held_positions(at, batch)[0].tolist() for at in (0, 1)]
    assert torch.equal(cache.gather(1, batch)[0], k_of([*history, 3], 1)[8:])


def test_a_layer_that_stores_nothing_is_refused_by_name() -> None:
    """A layer that shares an earlier one's K and V has no pages, and no step is written through it."""
    cache = make_cache(FULL, LayerKV(0, 8, 8))
    batch = cache.begin_step({cache.open([]): 1})
    with pytest.raises(ValueError, match="layer 1 shares an earlier one's"):
        cache.write(1, torch.zeros(1, 0, 8), torch.zeros(1, 0, 8), batch)
    assert (40, 0, 4, 8) == cache.k_pages[1].shape


def test_sink_tokens_are_the_layer_group_s() -> None:
    """A window layer cannot be bound to sinks that its pages are not kept for."""
    cache = make_cache(FULL, LayerKV(2, 8, 6, window=5, num_sink_tokens=2))
    cache.bind_layer(1, LayerSpec(0.5, window=5, num_sink_tokens=2))
    cache.bind_layer(0, LayerSpec(0.5, num_sink_tokens=7))  # without a window it changes nothing
    with pytest.raises(ValueError, match="num_sink_tokens of layer 1 must be 2, as its pages are kept, was 0"):
        cache.bind_layer(1, LayerSpec(0.5, window=5))


def test_memory_counts_positions() -> None:
    """A page's bytes are those of a position's widest layer, over all positions, and a budget buys whole pages."""
    config = tiny_config("gemma3")
    cache = PagedKVCache.from_config(config, memory="100 kB", page_size=8)
    assert sum(tensor.nbytes for tensor in cache.page_tensors) == cache.allocator.num_pages * cache.page_bytes
    assert 100_000 - cache.page_bytes < cache.allocator.num_pages * cache.page_bytes <= 100_000
    assert cache.bytes_per_token == len(cache.allocator.groups) * cache.page_bytes // 8


def test_default_size_is_32_texts_of_every_group() -> None:
    """Full attention counts the whole context, a window what it holds at most."""
    config = tiny_config("gpt_oss", max_position_embeddings=4096)
    cache = PagedKVCache.from_config(config)
    assert 32 * (4096 // 16 + -(-(5 - 1 + 1024) // 16) + 1) + 1 == cache.allocator.num_pages


def test_layers_live_where_the_map_says() -> None:
    """Each position is on one device, tables are mirrored on each, and every layer's step is on its own."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    on = {0: "cpu", 1: "cpu", 2: "meta", 3: "meta", 4: "meta", 5: "cpu"}
    spec = KVSpec((FULL, WINDOW, FULL, WINDOW, WINDOW, WINDOW), max_len=64, vocab_size=9)
    cache = PagedKVCache(spec, num_pages=9, page_size=4, device_map=on)
    assert [torch.device(on[layer]) for layer in range(6)] == [pages.device for pages in cache.k_pages]
    assert {cpu, meta} == {tensor.device for tensor in cache.page_tensors}
    sequence = cache.open([1, 2, 0])
    batch = cache.begin_step({sequence: [1, 2, 0]})
    assert {cpu, meta} == {device for _, device in batch.groups}
    assert all(step.slot_mapping.device == device for (_, device), step in batch.groups.items())
    assert all(step.attention.block_tables.device == device for (_, device), step in batch.groups.items())
    cache.end_step(batch)
    cache.end_step(cache.begin_step({sequence.fork(): [4], sequence: [5]}))  # a copy, on both devices
    cache.allocator.check()


def test_a_map_with_holes_is_refused() -> None:
    """Each layer needs a device, and no other number is a layer."""
    with pytest.raises(ValueError, match=r"device_map must name the layers 0 to 1, named \[0\]"):
        make_cache(FULL, WINDOW, device_map={0: "cpu"})
    with pytest.raises(ValueError, match=r"named \[0, 1, 7\]"):
        make_cache(FULL, WINDOW, device_map={0: "cpu", 1: "cpu", 7: "cpu"})

"""The paged cache at its door and in its numbers; `test_cache_machine` drives what it computes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.allocator import OutOfPages, PromptMismatch, WrongThread
from pagedkv.attention import LayerSpec
from pagedkv.cache import PagedKVCache
from tests.cache.naive import K_DIM, NUM_KV_HEADS, V_DIM, k_of, poisoned, q_of, run_step, tiny_spec, v_of
from tests.tiny_models import tiny_config

if TYPE_CHECKING:
    from pagedkv.allocator import Sequence


def make_cache(**options: Any) -> PagedKVCache:
    """Return a poisoned cache of 12 usable pages of 4 tokens that checks every call."""
    return poisoned(PagedKVCache(tiny_spec(), **{"num_pages": 13, "page_size": 4, "check": True, **options}))


def feed(
    cache: PagedKVCache, rows: dict[Sequence, list[int]], histories: dict[Sequence, list[int]] | None = None
) -> None:
    """Run and commit one step, held against dense attention."""
    stored: dict[Any, list[int]] = {sequence: [] for sequence in rows} | dict(histories or {})
    batch = run_step(cache, rows, stored)
    cache.end_step(batch)


def test_memory_makes_the_pages_that_fit() -> None:
    """A budget in bytes buys whole pages over all layers, the null page among them."""
    config = tiny_config("llama")
    page_bytes = 16 * PagedKVCache.from_config(config, num_pages=2).bytes_per_token

    cache = PagedKVCache.from_config(config, memory=10 * page_bytes + page_bytes // 2)

    assert cache.allocator.num_pages == 10
    assert sum(tensor.nbytes for tensor in cache.page_tensors) == 10 * page_bytes


def test_bytes_of_quantised_pages_count_their_scales() -> None:
    """What usage reports is what the tensors take, scales included."""
    cache = make_cache(kv_dtype="int8")
    sequence = cache.open([1, 2, 3])
    cache.end_step(cache.begin_step({sequence: [1, 2, 3]}))

    slot_bytes = sum(tensor.nbytes for tensor in cache.page_tensors) // (13 * 4)
    assert (3, 4, 3 * slot_bytes, 4 * slot_bytes, 1) == cache.usage()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_quantised_attention_is_close_and_chunks_agree(kv_dtype: str) -> None:
    """Attention reads what was stored: a prompt in chunks gives the bits of a prompt at once, near the exact one."""
    tokens = [1, 2, 0, 1, 1, 2, 0, 2, 1]
    outputs = []
    for chunks in ([9], [4, 5], [3, 3, 3]):
        cache = make_cache(kv_dtype=kv_dtype, prefix_cache=False)
        sequence = cache.open(tokens)
        for size in chunks:
            start = sequence.num_tokens
            batch = cache.begin_step({sequence: tokens[start : start + size]})
            part = slice(start, start + size)
            cache.write(0, k_of(tokens, 0)[part], v_of(tokens, 0)[part], batch)
            last = cache.attend(0, q_of(tokens, 0)[part], batch)[-1]
            cache.end_step(batch)
        outputs.append(last)

    exact = make_cache()
    sequence = exact.open(tokens)
    batch = exact.begin_step({sequence: tokens})
    exact.write(0, k_of(tokens, 0), v_of(tokens, 0), batch)
    expected = exact.attend(0, q_of(tokens, 0), batch)[-1]
    for output in outputs:
        torch.testing.assert_close(output, outputs[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(output, expected, rtol=0, atol=0.02 if kv_dtype == "int8" else 0.1)


def addresses_of(cache: PagedKVCache, inputs: dict[Sequence, list[int]]) -> list[int]:
    """Run an empty step and return where its tables and lengths lie."""
    batch = cache.begin_step(inputs)
    cache.end_step(batch)
    parts = [step.attention for step in batch.groups.values()]
    return [t.data_ptr() for part in parts for t in (part.block_tables, part.kv_lens, part.cu_q_lens)]


def test_step_metadata_keeps_its_addresses() -> None:
    """Tables and lengths of every step are views of the same memory, so that a step can be captured."""
    cache = make_cache()
    sequence = cache.open([1, 2, 3])
    first = addresses_of(cache, {sequence: [1, 2]})

    assert first == addresses_of(cache, {sequence: [3]})


def test_a_step_that_does_not_fit_leaves_all_as_it_was() -> None:
    """All sequences or none: the one that would have fitted got nothing either."""
    cache = make_cache()
    small, large = cache.open([1]), cache.open([2] * 49)

    with pytest.raises(OutOfPages) as error:
        cache.begin_step({small: [1], large: [2] * 49})

    assert (14, 12) == (error.value.needed, error.value.available)
    assert (0, 0) == (small.num_tokens, large.num_tokens)
    assert cache.usage().in_use == 0
    cache.allocator.check()


def test_sub_page_hits_copy_before_they_write() -> None:
    """A prompt that leaves a stored page halfway continues on a copy, and the first reader's page stays as it was."""
    cache = make_cache()
    first = cache.open([1, 2, 0, 1, 2, 2, 1, 0])
    feed(cache, {first: [1, 2, 0, 1, 2, 2, 1, 0]})
    second = cache.open([1, 2, 0, 1, 2, 2, 0, 0])
    assert second.num_tokens == 6

    feed(cache, {second: [0, 0], first: [1]}, {second: [1, 2, 0, 1, 2, 2], first: [1, 2, 0, 1, 2, 2, 1, 0]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size must be a power of two from 1 to 256, was 0"),
        ({"page_size": 24}, "page_size must be a power of two from 1 to 256, was 24"),
        ({"page_size": 512}, "page_size must be a power of two from 1 to 256, was 512"),
        ({"num_pages": 1}, "num_pages must be 2"),
        ({"max_batch": 0}, "max_batch must be at least 1, was 0"),
        ({"max_len": 0}, "max_len must be at least 1, was 0"),
        ({"kv_dtype": "int3"}, "kv_dtype must be None or one of .*, was 'int3'"),
        ({"attention_backend": "abacus"}, "attention_backend must be None or one of .*, was 'abacus'"),
        ({"policy": "coin"}, "policy must be one of .*, was 'coin'"),
    ],
)
def test_impossible_caches_are_refused(options: dict[str, Any], message: str) -> None:
    """Each argument that cannot be served is named with what it was."""
    with pytest.raises(ValueError, match=message):
        make_cache(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 2.5}, "max_batch must be an integer, was 2.5"),
        ({"max_len": "a"}, "max_len must be an integer, was 'a'"),
        ({"dtype": torch.int32}, "dtype must be a floating point torch.dtype, was torch.int32"),
        ({"dtype": "float32"}, "dtype must be a floating point torch.dtype, was 'float32'"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], message: str) -> None:
    """What is no number, or no dtype that K and V can have, is named with what it was."""
    with pytest.raises(TypeError, match=message):
        make_cache(**options)


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    """A layer counted from the end, or past it, is an off-by-one of the caller's, never the last layer."""
    cache = make_cache()
    sequence = cache.open([1])
    batch = cache.begin_step({sequence: [1]})

    for use in (
        lambda: cache.write(layer, k_of([1], 0), v_of([1], 0), batch),
        lambda: cache.attend(layer, q_of([1], 0), batch),
        lambda: cache.bind_layer(layer, LayerSpec(scale=1.0)),
    ):
        with pytest.raises(ValueError, match=f"layer must be 0 to 1, was {layer}"):
            use()


def test_looking_at_usage_leaves_the_cache_to_the_thread_that_uses_it() -> None:
    """A monitor may look before a worker thread begins; the first to use the cache owns it."""
    cache = make_cache()
    cache.usage()
    outcome: list[object] = []

    worker = threading.Thread(target=lambda: outcome.append(cache.open([1]).num_tokens))
    worker.start()
    worker.join()

    assert outcome == [0]
    with pytest.raises(WrongThread):
        cache.open([1])


def test_memory_and_pages_exclude_each_other() -> None:
    """Two sizes are one too many; a budget too small for a page says what it would take."""
    config = tiny_config("llama")

    with pytest.raises(ValueError, match="memory and num_pages exclude each other, were '1GiB' and 5"):
        PagedKVCache.from_config(config, memory="1GiB", num_pages=5)
    with pytest.raises(ValueError, match=r"memory must hold the null page and one more, \d+ bytes .*, was 10 bytes"):
        PagedKVCache.from_config(config, memory=10)


def test_steps_are_refused_at_the_door() -> None:
    """No sequences, no tokens, too many, too long, a second step: nothing is reserved for any of them."""
    cache = make_cache(max_batch=2, max_len=10)
    sequences = [cache.open([1, 2]) for _ in range(3)]

    with pytest.raises(ValueError, match="inputs must hold 1 to max_batch = 2 sequences, held 0"):
        cache.begin_step({})
    with pytest.raises(ValueError, match="inputs must hold 1 to max_batch = 2 sequences, held 3"):
        cache.begin_step({sequence: [1] for sequence in sequences})
    with pytest.raises(ValueError, match="at least one token"):
        cache.begin_step({sequences[0]: []})
    with pytest.raises(ValueError, match="within max_len = 10 tokens"):
        cache.begin_step({sequences[0]: [1, 2, *[0] * 9]})
    assert cache.usage().in_use == 0
    batch = cache.begin_step({sequences[0]: [1, 2]})
    with pytest.raises(RuntimeError, match="step in flight"):
        cache.begin_step({sequences[1]: [1, 2]})
    cache.abandon_step(batch)
    with pytest.raises(RuntimeError, match="batch must be the step in flight"):
        cache.end_step(batch)


def test_tokens_that_are_not_the_prompt_are_refused_before_the_step() -> None:
    """What a step feeds inside an opened prompt must be that prompt, and is looked at before anything is computed."""
    cache = make_cache()
    sequence = cache.open([1, 2, 0, 1])

    with pytest.raises(PromptMismatch, match="at position 1"):
        cache.begin_step({sequence: [1, 1, 0]})

    assert sequence.num_tokens == 0
    assert cache.usage().in_use == 0


def test_keep_is_refused_outside_the_step() -> None:
    """What stands of a step is 0 to all of its tokens, for its own sequences; a refusal leaves the step in flight."""
    cache = make_cache()
    sequence, other = cache.open([1, 2]), cache.open([2])
    batch = cache.begin_step({sequence: [1, 2]})

    with pytest.raises(ValueError, match="keep must name sequences of the step"):
        cache.end_step(batch, keep={other: 1})
    with pytest.raises(ValueError, match="must be 0 to 2, was 3"):
        cache.end_step(batch, keep={sequence: 3})
    no_counts: tuple[Any, ...] = (1.0, True)
    for count in no_counts:
        with pytest.raises(TypeError, match=rf"keep\[.*\] must be an integer, was {count}"):
            cache.end_step(batch, keep={sequence: count})
    cache.end_step(batch, keep={sequence: 1})

    assert sequence.num_tokens == 1


def test_window_of_a_layer_is_the_config_s() -> None:
    """Pages are kept by the config's window, so a layer cannot be bound to another."""
    cache = make_cache()
    cache.bind_layer(0, LayerSpec(scale=0.5, softcap=20.0))

    with pytest.raises(ValueError, match=r"spec.window of layer 0 must be the config's None, was 3"):
        cache.bind_layer(0, LayerSpec(scale=0.5, window=3))


def test_pages_have_the_documented_layout() -> None:
    """K and V of a layer are each ``[num_pages, num_kv_heads, page_size, dim]``, contiguous."""
    cache = make_cache()

    assert [(13, NUM_KV_HEADS, 4, K_DIM)] * 2 == [tuple(pages.shape) for pages in cache.k_pages]
    assert [(13, NUM_KV_HEADS, 4, V_DIM)] * 2 == [tuple(pages.shape) for pages in cache.v_pages]
    assert all(pages.is_contiguous() for pages in cache.page_tensors)

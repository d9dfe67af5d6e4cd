"""KV that no token names, and reading back what a layer has stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.cache import PagedKVCache
from tests.cache.naive import NUM_LAYERS, dense_attention, k_of, poisoned, q_of, tiny_spec, v_of


def make_cache(**options: Any) -> PagedKVCache:
    """Return a poisoned cache of twelve usable pages of four slots."""
    return poisoned(PagedKVCache(tiny_spec(), num_pages=13, page_size=4, check=True, **options))


def write(cache: PagedKVCache, batch: Any, texts: list[list[int]]) -> None:
    """Store every layer's K and V of the step's rows, the last ones of ``texts``."""
    for layer in range(NUM_LAYERS):
        parts = list(zip(texts, batch.q_lens, strict=True))
        cache.write(
            layer,
            torch.cat([k_of(text, layer)[-count:] for text, count in parts]),
            torch.cat([v_of(text, layer)[-count:] for text, count in parts]),
            batch,
        )


def test_counted_tokens_are_stored_and_never_found() -> None:
    """A sequence fed by counts attends like any other; nobody with the same text finds what it stored."""
    cache = make_cache()
    sequence = cache.open([])
    text = [1, 2, 0, 1, 2, 2]
    batch = cache.begin_step({sequence: 5})
    write(cache, batch, [text[:5]])
    cache.end_step(batch)
    batch = cache.begin_step({sequence: 1})
    write(cache, batch, [text])
    out = cache.attend(1, q_of(text, 1)[-1:], batch)
    cache.end_step(batch)

    torch.testing.assert_close(out.double(), dense_attention(text, 1, 1), atol=2e-6, rtol=2e-5)
    assert sequence.num_tokens == 6
    assert cache.open(text).num_tokens == 0
    assert batch.position_ids.tolist() == [5]
    cache.allocator.check()


def test_a_step_may_mix_tokens_and_counts() -> None:
    """One row is findable afterwards, the other is not; together they have no input ids."""
    cache = make_cache()
    named, counted = cache.open([1, 2, 0, 1, 2]), cache.open([])
    batch = cache.begin_step({named: [1, 2, 0, 1, 2], counted: 3})
    assert not batch.has_input_ids
    with pytest.raises(RuntimeError, match="no input_ids"):
        _ = batch.input_ids
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.last_rows.tolist() == [4, 7]
    cache.end_step(batch)

    assert cache.open([1, 2, 0, 1, 2]).num_tokens == 4
    assert (5, 3) == (named.num_tokens, counted.num_tokens)


def test_keep_and_abandon_of_counts() -> None:
    """Only so many stand; an abandoned step leaves the length as it was, and the text can still be named."""
    cache = make_cache()
    sequence = cache.open([1, 2, 0, 1])
    cache.abandon_step(cache.begin_step({sequence: 3}))
    assert (0, 0) == (sequence.num_tokens, sequence.num_reserved)
    cache.end_step(cache.begin_step({sequence: 3}), keep={sequence: 0})
    batch = cache.begin_step({sequence: [1, 2, 0, 1]})
    cache.end_step(batch)
    assert cache.open([1, 2, 0, 1, 2]).num_tokens == 4
    batch = cache.begin_step({sequence: 3})
    with pytest.raises(ValueError, match="must be 0 to 3, was 4"):
        cache.end_step(batch, keep={sequence: 4})
    cache.end_step(batch, keep={sequence: 2})
    assert sequence.num_tokens == 6


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (0, ValueError, "at least one token for each sequence, held 0"),
        (-1, ValueError, "at least one token for each sequence, held -1"),
        (True, TypeError, "token ids or a whole number of tokens, were True"),
        (65, ValueError, "within max_len = 64 tokens"),
        (49, RuntimeError, "13"),
    ],
)
def test_impossible_counts_are_refused(count: int, error: type[Exception], message: str) -> None:
    """What is no number of new tokens, or too many, is refused with nothing held."""
    cache = make_cache()
    sequence = cache.open([])
    with pytest.raises(error, match=message):
        cache.begin_step({sequence: count})
    assert cache.usage().in_use == 0


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_gather_returns_what_was_written(kv_dtype: str | None) -> None:
    """K and V of every row in the order of positions, dequantised, this step's included."""
    cache = make_cache(kv_dtype=kv_dtype)
    texts = [[1, 2, 0, 1, 2, 2], [0, 0, 1]]
    one, two = (cache.open(text) for text in texts)
    batch = cache.begin_step({one: texts[0][:5], two: texts[1][:1]})
    write(cache, batch, [texts[0][:5], texts[1][:1]])
    cache.end_step(batch)
    batch = cache.begin_step({two: texts[1][1:], one: texts[0][5:]})
    write(cache, batch, [texts[1], texts[0]])

    for layer in range(NUM_LAYERS):
        k, v = cache.gather(layer, batch)
        gap = 0.0 if kv_dtype is None else 0.005
        torch.testing.assert_close(k, torch.cat([k_of(texts[1], layer), k_of(texts[0], layer)]), rtol=0, atol=gap)
        torch.testing.assert_close(v, torch.cat([v_of(texts[1], layer), v_of(texts[0], layer)]), rtol=0, atol=gap)
        assert [row.tolist() for row in cache.held_positions(layer, batch)] == [[0, 1, 2], [0, 1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="layer must be 0 to 1, was 2"):
        cache.gather(2, batch)

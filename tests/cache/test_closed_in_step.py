"""A sequence that is closed while its step is in flight: its pages stay as they are until the step has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagedkv.allocator import OutOfPages, Sequence
from pagedkv.cache import PagedKVCache
from tests.cache.naive import poisoned, run_step, tiny_spec

if TYPE_CHECKING:
    from collections.abc import Callable


def cache_of(num_pages: int) -> PagedKVCache:
    """Return a poisoned cache of four slots a page."""
    return poisoned(PagedKVCache(tiny_spec(), num_pages=num_pages, page_size=4, check=True))


@pytest.mark.parametrize("leave", [PagedKVCache.end_step, PagedKVCache.abandon_step], ids=["end_step", "abandon_step"])
def test_the_step_ends_without_the_closed_sequence(leave: Callable[..., None]) -> None:
    """Closing one of two sequences mid-step leaves the other right, gives every page back, and sticks nowhere."""
    cache = cache_of(9)
    gone, stays = cache.open([1, 2, 3, 4, 5]), cache.open([6, 7])
    batch = run_step(cache, {gone: [1, 2, 3, 4, 5], stays: [6, 7]}, {gone: [], stays: []})
    gone.close()
    assert 3 == cache.allocator.stats().referenced
    assert 2 == cache.allocator.stats().deferred
    cache.allocator.check()
    leave(cache, batch)

    kept = [6, 7] if leave is PagedKVCache.end_step else []
    assert (len(kept), 0) == (stays.num_tokens, stays.num_reserved)
    assert bool(kept) == cache.allocator.stats().referenced
    new = [6, 7, 8][len(kept) :]
    cache.end_step(run_step(cache, {stays: new}, {stays: kept}))
    cache.allocator.check()


def test_pages_of_the_step_are_not_handed_out_in_it() -> None:
    """What another sequence reserves during the step shares no page with the sequence that was closed in it."""
    cache = cache_of(4)
    gone = cache.open([1, 2, 3, 4, 5])
    batch = run_step(cache, {gone: [1, 2, 3, 4, 5]}, {gone: []})
    pages = set(gone.block_table().tolist())
    gone.close()
    other = cache.open([9, 9])
    other.reserve(2)
    assert pages.isdisjoint(other.block_table().tolist())
    with pytest.raises(OutOfPages) as refused:
        cache.open([8]).reserve(1)
    assert (1, 0) == (refused.value.needed, refused.value.available)
    cache.end_step(batch)
    assert 2 == cache.allocator.stats().free


def test_all_closed() -> None:
    """A step whose sequences were all closed still ends, and the next one begins."""
    cache = cache_of(9)
    sequences = [cache.open([n, n]) for n in (1, 2)]
    histories: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
    batch = run_step(cache, {s: [n, n] for n, s in zip((1, 2), sequences, strict=True)}, histories)
    for sequence in sequences:
        sequence.close()
    cache.end_step(batch, keep={sequences[0]: 1})
    assert 8 == cache.allocator.stats().free
    again = cache.open([1, 2])
    cache.abandon_step(run_step(cache, {again: [1, 2]}, {again: []}))
    assert 8 == cache.allocator.stats().free

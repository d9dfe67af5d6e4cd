"""Pending copies: a list that may be run all at once."""

from __future__ import annotations

from pagedkv.allocator import BlockAllocator
from tests.allocator.helpers import extend, fill, run_copies, store


def test_copy_of_a_copy_reads_the_first_page() -> None:
    """A to B, then B to C becomes A to C: no page is source and destination."""
    allocator = BlockAllocator(16, 4)
    store(allocator, [1, 2, 3, 4])
    parent = allocator.open([1, 2, 9, 9, 9])
    parent.reserve(1)
    parent.commit([])
    child = parent.fork()
    child.reserve(1)
    allocator.check()

    assert [[1, 2], [1, 3]] == allocator.take_copies().tolist()


def test_taking_twice_gives_the_same() -> None:
    """What was not acknowledged is given again, together with what came since."""
    allocator = BlockAllocator(16, 4)
    parent = fill(allocator, range(6))
    first, second = parent.fork(), parent.fork()
    first.reserve(1)

    assert [[2, 3]] == allocator.take_copies().tolist()

    second.reserve(1)

    assert [[2, 3], [2, 4]] == allocator.take_copies().tolist()

    allocator.acknowledge_copies()

    assert (0, 2) == (len(allocator.take_copies()), allocator.take_copies().shape[1])


def test_acknowledge_covers_only_what_was_taken() -> None:
    """A copy made after the list was taken stays pending."""
    allocator = BlockAllocator(16, 4)
    parent = fill(allocator, range(6))
    first, second = parent.fork(), parent.fork()
    first.reserve(1)
    allocator.take_copies()
    second.reserve(1)
    allocator.acknowledge_copies()
    allocator.check()

    assert [[2, 4]] == allocator.take_copies().tolist()


def test_sources_are_held() -> None:
    """A source outlives everybody who had it until the copy is acknowledged."""
    allocator = BlockAllocator(16, 4)
    parent = fill(allocator, range(6))
    child = parent.fork()
    child.reserve(1)
    parent.close()
    allocator.check()

    assert 3 == allocator.stats().in_use
    assert [(2, 3)] == run_copies(allocator)
    assert 2 == allocator.stats().in_use


def test_copy_of_a_closed_sequence_is_dropped() -> None:
    """A destination that is given back takes its copy with it, and the source goes."""
    allocator = BlockAllocator(16, 4)
    store(allocator, range(8))
    sequence = allocator.open([0, 1, 2, 3, 4, 9])
    sequence.reserve(1)
    allocator.take_copies()
    sequence.close()
    allocator.check()

    assert (0, 2, 0) == (allocator.stats().in_use, allocator.stats().idle, len(allocator.take_copies()))


def test_a_page_handed_out_again_has_a_copy_of_its_own() -> None:
    """Acknowledging an old list says nothing of a new copy into the same page."""
    allocator = BlockAllocator(16, 4)
    store(allocator, range(4))
    for _ in range(2):
        sequence = allocator.open([0, 1, 9])
        sequence.reserve(1)
        if _ == 0:
            allocator.take_copies()
            sequence.close()
    allocator.acknowledge_copies()
    allocator.check()

    assert [[1, 2]] == allocator.take_copies().tolist()


def test_one_copy_less_than_forks() -> None:
    """Of n sequences with one tail the last keeps the page."""
    allocator = BlockAllocator(16, 4)
    parent = fill(allocator, range(6))
    forks = [parent, *(parent.fork() for _ in range(4))]
    allocator.reserve_batch(forks, 1)
    allocator.check()

    assert [(2, 3), (2, 4), (2, 5), (2, 6)] == run_copies(allocator)


def test_abandoned_copy_costs_nothing_later() -> None:
    """After a reservation was taken back the copied tail is the sequence's own."""
    allocator = BlockAllocator(16, 4)
    parent = fill(allocator, range(6))
    child = parent.fork()
    child.reserve(1)
    child.commit([])
    extend(allocator, child, [7])
    allocator.check()

    assert (1, 3) == (allocator.stats().copies, allocator.stats().in_use)

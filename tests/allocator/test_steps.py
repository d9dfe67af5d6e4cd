"""Steps in flight: what a device may still use is handed to nobody."""

from __future__ import annotations

import pytest

from pagedkv.allocator import BlockAllocator, OutOfPages, StepEnded
from tests.allocator.helpers import extend, fill, hit, store


def states(allocator: BlockAllocator) -> tuple[int, int, int, int]:
    """Return free, idle, referenced and deferred pages, after an audit."""
    allocator.check()
    stats = allocator.stats()
    return stats.free, stats.idle, stats.referenced, stats.deferred


def test_pages_freed_in_a_step_come_free_when_it_ends() -> None:
    """A closed sequence's pages, reserved ones too, are not available, and then are again."""
    allocator = BlockAllocator(5, 2, prefix_cache=False)
    sequence = fill(allocator, [1, 2, 3])
    with allocator.begin_step():
        sequence.reserve(3)
        sequence.close()
        assert (1, 0, 3, 3) == states(allocator)
        with pytest.raises(OutOfPages) as refused:
            allocator.open([1]).reserve(4)
        assert (2, 1) == (refused.value.needed, refused.value.available)
        assert (0, 6) == (allocator.stats().stored_tokens, allocator.stats().held_slots)
    assert (4, 0, 0, 0) == states(allocator)


def test_findable_pages_wait_too_and_are_found_meanwhile() -> None:
    """A page that would be idle cannot be evicted while the step may read it, but it can be shared."""
    allocator = BlockAllocator(4, 2)
    sequence = fill(allocator, [1, 2, 3, 4])
    step = allocator.begin_step()
    sequence.close()
    assert (1, 0, 2, 2) == states(allocator)
    with allocator.open([1, 2, 9]) as other:
        assert 2 == other.num_tokens
        assert (1, 0, 2, 1) == states(allocator)
    step.end()
    assert (1, 2, 0, 0) == states(allocator)
    assert 4 == hit(allocator, [1, 2, 3, 4, 5])
    assert [2, 1] == allocator.ledger.pool.policy.victims(2)


def test_overlapping_steps_do_not_wait_for_later_ones() -> None:
    """A page waits for the steps in flight when it was freed, so an engine that always has one goes on."""
    allocator = BlockAllocator(9, 2, prefix_cache=False)
    step = allocator.begin_step()
    for number in range(20):
        sequence = fill(allocator, [number] * 4)
        following = allocator.begin_step()
        sequence.close()
        assert allocator.stats().deferred <= 4
        step.end()
        allocator.check()
        step = following
    step.end()
    assert (8, 0, 0, 0) == states(allocator)


def test_steps_end_in_any_order() -> None:
    """A page freed in two steps is held until both have ended, whichever comes first."""
    for first in (0, 1):
        allocator = BlockAllocator(9, 2)
        sequence = fill(allocator, [1, 2, 3])
        steps = [allocator.begin_step(), allocator.begin_step()]
        sequence.close()
        steps.pop(first).end()
        assert 2 == states(allocator)[3]
        steps.pop().end()
        assert (7, 1, 0, 0) == states(allocator)


def test_a_page_found_and_freed_again_waits_for_the_newer_step() -> None:
    """Whoever used a waiting page in a later step may have it read there, so that step counts too."""
    allocator = BlockAllocator(9, 2)
    sequence = fill(allocator, [1, 2, 3, 4])
    old = allocator.begin_step()
    sequence.close()
    other = allocator.open([1, 2, 7])
    new = allocator.begin_step()
    other.close()
    old.end()
    assert (6, 1, 1, 1) == states(allocator)
    new.end()
    assert (6, 2, 0, 0) == states(allocator)


def test_a_waiting_page_is_not_written_in_place() -> None:
    """A sequence that cuts into a page which a step may still read writes into a copy, also after a reset."""
    for reset in (False, True):
        allocator = BlockAllocator(9, 2)
        sequence = fill(allocator, [1, 2, 3, 4])
        step = allocator.begin_step()
        sequence.close()
        other = allocator.open([1, 2, 3, 4, 5])
        if reset:
            allocator.reset_prefix_cache()
        page = int(other.block_table()[1])
        other.truncate(3)
        other.reserve(1)
        assert [[page, int(other.block_table()[1])]] == allocator.take_copies().tolist()
        assert page != int(other.block_table()[1])
        allocator.check()
        step.end()
        allocator.check()


def test_twins_merged_in_a_step_wait() -> None:
    """A page that a commit replaces by an equal one stays as it is until the step that wrote it has ended."""
    allocator = BlockAllocator(9, 2)
    one, two = allocator.open([1, 2, 3]), allocator.open([1, 2, 3])
    allocator.reserve_batch([one, two], 3)
    with allocator.begin_step():
        allocator.commit_batch([one, two], [[1, 2, 3], [1, 2, 3]])
        assert one.block_table()[0] == two.block_table()[0]
        assert (4, 0, 4, 1) == states(allocator)
    assert (5, 0, 3, 0) == states(allocator)


def test_a_reset_in_a_step_tells_the_truth() -> None:
    """Pages that wait are still held after a reset, and free once the step has ended."""
    allocator = BlockAllocator(9, 2)
    sequence = fill(allocator, [1, 2, 3, 4])
    store(allocator, [5, 6])
    step = allocator.begin_step()
    sequence.close()
    report = allocator.reset_prefix_cache()
    assert (1, 2, False) == (report.dropped, report.still_held, bool(report))
    step.end()
    assert (8, 0, 0, 0) == states(allocator)


def test_a_step_ends_once() -> None:
    """A second end, and another allocator's, raise and change nothing."""
    allocator, other = BlockAllocator(9, 2), BlockAllocator(9, 2)
    sequence = fill(allocator, [1])
    step, strange = allocator.begin_step(), other.begin_step()
    sequence.close()
    with pytest.raises(StepEnded, match="another allocator"):
        allocator.end_step(strange)
    assert 1 == states(allocator)[3]
    step.end()
    with pytest.raises(StepEnded, match="<StepInFlight 1> has ended already"):
        step.end()
    extend(allocator, allocator.open([]), [1, 2])
    assert 1 == states(allocator)[2]

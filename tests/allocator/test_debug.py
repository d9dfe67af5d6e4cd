"""Debug levels and the leak report: broken books are found after the operation that broke them, owners are named."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from pagedkv.allocator import BlockAllocator, HostPool, InvariantViolation, OutOfPages, WrongThread
from pagedkv.allocator.debug import EVERY, VERBS
from tests.allocator.helpers import extend, fill
from tests.allocator.tagged import Tagged


def breaking(debug: str) -> BlockAllocator:
    """Return an allocator one of whose pages has a reference too many."""
    allocator = BlockAllocator(9, 2, debug=debug)
    fill(allocator, [1, 2, 3])
    allocator.ledger.pool.refs[1] += 1
    return allocator


def test_every_operation_is_audited() -> None:
    """At the level "every" the first operation after the damage raises, and says which one it was."""
    allocator = breaking("every")
    with pytest.raises(InvariantViolation, match="references counted") as raised:
        allocator.open([5])
    assert ["found after open, operation 6; audited after every 1"] == raised.value.__notes__


def test_sampled_operations_are_audited() -> None:
    """At the level "sampled" damage shows within a thousand operations, not at each."""
    allocator = breaking("sampled")
    for _ in range(EVERY["sampled"] - 6):
        allocator.take_copies()
    with pytest.raises(InvariantViolation, match="references counted") as raised:
        allocator.take_copies()
    assert ["found after take_copies, operation 1000; audited after every 1000"] == raised.value.__notes__


def test_off_audits_nothing_and_wraps_nothing() -> None:
    """At the level "off" no operation audits, and the verbs are the class's own."""
    allocator = breaking("off")
    extend(allocator, allocator.open([5]), [5])
    assert [] == [name for name in VERBS if name in vars(allocator)]


def test_a_refused_operation_is_audited_too() -> None:
    """A call that raises must have changed nothing, so the books are looked at all the same."""
    allocator = BlockAllocator(3, 2, debug="every")
    sequence = allocator.open([])
    with pytest.raises(OutOfPages):
        sequence.reserve(100)
    allocator.ledger.pool.num_free -= 1
    with pytest.raises(InvariantViolation, match="exactly one state"):
        sequence.reserve(100)


def test_every_verb_that_changes_the_books_is_wrapped() -> None:
    """The list of audited verbs is the public interface less what only looks, so that no new verb is forgotten."""
    looks = {"room", "room_to_grow", "block_tables", "stats", "check", "leaks", "hand_over"}
    public = {name for name, _ in inspect.getmembers(BlockAllocator, inspect.isfunction) if not name.startswith("_")}
    assert public - looks == set(VERBS)


def test_another_thread_is_refused_without_an_audit() -> None:
    """The wrong thread gets its own error: the owner may be in the middle of a change."""
    allocator = breaking("every")
    allocator._thread = -1
    with pytest.raises(WrongThread):
        allocator.open([1])


def test_unknown_levels_are_refused() -> None:
    """The error names the levels there are."""
    with pytest.raises(ValueError, match=r"debug must be one of \['off', 'sampled', 'every'\], was 'often'"):
        BlockAllocator(4, 2, debug="often")


def test_a_debugged_allocator_does_what_another_does() -> None:
    """Auditing changes no page id: the same random run gives the same tables."""
    tables = []
    for debug in ("off", "every"):
        memory = Tagged(7, debug=debug)
        for _ in range(80):
            memory.do(memory.random.choice(Tagged.VERBS + Tagged.HOLDS + Tagged.SWAPS))
        tables.append(memory.allocator.ledger.tables.tolist())
    assert tables[0] == tables[1]


def test_leaks_name_owner_place_age_and_pages() -> None:
    """Every kind of owner is reported once, oldest first, with what it keeps and where it was made."""
    times = iter(range(100))
    allocator, host = BlockAllocator(32, 2, clock=lambda: float(next(times)), debug="sampled"), HostPool(4)
    assert () == allocator.leaks()
    sequence = fill(allocator, [1, 2, 3])
    fork = sequence.fork()
    pin = allocator.pin([1, 2, 3])
    away = fill(allocator, [7, 8, 9])
    allocator.swap_out(away, host).finish()
    step = allocator.begin_step()
    fork.close()
    leaks = allocator.leaks()

    assert [sequence, pin, away, step] == [leak.owner for leak in leaks]
    assert [(2, 0), (1, 0), (0, 2), (2, 0)] == [(leak.pages, leak.host_pages) for leak in leaks]
    assert [1.0, 3.0, 4.0, 5.0] == [leak.origin for leak in leaks]
    assert [5.0, 3.0, 2.0, 1.0] == [leak.age for leak in leaks]
    files = ["helpers.py", "test_debug.py", "helpers.py", "test_debug.py"]
    assert files == [Path(str(leak.where)).name.partition(":")[0] for leak in leaks]
    assert str(leaks[1]).startswith("<Pin, 2 tokens> keeps 1 pages, made at 3.0 at ")
    assert "keeps 0 pages and 2 host pages" in str(leaks[2])


def test_without_debug_leaks_name_no_place() -> None:
    """Looking at the caller costs time, so it is done only where it was asked for."""
    allocator = BlockAllocator(9, 2)
    sequence = fill(allocator, [1, 2, 3])
    (leak,) = allocator.leaks()
    assert (sequence, 2, None, 1) == (leak.owner, leak.pages, leak.where, leak.origin)
    assert "<Sequence 1, 3 tokens> keeps 2 pages, made at 1, 5 ago" == str(leak)
    sequence.close()
    assert () == allocator.leaks()

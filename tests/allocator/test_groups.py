"""Layer groups in one pool: when window pages go back, what they cost, and what hybrids can find."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from pagedkv.allocator import (
    BeyondWindow,
    BlockAllocator,
    FullAttention,
    InvariantViolation,
    OutOfPages,
    Room,
    SlidingWindow,
)
from tests.allocator.helpers import books, extend, fill, hit, run_copies, store

if TYPE_CHECKING:
    from pagedkv.allocator import Sequence
    from pagedkv.allocator.groups import LayerGroup

FULL = FullAttention()
POLICIES = ("lru", "slru", "lfu", "arc", "s3fifo", "priority")


def pool(num_pages: int, page_size: int, *groups: LayerGroup, policy: str = "lru") -> BlockAllocator:
    """Return an allocator with these groups."""
    return BlockAllocator(num_pages, page_size, groups=groups, policy=policy)


def held(sequence: Sequence, group: int) -> list[int]:
    """Return the blocks that have a page."""
    return sequence.block_table(group).nonzero()[0].tolist()


def evict(allocator: BlockAllocator, page: int) -> None:
    """Evict one idle page, as when the policy names it."""
    pool = allocator.ledger.pool
    pool._forget(allocator.ledger.index.evict([page]), evicted=True)


def test_each_group_has_its_own_pages_from_one_pool() -> None:
    """Two groups take two pages a block, all different, and slots follow the table of the group asked for."""
    allocator = pool(20, 4, FULL, SlidingWindow(8))
    sequence = fill(allocator, range(6))
    tables = [sequence.block_table(group).tolist() for group in (0, 1)]
    assert 4 == len({*tables[0], *tables[1]}) == allocator.stats().in_use
    assert [tables[1][0] * 4 + 3, tables[1][1] * 4] == sequence.slots(3, 5, group=1).tolist()
    assert 12 == allocator.stats().stored_tokens
    allocator.check()


def test_window_pages_go_back_in_the_next_reserve() -> None:
    """After c tokens the next one sees c - (w - 1) and later; earlier pages go in the reserve, none before it."""
    allocator = pool(40, 4, FULL, SlidingWindow(6))
    sequence = fill(allocator, range(17))
    assert [0, 1, 2, 3, 4] == held(sequence, 1)
    sequence.reserve(1)
    assert [3, 4] == held(sequence, 1)
    assert [0, 1, 2, 3, 4] == held(sequence, 0)
    sequence.commit([17])
    extend(allocator, sequence, [18, 19, 20])
    sequence.reserve(1)
    assert [4, 5] == held(sequence, 1)
    allocator.check()


def test_sink_pages_stay() -> None:
    """Pages with sink tokens stay when all others have left the window."""
    allocator = pool(40, 4, SlidingWindow(4, num_sink_tokens=5))
    sequence = fill(allocator, range(22))
    sequence.reserve(1)
    assert [0, 1, 4, 5] == held(sequence, 0)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 16, 17, 40])
@pytest.mark.parametrize("step", [1, 3, 4, 9])
@pytest.mark.parametrize("sinks", [0, 3])
def test_bound(window: int, step: int, sinks: int) -> None:
    """A window group never holds more than ceil((window - 1 + step) / page_size) + 1 pages and its sinks'."""
    size = 4
    allocator = pool(200, size, FULL, SlidingWindow(window, sinks))
    bound = -(-(window - 1 + step) // size) + 1 + -(-sinks // size)
    sequence, most = allocator.open([]), 0
    for at in range(60):
        sequence.reserve(step)
        most = max(most, len(held(sequence, 1)))
        sequence.commit(range(at, at + step))
    assert most <= bound
    assert most >= min(bound - 2, -(-60 * step // size))


def test_pages_that_leave_are_room_for_the_same_reserve() -> None:
    """A full pool goes on with the pages that leave the window, and `room` says so before."""
    allocator = pool(4, 4, SlidingWindow(4))
    sequence = fill(allocator, range(12))
    assert Room(1, 2) == sequence.room(4)
    sequence.reserve(4)
    sequence.commit(range(12, 16))
    assert [2, 3] == held(sequence, 0)
    allocator.check()


def test_pages_that_others_hold_make_no_room() -> None:
    """A page that leaves one fork's window is room only when the other fork lets go of it in the same reserve."""
    allocator = pool(5, 4, SlidingWindow(4))
    one = fill(allocator, range(16))
    two = one.fork()
    assert Room(1, 0) == one.room(1)
    with pytest.raises(OutOfPages, match="1 pages needed, 0 available"):
        one.reserve(1)
    allocator.reserve_batch([one, two], 1)
    assert [[3, 4], [3, 4]] == [held(one, 0), held(two, 0)]
    allocator.check()


def test_a_reserve_that_fails_gives_nothing_back() -> None:
    """Short of one page, everything stays: tables, references, index and recency."""
    allocator = pool(4, 4, SlidingWindow(4))
    sequence = fill(allocator, range(12))
    before = books(allocator)
    with pytest.raises(OutOfPages, match="3 pages needed, 2 available"):
        sequence.reserve(12)
    assert before == books(allocator)
    assert [0, 1, 2] == held(sequence, 0)


def test_the_last_step_can_be_rolled_back_and_no_more() -> None:
    """Whatever the step's length, the length before it can be returned to; before the window then held it cannot."""
    for step in (1, 4, 11):
        allocator = pool(40, 4, FULL, SlidingWindow(6))
        sequence = fill(allocator, range(17))
        extend(allocator, sequence, list(range(step)))
        with pytest.raises(BeyondWindow, match="num_tokens must be a length whose window group 1 still holds, was 16"):
            sequence.truncate(16)
        assert 17 + step == sequence.num_tokens
        sequence.truncate(17)
        sequence.truncate(0)
        assert [] == sequence.block_table(1).tolist()
        extend(allocator, sequence, [1, 2, 3])
        allocator.check()


def test_hold_window_keeps_pages_until_the_next_truncate() -> None:
    """While held, nothing goes back and every length can be returned to; a truncate ends it."""
    allocator = pool(40, 4, FULL, SlidingWindow(4))
    sequence = fill(allocator, range(9))
    sequence.hold_window()
    for token in range(9):
        extend(allocator, sequence, [token])
    assert [0, 1, 2, 3, 4] == held(sequence, 1)
    sequence.truncate(10)
    extend(allocator, sequence, [1])
    assert [1, 2] == held(sequence, 1)
    allocator.check()


def test_a_hybrid_hit_needs_only_the_last_window() -> None:
    """A prefix is found though the window group's early pages are gone, and takes none of those up."""
    allocator = pool(40, 4, FULL, SlidingWindow(5))
    with fill(allocator, range(16)) as sequence:
        extend(allocator, sequence, [16, 17, 18, 19, 20])
    again = allocator.open([*range(20), 99])
    assert 20 == again.num_tokens
    assert [[0, 1, 2, 3, 4], [4]] == [held(again, group) for group in (0, 1)]
    allocator.check()


def test_the_longest_prefix_that_every_group_can_serve_wins() -> None:
    """With the last window page evicted, the hit ends where the window group still has its last window."""
    allocator = pool(40, 4, FULL, SlidingWindow(5))
    store(allocator, range(16))
    last = allocator.open([*range(16), 9])
    page = int(last.block_table(1)[3])
    last.close()
    evict(allocator, page)
    allocator.check()
    assert 12 == hit(allocator, [*range(16), 9])


def test_a_sub_page_hit_needs_all_groups() -> None:
    """A partly matching page counts only where each group has it; then each group's is copied before the write."""
    allocator = pool(40, 4, FULL, SlidingWindow(5))
    store(allocator, range(8))
    sequence = allocator.open([0, 1, 2, 3, 4, 5, 77, 78])
    assert 6 == sequence.num_tokens
    sequence.reserve(2)
    assert 2 == len(run_copies(allocator))
    sequence.commit([77, 78])
    sequence.close()
    with allocator.open([*range(8), 9]) as whole:
        page = int(whole.block_table(1)[1])
    evict(allocator, page)
    assert 6 == hit(allocator, [0, 1, 2, 3, 4, 5, 6, 66])  # by the page of 4, 5, 77, 78
    allocator = pool(40, 4, FULL, SlidingWindow(5))
    store(allocator, range(12))
    with allocator.open([*range(8), 9]) as whole:
        page = int(whole.block_table(1)[1])
    evict(allocator, page)
    assert 4 == hit(allocator, [0, 1, 2, 3, 4, 5, 66])
    allocator.check()


def test_what_can_be_hit_no_more_is_freed_at_once() -> None:
    """When a sink's page is evicted nothing behind it can be hit: all groups' pages of the subtree are freed."""
    allocator = pool(40, 4, FULL, SlidingWindow(5, num_sink_tokens=4))
    store(allocator, range(16))
    assert 8 == allocator.stats().idle
    with allocator.open([0, 1, 2, 3, 4]) as sequence:
        sink = int(sequence.block_table(1)[0])
    evict(allocator, sink)
    assert (0, 39) == (allocator.stats().idle, allocator.stats().free)
    allocator.check()


def test_duplicates_are_merged_per_group() -> None:
    """Two sequences that computed the same page keep one of each group."""
    allocator = pool(40, 4, FULL, SlidingWindow(8))
    one, two = allocator.open(range(9)), allocator.open(range(9))
    for sequence in (one, two):
        extend(allocator, sequence, list(range(9)))
    for group in (0, 1):
        assert one.block_table(group)[:2].tolist() == two.block_table(group)[:2].tolist()
    assert 4 == allocator.stats().merged_pages
    assert 8 == allocator.stats().in_use
    allocator.check()


def test_a_node_takes_a_window_page_up_again() -> None:
    """A full-attention page that lost its window page gets the next sequence's, and can be hit again."""
    allocator = pool(40, 4, FULL, SlidingWindow(5))
    store(allocator, range(12))
    with allocator.open([*range(12), 9]) as sequence:
        page = int(sequence.block_table(1)[2])
    keeper = allocator.open([*range(12), 9])
    keeper.close()
    evict(allocator, page)
    assert 8 == hit(allocator, [*range(12), 9])
    store(allocator, range(12))
    assert 12 == hit(allocator, [*range(12), 9])
    allocator.check()


def test_a_model_of_windows_alone_works() -> None:
    """Without full attention a long prompt is found by its last window, and eviction frees what it must."""
    allocator = pool(12, 4, SlidingWindow(5))
    with fill(allocator, range(16)) as sequence:
        for token in range(16, 33):
            extend(allocator, sequence, [token])
        assert 33 == sequence.num_tokens
    again = allocator.open([*range(32), 5])
    assert (32, [7]) == (again.num_tokens, held(again, 0))
    again.close()
    store(allocator, range(100, 144))
    assert 0 == hit(allocator, [*range(32), 5])
    allocator.check()


def test_forks_share_and_copy_in_every_group() -> None:
    """A fork shares all pages of all groups; the first write copies the partial tail of each."""
    allocator = pool(40, 4, FULL, SlidingWindow(6))
    one = fill(allocator, range(10))
    two = one.fork()
    assert 6 == allocator.stats().in_use
    assert Room(2, 33) == two.room(1)
    two.reserve(1)
    assert sorted((int(one.block_table(g)[2]), int(two.block_table(g)[2])) for g in (0, 1)) == sorted(
        run_copies(allocator)
    )
    two.commit([5])
    one.close()
    two.close()
    allocator.check()
    assert 0 == allocator.stats().in_use


def test_room_counts_a_window_group_as_window_and_chunk() -> None:
    """A long prompt in chunks needs full attention's pages and the window's bound; in one piece all of both."""
    allocator = pool(200, 4, FULL, SlidingWindow(9, num_sink_tokens=4))
    assert Room(50, 199) == allocator.room(range(100))
    # 8 + 16 tokens lie in at most 7 pages, and one page holds the sinks.
    assert Room(25 + 7 + 1, 199) == allocator.room(range(100), chunk=16)
    assert Room(25 + 25, 199) == allocator.room(range(100), chunk=100)
    with pytest.raises(ValueError, match="chunk must be at least 1, was 0"):
        allocator.room(range(100), chunk=0)


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 50])
@pytest.mark.parametrize("found", [0, 7, 24, 50])
def test_what_room_admits_runs_to_its_end(chunk: int, found: int) -> None:
    """Where `room` fits, the prompt runs to its end in such chunks; idle hits never bar what an empty pool admits."""
    groups = (FULL, SlidingWindow(9, num_sink_tokens=2))
    needed = pool(200, 4, *groups).room(range(60), chunk=chunk).needed
    for pages in range(needed - 4, needed + 2):
        allocator = pool(pages + 1, 4, *groups)
        with suppress(OutOfPages), allocator.open(range(found)) as first:
            run_in_chunks(allocator, first, found, 3)
        fits = allocator.room(range(60), chunk=chunk).fits
        with allocator.open(range(60)) as sequence:
            if fits:
                run_in_chunks(allocator, sequence, 60, chunk)
                assert 60 == sequence.num_tokens
        assert fits or pages < needed
        allocator.check()


def run_in_chunks(allocator: BlockAllocator, sequence: Sequence, end: int, chunk: int) -> None:
    """Compute consecutive numbers up to ``end``."""
    while (start := sequence.num_tokens) < end:
        extend(allocator, sequence, list(range(start, min(start + chunk, end))))


@pytest.mark.parametrize("policy", POLICIES)
def test_idle_window_pages_are_evicted_by_the_same_policy(policy: str) -> None:
    """Under every policy a small pool serves more text than it holds, window pages included, and stays sound."""
    allocator = pool(14, 2, FULL, SlidingWindow(5), SlidingWindow(3, num_sink_tokens=2), policy=policy)
    for start in (0, 1, 0, 5, 1, 0):
        store(allocator, range(start, start + 8))
        allocator.check()
    assert 0 < allocator.stats().evictions


def test_reset_makes_all_groups_unfindable() -> None:
    """After a reset neither group's pages are found, and an open sequence goes on."""
    allocator = pool(40, 4, FULL, SlidingWindow(6))
    sequence = fill(allocator, range(10))
    store(allocator, range(50, 60))
    assert not allocator.reset_prefix_cache()
    extend(allocator, sequence, [1, 2, 3, 4, 5, 6])
    assert 0 == hit(allocator, [*range(10), 1])
    assert 0 == hit(allocator, [*range(50, 60), 1])
    sequence.close()
    allocator.check()
    assert 0 == allocator.stats().in_use


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("rows.tables[1][0, 4] = 0", "a block has no page of the pool"),
        ("rows.firsts[1][0] = 5", "a table names a page that left the window"),
        ("rows.tables[1][0, 0] = rows.tables[0][0, 0]", "a table names a page that left the window"),
        ("index.node_of[rows.tables[0][0, 0]].sheets[0].pop(3)", "index nodes name a page marked otherwise"),
        (
            "index.node_of[rows.tables[0][0, 0]].sheets[0][99] = index.node_of[page].sheets[0].pop(3)",
            "outside its node's run",
        ),
        ("index._forget([index.node_of[idle].sheets[0].pop(0)])", "a page must be in exactly one state"),
    ],
)
def test_the_audit_speaks_of_groups(breakage: str, message: str) -> None:
    """What is broken by hand in a window group is named."""
    allocator = pool(40, 4, FULL, SlidingWindow(6))
    sequence = fill(allocator, range(17))
    store(allocator, range(50, 58))
    sequence.reserve(4)
    allocator.check()
    ledger = allocator.ledger
    index = ledger.index
    idle = next(
        page
        for page in range(40)
        if index.indexed[page] and not ledger.pool.refs[page] and index.node_of[page].tokens[0] == 50
    )
    names = {"rows": ledger.rows, "index": index, "idle": idle, "page": int(ledger.rows.tables[0][0, 0])}
    exec(breakage, names)
    with pytest.raises(InvariantViolation, match=message):
        allocator.check()


def test_the_audit_finds_what_can_be_hit_no_more() -> None:
    """An idle block that no prompt can reach is named; it should have been freed."""
    allocator = pool(40, 4, FULL, SlidingWindow(6))
    store(allocator, range(8))
    pool_, index = allocator.ledger.pool, allocator.ledger.index
    with allocator.open([*range(8), 9]) as sequence:
        page = int(sequence.block_table(1)[1])
    pool_.policy.removed([page], evicted=True)
    dropped = index._drop_page(page)  # type: ignore[attr-defined]
    pool_.num_idle -= 1
    pool_._put_back(dropped)
    with pytest.raises(InvariantViolation, match="block 1 can be hit no more"):
        allocator.check()


def test_wrong_windows_are_refused() -> None:
    """Numbers that describe no window raise by name."""
    with pytest.raises(ValueError, match="window must be at least 1, was 0"):
        SlidingWindow(0)
    with pytest.raises(ValueError, match="num_sink_tokens must be at least 0, was -1"):
        SlidingWindow(4, num_sink_tokens=-1)
    with pytest.raises(TypeError, match=r"window must be an integer, was 4\.0"):
        SlidingWindow(4.0)  # type: ignore[arg-type]

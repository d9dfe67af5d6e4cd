"""Layer groups with what holds pages besides sequences: steps in flight, pins, swap plans, and who is told of them."""

from __future__ import annotations

import pytest

from pagedkv.allocator import BlockAllocator, FullAttention, HostPool, InvariantViolation, OutOfPages, SlidingWindow
from tests.allocator.helpers import extend, fill, hit, store
from tests.allocator.test_groups import POLICIES, evict, held, pool
from tests.allocator.test_observer import watched

FULL = FullAttention()
MIXES = [
    (FULL, SlidingWindow(5)),
    (SlidingWindow(6), FULL),
    (SlidingWindow(4),),
    (SlidingWindow(4, 2), SlidingWindow(9)),
]


def test_pages_that_leave_a_window_in_a_step_are_no_room_before_it_ends() -> None:
    """The step may read them; so the reserve in which they leave, and those after it, must do without."""
    allocator = pool(6, 4, SlidingWindow(4))
    sequence = fill(allocator, range(16))
    step = allocator.begin_step()
    assert (1, 1) == sequence.room(4)
    extend(allocator, sequence, [16, 17, 18, 19])
    assert [3, 4] == held(sequence, 0)
    assert (3, 5) == (allocator.stats().deferred, allocator.stats().referenced)
    with pytest.raises(OutOfPages) as refused:
        sequence.reserve(4)
    assert (1, 0) == (refused.value.needed, refused.value.available)
    allocator.check()
    step.end()
    assert (1, 4) == sequence.room(4)
    sequence.reserve(4)
    assert 0 == allocator.stats().deferred
    allocator.check()


@pytest.mark.parametrize("groups", MIXES)
def test_a_close_in_a_step_leaves_what_a_close_leaves(groups: tuple[FullAttention | SlidingWindow, ...]) -> None:
    """Once the step has ended as many pages are free and idle, and as much is found, as without it."""
    found = []
    for in_step in (False, True):
        allocator = pool(60, 2, *groups)
        sequence = fill(allocator, range(7))
        for token in range(7, 19):
            extend(allocator, sequence, [token])
        idle = allocator.stats().idle
        if in_step:
            with allocator.begin_step():
                sequence.close()
                allocator.check()
                assert idle == allocator.stats().idle
        else:
            sequence.close()
        allocator.check()
        stats = allocator.stats()
        found.append((stats.free, stats.idle, [hit(allocator, range(length)) for length in range(20)]))
    assert found[0] == found[1]


def test_blocks_that_die_with_their_holder_go_when_the_step_ends() -> None:
    """What only an open sequence kept from being dead is held by the step after its close, and freed at its end."""
    allocator = pool(60, 2, FULL, SlidingWindow(5))
    sequence = fill(allocator, range(10))
    for _ in range(6):
        sequence.reserve(2)
        sequence.commit(count=2)
    ledger = allocator.ledger
    idle = (ledger.index.indexed & (ledger.pool.refs == 0)).nonzero()[0].tolist()
    assert 5 == len(idle)
    for page in idle:
        evict(allocator, page)
    with allocator.begin_step():
        sequence.close()
        allocator.check()
        assert 0 == allocator.stats().idle
    allocator.check()
    assert (59, 0) == (allocator.stats().free, allocator.stats().idle)


@pytest.mark.parametrize(("in_step", "copies"), [(False, 2), (True, 4)])
def test_a_tail_that_a_step_reads_is_written_by_nobody(in_step: bool, copies: int) -> None:
    """Of two forks that write at once one may keep the tails of all groups, unless a step in flight may read them."""
    allocator = pool(30, 4, FULL, SlidingWindow(6))
    one = fill(allocator, range(6))
    two = one.fork()
    step = allocator.begin_step() if in_step else None
    allocator.reserve_batch([one, two], 1)
    assert copies == len(allocator.take_copies())
    allocator.check()
    if step is not None:
        step.end()
    allocator.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_prefixes_survive_in_every_group(policy: str) -> None:
    """A pin holds what the next token sees of each group, so that the prefix is found after any scan."""
    allocator = pool(20, 4, FULL, SlidingWindow(6), policy=policy)
    store(allocator, range(16))
    with allocator.pin(range(16)) as pin:
        assert (16, 6) == (pin.num_tokens, len(pin.pages()))
        assert 6 == allocator.stats().in_use
        assert 24 == allocator.stats().stored_tokens
        for scan in range(1, 5):
            store(allocator, range(100 * scan, 100 * scan + 20))
            allocator.check()
        assert 16 == hit(allocator, range(17))
        allocator.reset_prefix_cache()
        assert 24 == allocator.stats().stored_tokens
    assert (0, 19) == (allocator.stats().in_use, allocator.stats().free)
    allocator.check()


def test_a_pin_ends_with_the_last_full_page() -> None:
    """Where part of a further page is stored too, the pin still holds all that a hit of its full pages needs."""
    allocator = pool(30, 4, FULL, SlidingWindow(6))
    store(allocator, range(24))
    pin = allocator.pin(range(14))
    assert (12, 5) == (pin.num_tokens, len(pin.pages()))
    allocator.check()


def test_a_page_pinned_in_one_group_is_not_written() -> None:
    """A sequence that cuts into a pinned prefix writes into copies, in every group."""
    allocator = pool(30, 4, SlidingWindow(6), FULL)
    sequence = fill(allocator, range(12))
    pin = allocator.pin(range(12))
    sequence.truncate(10)
    before = [int(sequence.block_table(group)[2]) for group in (0, 1)]
    sequence.reserve(1)
    after = [int(sequence.block_table(group)[2]) for group in (0, 1)]
    assert [[a, b] for a, b in zip(before, after, strict=True)] == allocator.take_copies().tolist()
    allocator.check()
    pin.unpin()
    allocator.check()


@pytest.mark.parametrize("groups", [*MIXES, (FULL, FULL)])
@pytest.mark.parametrize("evicted", [False, True])
def test_swap_moves_what_the_next_token_sees(groups: tuple[FullAttention | SlidingWindow, ...], evicted: bool) -> None:
    """The way out copies each group's visible pages; the way back only what cannot be found, and is findable again."""
    allocator, host = pool(30, 4, *groups), HostPool(30)
    sequence = fill(allocator, range(17))
    sequence.reserve(1)  # what has left the windows goes back
    sequence.commit([17])
    tables = [sequence.block_table(group).astype(bool).tolist() for group in range(len(groups))]
    with allocator.swap_out(sequence, host) as plan:
        pages = plan.copies[:, 0].tolist()
    assert len(set(pages)) == len(pages) == sum(map(sum, tables)) == host.num_used
    assert allocator.stats().in_use == 0
    if evicted:
        allocator.reset_prefix_cache()
    with allocator.swap_in(sequence) as plan:
        copied = len(plan.copies)
    assert (len(pages) if evicted else len(groups)) == copied
    assert tables == [sequence.block_table(group).astype(bool).tolist() for group in range(len(groups))]
    assert (18, 0) == (sequence.num_tokens, host.num_used)
    allocator.check()
    sequence.reserve(6)
    sequence.commit(range(18, 24))
    sequence.close()
    allocator.check()
    assert (0 if evicted else 16) == hit(allocator, range(17))


def test_leaks_count_the_pages_of_every_group() -> None:
    """An owner's pages are those of all its tables; blocks that left a window are none."""
    allocator = pool(40, 4, FULL, SlidingWindow(6))
    sequence = fill(allocator, range(17))
    sequence.reserve(1)
    pin = allocator.pin(range(16))
    assert [(sequence, 7), (pin, 6)] == [(leak.owner, leak.pages) for leak in allocator.leaks()]


def test_evictions_of_every_group_are_told() -> None:
    """The observer hears of exactly the pages that are findable no more, window pages and dead blocks included."""
    allocator, notes = watched(9, 2, groups=(FULL, SlidingWindow(5)))
    store(allocator, range(6))
    index = allocator.ledger.index
    before = set(index.indexed.nonzero()[0].tolist())
    notes.take()
    allocator.open([7] * 6).reserve(6)
    told = [page for name, *event in notes.take() if name == "evicted" for page in event[0]]
    assert sorted(before - set(index.indexed.nonzero()[0].tolist())) == sorted(told)
    assert 4 <= len(told) == allocator.stats().evictions


def test_every_operation_is_audited_in_every_group() -> None:
    """Damage to a window group's books shows after the next operation, holding a window included."""
    allocator = BlockAllocator(30, 2, groups=(FULL, SlidingWindow(5)), debug="every")
    sequence = fill(allocator, range(4))
    allocator.ledger.rows.tables[1][sequence.row, 0] = 0
    with pytest.raises(InvariantViolation):
        sequence.hold_window()

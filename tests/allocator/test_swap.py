"""Swap plans: both ends stay held until the copies have run, nothing is taken from others, books balance per tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from pagedkv.allocator import (
    BlockAllocator,
    CopiesPending,
    HostPool,
    OutOfPages,
    PlanOpen,
    PlanSettled,
    ReservationOpen,
    SequenceClosed,
    SequenceSwapped,
)
from tests.allocator.helpers import books, extend, fill, hit, run_copies, store
from tests.allocator.tagged import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.allocator import Sequence


def swapped(allocator: BlockAllocator, host: HostPool, tokens: list[int]) -> Sequence:
    """Return a sequence that lies in the host pool."""
    sequence = fill(allocator, tokens)
    allocator.swap_out(sequence, host).finish()
    return sequence


def test_out_and_in_again() -> None:
    """A sequence keeps its length and text, gives its pages up, and goes on where it stopped."""
    allocator, host = BlockAllocator(9, 2, prefix_cache=False), HostPool(4)
    sequence = fill(allocator, [1, 2, 3, 4, 5])
    table = sequence.block_table().tolist()
    plan = allocator.swap_out(sequence, host)
    assert [[table[0], 0], [table[1], 1], [table[2], 2]] == plan.copies.tolist()
    assert (np.dtype(np.int32), True) == (plan.copies.dtype, plan.to_host)
    assert (3, 3) == (allocator.stats().referenced, host.num_used)
    allocator.check()
    plan.finish()
    assert (0, 0, 1) == (allocator.stats().referenced, allocator.stats().sequences, allocator.stats().swapped)
    assert (True, False, 5, 0) == (sequence.swapped, sequence.closed, sequence.num_tokens, sequence.num_reserved)
    allocator.check()

    store(allocator, [9] * 6)
    plan = allocator.swap_in(sequence)
    assert [0, 1, 2] == plan.copies[:, 1].tolist()
    assert (3, 3, False) == (allocator.stats().referenced, host.num_used, plan.to_host)
    allocator.check()
    plan.finish()
    assert plan.copies[:, 0].tolist() == sequence.block_table().tolist()
    assert (4, 0, False, 5) == (host.num_free, allocator.stats().swapped, sequence.swapped, sequence.num_tokens)
    extend(allocator, sequence, [6, 7])
    assert 7 == sequence.num_tokens
    allocator.check()
    sequence.close()
    assert 8 == allocator.stats().free


def test_cancel_leaves_everything_as_it_was() -> None:
    """A cancelled way out leaves the device as it was, a cancelled way in the host; both can be tried again."""
    allocator, host = BlockAllocator(9, 2), HostPool(4)
    store(allocator, [8, 8])
    sequence = fill(allocator, [1, 2, 3])
    before = books(allocator)
    allocator.swap_out(sequence, host).cancel()
    assert before == books(allocator)
    assert (4, False) == (host.num_free, sequence.swapped)
    extend(allocator, sequence, [4])

    allocator.swap_out(sequence, host).finish()
    available = allocator.stats().free + allocator.stats().idle
    allocator.swap_in(sequence).cancel()
    assert (available, 2, True) == (allocator.stats().free + allocator.stats().idle, host.num_used, sequence.swapped)
    allocator.check()
    allocator.swap_in(sequence).finish()
    assert 4 == sequence.num_tokens


def test_a_plan_is_a_context_manager() -> None:
    """It finishes by itself, and cancels on an exception."""
    allocator, host = BlockAllocator(9, 2), HostPool(4)
    sequence = fill(allocator, [1, 2, 3])
    with pytest.raises(ZeroDivisionError), allocator.swap_out(sequence, host):
        _ = 1 // 0
    assert not sequence.swapped
    with allocator.swap_out(sequence, host):
        pass
    assert sequence.swapped


def test_shared_and_findable_pages_are_copied_and_stay() -> None:
    """What others share stays theirs: every page is copied, and a fork reads on as before."""
    allocator, host = BlockAllocator(16, 2), HostPool(8)
    sequence = fill(allocator, [1, 2, 3, 4, 5])
    fork = sequence.fork()
    table = fork.block_table().tolist()
    plan = allocator.swap_out(sequence, host)
    assert table == plan.copies[:, 0].tolist()
    extend(allocator, fork, [6])
    assert table[:2] == fork.block_table().tolist()[:2]
    assert table[2] != fork.block_table()[2]
    plan.finish()
    assert 4 == hit(allocator, [1, 2, 3, 4, 7])
    allocator.check()


def test_the_way_in_takes_prefix_hits() -> None:
    """Pages still in the index are shared, only the others are copied; hits so found count in no hit rate."""
    allocator, host = BlockAllocator(16, 2), HostPool(8)
    sequence = swapped(allocator, host, [1, 2, 3, 4, 5])
    store(allocator, [1, 2, 3, 4])
    before = allocator.stats().hit_tokens
    with allocator.swap_in(sequence) as plan:
        assert [2] == plan.copies[:, 1].tolist()
    assert before == allocator.stats().hit_tokens
    allocator.check()


def test_what_comes_in_is_findable_after_finish_never_before() -> None:
    """Copied pages enter the index when the copies have run; equal ones stored meanwhile are merged."""
    allocator, host = BlockAllocator(16, 2), HostPool(8)
    sequence = swapped(allocator, host, [1, 2, 3, 4, 5])
    fill(allocator, [7] * 29).close()  # evicts everything
    plan = allocator.swap_in(sequence)
    assert [0, 1, 2] == plan.copies[:, 1].tolist()
    assert 0 == hit(allocator, [1, 2, 3, 4, 6])
    twin = fill(allocator, [1, 2, 9])
    plan.finish()
    allocator.check()
    assert 4 == hit(allocator, [1, 2, 3, 4, 6])
    assert twin.block_table()[0] == sequence.block_table()[0]
    assert 1 == allocator.stats().merged_pages


@pytest.mark.parametrize("when", ["on the host", "on the way in", "on the way out"])
def test_a_reset_reaches_swapped_sequences(when: str) -> None:
    """KV computed before a reset is not findable after the sequence came back."""
    allocator, host = BlockAllocator(16, 2), HostPool(8)
    sequence = fill(allocator, [1, 2, 3, 4, 5])
    plan = allocator.swap_out(sequence, host)
    if when == "on the way out":
        allocator.reset_prefix_cache()
    plan.finish()
    if when == "on the host":
        allocator.reset_prefix_cache()
    plan = allocator.swap_in(sequence)
    if when == "on the way in":
        allocator.reset_prefix_cache()
    plan.finish()
    extend(allocator, sequence, [6, 7])
    assert 0 == hit(allocator, [1, 2, 3, 4, 5, 6, 7])
    allocator.check()


def test_a_reset_counts_what_lies_in_a_host_pool() -> None:
    """Old KV in a host pool is still held, so the reset does not say that all of it is gone."""
    allocator, host = BlockAllocator(16, 2), HostPool(8)
    sequence = swapped(allocator, host, [1, 2, 3, 4, 5])
    report = allocator.reset_prefix_cache()
    assert (2, 3, False) == (report.dropped, report.still_held, bool(report))
    sequence.close()
    assert allocator.reset_prefix_cache()


def test_the_way_in_reports_scrubs() -> None:
    """Device pages that another namespace had are reported like those of a reserve, before the copies run."""
    allocator, host = BlockAllocator(4, 2), HostPool(8)
    sequence = swapped(allocator, host, [1, 2, 3, 4, 5])
    store(allocator, [7] * 6, namespace="other")
    allocator.take_scrubs()
    plan = allocator.swap_in(sequence)
    assert sorted(plan.copies[:, 0].tolist()) == sorted(allocator.take_scrubs().tolist())
    plan.finish()
    allocator.check()


VERBS: list[Callable[[BlockAllocator, Sequence], object]] = [
    lambda allocator, sequence: sequence.reserve(1),
    lambda allocator, sequence: sequence.commit([]),
    lambda allocator, sequence: sequence.fork(),
    lambda allocator, sequence: sequence.truncate(0),
    lambda allocator, sequence: sequence.room(1),
    lambda allocator, sequence: sequence.block_table(),
    lambda allocator, sequence: sequence.slots(0, 1),
    lambda allocator, sequence: sequence.row,
    lambda allocator, sequence: allocator.reserve_batch([sequence], 1),
    lambda allocator, sequence: allocator.swap_out(sequence, HostPool(9)),
]


@pytest.mark.parametrize("verb", range(len(VERBS)))
@pytest.mark.parametrize("where", ["out", "away", "in"])
def test_a_swapped_sequence_refuses_verbs(verb: int, where: str) -> None:
    """On the way and away, whatever needs its pages raises and changes nothing."""
    allocator, host = BlockAllocator(9, 2), HostPool(4)
    sequence = fill(allocator, [1, 2, 3])
    plan = allocator.swap_out(sequence, host)
    if where != "out":
        plan.finish()
    if where == "in":
        plan = allocator.swap_in(sequence)
    before = books(allocator)
    with pytest.raises(SequenceSwapped, match="lies in a host pool, or is on its way"):
        VERBS[verb](allocator, sequence)
    assert before == books(allocator)
    allocator.check()


def test_refusals_change_nothing() -> None:
    """Open reservations, full pools, open plans, settled plans and wrong arguments are named errors."""
    allocator, host = BlockAllocator(5, 2), HostPool(1)
    sequence = fill(allocator, [1, 2, 3])
    before = books(allocator)
    with pytest.raises(OutOfPages) as refused:
        allocator.swap_out(sequence, host)
    assert (2, 1) == (refused.value.needed, refused.value.available)
    with pytest.raises(TypeError, match="host_pool must be a HostPool, was int"):
        allocator.swap_out(sequence, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sequence must be swapped"):
        allocator.swap_in(sequence)
    assert (before, 1, False) == (books(allocator), host.num_free, sequence.swapped)
    sequence.reserve(1)
    with pytest.raises(ReservationOpen):
        allocator.swap_out(sequence, HostPool(9))
    sequence.commit([])

    host = HostPool(3)
    plan = allocator.swap_out(sequence, host)
    for call in (sequence.close, lambda: allocator.swap_in(sequence)):
        with pytest.raises(PlanOpen):
            call()
    plan.finish()
    for call in (plan.finish, plan.cancel):
        with pytest.raises(PlanSettled):
            call()
    allocator.check()
    other = fill(allocator, [7, 7, 7, 7, 7])
    before = books(allocator)
    with pytest.raises(OutOfPages) as refused:
        allocator.swap_in(sequence)
    assert (1, 0) == (refused.value.needed, refused.value.available)  # the idle page is a hit, and so counts nowhere
    assert (before, 2) == (books(allocator), host.num_used)
    other.close()
    allocator.swap_in(sequence).finish()


def test_a_page_still_to_be_copied_into_is_not_swapped() -> None:
    """A copy that has not been acknowledged must run first: its destination holds nothing yet."""
    allocator, host = BlockAllocator(9, 2), HostPool(4)
    sequence = fill(allocator, [1])
    fork = sequence.fork()
    fork.reserve(1)
    fork.commit([])
    with pytest.raises(CopiesPending):
        allocator.swap_out(fork, host)
    assert 4 == host.num_free
    run_copies(allocator)
    allocator.swap_out(fork, host).finish()
    allocator.check()


def test_close_frees_the_host_pages() -> None:
    """A swapped sequence can be closed where it lies; afterwards it is closed like any other."""
    allocator, host = BlockAllocator(9, 2), HostPool(4)
    with swapped(allocator, host, [1, 2, 3]) as sequence:
        assert 2 == host.num_used
    assert 4 == host.num_free
    assert (True, False) == (sequence.closed, sequence.swapped)
    with pytest.raises(SequenceClosed):
        allocator.swap_in(sequence)
    allocator.check()


def test_pages_swapped_out_in_a_step_wait_for_it() -> None:
    """Device pages given up by a finished plan are not handed out while a step may still use them."""
    allocator, host = BlockAllocator(9, 2), HostPool(4)
    sequence = fill(allocator, [1, 2, 3])
    with allocator.begin_step():
        allocator.swap_out(sequence, host).finish()
        assert 2 == allocator.stats().deferred
    assert 0 == allocator.stats().referenced


def test_two_swaps_at_once_share_no_page() -> None:
    """Sequences swapped in one step have distinct host slots and come back byte-equal, whoever used the pages since.

    Source: NVIDIA/TensorRT-LLM#9056, vllm-project/vllm#45704 (text of one user appears in another's output).
    """
    allocator, host = BlockAllocator(7, 4, prefix_cache=False), HostPool(6)
    device, memory = np.zeros((7, 4), np.int64), np.zeros((6, 4), np.int64)
    pair = [fill(allocator, [n] * 11) for n in (1, 2)]
    for sequence in pair:
        device.reshape(-1)[sequence.slots(0, 11)] = np.arange(11) + 100 * sequence.serial
    plans = [allocator.swap_out(sequence, host) for sequence in pair]
    for plan in plans:
        memory[plan.copies[:, 1]] = device[plan.copies[:, 0]]
        plan.finish()
    assert 6 == len({int(page) for plan in plans for page in plan.copies[:, 1]})

    third = fill(allocator, [3] * 24)
    device.reshape(-1)[third.slots(0, 24)] = -1
    third.close()
    for sequence in reversed(pair):
        with allocator.swap_in(sequence) as plan:
            device[plan.copies[:, 0]] = memory[plan.copies[:, 1]]
    for sequence in pair:
        expected = (np.arange(11) + 100 * sequence.serial).tolist()
        assert expected == device.reshape(-1)[sequence.slots(0, 11)].tolist()


@pytest.mark.parametrize("seed", range(6))
def test_random_swaps_keep_every_byte(seed: int) -> None:
    """Over thousands of operations with swaps, each text is where its sequence is, and books balance in both tiers."""
    memory = Tagged(seed, num_pages=10 + 3 * seed, page_size=1 + seed % 4, host_pages=4 + 4 * (seed % 3))
    for _ in range(400):
        memory.do(memory.random.choice(Tagged.VERBS + Tagged.HOLDS + Tagged.SWAPS * 2))
    memory.finish()


def test_the_random_swaps_reach_every_corner() -> None:
    """The random walk meets full pools in both tiers, and hits on the way in."""
    seen = dict[str, int]()
    for seed in range(6):
        memory = Tagged(seed, num_pages=14, page_size=2, host_pages=8)
        for _ in range(250):
            memory.do(memory.random.choice(Tagged.VERBS + Tagged.HOLDS + Tagged.SWAPS * 2))
        seen = {name: seen.get(name, 0) + count for name, count in memory.seen.items()}

    assert [] == [name for name, count in seen.items() if not count]

"""The fragmentation models: each holds exactly what it says, and nothing is lost between its pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fragmentation import serve, serve_static
from benchmarks.memory_models import Buddy, Contiguous, Paged, Region, ReserveMaximum

if TYPE_CHECKING:
    from benchmarks.memory_models import Memory


@given(size=st.integers(1, 40), data=st.data())
def test_region_is_first_fit_without_overlap(size: int, data: st.DataObject) -> None:
    """A piece goes to the lowest hole that is long enough, pieces never overlap, and holes are joined."""
    region = Region(size)
    pieces: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()) and pieces:
            start = data.draw(st.sampled_from(sorted(pieces)))
            region.give(start, pieces.pop(start))
        else:
            length = data.draw(st.integers(1, size))
            taken = {slot for start, count in pieces.items() for slot in range(start, start + count)}
            fits = [s for s in range(size - length + 1) if not taken & set(range(s, s + length))]
            got = region.take(length)
            assert (fits[0] if fits else None) == got
            if got is not None:
                pieces[got] = length
        assert size - sum(pieces.values()) == region.free
    for start, length in pieces.items():
        region.give(start, length)
    assert size == region.largest_hole


@given(order=st.integers(0, 6), data=st.data())
def test_buddy_blocks_are_aligned_and_joined_again(order: int, data: st.DataObject) -> None:
    """Blocks are the smallest power of two that fits, aligned to their size, apart, and all joined at the end."""
    size = 2**order
    buddy = Buddy(size)
    lengths: dict[int, int] = {}
    for number in range(data.draw(st.integers(1, 20))):
        if data.draw(st.booleans()) and lengths:
            request = data.draw(st.sampled_from(sorted(lengths)))
            if data.draw(st.booleans()):
                lengths[request] += buddy.grow([request])
            else:
                buddy.free(request)
                del lengths[request]
        else:
            length = data.draw(st.integers(1, size))
            if buddy.admit(number, length, length):
                lengths[number] = length
        blocks = [buddy._block[request] for request in lengths]
        assert [1 << (length - 1).bit_length() for length in lengths.values()] == [2**o for _, o, _ in blocks]
        assert all(start % 2**o == 0 for start, o, _ in blocks)
        slots = [slot for start, o, _ in blocks for slot in range(start, start + 2**o)]
        assert len(slots) == len(set(slots)) == buddy.held
    for request in lengths:
        buddy.free(request)
    assert buddy.admit(-1, size, size)


@pytest.mark.parametrize("size", [0, 3, 48])
def test_buddy_needs_a_power_of_two(size: int) -> None:
    """Any other size cannot be halved to the end."""
    with pytest.raises(ValueError, match="power of two"):
        Buddy(size)


def test_contiguous_growth_holds_both_copies() -> None:
    """A piece of 4 grows into one of 5 while the 4 are still there: 9 slots at the highest moment."""
    memory = Contiguous(10)
    assert memory.admit(1, 4, 5)
    assert 1 == memory.grow([1])
    assert (5, 9) == (memory.held, memory.highest)
    assert not memory.ever_fits(6)


def test_contiguous_growth_fails_between_others() -> None:
    """Slots enough in all, none in one piece: refused, and nothing has changed."""
    memory = Contiguous(12)
    for number in range(4):
        assert memory.admit(number, 3, 4)
    memory.free(0)
    memory.free(2)
    assert 0 == memory.grow([1])
    assert 6 == memory.held


def test_reserved_slabs_are_the_maximum() -> None:
    """Each request holds the maximum, however short; more than fit are refused."""
    memory = ReserveMaximum(100, 40)
    assert (True, True, False) == tuple(memory.admit(n, 1, 2) for n in range(3))
    assert 80 == memory.held
    assert not memory.ever_fits(41)


def test_paged_holds_whole_pages_and_pays_for_the_null_page() -> None:
    """17 tokens hold two pages of 16; a memory of 64 slots has three usable pages."""
    memory = Paged(64, 16)
    assert memory.admit(1, 17, 20)
    assert 32 == memory.held
    assert memory.ever_fits(48)
    assert not memory.ever_fits(49)


def test_one_request_is_accounted_for_by_hand() -> None:
    """Two requests of 3 + 2 tokens on slabs of 8, one slab: the second waits while the first holds 3 slots of air."""
    outcome = serve(ReserveMaximum(8, 8), 8, [(3, 2), (3, 2)])

    # While the second waits: 4 then 5 of 8 held slots have a token, and no slot is free.
    assert pytest.approx(1 - 9 / 16) == outcome.internal
    assert (0.0, 1.0, 1, 0, 0) == (
        outcome.external, outcome.peak, outcome.most_running, outcome.refused, outcome.preempted,
    )  # fmt: skip


def test_a_static_batch_is_held_until_its_longest_request_ends() -> None:
    """Two requests in one batch of 2 * (4 + 3) slots; when the short one has ended its slab is all waste."""
    outcome = serve_static(14, [(4, 1), (2, 3), (4, 3)], max_new=3)

    assert pytest.approx(1 - (5 + 3 + 4 + 5) / (3 * 14)) == outcome.internal
    assert pytest.approx(4 / 3) == outcome.running


def test_pages_of_one_token_waste_nothing() -> None:
    """At page size 1 every held slot has a token."""
    assert 0 == serve(Paged(64, 1), 64, [(9, 7)] * 12).internal


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=12),
    which=st.sampled_from(["reserve", "buddy", "contiguous", "page 1", "page 4"]),
)
def test_every_memory_serves_all_or_refuses(lengths: list[tuple[int, int]], which: str) -> None:
    """No memory hangs under load: what could ever fit is served, everything comes back, fractions are fractions."""
    memories: dict[str, Memory] = {
        "reserve": ReserveMaximum(64, 32), "buddy": Buddy(64), "contiguous": Contiguous(64),
        "page 1": Paged(64, 1), "page 4": Paged(64, 4),
    }  # fmt: skip
    memory = memories[which]
    outcome = serve(memory, 64, lengths)

    assert 0 == memory.held
    assert sum(not memory.ever_fits(prompt + output) for prompt, output in lengths) == outcome.refused
    assert 0 <= outcome.internal < 1
    assert 0 <= outcome.external <= 1
    assert 0 <= outcome.stored <= outcome.peak <= 1

"""Handles of another allocator, and things that are no handles, are refused by name and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.allocator import BlockAllocator, ForeignSequence, HostPool, StepEnded
from tests.allocator.helpers import books, fill

if TYPE_CHECKING:
    from collections.abc import Callable


def pair() -> tuple[BlockAllocator, BlockAllocator]:
    """Return two allocators with a sequence each."""
    allocators = BlockAllocator(9, 2), BlockAllocator(9, 2)
    for allocator in allocators:
        fill(allocator, [1, 2, 3])
    return allocators


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda mine, other: mine.unpin(other.pin([1, 2])), ValueError, "pin must be one that this allocator made"),
        (lambda mine, other: mine.end_step(other.begin_step()), StepEnded, "is another allocator's"),
        (lambda mine, other: mine.swap_out(other.open([1]), HostPool(4)), ForeignSequence, "opened by another"),
        (
            lambda mine, other: mine.finish_swap(other.swap_out(other.open([1]), HostPool(4))),
            ForeignSequence,
            "made by another allocator",
        ),
        (
            lambda mine, other: mine.cancel_swap(other.swap_out(other.open([1]), HostPool(4))),
            ForeignSequence,
            "made by another allocator",
        ),
        (lambda mine, other: mine.swap_in(other.open([1])), ForeignSequence, "opened by another"),
        (lambda mine, other: mine.unpin(3), TypeError, "pin must be a Pin, was int"),
        (lambda mine, other: mine.end_step(3), TypeError, "step must be a StepInFlight, was int"),
        (lambda mine, other: mine.finish_swap(3), TypeError, "plan must be a SwapPlan, was int"),
        (lambda mine, other: mine.swap_in(3), TypeError, "sequences must be Sequence handles, had int"),
        (lambda mine, other: mine.close(3), TypeError, "sequences must be Sequence handles, had int"),
    ],
)
def test_foreign_handles(use: Callable[[Any, Any], object], error: type[Exception], message: str) -> None:
    """Each verb that takes a handle refuses another allocator's, and what is none."""
    mine, other = pair()
    before = books(mine)
    with pytest.raises(error, match=message):
        use(mine, other)
    assert before == books(mine)
    mine.check()
    other.check()


def test_a_swapped_foreigner_cannot_be_closed_here() -> None:
    """Close looks at whose a swapped sequence is."""
    mine, other = pair()
    sequence = fill(other, [4])
    other.swap_out(sequence, HostPool(4)).finish()
    with pytest.raises(ForeignSequence):
        mine.close(sequence)
    other.close(sequence)
    other.check()


@pytest.mark.parametrize(
    ("num_pages", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_host_pools_have_pages(num_pages: Any, error: type[Exception]) -> None:
    """A host pool of no pages, or of a number that is none, is refused."""
    with pytest.raises(error, match="num_pages must be"):
        HostPool(num_pages)

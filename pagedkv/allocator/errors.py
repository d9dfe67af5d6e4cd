"""What can go wrong with the allocator, one class per situation.

Every error is raised before anything has changed: the call that raises can be taken as not made.
"""

from __future__ import annotations

# ruff: noqa: N818 -- a class is named after the situation, which is what a caller handles, and not every one is a fault.


class OutOfPages(RuntimeError):
    """More pages are needed than are free or idle; close or preempt a sequence and call again.

    Attributes:
        needed: pages the call would have taken.
        available: free plus idle pages at that moment.
    """

    def __init__(self, needed: int, available: int) -> None:
        """Say both numbers."""
        super().__init__(f"{needed} pages needed, {available} available")
        self.needed = needed
        self.available = available

    def __reduce__(self) -> tuple[type[OutOfPages], tuple[int, int]]:
        return type(self), (self.needed, self.available)


class SequenceClosed(RuntimeError):
    """A sequence was used after `close`."""


class SequenceSwapped(RuntimeError):
    """A sequence was used that lies in a host pool, or is on its way; only `close` and `swap_in` take such a one."""


class PlanOpen(RuntimeError):
    """A sequence was closed or swapped whose swap plan has neither been finished nor cancelled."""


class PlanSettled(RuntimeError):
    """A swap plan was finished or cancelled a second time."""


class AlreadyUnpinned(RuntimeError):
    """A pin was used after `unpin`."""


class StepEnded(RuntimeError):
    """A step was ended a second time, or by another allocator."""


class ForeignSequence(ValueError):
    """A sequence was given to an allocator that did not open it."""


class ReservationOpen(RuntimeError):
    """A call that needs a sequence at rest met one with a reservation that has not been committed."""


class NotReserved(RuntimeError):
    """More tokens were committed than are reserved."""


class PromptMismatch(ValueError):
    """A committed token differs from the prompt that the sequence was opened with."""


class BeyondWindow(ValueError):
    """A sequence was cut back to where a window group has given back pages that it would need again."""


class CopiesPending(RuntimeError):
    """Tokens were committed into a page whose copy has not been acknowledged.

    Its bytes were not there yet when the tokens were written, or were still to be read by another copy. Run what
    `take_copies` returns before writing, then call `acknowledge_copies`.
    """


class WrongThread(RuntimeError):
    """The allocator belongs to another thread; its owner must call `hand_over` first."""


class InvariantViolation(RuntimeError):
    """`check` found the books to be wrong.

    Attributes:
        page: the page concerned, or None.
        owner: the sequence concerned, or None.
        origin: the clock's reading when the owner was opened, or None.
    """

    def __init__(
        self, what: str, *, page: int | None = None, owner: object = None, origin: float | None = None
    ) -> None:
        """Name the invariant, the page, its owner and its origin."""
        where = "" if page is None else f" (page {page})"
        whose = "" if owner is None else f" (owner {owner!r}, opened at {origin})"
        super().__init__(what + where + whose)
        self.page = page
        self.owner = owner
        self.origin = origin

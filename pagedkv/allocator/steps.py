"""Steps in flight: pages given back while a device may still use them are not handed out until its steps have ended.

Takes the pages that somebody gives back, lets go of them when every step that was in flight at that moment has ended,
and refuses to know what a step computes. Meanwhile the steps hold them, as a pin does: such a page is neither free nor
idle, so it counts as referenced, and whoever shares it writes into a copy. Steps may overlap, and end in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from .errors import StepEnded

if TYPE_CHECKING:
    from .holding import Holding
    from .prefix_index import PageArray


class StepInFlight:
    """A step that a device is running; a context manager. Made by `BlockAllocator.begin_step`.

    Attributes:
        serial: its number among the allocator's steps, from 1.
        origin: the allocator's clock when it began.
        where: the caller's file and line, where the allocator's ``debug`` is on.
    """

    __slots__ = ("_allocator", "origin", "serial", "where")

    def __init__(self, allocator: Holding, serial: int, origin: float, where: str | None) -> None:
        """Remember; holding pages back is the pool's work."""
        self._allocator = allocator
        self.serial = serial
        self.origin = origin
        self.where = where

    def __repr__(self) -> str:
        return f"<StepInFlight {self.serial}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Say that the device is done with the step.

        Raises:
            StepEnded: it ended before.
        """
        self._allocator.end_step(self)


class Deferred:
    """The pages that wait for steps.

    Attributes:
        steps: the steps in flight, oldest first.
        pages: per page that waits the newest step that was in flight when it was given back last; in that order.
    """

    def __init__(self) -> None:
        """Start with nothing in flight."""
        self.steps: dict[int, StepInFlight] = {}
        self.pages: dict[int, int] = {}
        self._serial = 0

    def begin(self, allocator: Holding, origin: float, where: str | None) -> StepInFlight:
        """Note that a step begins."""
        self._serial += 1
        step = self.steps[self._serial] = StepInFlight(allocator, self._serial, origin, where)
        return step

    def add(self, pages: PageArray) -> None:
        """Have pages wait for all steps in flight; ones that wait already wait for the newer steps too."""
        for page in pages.tolist():
            self.pages.pop(page, None)
            self.pages[page] = self._serial

    def end(self, step: StepInFlight) -> PageArray:
        """Note that a step has ended; return the pages that wait no more, in the order in which they came.

        Raises:
            StepEnded: it is none of those in flight.
        """
        if self.steps.get(step.serial) is not step:
            raise StepEnded(f"{step!r} has ended already, or is another allocator's")
        del self.steps[step.serial]
        oldest = next(iter(self.steps), self._serial + 1)
        done = [page for page, newest in self.pages.items() if newest < oldest]
        for page in done:
            del self.pages[page]
        return np.array(done, np.int32)

"""The leak report: who keeps pages, since when, and where it was made.

Takes the books, gives one entry per owner, changes nothing, and refuses to judge: what is a leak at the end of the day
is a running request in the middle of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .ledger import Ledger
    from .pins import Pin
    from .sequence import Sequence
    from .steps import StepInFlight


class Leak(NamedTuple):
    """An owner of pages.

    ``owner`` is the handle itself, ``pages`` what it names of the device pool (for a step in flight, what waits for it
    or an older one), ``host_pages`` what it has of a host pool, ``origin`` the clock when it was made, ``age`` the
    clock's advance since, and ``where`` the caller's file and line, known where the allocator's ``debug`` is on.
    """

    owner: Sequence | Pin | StepInFlight
    pages: int
    host_pages: int
    origin: float
    age: float
    where: str | None

    def __str__(self) -> str:
        where = "" if self.where is None else f" at {self.where}"
        host = f" and {self.host_pages} host pages" if self.host_pages else ""
        return f"{self.owner!r} keeps {self.pages} pages{host}, made at {self.origin}{where}, {self.age} ago"


def leaks(ledger: Ledger, now: float) -> tuple[Leak, ...]:
    """Return every sequence, pin and step that is open, by its origin."""
    rows, swaps = ledger.rows, ledger.swaps
    pages: dict[Sequence | Pin | StepInFlight, int] = {swap.sequence: 0 for swap in swaps.values()}
    for row in rows.live():
        sequence = rows.sequences[row]
        if sequence is not None:
            pages[sequence] = sum(int(np.count_nonzero(table[row])) for table in rows.tables)
    for pin in ledger.pins.values():
        pages[pin] = len(pin.pages())
    waiting = ledger.pool.deferred
    for step in waiting.steps.values():
        pages[step] = sum(newest >= step.serial for newest in waiting.pages.values())
    found = [
        Leak(owner, count, _host_pages(ledger, owner), owner.origin, now - owner.origin, owner.where)
        for owner, count in pages.items()
    ]
    return tuple(sorted(found, key=lambda leak: leak.origin))


def _host_pages(ledger: Ledger, owner: Sequence | Pin | StepInFlight) -> int:
    return next((len(swap.host_pages) for swap in ledger.swaps.values() if swap.sequence is owner), 0)

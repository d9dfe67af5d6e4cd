"""The door's keeper: who may call an allocator, and on which sequences.

Takes callers and handles, gives rows, and refuses a second thread, closed and foreign handles, and handles given twice
before anything is changed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .errors import ForeignSequence, ReservationOpen, WrongThread
from .sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .decode import DecodeBatch
    from .ledger import Ledger
    from .observer import Observer


class Door:
    """What every verb of an allocator begins with.

    The first thread that calls it owns it; `hand_over` gives it to the next one that calls.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] | None) -> None:
        """Open the door to the first thread that comes."""
        if clock is not None and not callable(clock):
            raise TypeError(f"clock must be a function that returns the time, was {clock!r}")
        self.ledger = ledger
        self._calls = 0
        self._clock = clock
        self._thread: int | None = None
        self._batch: DecodeBatch | None = None
        self._observer: Observer | None = None

    def hand_over(self) -> None:
        """Let go of the allocator: the next thread that calls it owns it."""
        self._enter()
        self._thread = None

    def _enter(self) -> None:
        """Count the call and refuse a second thread."""
        if self._thread != threading.get_ident():
            self._look()
            self._thread = threading.get_ident()
        self._calls += 1

    def _look(self) -> None:
        """Refuse a second thread, but leave the allocator to whoever uses it first: looking is no use."""
        thread = threading.get_ident()
        if self._thread not in {None, thread}:
            raise WrongThread(
                f"the allocator belongs to thread {self._thread}, thread {thread} called; "
                "the owner must call hand_over() first"
            )

    def _now(self) -> float:
        return self._calls if self._clock is None else self._clock()

    def _rows_of(self, sequences: Iterable[Sequence], at_rest: str = "") -> list[int]:
        """Return the rows of different open sequences; ``at_rest`` names a verb that refuses open reservations."""
        rows = []
        for sequence in sequences:
            if not isinstance(sequence, Sequence):
                raise TypeError(f"sequences must be Sequence handles, had {type(sequence).__name__}")
            if sequence._allocator is not self:
                raise ForeignSequence(f"{sequence!r} was opened by another allocator")
            rows.append(sequence._row if sequence._row >= 0 else sequence.row)  # which says why there is none
        if len(set(rows)) != len(rows):
            raise ValueError("sequences must be different, one was given twice")
        if at_rest:
            for row in rows:
                if self.ledger.rows.reserved(row):
                    owner = self.ledger.rows.sequences[row]
                    raise ReservationOpen(f"{at_rest} needs {owner!r} without a reservation; commit it first")
        return rows

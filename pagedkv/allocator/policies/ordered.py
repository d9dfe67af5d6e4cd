"""Pages in an order that is not the order of their arrival.

Takes pages with a rank and a ticket, gives them lowest first, and refuses to know what a rank means. Entries lie in
sorted runs of bounded length, so that adding and discarding among a million pages costs no more than among a thousand.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_RUN = 512
_Entry = tuple[float, int, int]


class OrderedPages:
    """A set of pages, ordered by rank, and among equal ranks by ticket."""

    __slots__ = ("_entry_of", "_lows", "_runs")

    def __init__(self) -> None:
        """Start empty."""
        self._entry_of: dict[int, _Entry] = {}
        self._runs: list[list[_Entry]] = [[]]
        self._lows: list[_Entry] = [(-math.inf, 0, 0)]

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, page: int) -> bool:
        return page in self._entry_of

    def __iter__(self) -> Iterator[int]:
        for run in self._runs:
            for _, _, page in run:
                yield page

    def add(self, page: int, rank: float, ticket: int) -> None:
        """Add a page, or move it to another place."""
        if page in self._entry_of:
            self.discard(page)
        entry = self._entry_of[page] = (rank, ticket, page)
        at = len(self._runs) - 1
        run = self._runs[at]
        if run and run[-1] < entry:  # the newest of the highest rank, as often as not
            run.append(entry)
        else:
            at = bisect_right(self._lows, entry) - 1
            run = self._runs[at]
            insort(run, entry)
        if len(run) > _RUN:
            half = len(run) // 2
            self._runs.insert(at + 1, run[half:])
            self._lows.insert(at + 1, run[half])
            del run[half:]

    def discard(self, page: int) -> None:
        """Take a page out, if it is in."""
        entry = self._entry_of.pop(page, None)
        if entry is None:
            return
        first = self._runs[0]
        if first and first[0] is entry:  # a victim, as often as not
            del first[0]
            if not first and len(self._runs) > 1:
                del self._runs[0], self._lows[1]  # the lowest bound stays below everything
            return
        at = bisect_right(self._lows, entry) - 1
        run = self._runs[at]
        del run[bisect_left(run, entry)]
        if not run and at:
            del self._runs[at], self._lows[at]

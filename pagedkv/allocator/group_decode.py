"""The decode step with several layer groups: what `decode` does for one, and windows that slide.

Takes sequences that each take one token, none inside its prompt, no shared tail; writes the same books as `reserving`
and `committing`, in a few array operations for all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from .decode import DecodeBatch
from .errors import OutOfPages

if TYPE_CHECKING:
    from .decode import IntArray
    from .groups import Span
    from .ledger import Ledger
    from .prefix_index import PageArray
    from .sequence import Sequence


class _Window(NamedTuple):
    """Groups with the same window, whose pages leave together.

    Attributes:
        groups: which they are.
        span: what they need.
        floor: int64 ``[rows of the batch]``: the first block, sinks apart, that each row still holds.
    """

    groups: list[int]
    span: Span
    floor: np.ndarray[tuple[int], np.dtype[np.int64]]


class GroupDecodeBatch(DecodeBatch):
    """A `DecodeBatch` for any layer groups."""

    def __init__(self, ledger: Ledger, sequences: list[Sequence], rows: list[int], at: IntArray) -> None:
        """Remember the rows' lengths and where their windows begin; change nothing."""
        super().__init__(ledger, sequences, rows, at)
        alike: dict[Span, list[int]] = {}
        for group in ledger.windows:
            alike.setdefault(ledger.spans[group], []).append(group)
        self._windows = [
            _Window(groups, span, np.maximum(ledger.rows.firsts[groups[0]][self._at], span.sink_blocks))
            for span, groups in alike.items()
        ]

    @classmethod
    def of(cls, ledger: Ledger, sequences: list[Sequence], rows: list[int]) -> Self | None:
        """Return the batch, or None unless each row is past its prompt, its last page its own, its windows sliding."""
        if ledger.rows.window_held[rows].any():
            return None
        return super().of(ledger, sequences, rows)

    def reserve(self) -> None:
        """Give back what has left a window and make room for one token each, or raise with nothing changed."""
        ledger, pool = self._ledger, self._ledger.pool
        books, num_groups = ledger.rows, len(ledger.spans)
        due = self._due.get(self._steps % ledger.page_size, [])
        needed = num_groups * len(due)
        leaving = self._leaving()
        if needed > pool.available:
            available = pool.available + self._room_made(leaving)
            if needed > available:
                raise OutOfPages(needed, available)
        if due:
            books.ensure_width((self._longest + self._steps) // ledger.page_size + 1)
        for window, sliding, ends in leaving:
            self._slide(window, sliding, ends)
        if due:
            rows, blocks = [self.rows[member] for member in due], [self._blocks[member] for member in due]
            pages = pool.take(needed).reshape(len(rows), num_groups)
            for group, table in enumerate(books.tables):
                table[rows, blocks] = pages[:, group]
            if ledger.scrubs.many:
                ledger.scrubs.note(pages.ravel(), np.repeat(books.space[rows], num_groups))
        self._lengths += self._one_each
        books.ends[self._at] = self._lengths
        self.is_reserved = True

    def _leaving(self) -> list[tuple[_Window, list[int], list[int]]]:
        """Return for each window the members that leave blocks behind, and the block each begins at from now on."""
        found = []
        for window in self._windows:
            ends = np.maximum(self._lengths - window.span.reach, 0) // self._ledger.page_size
            members = np.flatnonzero(ends > window.floor)
            if members.size:
                found.append((window, members.tolist(), ends[members].tolist()))
        return found

    def _pages(self, window: _Window, group: int, members: list[int], ends: list[int]) -> list[PageArray]:
        """Return what each member gives back of a group: views of its table."""
        table, first = self._ledger.rows.tables[group], window.floor
        return [table[self.rows[member], first[member] : end] for member, end in zip(members, ends, strict=True)]

    def _room_made(self, leaving: list[tuple[_Window, list[int], list[int]]]) -> int:
        """Count the pages that nobody holds any more once those outside the windows have been given back."""
        if self._ledger.pool.deferred.steps:
            return 0  # the steps in flight hold them back
        parts = [
            part for left in leaving for group in left[0].groups for part in self._pages(left[0], group, *left[1:])
        ]
        if not parts:
            return 0
        pages, times = np.unique(np.concatenate(parts), return_counts=True)
        return int(np.count_nonzero(self._ledger.pool.refs[pages] == times))

    def _slide(self, window: _Window, members: list[int], ends: list[int]) -> None:
        """Give back, row by row since rows may share pages, what has left a window."""
        ledger = self._ledger
        for group in window.groups:
            for entries in self._pages(window, group, members, ends):
                pages = entries.copy()
                entries[:] = 0
                ledger.give_back(pages)
            ledger.rows.firsts[group][self._at[members]] = ends
        window.floor[members] = ends


def decode_batch(ledger: Ledger, sequences: list[Sequence], rows: list[int]) -> DecodeBatch | None:
    """Return the batch for a decode step of ``rows``, or None where the step is of another kind."""
    kind = DecodeBatch if ledger.is_plain else GroupDecodeBatch
    return kind.of(ledger, sequences, rows)

"""Pending copies: whole pages that the cache must copy before the next write.

Takes (source, destination) pairs as copy-on-write makes them, gives a list that may be run all at once, and refuses to
know what lies in a page. No page is both source and destination, none is a destination twice, and every source is
pinned until the copy has been acknowledged or its destination was given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .pages import PagePool
    from .prefix_index import PageArray


_NONE = np.empty((0, 2), np.int32)


class PendingCopies:
    """The copies that have not been acknowledged, by destination."""

    def __init__(self, pool: PagePool) -> None:
        """Start with none."""
        self._pool = pool
        self.source_of: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self.made = 0

    def __len__(self) -> int:
        return len(self.source_of)

    def add(self, source: int, destination: int) -> None:
        """Note that a table has ``destination`` for ``source`` now; a copy of a copy reads the first page."""
        first = self.source_of.get(source, source)
        self._pool.pin(first)
        self._pool.release(np.array([source], np.int32))
        self.source_of[destination] = first
        self.made += 1

    def drop_dead(self, pages: PageArray) -> None:
        """Drop the copies into those of ``pages`` that are about to lose their last reference."""
        for page in pages.tolist():
            if page in self.source_of and self._pool.table_refs(page) == 1:
                self._taken.pop(page, None)
                self._pool.unpin(self.source_of.pop(page))

    def touch(self, pages: PageArray) -> int | None:
        """Return a page among ``pages`` that a pending copy reads or writes, or None."""
        busy = set(self.source_of).union(self.source_of.values())
        return next((page for page in pages.tolist() if page in busy), None)

    def take(self) -> PageArray:
        """Return every pending copy as int32 ``[n, 2]``: source, destination."""
        self._taken = dict(self.source_of)
        if not self._taken:
            return _NONE
        return np.array([(source, page) for page, source in self._taken.items()], np.int32)

    def acknowledge(self) -> None:
        """Let the sources of the copies last taken go: they have run."""
        taken, self._taken = self._taken, {}
        for page, source in taken.items():
            del self.source_of[page]
            self._pool.unpin(source)

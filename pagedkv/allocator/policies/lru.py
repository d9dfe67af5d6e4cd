"""LRU: the page that was released longest ago goes first.

Takes what happens to pages, gives victims, and refuses to know what pages hold.
"""

from __future__ import annotations

from collections import deque

_SLACK = 1024


class LRU:
    """Least recently used; of one sequence, the last block goes first.

    Releases stand in a log, each with its number; a candidate is a page whose last release has not been taken back. So
    a release of a thousand pages costs two bulk operations, and a page that is held again leaves its entry behind,
    which is passed over and, when such entries are the greater part, swept out.
    """

    def __init__(self) -> None:
        """Start with no candidates."""
        self._release_of: dict[int, int] = {}
        self._log: deque[tuple[int, list[int]]] = deque()
        self._entries = 0
        self._first = 0  # entries of the oldest release that are known to be void
        self._releases = 0

    def hit(self, pages: list[int]) -> None:
        """Recency is counted from the release, so a hit alone changes nothing."""

    def held(self, pages: list[int]) -> None:
        """Forget candidates."""
        self._forget(pages)

    def released(self, pages: list[int]) -> None:
        """Add candidates at the recent end."""
        self._releases += 1
        self._release_of.update(dict.fromkeys(pages, self._releases))
        self._log.append((self._releases, list(pages)))
        self._entries += len(pages)
        if self._entries > 2 * len(self._release_of) + _SLACK:
            self._sweep()

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Forget pages; after an eviction they are, as often as not, the oldest entries just as they stand."""
        self._forget(pages)
        log, done = self._log, 0
        while evicted and log and done < len(pages):
            oldest = log[0][1]
            alike = min(len(pages) - done, len(oldest) - self._first)
            if oldest[self._first : self._first + alike] != pages[done : done + alike]:
                break
            self._first += alike
            done += alike
            self._pass_void()

    def victims(self, count: int) -> list[int]:
        """Return the oldest candidates."""
        self._pass_void()
        chosen: list[int] = []
        at, current = self._first, self._release_of.get
        for number, pages in self._log:
            while at < len(pages) and len(chosen) < count:
                end = at + count - len(chosen)
                chosen += [page for page in pages[at:end] if current(page) == number]
                at = end
            if len(chosen) == count:
                break
            at = 0
        return chosen

    def _forget(self, pages: list[int]) -> None:
        for page in pages:
            self._release_of.pop(page, None)

    def _pass_void(self) -> None:
        """Move past the oldest entries that stand for no candidate."""
        log, current, first = self._log, self._release_of.get, self._first
        while log:
            number, oldest = log[0]
            while first < len(oldest) and current(oldest[first]) != number:
                first += 1
            if first < len(oldest):
                break
            self._entries -= len(oldest)
            first = 0
            log.popleft()
        self._first = first

    def _sweep(self) -> None:
        """Keep only the entries that stand for candidates."""
        current = self._release_of.get
        kept = ((number, [page for page in pages if current(page) == number]) for number, pages in self._log)
        self._log = deque((number, pages) for number, pages in kept if pages)
        self._entries = len(self._release_of)
        self._first = 0

"""LFU: the page that was used least often goes first, and old fame fades.

Takes what happens to pages, gives victims, and refuses to know what pages hold.
"""

from __future__ import annotations

from itertools import islice

from .ordered import OrderedPages


class LFU:
    """Least frequently used, with dynamic ageing (LFU-DA).

    Source: Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating content management techniques for web proxy
    caches", 2000. A page's rank is its uses (storing it is the first, each hit one more) plus the cache's age when it
    was last used; the age is the rank of the last page evicted. So a page that is used no more is overtaken by newer
    ones. With ``ageing=False`` the age stays 0 and a page that was once popular stays for ever (plain LFU).

    Uses are counted while a page is findable and forgotten with it. Among equal ranks the least recently released
    goes first.
    """

    def __init__(self, ageing: bool = True) -> None:
        """Start with no pages."""
        self._ageing = ageing
        self._age = 0
        self._idle = OrderedPages()
        self._uses: dict[int, int] = {}
        self._rank: dict[int, int] = {}
        self._releases = 0

    def hit(self, pages: list[int]) -> None:
        """Count one more use of each page."""
        for page in pages:
            self._use(page, self._uses.get(page, 1) + 1)

    def held(self, pages: list[int]) -> None:
        """Forget candidates, not their uses."""
        for page in pages:
            self._idle.discard(page)

    def released(self, pages: list[int]) -> None:
        """Add candidates by rank."""
        for page in pages:
            if page not in self._uses:
                self._use(page, 1)
            self._releases += 1
            self._idle.add(page, self._rank[page], self._releases)

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Forget pages and their uses; an eviction makes the cache as old as what it lost."""
        for page in pages:
            self._idle.discard(page)
            self._uses.pop(page, None)
            rank = self._rank.pop(page, 0)
            if evicted and self._ageing:
                self._age = max(self._age, rank)

    def victims(self, count: int) -> list[int]:
        """Return the candidates of lowest rank."""
        return list(islice(self._idle, count))

    def _use(self, page: int, uses: int) -> None:
        self._uses[page] = uses
        self._rank[page] = self._age + uses

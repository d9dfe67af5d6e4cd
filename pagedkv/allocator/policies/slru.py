"""SLRU: pages that were found again are kept before pages that never were.

Takes what happens to pages, gives victims, and refuses to know what pages hold.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice


class SLRU:
    """Segmented LRU (Karedla, Love and Wherry, "Caching strategies to improve disk system performance", 1994).

    A page starts in the probationary segment; once it was hit it belongs to the protected one. Victims are the least
    recently released of the probationary segment, then of the protected one. When pages are evicted and the protected
    segment has more than its share of the candidates, its oldest go back to probation, as the most recent there, and
    need another hit to return.

    The paper bounds the protected segment by a number of lines. Here the cache is what running sequences leave idle,
    so the bound is a share of the candidates, applied when there is pressure and at no other time.
    """

    def __init__(self, protected: float = 0.8) -> None:
        """Give the protected segment at most the share ``protected`` of all candidates, from 0 to 1."""
        if not 0 <= protected <= 1:
            raise ValueError(f"protected must be from 0 to 1, was {protected}")
        self._share = protected
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._proven: set[int] = set()

    def hit(self, pages: list[int]) -> None:
        """Pages belong to the protected segment from now on."""
        self._proven.update(pages)

    def held(self, pages: list[int]) -> None:
        """Forget candidates."""
        for page in pages:
            self._probation.pop(page, None)
            self._protected.pop(page, None)

    def released(self, pages: list[int]) -> None:
        """Add candidates at the recent end of their segment."""
        for page in pages:
            segment = self._protected if page in self._proven else self._probation
            segment[page] = None

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Forget pages; after an eviction, bring the protected segment back to its share."""
        most = self._share * (len(self._probation) + len(self._protected))
        self.held(pages)
        self._proven.difference_update(pages)
        while evicted and len(self._protected) > most:
            page, _ = self._protected.popitem(last=False)
            self._probation[page] = None
            self._proven.discard(page)

    def victims(self, count: int) -> list[int]:
        """Return the oldest of probation, then the oldest of the protected."""
        return list(islice(chain(self._probation, self._protected), count))

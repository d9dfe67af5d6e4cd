"""ARC: a balance between recency and frequency that tunes itself by what it regrets.

Takes what happens to pages and what they hold, gives victims, and refuses to know tokens: content is a digest.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice


class ARC:
    """Adaptive replacement cache (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003).

    Pages seen once (T1) and pages seen again (T2) are each kept least recently released first. What is evicted leaves
    its digest in a ghost list (B1, B2). Content that is stored again while its ghost is in B1 says that T1 was too
    small, in B2 that T2 was; the target for T1 moves by the paper's step, and the page goes to T2.

    Where it differs from the paper: pages are evicted before it is known what will be stored in them, so the paper's
    tie rule for a B2 ghost has nothing to apply to. The cache is what running sequences leave idle, so the target is
    kept as a share of the candidates; ghosts are bounded by the pages known, held ones included
    (``|T1| + |B1| <= c`` and all four lists ``<= 2c``).
    """

    def __init__(self) -> None:
        """Start with no pages, no ghosts, and a target of 0 for pages seen once."""
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._proven: set[int] = set()
        self._identity: dict[int, bytes] = {}
        self._ghosts_once: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts_again: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0

    def stored(self, pages: list[int], identities: list[bytes]) -> None:
        """Pages hold new content; learn from those whose ghosts are still there."""
        self._identity.update(zip(pages, identities, strict=True))
        capacity = len(self._identity)
        for page, identity in zip(pages, identities, strict=True):
            once, again = len(self._ghosts_once), len(self._ghosts_again)
            if identity in self._ghosts_once:
                self._target = min(1.0, self._target + max(1.0, again / once) / capacity)
                del self._ghosts_once[identity]
                self._proven.add(page)
            elif identity in self._ghosts_again:
                self._target = max(0.0, self._target - max(1.0, once / again) / capacity)
                del self._ghosts_again[identity]
                self._proven.add(page)
        # |T1| + |B1| <= c = |T1| + |T2|, and |B1| + |B2| <= c.
        while len(self._ghosts_once) > len(self._proven):
            self._ghosts_once.popitem(last=False)
        while len(self._ghosts_once) + len(self._ghosts_again) > capacity:
            (self._ghosts_again or self._ghosts_once).popitem(last=False)

    def hit(self, pages: list[int]) -> None:
        """Pages were seen again."""
        self._proven.update(pages)

    def held(self, pages: list[int]) -> None:
        """Forget candidates."""
        for page in pages:
            self._once.pop(page, None)
            self._again.pop(page, None)

    def released(self, pages: list[int]) -> None:
        """Add candidates at the recent end of their list."""
        for page in pages:
            candidates = self._again if page in self._proven else self._once
            candidates[page] = None

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Forget pages; of those evicted keep the ghosts."""
        self.held(pages)
        for page in pages:
            ghosts = self._ghosts_again if page in self._proven else self._ghosts_once
            self._proven.discard(page)
            identity = self._identity.pop(page)
            if evicted:
                ghosts[identity] = None

    def victims(self, count: int) -> list[int]:
        """Return the oldest seen once while there are more of them than the target, then the oldest seen again."""
        # Rounded: the target is a sum of fractions of the capacity and must meet whole numbers exactly.
        target = int(round(self._target * (len(self._once) + len(self._again)), 6))
        above = min(count, max(0, len(self._once) - target))
        first = list(islice(self._once, above))
        first += islice(self._again, count - len(first))
        return first + list(islice(self._once, above, above + count - len(first)))

"""S3-FIFO: three queues that let one-time pages go quickly.

Takes what happens to pages and what they hold, gives victims, and refuses to know tokens: content is a digest.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from .ordered import OrderedPages

_MOST_USES = 3


class _Walk(NamedTuple):
    """What an eviction does: who goes, and who is put at the young end of the main queue with how many uses."""

    victims: list[int]
    moved: dict[int, int]


class S3FIFO:
    """S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023).

    New pages enter a small queue. Its oldest page goes to the main queue if it was hit more than once while it waited,
    otherwise it is evicted and leaves a ghost; content stored again while its ghost is there enters the main queue at
    once. The main queue gives its oldest page another round per hit (at most three). Pages leave the small queue while
    it has its share of the candidates, else the main queue.

    Where it differs from the paper: pages enter a queue when they are first released, last block first, so that
    children stand before parents, and keep their place while they are held again. The cache is what running sequences
    leave idle, so shares are of the candidates (ghosts: of all pages known). Exactly as many pages go as are needed.
    """

    def __init__(self, small: float = 0.1, ghosts: float = 0.9) -> None:
        """Give the small queue the share ``small`` of the candidates, and keep ``ghosts`` per page known."""
        for name, share in (("small", small), ("ghosts", ghosts)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be from 0 to 1, was {share}")
        self._small_share, self._ghost_share = small, ghosts
        self._small, self._main = OrderedPages(), OrderedPages()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._identity: dict[int, bytes] = {}
        self._uses: dict[int, int] = {}
        self._in_main: set[int] = set()
        self._ticket: dict[int, int] = {}
        self._tickets = 0

    def stored(self, pages: list[int], identities: list[bytes]) -> None:
        """Pages hold new content; what has a ghost belongs in the main queue."""
        for page, identity in zip(pages, identities, strict=True):
            self._identity[page] = identity
            if identity in self._ghosts:
                del self._ghosts[identity]
                self._in_main.add(page)
        while len(self._ghosts) > self._ghost_share * len(self._identity):
            self._ghosts.popitem(last=False)

    def hit(self, pages: list[int]) -> None:
        """Count uses; places in the queues stay."""
        for page in pages:
            self._uses[page] = min(self._uses.get(page, 0) + 1, _MOST_USES)

    def held(self, pages: list[int]) -> None:
        """Pass over pages until they are released."""
        for page in pages:
            self._small.discard(page)
            self._main.discard(page)

    def released(self, pages: list[int]) -> None:
        """Add candidates: at the young end the first time, then where they stood."""
        for page in pages:
            if page not in self._ticket:
                self._take_ticket(page)
            queue = self._main if page in self._in_main else self._small
            queue.add(page, 0, self._ticket[page])

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Forget pages; an eviction also carries out the moves that led to it, and leaves ghosts."""
        if evicted:
            for page, uses in self._walk(len(pages)).moved.items():
                self._small.discard(page)
                self._in_main.add(page)
                self._uses[page] = uses
                self._take_ticket(page)
                self._main.add(page, 0, self._ticket[page])
        self.held(pages)
        for page in pages:
            identity = self._identity.pop(page)
            if evicted and page not in self._in_main:
                self._ghosts[identity] = None
            self._in_main.discard(page)
            self._uses.pop(page, None)
            self._ticket.pop(page, None)

    def victims(self, count: int) -> list[int]:
        """Return who goes, by playing the eviction through without changing anything."""
        return self._walk(count).victims

    def _take_ticket(self, page: int) -> None:
        self._tickets += 1
        self._ticket[page] = self._tickets

    def _walk(self, count: int) -> _Walk:
        small, main = iter(self._small), iter(self._main)
        num_small, num_main = len(self._small), len(self._main)
        share = self._small_share * (num_small + num_main)
        young: deque[int] = deque()
        walk = _Walk([], {})
        while len(walk.victims) < count:
            if num_small and (num_small >= share or not num_main):
                page = next(small)
                num_small -= 1
                if self._uses.get(page, 0) <= 1:
                    walk.victims.append(page)
                    continue
                left = 0
                num_main += 1
            else:
                page = next(main, -1)
                if page < 0:
                    page = young.popleft()
                uses = walk.moved.get(page, self._uses.get(page, 0))
                if uses == 0:
                    walk.victims.append(page)
                    num_main -= 1
                    continue
                left = uses - 1
            walk.moved.pop(page, None)  # the dictionary's order is that of the last moves
            walk.moved[page] = left
            young.append(page)
        return walk

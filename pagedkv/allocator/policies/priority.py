"""Priority with time-to-live: the caller says what is worth keeping, and for how long.

Takes priorities of content and what happens to pages, gives victims, and refuses to know tokens and wall clocks:
content is a digest, time is what ``clock`` says.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

from ..content_hash import DIGEST_BYTES
from ..tokens import count_of
from .ordered import OrderedPages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HIGHEST = 100


class Priority:
    """Lowest priority first; among equals the least recently released.

    `prioritise` marks content, named by `content_hashes`, with a priority from 0 to 100 (the scale of TensorRT-LLM's
    retention config). Content can be marked before it is stored, and the mark outlives its eviction; what has no mark,
    or whose mark's time is up, has the default.

    A page cannot stay when its parents go, and a parent that must go takes the pages below it along first. So mark a
    whole beginning, from the first page on; mark later pages lower than earlier ones, never higher.

    Args:
        default: priority of content without a mark.
        clock: gives the time that ``ttl`` is counted in; by default the number of calls to this policy so far.
        max_marks: most marks kept; beyond that the oldest are dropped.
    """

    def __init__(self, default: int = 35, *, clock: Callable[[], float] | None = None, max_marks: int = 65536) -> None:
        """Start with no pages and no marks."""
        self._default = _require_priority(default, "default")
        self._max_marks = count_of(max_marks, "max_marks", 1)
        self._calls = 0
        self._clock: Callable[[], float] = (lambda: self._calls) if clock is None else clock
        self._marks: OrderedDict[bytes, tuple[int, float | None]] = OrderedDict()
        self._expiries: list[tuple[float, bytes]] = []
        self._identity: dict[int, bytes] = {}
        self._page: dict[bytes, int] = {}
        self._idle = OrderedPages()
        self._ticket: dict[int, int] = {}
        self._releases = 0

    def prioritise(self, identities: Iterable[bytes], priority: int, ttl: float | None = None) -> None:
        """Mark content with a priority, for ``ttl`` units of the clock from now (None: until it is marked again).

        Args:
            identities: digests as `content_hashes` gives them.
            priority: 0 (goes first) to 100 (goes last).
            ttl: above 0.

        Raises:
            TypeError, ValueError: an argument is not what it must be; no mark was set.
        """
        priority = _require_priority(priority, "priority")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl must be above 0 or None, was {ttl}")
        digests = list(identities)
        for digest in digests:
            if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
                raise TypeError(f"identities must be digests of {DIGEST_BYTES} bytes, had {digest!r}")
        self._expire()
        expires = None if ttl is None else self._clock() + ttl
        for digest in digests:
            self._marks[digest] = (priority, expires)
            self._marks.move_to_end(digest)
            if expires is not None:
                heappush(self._expiries, (expires, digest))
            self._place(digest)
        while len(self._marks) > self._max_marks:
            digest, _ = self._marks.popitem(last=False)
            self._place(digest)
        self._tidy()

    def stored(self, pages: list[int], identities: list[bytes]) -> None:
        """Pages hold new content; its mark may have been set long before."""
        self._calls += 1
        for page, identity in zip(pages, identities, strict=True):
            self._identity[page] = identity
            self._page[identity] = page

    def hit(self, pages: list[int]) -> None:
        """Recency is counted from the release, so a hit alone changes nothing but the time."""
        self._calls += 1

    def held(self, pages: list[int]) -> None:
        """Forget candidates."""
        self._calls += 1
        self._discard(pages)

    def released(self, pages: list[int]) -> None:
        """Add candidates by priority."""
        self._calls += 1
        for page in pages:
            self._releases += 1
            self._ticket[page] = self._releases
            self._idle.add(page, self._rank(self._identity[page]), self._releases)

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Forget pages, not the marks of what they held."""
        self._calls += 1
        self._discard(pages)
        for page in pages:
            identity = self._identity.pop(page)
            if self._page.get(identity) == page:
                del self._page[identity]

    def victims(self, count: int) -> list[int]:
        """Return the candidates of lowest priority at this time."""
        self._expire()
        return list(islice(self._idle, count))

    def _rank(self, identity: bytes) -> int:
        mark = self._marks.get(identity)
        return self._default if mark is None else mark[0]

    def _place(self, identity: bytes) -> None:
        """Put the page that holds this content where its priority of now belongs."""
        page = self._page.get(identity)
        if page is not None and page in self._idle:
            self._idle.add(page, self._rank(identity), self._ticket[page])

    def _discard(self, pages: list[int]) -> None:
        for page in pages:
            self._idle.discard(page)
            self._ticket.pop(page, None)

    def _expire(self) -> None:
        """Drop the marks whose time is up; pages are where they would be had the marks never been."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            expires, identity = heappop(self._expiries)
            if self._marks.get(identity, (0, None))[1] == expires:
                del self._marks[identity]
                self._place(identity)

    def _tidy(self) -> None:
        """Drop expiries of marks that were set again, once they are the greater part."""
        if len(self._expiries) > 2 * len(self._marks) + 64:
            current = [(at, digest) for digest, (_, at) in self._marks.items() if at is not None]
            self._expiries = sorted(current)


def _require_priority(value: int, name: str) -> int:
    return count_of(value, name, 0, HIGHEST)

"""Who runs in a step, with how many tokens, and who has to leave when pages run out.

Takes requests; asks the cache for room; gives each step's shares; refuses to know models, sampling and text.

A step has one token budget: every decoding request takes one token, then unfinished prompts take chunks in order of
seniority, then waiting requests enter while tokens, rows and pages last.

*Order.* First come, first served; or, with ``ageing``, by priority: a request's rank is the step at which it was queued
plus ``ageing`` times its priority, smaller first. Each ``ageing`` steps of waiting so count as much as one level, and
two requests never change places. The bound on waiting: before a request of priority p go only those that were there,
those of priority q that were queued at most ``ageing * (p - q)`` steps after it, and ``max_passes`` others.

*Admission* is decided at the moment of entry, never when a request is queued:

- A new request enters if its prompt and a chunk of growth fit beside what the running ones' known tokens still need,
  and the watermark stays free. With nothing running the first in the queue enters as it is: that it fits alone was
  checked when it was added.
- One that was preempted comes back only if its pages to the very end fit beside what its elders may still take to
  theirs. From then on only younger ones can be preempted for pages, so nobody is preempted twice, and the tokens
  computed to bring a text up to date are at most twice its length.
- A request may pass an older one that is blocked for pages only if its own pages to the very end fit beside
  everybody running, and only ``max_passes`` younger ones may ever pass the same request; then those running drain
  until it fits. So small requests need not idle behind a large one, and the large one always gets its turn.
- A request whose next full prefix pages an elder is computing right now waits for them instead of computing them a
  second time; at most as long as that elder's prefill.

- Samples (and beams) that have not parted yet are counted: each will copy a page that is not full and grow.

*Preemption* takes the pages of the youngest by rank (`Preemption`: to host memory, or given up; full ones then stay
findable, so coming back may cost little). The eldest is never preempted.
"""

from __future__ import annotations

import sys
from bisect import insort
from contextlib import suppress
from typing import TYPE_CHECKING

from pagedkv.allocator import OutOfPages, Room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.backend import CacheBackend, CacheSequence
    from pagedkv.engine.preemption import Preemption
    from pagedkv.engine.request import Request

_MOST_BLOCKED = 8  # blocked requests looked at in one step, so that a step's cost does not grow with the queue


class Scheduler:
    """Waiting and running requests over one cache.

    Args:
        backend: the cache; only asked for room, and to open and close sequences. Where it has a ``page_size``, forks
            share full pages; else nothing.
        preemption: how those who must leave do so, and come back.
        max_batch: the most requests running at a time.
        max_step_tokens: the most input tokens in one step, at least ``max_batch``.
        watermark: pages (the backend's own unit) that a new request must leave free beside others.
        growth: tokens of growth that a new request must have room for.
        max_passes: how many younger requests may enter before one that waits for pages.
        prefix_page_size: the cache shares prefixes in whole pages of so many tokens; None: it shares none.
        ageing: steps of waiting that count as one level of priority; None: first come, first served.

    ``running`` is in order of seniority: the last is preempted first. ``waiting`` is in order of rank. ``chunked``
    is false once the cache was seen not to keep a committed token: then each step feeds every text whole, whatever the
    budget.
    """

    def __init__(
        self,
        backend: CacheBackend,
        preemption: Preemption,
        *,
        max_batch: int,
        max_step_tokens: int,
        watermark: int = 0,
        growth: int = 32,
        max_passes: int = 16,
        prefix_page_size: int | None = None,
        ageing: int | None = None,
    ) -> None:
        """Start with no requests."""
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.chunked = True
        self._backend = backend
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._watermark = watermark
        self._growth = growth
        self._max_passes = max_passes
        self._prefix_page_size = prefix_page_size
        self._page_size: int | None = getattr(backend, "page_size", None)
        self._preemption = preemption
        self._ageing = ageing
        self._round = 0

    def add(self, request: Request) -> None:
        """Queue a request by its rank, which it keeps for ever."""
        if request.deadline is None:
            request.deadline = 0 if self._ageing is None else self._round + self._ageing * request.group.priority
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Forget a request, whether it waits or runs, and give its pages back."""
        if request.sequence is None:
            self.waiting.remove(request)
            self._preemption.forget(request)
        else:
            self.running.remove(request)
            request.sequence.close()
            request.sequence = None
            request.note_stored()

    def schedule(self) -> dict[Request, int]:
        """Admit who may enter, and return how many input tokens each request has in this step, eldest first."""
        shares: dict[Request, int] = {}
        budget = self._max_step_tokens
        self._round += 1
        for decoding in (True, False):
            for request in self.running:
                if request.pending and (request.pending == 1) == decoding and budget > 0:
                    budget -= self._share(request, budget, shares)
        self._admit(shares, budget)
        return {request: shares[request] for request in self.running if request in shares}

    def preempt_youngest(self) -> Request | None:
        """Let the youngest running one leave and queue it again; None if only the eldest is left."""
        if len(self.running) < 2:
            return None
        request = self.running.pop()
        self._preemption.leave(request)
        self.add(request)
        return request

    def branch(self, request: Request) -> Request:
        """Return a second request at the same place of the same text; it shares the first one's pages by fork.

        Where there is no place or no memory for it now, it waits its turn and finds what is stored by then.
        """
        twin = request.branch()
        if request.sequence is not None and len(self.running) < self._max_batch:
            with suppress(OutOfPages):
                twin.sequence = request.sequence.fork()
        if twin.sequence is None:
            self.add(twin)
        else:
            self.running.insert(self._place(twin), twin)
            twin.note_stored()
        return twin

    def preempt_for_progress(self) -> bool:
        """Let the youngest give way where nobody running can go on and somebody waits; say whether one did.

        Beams of a search wait for each other: two searches could hold what the other's missing beam needs.
        """
        stuck = self.waiting and not any(request.pending for request in self.running)
        return bool(stuck) and self.preempt_youngest() is not None

    def _share(self, request: Request, budget: int, shares: dict[Request, int]) -> int:
        """Give a request its share of the step; return what that takes of the budget."""
        if not self.chunked:
            shares[request] = request.pending
            return 0
        shares[request] = min(request.pending, budget)
        return shares[request]

    def _admit(self, shares: dict[Request, int], budget: int) -> None:
        blocked: list[Request] = []
        for request in tuple(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_batch or len(blocked) == _MOST_BLOCKED:
                break
            if any(elder.passed >= self._max_passes for elder in blocked):
                break
            if self._prefix_is_coming(request):
                continue
            if not self._fits(request, passing=bool(blocked)):
                blocked.append(request)
                continue
            for elder in blocked:
                elder.passed += 1
            self._enter(request)
            budget -= self._share(request, budget, shares)

    def _enter(self, request: Request) -> None:
        sequence = self._preemption.come_back(request)
        if sequence is None:
            sequence = self._opened(request)
        self.waiting.remove(request)
        self.running.insert(self._place(request), request)
        request.sequence = sequence
        request.note_stored()

    def _opened(self, request: Request) -> CacheSequence:
        sequence = self._backend.open(request.tokens)
        cached, most = sequence.num_cached_tokens, request.most_cached
        if most is not None and sequence.num_tokens > most:
            sequence.truncate(most)
            cached = most
        request.prefill_end = len(request.tokens)
        if request.cached_tokens is None:
            request.cached_tokens = cached
        else:
            request.refound_tokens += cached
        return sequence

    def _place(self, request: Request) -> int:
        """Return where it stands in seniority: by rank, but never before one that came back from preemption."""
        place = len(self.running)
        while place and self.running[place - 1].rank > request.rank and not self.running[place - 1].preemptions:
            place -= 1
        return place

    def _fits(self, request: Request, *, passing: bool) -> bool:
        if not self.running:
            return True
        if passing:
            return self._fits_to_the_end(request, self.running)
        if request.preemptions:
            return self._fits_to_the_end(request, self.running[: self._place(request)])
        needed, available = self._room(request, min(self._growth, request.remaining - request.pending))
        claimed = sum(self._needed(other, other.pending) for other in self.running)
        return needed + claimed + self._watermark <= available

    def _fits_to_the_end(self, request: Request, elders: Sequence[Request]) -> bool:
        needed, available = self._room(request, request.remaining - request.pending)
        return needed + sum(self._needed(elder, elder.remaining) for elder in elders) <= available

    def _room(self, request: Request, growth: int) -> Room:
        """Return the pages that a waiting request would take with so much growth a sample, and those there are."""
        needed, available = self._backend.room(request.tokens, growth=growth, chunk=self._max_step_tokens)
        return Room(needed + self._for_unparted(request, growth), available)

    def _needed(self, request: Request, tokens: int) -> int:
        """Return the pages that a running request would take for so many more tokens of its known and coming text."""
        if request.sequence is None:
            return 0
        needed = request.sequence.room(tokens, chunk=self._max_step_tokens).needed
        return needed + self._for_unparted(request, tokens - request.pending)

    def _for_unparted(self, request: Request, growth: int) -> int:
        """Return the pages of samples that will yet part: each copies what is in no full page, and grows as said."""
        if not request.unparted:
            return 0
        own = growth + len(request.tokens) % (self._page_size or sys.maxsize)
        if not own:
            return 0
        return request.unparted * self._backend.room([0], growth=own - 1, chunk=self._max_step_tokens).needed

    def _prefix_is_coming(self, request: Request) -> bool:
        """Whether an elder's prefill is about to store a full page that ``request`` could share."""
        page = self._prefix_page_size
        if page is None or request.most_cached is not None:
            return False
        for elder in self.running:
            stored = elder.num_stored
            if elder.rank < request.rank and stored < elder.prefill_end:
                # One token is always left to compute, so a hit never covers the whole text.
                shared = min(_common_prefix(elder.tokens, request.tokens), len(request.tokens) - 1, elder.prefill_end)
                if shared // page > stored // page:
                    return True
        return False


def longest_fitting(backend: CacheBackend, capacity: int, limit: int, chunk: int) -> int:
    """Return the most tokens, up to ``limit``, that one sequence could store in a cache of ``capacity``.

    ``chunk`` is the most tokens of one step.

    Measured once, by bisection, so that `EngineCore.add_request` needs not touch the cache from another thread. One
    token is always left to compute, so a one-token prompt has no prefix hits and ``room`` tells the cold price.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if backend.room([0], growth=middle - 1, chunk=chunk).needed <= capacity:
            low = middle
        else:
            high = middle - 1
    return low


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens are the same, by bisection over slices (compared in C)."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

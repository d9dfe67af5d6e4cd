"""Replay: the requests of a trace, served again out of a pool of another size under another eviction policy.

Takes requests, drives a real `BlockAllocator` with the policy object that would serve live, and refuses to know time:
the loop is closed. Up to ``running`` requests run at once, in the order of arrival. Each round

1. admits waiting requests from the head of the queue while there is a place and room for the whole prompt and one page
   of growth; the prompt is stored at once. A request that does not fit waits, and nobody passes it;
2. stores one output token of every running request. Where the pool is full, the request admitted last gives up its
   pages and goes back to the head of the queue, with its output so far as part of its prompt; it comes back when there
   is room for all that it will ever store;
3. ends the requests whose output is complete.

A request that could not fit into the empty pool is refused before the first round.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..block_allocator import BlockAllocator
from ..errors import OutOfPages
from .belady import Belady, NextUses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..eviction import EvictionPolicy
    from ..sequence import Sequence as Handle
    from ..tokens import TokenArray
    from .request import Request

SOON = -1
"""The next use of a preempted request's pages: before any other."""

_WASTE_EVERY = 8  # counting empty slots costs as much as a round


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one pool under one policy made of a trace.

    Attributes:
        policy: its name.
        num_pages: usable pages.
        page_size: token slots in a page.
        requests: requests served.
        refused: requests longer than the pool.
        prompt_tokens: tokens of the prompts served, each prompt once.
        hit_tokens: of these, the ones found stored when the request was first admitted.
        recomputed_tokens: prompt tokens computed although a whole page with them had been computed before, and all
            tokens computed again after a preemption.
        preemptions: times that a running request gave up its pages.
        evictions: idle pages given up for new tokens.
        rounds: rounds of the loop.
        occupancy: the fraction of usable pages that running requests held, mean over rounds.
        peak: the same, the largest.
        waste: the fraction of held slots without a token, over every eighth round.
    """

    policy: str
    num_pages: int
    page_size: int
    requests: int
    refused: int
    prompt_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    preemptions: int
    evictions: int
    rounds: int
    occupancy: float
    peak: float
    waste: float

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that were found stored."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def regret(self, reference: ReplayResult) -> float:
        """Return by how much the hit rate falls short of the reference's; below 0 where it is better."""
        return reference.hit_rate - self.hit_rate


def replay(
    requests: Sequence[Request],
    *,
    num_pages: int,
    page_size: int = 16,
    policy: str | EvictionPolicy = "lru",
    running: int = 32,
    uses: NextUses | None = None,
    progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Serve ``requests`` in their order; see the module.

    Args:
        requests: of a `Trace`.
        num_pages: usable pages; the null page comes on top.
        page_size: token slots in a page.
        policy: a name that `BlockAllocator` takes, "belady", or a policy object, new for this replay.
        running: most requests at once.
        uses: `NextUses` of the same requests and page size, made here if it is not given; one serves many replays.
        progress: called with 1 whenever a request has ended or was refused.

    Raises:
        ValueError, TypeError: an argument is not what it must be.
    """
    if running < 1:
        raise ValueError(f"running must be at least 1, was {running}")
    if num_pages < 1:
        raise ValueError(f"num_pages must be at least 1, was {num_pages}")
    name = policy if isinstance(policy, str) else type(policy).__name__.lower()
    chosen = Belady() if policy == "belady" else policy
    allocator = BlockAllocator(num_pages + 1, page_size, policy=chosen)
    uses = uses or NextUses(requests, page_size)
    loop = _Loop(allocator, requests, uses, running, chosen if isinstance(chosen, Belady) else None)
    tell = progress or (lambda ended: None)
    refused = loop.refuse_too_long()
    for _ in range(refused):
        tell(1)
    while loop.waiting or loop.active:
        for _ in range(loop.round()):
            tell(1)
    stats = allocator.stats()
    return ReplayResult(
        policy=name,
        num_pages=num_pages,
        page_size=page_size,
        requests=len(requests) - refused,
        refused=refused,
        prompt_tokens=loop.prompt_tokens,
        hit_tokens=loop.hit_tokens,
        recomputed_tokens=loop.recomputed_tokens,
        preemptions=loop.preemptions,
        evictions=stats.evictions,
        rounds=loop.rounds,
        occupancy=loop.referenced / (loop.rounds * num_pages) if loop.rounds else 0.0,
        peak=loop.peak / num_pages,
        waste=1 - loop.stored / loop.held if loop.held else 0.0,
    )


class _Job:
    """A request on its way: its text (prompt, then output), and how many output tokens are left to store."""

    __slots__ = ("again", "handle", "index", "left", "output", "request", "text")

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.request = request
        self.left = len(request.output)
        self.again = False
        self.handle: Handle | None = None
        self.text: TokenArray | None = None
        self.output: list[int] = []

    def start(self) -> TokenArray:
        """Return the tokens to open with; the ids are made at the first call."""
        if self.text is None:
            output = self.request.output.array()
            self.output = output.tolist()
            self.text = np.concatenate([self.request.prompt.array(), output])
        return self.text[: len(self.text) - self.left]


class _Loop:
    """The closed loop, and what it counts."""

    def __init__(
        self,
        allocator: BlockAllocator,
        requests: Sequence[Request],
        uses: NextUses,
        running: int,
        belady: Belady | None,
    ) -> None:
        self.allocator = allocator
        self.uses = uses
        self.running = running
        self.belady = belady
        self.waiting = deque(_Job(index, request) for index, request in enumerate(requests))
        self.active: list[_Job] = []
        self.usable = allocator.num_pages - 1
        self.page_size = allocator.page_size
        self.last_admitted = -1
        self.blocked = False
        self.prompt_tokens = self.hit_tokens = self.recomputed_tokens = 0
        self.preemptions = self.rounds = self.referenced = self.peak = self.stored = self.held = 0

    def refuse_too_long(self) -> int:
        """Drop the requests that could never fit, and return how many they were."""
        before = len(self.waiting)
        most = self.usable * self.page_size
        self.waiting = deque(job for job in self.waiting if job.request.num_tokens <= most)
        return before - len(self.waiting)

    def round(self) -> int:
        """Run one round and return how many requests ended in it."""
        while self.waiting and len(self.active) < self.running and self._admit(self.waiting[0]):
            self.waiting.popleft()
        growing = [job for job in self.active if job.left]
        while growing and not self._decode(growing):
            self._preempt()
            growing = [job for job in self.active if job.left]
        self._count()
        ended = [job for job in self.active if not job.left]
        if ended:
            self.active = [job for job in self.active if job.left]
            for job in ended:
                self._give_back(job, after=self.last_admitted)
        return len(ended)

    def _admit(self, job: _Job) -> bool:
        """Store a request's prompt; False, and nothing done, where there is no room."""
        if self.blocked:
            return False
        tokens = job.start()
        growth = job.left if job.again else min(self.page_size, job.left)
        space = job.request.namespace
        most = -(-(len(tokens) + growth) // self.page_size)
        if most > self.allocator.ledger.pool.available:
            room = self.allocator.room(tokens, growth=growth, namespace=space, media=job.request.media)
            if not room.fits:
                self.blocked = True
                return False
        handle = job.handle = self.allocator.open(tokens, namespace=space, media=job.request.media)
        cached = handle.num_tokens
        handle.reserve(len(tokens) - cached)
        self._run_copies()
        handle.commit(tokens[cached:])
        self.active.append(job)
        if job.again:
            self.recomputed_tokens += len(tokens) - cached
        else:
            self.prompt_tokens += len(tokens)
            self.hit_tokens += cached
            self.recomputed_tokens += max(self.uses.seen_tokens[job.index] - cached, 0)
            self.last_admitted = job.index
        return True

    def _decode(self, jobs: list[_Job]) -> bool:
        """Store one token of each; False, and nothing done, where the pool is full."""
        handles = [job.handle for job in jobs if job.handle is not None]
        try:
            self.allocator.reserve_batch(handles, 1)
        except OutOfPages:
            return False
        self._run_copies()
        self.allocator.commit_batch(handles, [job.output[-job.left] for job in jobs])
        for job in jobs:
            job.left -= 1
        return True

    def _run_copies(self) -> None:
        # There are no tensors; a copy has run as soon as it is asked for.
        if len(self.allocator.take_copies()):
            self.allocator.acknowledge_copies()

    def _preempt(self) -> None:
        job = self.active.pop()
        self._give_back(job, after=None)
        job.again = True
        self.preemptions += 1
        self.waiting.appendleft(job)

    def _give_back(self, job: _Job, *, after: int | None) -> None:
        """Close a request's sequence; ``after`` is the request admitted last, None where this one will be back."""
        handle = job.handle
        assert handle is not None
        if self.belady is not None:
            pages = handle.block_table().tolist()
            if after is None:
                self.belady.expect(pages, [SOON] * len(pages))
            else:
                uses = self.uses.after(job.index, after)
                self.belady.expect(pages[: len(uses)], uses)
        handle.close()
        job.handle = None
        self.blocked = False

    def _count(self) -> None:
        referenced = self.usable - self.allocator.ledger.pool.available
        self.referenced += referenced
        self.peak = max(self.peak, referenced)
        if self.rounds % _WASTE_EVERY == 0:
            stats = self.allocator.stats()
            self.stored += stats.stored_tokens
            self.held += stats.held_slots
        self.rounds += 1

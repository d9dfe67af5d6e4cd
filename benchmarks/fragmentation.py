"""Serving lengths out of one memory, and counting where its slots are.

Takes ``(prompt, output)`` lengths and a `Memory`, gives an `Outcome`. The loop is closed: requests are admitted in
their order for as long as the memory takes them, and every round stores one token of each. Where growth fails the
youngest gives up its slots, goes back to the head of the queue, and nobody is admitted until a request has ended.

Means are over the rounds in which a request waits for memory: what an idle memory wastes is nobody's concern. All
are exact counts of slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.memory_models import Memory

Lengths = tuple[int, int]


@dataclass(frozen=True)
class Outcome:
    """Where the slots of a memory were.

    Attributes:
        internal: the fraction of held slots without a token of a running request, each round taken at the moment when
            most is held.
        external: the fraction of the memory that was free when an admission or a growth was refused, though it was
            enough for the tokens asked for; mean over all that were refused.
        stored: the fraction of the memory with tokens of running requests.
        peak: the fraction of the memory that was held at the highest moment of all rounds.
        running: requests running at once, mean.
        most_running: the same, the largest.
        refused: requests that do not fit into the empty memory.
        preempted: times that a request gave up its slots.
    """

    internal: float
    external: float
    stored: float
    peak: float
    running: float
    most_running: int
    refused: int
    preempted: int


class Account:
    """Sums over rounds."""

    def __init__(self, size: int) -> None:
        """Start at nothing, for a memory of ``size`` slots."""
        self.size = size
        self.rounds = self.held = self.stored = self.external = self.running = 0
        self.peak = self.most_running = self.refused = self.preempted = self.refusals = 0

    def add_refusal(self, free: int, needed: int) -> None:
        """Add a moment when ``needed`` tokens were not taken in although, or since, ``free`` slots were free."""
        self.refusals += 1
        self.external += free if free >= needed else 0

    def add(self, *, held: int, stored: int, running: int, pressed: bool) -> None:
        """Add a round; ``pressed`` where a request waits for memory."""
        self.peak = max(self.peak, held)
        self.most_running = max(self.most_running, running)
        if pressed:
            self.rounds += 1
            self.held += held
            self.stored += stored
            self.running += running

    def outcome(self) -> Outcome:
        """Return the means."""
        rounds = max(self.rounds, 1)
        return Outcome(
            internal=1 - self.stored / self.held if self.held else 0.0,
            external=self.external / (max(self.refusals, 1) * self.size),
            stored=self.stored / (rounds * self.size),
            peak=self.peak / self.size,
            running=self.running / rounds,
            most_running=self.most_running,
            refused=self.refused,
            preempted=self.preempted,
        )


@dataclass(eq=False, slots=True)
class _Job:
    number: int
    length: int
    final: int


def serve(memory: Memory, size: int, lengths: Iterable[Lengths]) -> Outcome:
    """Serve all requests out of a memory of ``size`` slots."""
    account = Account(size)
    jobs = [_Job(number, prompt, prompt + output) for number, (prompt, output) in enumerate(lengths)]
    queue = deque(job for job in jobs if memory.ever_fits(job.final))
    account.refused = len(jobs) - len(queue)
    active: list[_Job] = []
    wait_for_an_end = False
    while queue or active:
        while (
            queue
            and not (wait_for_an_end and active)
            and memory.admit(queue[0].number, queue[0].length, queue[0].final)
        ):
            active.append(queue.popleft())
            wait_for_an_end = False
        memory.highest = memory.held
        grown = 0
        growing = [job for job in active if job.length < job.final]
        while grown < len(growing):
            done = memory.grow([job.number for job in growing[grown:]])
            for job in growing[grown : grown + done]:
                job.length += 1
            grown += done
            if grown < len(growing):
                account.add_refusal(size - memory.held, 1)
                victim = active.pop()
                account.peak = max(account.peak, memory.highest)
                memory.free(victim.number)
                memory.highest = memory.held
                queue.appendleft(victim)
                account.preempted += 1
                wait_for_an_end = True
                if growing[-1] is victim:
                    growing.pop()
        account.add(
            held=max(memory.highest, memory.held),
            stored=sum(job.length for job in active),
            running=len(active),
            pressed=bool(queue),
        )
        ended = [job for job in active if job.length == job.final]
        for job in ended:
            memory.free(job.number)
            wait_for_an_end = False
        active = [job for job in active if job.length < job.final]
    return account.outcome()


def serve_static(size: int, lengths: Sequence[Lengths], max_new: int) -> Outcome:
    """Serve batch after batch as ``model.generate`` does with a ``StaticCache``.

    A batch is the next requests for as long as all of them, padded to the longest prompt and given ``max_new`` slots
    more, fit; it holds these slots until its longest output is complete.
    """
    account = Account(size)
    queue = deque(pair for pair in lengths if pair[0] + max_new <= size)
    account.refused = len(lengths) - len(queue)
    while queue:
        batch: list[Lengths] = []
        longest = 0
        while queue and (len(batch) + 1) * (max(longest, queue[0][0]) + max_new) <= size:
            longest = max(longest, queue[0][0])
            batch.append(queue.popleft())
        held = len(batch) * (longest + max_new)
        if queue:
            account.add_refusal(size - held, queue[0][0])
        for step in range(1, max(1, *(output for _, output in batch)) + 1):
            running = [prompt + step for prompt, output in batch if step <= output]
            account.add(held=held, stored=sum(running), running=len(running), pressed=bool(queue))
    return account.outcome()

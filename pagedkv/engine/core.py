"""The step loop on plain integers: requests in, one token for each of them a step, out.

Takes a runner (tokens to logits) and a cache backend; gives step outputs; refuses to know text and model classes, so
that all of it can be tested with a scripted runner in milliseconds.

A step is atomic. If the runner, or the choice of tokens, raises, the exception reaches the caller of `step` and every
text is as it was; the next step tries again, and `abort` takes a request out that cannot be served. Outputs that were
due (aborts) come with the next step.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, Protocol, get_args

import torch

from pagedkv.allocator import OutOfPages
from pagedkv.engine.accounting import count_step
from pagedkv.engine.checks import require_hashable, require_int, require_number, require_token_ids
from pagedkv.engine.decoding import Work, choose, wanted_rows
from pagedkv.engine.delivery import Delivery
from pagedkv.engine.door import Door
from pagedkv.engine.outputs import EngineStats
from pagedkv.engine.params import MAX_SEED, SamplingParams
from pagedkv.engine.preemption import Preemption
from pagedkv.engine.request import Group, Request
from pagedkv.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from pagedkv.backend import CacheBackend, StepBatch
    from pagedkv.engine.outputs import StepOutput
    from pagedkv.engine.preemption import PreemptionMode
    from pagedkv.engine.stops import OutputText
    from pagedkv.swap_space import SwapSpace

Scheduling = Literal["fcfs", "priority"]
SCHEDULINGS: Final = get_args(Scheduling)
MAX_PRIORITY: Final = 100
DEFAULT_AGEING: Final = 64


class Runner(Protocol):
    """What runs the model."""

    def forward(self, batch: StepBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Write the step's K and V through the cache and return float logits ``[n, vocab]``.

        Of the tokens ``rows``, int64 ``[n]``, counted over the step; of each sequence's last token where it is None,
        as it always is without drafts and prompt log-probabilities.
        """


class EngineCore:
    """Continuous batching over one cache.

    Args:
        runner: runs the model over a step's batch.
        backend: the cache. The engine counts on what is available in it now; nobody else should take from it.
        vocab_size: token ids are 0 to ``vocab_size - 1``; None: not checked.
        max_len: the model's context in tokens, prompt and generated ones together; None: unlimited.
        eos_token_ids: tokens that end every request that does not ignore them.
        max_batch: the most requests running at a time.
        max_step_tokens: the most input tokens in one step, prefill chunks and decode together; at least ``max_batch``.
        watermark: the share of the cache that new requests leave free beside running ones; 0 to below 1.
        growth, max_passes, prefix_page_size: see `Scheduler`.
        scheduling: ``"fcfs"``, first come, first served; or ``"priority"``, see `Scheduler`.
        ageing: with ``"priority"``: the steps of waiting that count as one level, at least 1.
        swap_space: host memory of ``backend`` for preempted requests; None: they are computed again.
        preemption: ``"auto"`` by cost, ``"swap"`` or ``"recompute"``; see `Preemption`.
        seed: of the seeds that requests without their own draw, 0 to 2**64 - 1; None: from the system.
        clock: seconds, for metrics and the cost of preemption; no answer depends on it.

    ``add_request`` and ``abort`` may be called from any thread: what they ask for takes effect at the next step.
    ``step`` belongs to one thread at a time.
    """

    def __init__(
        self,
        runner: Runner,
        backend: CacheBackend,
        *,
        vocab_size: int | None = None,
        max_len: int | None = None,
        eos_token_ids: Sequence[int] = (),
        max_batch: int = 32,
        max_step_tokens: int = 1024,
        watermark: float = 0.01,
        growth: int = 32,
        max_passes: int = 16,
        prefix_page_size: int | None = None,
        scheduling: Scheduling = "fcfs",
        ageing: int = DEFAULT_AGEING,
        swap_space: SwapSpace | None = None,
        preemption: PreemptionMode = "auto",
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure the cache and start with no requests."""
        require_int("max_batch", max_batch, 1)
        require_int("max_step_tokens", max_step_tokens, 1)
        if max_step_tokens < max_batch:
            raise ValueError(f"max_step_tokens must be at least max_batch = {max_batch}, was {max_step_tokens}")
        require_int("growth", growth, 0)
        require_int("max_passes", max_passes, 0)
        require_int("ageing", ageing, 1)
        if scheduling not in SCHEDULINGS:
            raise ValueError(f"scheduling must be one of {', '.join(SCHEDULINGS)}, was {scheduling!r}")
        if require_number("watermark", watermark, 0) >= 1:
            raise ValueError(f"watermark must be at least 0 and below 1, was {watermark!r}")
        if seed is not None:
            require_int("seed", seed, 0, MAX_SEED)
        self.backend = backend
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_len = max_len
        self.eos_token_ids = frozenset(require_token_ids("eos_token_ids", tuple(eos_token_ids), None))
        self.stats = EngineStats()
        self.preemption = Preemption(self.stats, swap_space, preemption)
        self._new_text: Callable[[SamplingParams], OutputText] | None = None
        self._max_step_tokens = max_step_tokens
        self._door = Door(
            backend,
            vocab_size=vocab_size,
            max_len=max_len,
            eos_token_ids=self.eos_token_ids,
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
        )
        self.max_stored = self._door.max_stored
        self._prioritised = scheduling == "priority"
        self.scheduler = Scheduler(
            backend,
            self.preemption,
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            watermark=int(watermark * self._door.capacity),
            growth=growth,
            max_passes=max_passes,
            prefix_page_size=prefix_page_size,
            ageing=ageing if self._prioritised else None,
        )
        self._clock = clock
        self._random = random.Random(seed)
        self._lock = threading.RLock()  # a stream that is collected inside a call aborts its request
        self._stepping = threading.Lock()
        self._groups: dict[Hashable, Group] = {}
        self._arrivals = 0
        self._added: deque[Request] = deque()
        self._aborted: deque[Group] = deque()
        self._delivery = Delivery(self.scheduler, self.stats, self._forget)

    def use_text(self, new_text: Callable[[SamplingParams], OutputText]) -> None:
        """Give outputs text, and let stop strings end it; ``new_text`` makes an answer's text by its params.

        Called before the first request.
        """
        self._new_text = self._delivery.new_text = new_text
        self._door.has_text = True

    @property
    def has_unfinished(self) -> bool:
        """Whether another step has something to do or to tell."""
        return bool(self._groups or self._delivery.outputs)

    @property
    def num_waiting(self) -> int:
        """Samples that are not running; a request counts once before they part."""
        return len(self._added) + len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Samples that hold a sequence in the cache."""
        return len(self.scheduler.running)

    def add_request(
        self,
        request_id: Hashable,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a request; it enters at the next step that has room for it.

        ``request_id`` may be used again once its request has finished. ``params`` are `SamplingParams()` by default.
        ``priority`` is -100 to 100, smaller goes first; other than 0 only with scheduling "priority".

        Raises:
            ValueError, TypeError: if the prompt is empty or holds what is no token id; the id is in use; the params
                are none, or go with another vocabulary; or the request, with all its samples or beams, can never fit
                in the batch, the model's context or the cache. Nothing has changed.
        """
        require_hashable("request_id", request_id)
        params = SamplingParams() if params is None else params
        tokens, stop_ids = self._door.check(prompt_ids, params)
        if require_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY) and not self._prioritised:
            raise ValueError(f"priority must be 0 with scheduling 'fcfs', was {priority}")
        with self._lock:
            if request_id in self._groups:
                raise ValueError(f"request_id must not be in use by an unfinished request, was {request_id!r}")
            seed = self._random.getrandbits(64) if params.seed is None else params.seed
            text = None if self._new_text is None else self._new_text(params)
            group = Group.of(request_id, params, stop_ids, priority=priority)
            group.requests.append(Request(group, tokens, stop_ids, seed, self._arrivals, self._clock(), text))
            self._arrivals += 1
            self._groups[request_id] = group
            self._added.append(group.requests[0])

    def abort(self, request_id: Hashable) -> bool:
        """Ask for a request's end at the next step; say whether there was such a request.

        That step reports it with finish reason ``"abort"``, unless it has finished by itself by then. An unknown id is
        no error: the request may have finished a moment ago.
        """
        with self._lock:
            group = self._groups.get(request_id)
            if group is not None:
                self._aborted.append(group)
            return group is not None

    def step(self) -> list[StepOutput]:
        """Run the model once and return what each request got: a token each, more where drafts held, and who finished.

        Aborts take effect first, then waiting requests enter, also into places that the last step's finished ones
        left. With nothing to run the model is not called.

        Raises:
            OutOfPages: if the eldest request alone does not fit: somebody else has taken from the cache.
            RuntimeError: if another thread is inside `step`.
            Exception: the runner's own; every text is as before.
        """
        with self._only_one():
            self._receive()
            shares = self.scheduler.schedule()
            while not shares and self.scheduler.preempt_for_progress():
                shares = self.scheduler.schedule()
            if shares:
                self._run(shares)
            elif self.scheduler.waiting:
                raise OutOfPages(*self.backend.room(self.scheduler.waiting[0].tokens))
            return self._delivery.take()

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("step must be called by one thread at a time; another thread is inside it")
        try:
            yield
        finally:
            self._stepping.release()

    def _receive(self) -> None:
        """Take in what other calls asked for since the last step."""
        # Aborts are counted first: what they name was added before, and so is in the scheduler when they are served.
        for_abort = len(self._aborted)
        while self._added:
            self.scheduler.add(self._added.popleft())
        for _ in range(for_abort):
            group = self._aborted.popleft()
            if self._groups.get(group.request_id) is group:
                self._delivery.abort(group, self._clock())

    def _forget(self, group: Group) -> None:
        with self._lock:
            del self._groups[group.request_id]

    def _run(self, shares: dict[Request, int]) -> None:
        started = self._clock()
        batch, works = self._begin(shares)
        if batch is None:
            return
        try:
            choices = choose(self._forward(batch, works), works)
        except BaseException:
            self.backend.abandon_step(batch)
            raise
        drafted = [(work, choice) for work, choice in zip(works, choices, strict=True) if work.draft]
        # What was drafted and not drawn never stands: a draft of k tokens that brought m has k - m + 1 too many.
        keep = {work.request.sequence: len(work.fed) - len(work.draft) + len(c.tokens) - 1 for work, c in drafted}
        self.backend.end_step(batch, keep=keep or None)
        now = self._clock()
        cost = count_step(self.stats, works, choices, started)
        self.preemption.note_step(cost, now - started)
        self.scheduler.chunked = self.scheduler.chunked and cost.kept
        for work, choice in zip(works, choices, strict=True):
            self._delivery.deliver(work.request, choice, now)

    def _begin(self, shares: dict[Request, int]) -> tuple[StepBatch | None, list[Work]]:
        """Make room for the step, first by leaving drafts out, then by preempting the youngest while there is none.

        No step is left where only beams run that wait for the preempted one.
        """
        works = self._works(shares)
        while True:
            try:
                return self.backend.begin_step({work.request.sequence: work.fed for work in works}), works
            except OutOfPages:
                if any(work.draft for work in works):
                    works = self._works(shares, drafts=False)
                    continue
                victim = self.scheduler.preempt_youngest()
                if victim is None:
                    raise
                shares.pop(victim, None)
                works = self._works(shares, drafts=False)
                if not works:
                    return None, []

    def _works(self, shares: dict[Request, int], *, drafts: bool = True) -> list[Work]:
        """Lay out what each request feeds. Drafts take what the step's budget has left, so they delay nobody."""
        spare = self._max_step_tokens - sum(shares.values()) if drafts else 0
        works = []
        for request, count in shares.items():
            fed = request.tokens[request.num_stored : request.num_stored + count]
            draft = request.draft(spare) if count == request.pending == 1 else []
            spare -= len(draft)
            works.append(Work(request, fed + draft, draft))
        return works

    def _forward(self, batch: StepBatch, works: list[Work]) -> torch.Tensor:
        rows = wanted_rows(works)
        if rows is None:
            logits = self.runner.forward(batch)
        else:
            logits = self.runner.forward(batch, torch.tensor(rows, device=batch.input_ids.device))
        expected = (
            sum(work.num_rows for work in works),
            logits.shape[-1] if self.vocab_size is None else self.vocab_size,
        )
        if tuple(logits.shape) != expected:
            raise ValueError(f"the runner's logits must be {expected}, were {tuple(logits.shape)}")
        return logits

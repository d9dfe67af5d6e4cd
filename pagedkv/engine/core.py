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
from typing import TYPE_CHECKING, Protocol

import torch

from pagedkv.allocator import OutOfPages
from pagedkv.engine.checks import require_int, require_number, require_token_ids
from pagedkv.engine.outputs import EngineStats, StepOutput
from pagedkv.engine.request import Request, SamplingParams
from pagedkv.engine.sampler import sample
from pagedkv.engine.scheduler import Scheduler, longest_fitting

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from pagedkv.backend import CacheBackend, StepBatch
    from pagedkv.engine.outputs import FinishReason

_NO_LIMIT = 2**31


class Runner(Protocol):
    """What runs the model."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the step's K and V through the cache and return float logits ``[num_sequences, vocab]``."""


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
        seed: of the seeds that requests without their own draw; None: from the system.
        clock: seconds, for metrics only.

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
        if require_number("watermark", watermark, 0) >= 1:
            raise ValueError(f"watermark must be at least 0 and below 1, was {watermark!r}")
        self.backend = backend
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_len = max_len
        self.eos_token_ids = frozenset(require_token_ids("eos_token_ids", tuple(eos_token_ids), None))
        self.stats = EngineStats()
        capacity = backend.room([0]).available
        self.max_stored = longest_fitting(backend, capacity, max_len or _NO_LIMIT, max_step_tokens)
        self.scheduler = Scheduler(
            backend,
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            watermark=int(watermark * capacity),
            growth=growth,
            max_passes=max_passes,
            prefix_page_size=prefix_page_size,
        )
        self._clock = clock
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._stepping = threading.Lock()
        self._requests: dict[Hashable, Request] = {}
        self._arrivals = 0
        self._added: deque[Request] = deque()
        self._aborted: deque[Request] = deque()
        self._outputs: list[StepOutput] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether another step has something to do or to tell."""
        return bool(self._requests or self._outputs)

    @property
    def num_waiting(self) -> int:
        """Requests that are not running."""
        return len(self._requests) - len(self.scheduler.running)

    @property
    def num_running(self) -> int:
        """Requests that hold a sequence in the cache."""
        return len(self.scheduler.running)

    def add_request(
        self, request_id: Hashable, prompt_ids: Sequence[int], params: SamplingParams | None = None
    ) -> None:
        """Queue a request; it enters at the next step that has room for it.

        ``request_id`` may be used again once its request has finished. ``params`` are `SamplingParams()` by default.

        Raises:
            ValueError, TypeError: if the prompt is empty or holds what is no token id; the id is in use; the params
                are none; or the request can never fit in the model's context or in the cache. Nothing has changed.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, was {type(params).__name__}")
        tokens = require_token_ids("prompt", prompt_ids, self.vocab_size)
        require_token_ids("stop_token_ids", params.stop_token_ids, self.vocab_size)
        if not tokens:
            raise ValueError("prompt must hold at least one token, was empty")
        self._require_fits(len(tokens), params.max_new_tokens)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        with self._lock:
            if request_id in self._requests:
                raise ValueError(f"request_id must not be in use by an unfinished request, was {request_id!r}")
            seed = self._random.getrandbits(64) if params.seed is None else params.seed
            request = Request(request_id, tokens, params, stop_ids, seed, self._arrivals, self._clock())
            self._arrivals += 1
            self._requests[request_id] = request
            self._added.append(request)

    def abort(self, request_id: Hashable) -> bool:
        """Ask for a request's end at the next step; say whether there was such a request.

        That step reports it with finish reason ``"abort"``, unless it has finished by itself by then. An unknown id is
        no error: the request may have finished a moment ago.
        """
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None:
                self._aborted.append(request)
            return request is not None

    def step(self) -> list[StepOutput]:
        """Run the model once and return what each request got: at most one token each, and who finished.

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
            if shares:
                self._run(shares)
            outputs, self._outputs = self._outputs, []
            return outputs

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
            request = self._aborted.popleft()
            if self._requests.get(request.request_id) is request:
                self.scheduler.remove(request)
                self._finish(request, (), "abort")

    def _run(self, shares: dict[Request, int]) -> None:
        batch, shares = self._begin(shares)
        requests = list(shares)
        complete = [row for row, (request, count) in enumerate(shares.items()) if count == request.pending]
        try:
            logits = self.runner.forward(batch)
            tokens = self._sample(logits, requests, complete)
        except BaseException:
            self.backend.abandon_step(batch)
            raise
        self.backend.end_step(batch)
        self._count(shares)
        for row, token in zip(complete, tokens, strict=True):
            self._append(requests[row], token)

    def _begin(self, shares: dict[Request, int]) -> tuple[StepBatch, dict[Request, int]]:
        """Make room for the step, preempting the youngest while there is none."""
        while True:
            rows = {
                request.sequence: request.tokens[request.num_stored : request.num_stored + count]
                for request, count in shares.items()
            }
            try:
                return self.backend.begin_step(rows), shares
            except OutOfPages:
                victim = self.scheduler.preempt_youngest()
                if victim is None:
                    raise
                self.stats.preemptions += 1
                shares = {request: count for request, count in shares.items() if request is not victim}

    def _sample(self, logits: torch.Tensor, requests: list[Request], rows: list[int]) -> list[int]:
        expected = (len(requests), logits.shape[-1] if self.vocab_size is None else self.vocab_size)
        if tuple(logits.shape) != expected:
            raise ValueError(f"the runner's logits must be {expected}, were {tuple(logits.shape)}")
        if not rows:
            return []
        if len(rows) < len(requests):
            logits = logits[torch.tensor(rows, device=logits.device)]
        chosen = [requests[row] for row in rows]
        return sample(
            logits,
            [request.params for request in chosen],
            [request.seed for request in chosen],
            [len(request.tokens) for request in chosen],
        )

    def _count(self, shares: dict[Request, int]) -> None:
        """Note what the committed step has stored and computed."""
        self.stats.steps += 1
        for request, count in shares.items():
            start = request.num_stored
            prefill = max(0, min(start + count, request.prefill_end) - start)
            request.prefill_tokens += prefill
            self.stats.prefill_tokens += prefill
            self.stats.decode_tokens += count - prefill
            request.note_stored()
            if request.num_stored == start:
                self.scheduler.chunked = False

    def _append(self, request: Request, token: int) -> None:
        reason = request.append(token)
        self.stats.new_tokens += 1
        if request.first_token_at is None:
            request.first_token_at = self._clock()
        if reason is None:
            self._outputs.append(StepOutput(request.request_id, (token,)))
        else:
            self.scheduler.remove(request)
            self._finish(request, (token,), reason)

    def _finish(self, request: Request, token_ids: tuple[int, ...], reason: FinishReason) -> None:
        with self._lock:
            del self._requests[request.request_id]
        self.stats.cached_tokens += request.cached_tokens or 0
        self.stats.refound_tokens += request.refound_tokens
        self.stats.finished[reason] += 1
        metrics = request.metrics(self._clock())
        self._outputs.append(StepOutput(request.request_id, token_ids, finish_reason=reason, metrics=metrics))

    def _require_fits(self, prompt_tokens: int, max_new_tokens: int) -> None:
        total = prompt_tokens + max_new_tokens
        # The last token generated is never fed back, so it needs no slot.
        most, why = self.max_stored + 1, "all that the cache can ever hold"
        if self.max_len is not None and self.max_len <= most:
            most, why = self.max_len, "the model's context"
        if total > most:
            raise ValueError(
                f"prompt and max_new_tokens must together be at most {most} tokens, {why}, "
                f"were {prompt_tokens} + {max_new_tokens} = {total}"
            )

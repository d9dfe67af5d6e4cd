"""AsyncEngine: one engine for everybody on an event loop, stepped by a thread of its own.

Takes prompts from tasks, gives each its outputs as they come, and leaves every decision to the engine. No step and no
tokenizing of a prompt ever blocks the loop; a task that is cancelled, or drops its stream, ends its request.
"""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Self

from pagedkv.engine.async_stream import AsyncStream
from pagedkv.engine.checks import require_int
from pagedkv.engine.engine import Engine
from pagedkv.engine.params import one_each
from pagedkv.engine.prompts import prompts_or_chats, to_token_ids
from pagedkv.engine.step_thread import StepThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable, Sequence

    from pagedkv.backend import CacheUsage
    from pagedkv.engine.outputs import Completion, EngineStats, StepOutput
    from pagedkv.engine.params import SamplingParams
    from pagedkv.engine.prompts import Message


class EngineBusy(RuntimeError):  # noqa: N818  (named for the situation)
    """So many requests are unfinished that no further one is taken; try again later."""


class EngineStopped(RuntimeError):  # noqa: N818  (named for the situation)
    """The engine takes no more requests: it was never started, is shutting down, or has failed for good."""


class StepFailed(RuntimeError):  # noqa: N818  (named for the situation)
    """The model raised while the request ran, which ended it; the model's own exception is the cause."""


class AsyncEngine:
    """An engine for asyncio, from ``async with`` to its end.

    Args:
        engine: nobody else uses it meanwhile.
        max_requests: the most unfinished requests, running and waiting; further ones are refused, at least 1. What a
            slow reader has not read yet is kept, at most its request's own tokens, and delays nobody.
        observe: called on the loop with the last output of every sample, also of those that nobody reads any more.

    All methods belong to the loop it was entered on. At the end of the ``async with`` what still runs is aborted, the
    thread has ended, and the engine is the caller's again; `drain` before it lets running requests end by themselves.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int = 256,
        observe: Callable[[StepOutput], None] | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise TypeError(f"engine must be an Engine, was {type(engine).__name__}")
        self.max_requests = require_int("max_requests", max_requests, 1)
        self._engine = engine
        self._observe = observe
        # A fast tokenizer must not encode while another thread decodes with it.
        self._encoder = copy.deepcopy(engine.tokenizer)
        self._prompts = ThreadPoolExecutor(1, thread_name_prefix="pagedkv-prompts")
        self._thread = StepThread(engine, self._deliver, self._fail)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inboxes: dict[Hashable, asyncio.Queue[StepOutput | BaseException]] = {}
        self._idle = asyncio.Event()
        self._num_submitted = 0
        self._refusal: str | None = "has not been entered: use it in an `async with`"

    async def __aenter__(self) -> Self:
        """Start the thread, once."""
        if self._loop is not None:
            raise RuntimeError("an AsyncEngine must be entered once, was entered before")
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._refusal = None
        self._idle.set()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._refusal = "has ended"
        for request_id in self._inboxes:
            self._thread.abort(request_id)
        self._prompts.shutdown(wait=False)
        await asyncio.shield(asyncio.to_thread(self._thread.stop))

    @property
    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._engine.stats

    @property
    def usage(self) -> CacheUsage:
        """What the cache holds: at most a second old while requests run, exact when none does."""
        return self._thread.usage

    @property
    def num_requests(self) -> int:
        """Unfinished requests, of which ``max_requests`` are the most."""
        return len(self._inboxes)

    @property
    def num_running(self) -> int:
        """Samples that hold a sequence in the cache."""
        return self._engine.core.num_running

    @property
    def num_waiting(self) -> int:
        """Samples that are not running."""
        return self._engine.core.num_waiting

    @property
    def max_len(self) -> int:
        """The most tokens of one request that is no beam search, prompt and new ones together."""
        core = self._engine.core
        most = core.max_stored + 1  # the last token is never fed back, so it needs no slot
        return most if core.max_len is None else min(most, core.max_len)

    @property
    def refusal(self) -> str | None:
        """Why no request is taken any more; None: they are."""
        if self._refusal is None and self._thread.error is not None:
            self._refusal = f"has failed: {type(self._thread.error).__name__}: {self._thread.error}"
        return self._refusal

    async def tokenize(
        self, prompt: str | Sequence[int] | None = None, *, messages: Sequence[Message] | None = None
    ) -> list[int]:
        """Return the token ids of a prompt or of a chat, as `Engine.add_request` takes them. Errors: `submit`'s.

        Where no further request is taken nothing is tokenized.
        """
        self._require_running()
        self._require_place()
        work = partial(to_token_ids, self._encoder, prompt, messages)
        return await asyncio.get_running_loop().run_in_executor(self._prompts, work)

    async def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        priority: int = 0,
    ) -> AsyncStream:
        """Queue a request, as `Engine.add_request` does; return its outputs' stream, which an early leaver closes.

        Raises:
            ValueError, TypeError: as `Engine.add_request` does.
            EngineBusy: if ``max_requests`` are unfinished.
            EngineStopped: if no requests are taken any more.
        """
        tokens = await self.tokenize(prompt, messages=messages)
        self._require_place()  # others may have come meanwhile
        self._require_running()
        self._num_submitted += 1
        request_id = ("async", self._num_submitted, object())  # nobody else can have this id
        inbox: asyncio.Queue[StepOutput | BaseException] = asyncio.Queue()
        self._thread.add(request_id, tokens, params, priority)
        self._require_running()  # the thread may have died since
        self._inboxes[request_id] = inbox
        self._idle.clear()
        return AsyncStream(partial(self._forget, request_id), tuple(tokens), inbox)

    async def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[StepOutput]:
        """Queue a request at the first ``anext`` and yield its outputs; leaving early aborts it. Errors: `submit`'s."""
        async with aclosing(await self.submit(prompt, params, messages=messages, priority=priority)) as outputs:
            async for output in outputs:
                yield output

    async def generate(
        self,
        prompts: Sequence[str | Sequence[int]] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        messages: Sequence[Sequence[Message]] | None = None,
        priority: int = 0,
    ) -> list[Completion]:
        """Serve ``prompts``, or the chats ``messages``, to their ends, as `Engine.generate` does.

        If one is refused or fails, or the task is cancelled, all of them are aborted. Errors: `submit`'s.
        """
        given = prompts_or_chats(prompts, messages)
        streams: list[AsyncStream] = []
        try:
            for (prompt, chat), own in zip(given, one_each(params, len(given)), strict=True):
                streams.append(await self.submit(prompt, own, messages=chat, priority=priority))
            return [await stream.completion() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    async def drain(self, grace: float | None = None) -> bool:
        """Take no more requests and wait for the unfinished ones; those that take over ``grace`` seconds are aborted.

        Return whether all ended by themselves.
        """
        if self._refusal is None:
            self._refusal = "is shutting down"
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            for request_id in self._inboxes:
                self._thread.abort(request_id)
            await self._idle.wait()
            return False
        return True

    def _require_running(self) -> None:
        if self.refusal is not None:
            raise EngineStopped(f"the engine {self.refusal}")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("an AsyncEngine must be used on the event loop that it was entered on, was another")

    def _require_place(self) -> None:
        if len(self._inboxes) >= self.max_requests:
            raise EngineBusy(f"max_requests = {self.max_requests} requests are unfinished; try again later")

    def _forget(self, request_id: Hashable) -> None:
        """End a request that nobody reads any more. From any thread, and from a destructor."""
        self._thread.abort(request_id)

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        self._post(partial(self._put_outputs, outputs))

    def _fail(self, request_ids: Sequence[Hashable], error: BaseException) -> None:
        self._post(partial(self._put_error, request_ids, error))

    def _post(self, call: Callable[[], None]) -> None:
        """From the thread to the loop."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop was closed with requests running: nobody will ever read them
            self._thread.stop()

    def _put_outputs(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.put_nowait(output)
            if output.ends_request:
                self._end(output.request_id)
            if self._observe is not None and output.finished:
                self._observe(output)

    def _put_error(self, request_ids: Sequence[Hashable], error: BaseException) -> None:
        for request_id in request_ids:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                failure = StepFailed(f"the model step failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                inbox.put_nowait(failure)
            self._thread.abort(request_id)  # it may have been added while the step failed
            self._end(request_id)

    def _end(self, request_id: Hashable) -> None:
        self._inboxes.pop(request_id, None)
        if not self._inboxes:
            self._idle.set()

"""A thread that steps an engine whenever there is something to do, and sleeps when there is not.

Takes an engine and two calls for what comes of it; gives outputs and failures, in this thread; refuses to know who
waits for them, so that it serves asyncio as it would anything else. While it runs the cache is its own.

A step that fails fails everybody: which request was the poison cannot be told, so all of them are ended and their pages
freed, and the thread goes on. It ends only where the engine cannot even do that.
"""

from __future__ import annotations

import atexit
import threading
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from pagedkv.backend import CacheUsage
    from pagedkv.engine.engine import Engine
    from pagedkv.engine.outputs import StepOutput
    from pagedkv.engine.params import SamplingParams

_USAGE_PERIOD = 1.0  # seconds; counting what a full cache holds costs about a millisecond


class StepThread:
    """Steps ``engine`` from `start` to `stop`.

    Args:
        engine: nobody else steps it meanwhile.
        deliver: takes a step's outputs.
        fail: takes the ids that a failed step ended, and its error.

    ``usage`` is what the cache held at most a second ago, and right now where nothing runs. ``error`` is what the
    thread died of. Both calls are made in this thread.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Sequence[StepOutput]], None],
        fail: Callable[[Sequence[Hashable], BaseException], None],
    ) -> None:
        self.usage: CacheUsage = engine.backend.usage()
        self.error: BaseException | None = None
        self._engine = engine
        self._deliver = deliver
        self._fail = fail
        # Calls to be made between steps. A SimpleQueue may be put to from a destructor, wherever that interrupts.
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._ids: set[Hashable] = set()
        self._ended: list[Hashable] = []
        self._stopping = False
        self._usage_due = 0.0
        self._thread = threading.Thread(target=self._run, name="pagedkv-step", daemon=True)

    def start(self) -> None:
        """Take over the cache from the calling thread and begin."""
        self._engine.hand_over()
        atexit.register(self.stop)
        self._thread.start()

    def add(
        self, request_id: Hashable, prompt_ids: Sequence[int], params: SamplingParams | None, priority: int = 0
    ) -> None:
        """Queue a request, as `EngineCore.add_request` does and with its errors. From any thread.

        A thread that has died takes it in silence, so look at ``error`` afterwards: it is set before anybody is told,
        and so nobody falls between the two.
        """
        self._ids.add(request_id)  # before the first step that could end it
        try:
            self._engine.core.add_request(request_id, prompt_ids, params, priority=priority)
        except BaseException:
            self._ids.discard(request_id)
            raise
        self._calls.put(_wake)

    def abort(self, request_id: Hashable) -> None:
        """End a request before the next step. From any thread, and from a destructor."""
        self._calls.put(partial(self._engine.abort, request_id))

    def stop(self) -> None:
        """End every request, then the thread, and wait for it; the cache is then anybody's. Twice does no harm."""
        self._calls.put(self._end)
        atexit.unregister(self.stop)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self) -> None:
        self._stopping = True
        for request_id in list(self._ids):
            self._engine.abort(request_id)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._calls.get()()
                self._work()
        except BaseException as error:
            self.error = error
            self._fail(list(self._ids), error)
        finally:
            self._engine.hand_over()

    def _work(self) -> None:
        """Step until nothing is left to do."""
        while True:
            self._make_calls()
            if not self._engine.has_unfinished:
                break
            self._step()
        self._note_usage()

    def _make_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            call()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._end_all(error)
            return
        self._ended = []
        self._ids.difference_update(output.request_id for output in outputs if output.ends_request)
        if time.monotonic() >= self._usage_due:
            self._note_usage()
        self._deliver(outputs)

    def _end_all(self, error: Exception) -> None:
        """Tell everybody of a failed step and end what ran; raise ``error`` where the engine cannot end it."""
        if any(self._engine.abort(request_id) for request_id in self._ended):
            raise error  # what was to end before this step is still there
        self._ended = list(self._ids)
        for request_id in self._ended:
            self._engine.abort(request_id)
        self._fail(self._ended, error)
        self._ids.difference_update(self._ended)

    def _note_usage(self) -> None:
        self.usage = self._engine.backend.usage()
        self._usage_due = time.monotonic() + _USAGE_PERIOD


def _wake() -> None:
    """Do nothing: that there is a call at all is what wakes the thread."""

"""One request's outputs as an asynchronous iterator.

Takes an inbox that somebody fills on the event loop, gives outputs in order, and refuses to know who fills it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pagedkv.engine.stream import join_outputs

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pagedkv.engine.outputs import Completion, StepOutput


class AsyncStream:
    """One request's outputs; made by `AsyncEngine.submit`, for one reader.

    Left before its end, by `close` or dropped, it aborts the request at the next step.
    """

    def __init__(
        self,
        forget: Callable[[], None],
        prompt_token_ids: tuple[int, ...],
        inbox: asyncio.Queue[StepOutput | BaseException],
    ) -> None:
        """Read from ``inbox``; ``forget`` gives the request up."""
        self.prompt_token_ids = prompt_token_ids
        self._forget = forget
        self._inbox = inbox
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        """Wait for the next output.

        Raises:
            StepFailed: if the model raised; the request has ended.
        """
        if self._ended:
            raise StopAsyncIteration
        item = await self._inbox.get()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._ended = item.ends_request
        return item

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Abort what has not finished. Safe from any thread, and twice."""
        if not self._ended:
            self._ended = True
            self._forget()

    async def aclose(self) -> None:
        """Do what `close` does."""
        self.close()

    async def completion(self) -> Completion:
        """Read on to the end and return the outputs read by this call, joined sample by sample."""
        return join_outputs(self.prompt_token_ids, [output async for output in self])

"""One request's outputs as an iterator that steps the engine as needed.

Takes a box that an engine fills and the engine's two verbs; gives outputs in order; refuses to know how they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pagedkv.engine.outputs import Completion, StepOutput

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Hashable


class RequestStream:
    """One request's outputs as an iterator; also a context manager. Made by `Engine.stream`."""

    def __init__(
        self,
        advance: Callable[[], None],
        forget: Callable[[Hashable], None],
        request_id: Hashable,
        prompt_token_ids: tuple[int, ...],
        box: deque[StepOutput],
    ) -> None:
        """Read from ``box``, which ``advance`` fills by one step; ``forget`` gives the request up."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._advance = advance
        self._forget = forget
        self._box = box
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepOutput:
        if self._ended:
            raise StopIteration
        while not self._box:
            self._advance()
        output = self._box.popleft()
        self._ended = output.finished
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End it: what has not finished is aborted at the next step. Safe from any thread, and twice."""
        if not self._ended:
            self._ended = True
            self._forget(self.request_id)

    def completion(self) -> Completion:
        """Read on to the end and return the outputs read by this call, joined."""
        tokens: list[int] = []
        pieces: list[str] = []
        for output in self:
            tokens += output.token_ids
            pieces.append(output.text)
            if output.finish_reason is not None and output.metrics is not None:
                return Completion(
                    self.prompt_token_ids, tuple(tokens), "".join(pieces), output.finish_reason, output.metrics
                )
        raise RuntimeError("completion must be called before the stream has ended")

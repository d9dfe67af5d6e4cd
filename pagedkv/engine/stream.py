"""One request's outputs as an iterator that steps the engine as needed.

Takes a box that an engine fills and the engine's two verbs; gives outputs in order; refuses to know how they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pagedkv.engine.outputs import Completion, Sample, StepOutput

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Hashable, Sequence


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
        self._ended = output.ends_request
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
        """Read on to the end and return the outputs read by this call, joined sample by sample."""
        return join_outputs(self.prompt_token_ids, list(self))


def join_outputs(prompt_token_ids: tuple[int, ...], outputs: Sequence[StepOutput]) -> Completion:
    """Return one request's ``outputs``, in order and up to its end, joined sample by sample."""
    if not outputs:
        raise RuntimeError("completion must be called before the stream has ended")
    read: dict[int, list[StepOutput]] = {}
    prompt_logprobs = None
    for output in outputs:
        read.setdefault(output.index, []).append(output)
        prompt_logprobs = prompt_logprobs or output.prompt_logprobs
    samples = tuple(_joined(read[index]) for index in sorted(read) if read[index][-1].finished)
    return Completion(prompt_token_ids, samples, prompt_logprobs)


def _joined(outputs: list[StepOutput]) -> Sample:
    last = outputs[-1]
    if last.finish_reason is None or last.metrics is None:
        raise RuntimeError("the stream must have been read to its end")
    return Sample(
        tuple(token for output in outputs for token in output.token_ids),
        "".join(output.text for output in outputs),
        last.finish_reason,
        last.metrics,
        tuple(found for output in outputs for found in output.logprobs),
        last.score,
    )

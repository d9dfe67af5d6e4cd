"""From what a step chose to what callers hear: samples part, beams go on, answers end.

Takes choices, gives outputs, and moves requests in the scheduler as they part and end; refuses to choose. Nothing here
can fail half-way: it runs after the step has been committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.engine.outputs import StepOutput
from pagedkv.engine.params import MAX_SEED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedkv.engine.beams import BeamSearch, Child
    from pagedkv.engine.decoding import Choice
    from pagedkv.engine.logprobs import Logprob
    from pagedkv.engine.outputs import EngineStats, FinishReason
    from pagedkv.engine.params import SamplingParams
    from pagedkv.engine.request import Group, Request
    from pagedkv.engine.scheduler import Scheduler
    from pagedkv.engine.stops import OutputText


class Delivery:
    """What is due to callers.

    Args:
        scheduler: told of requests that part and end.
        stats: counted into.
        forget: called with each group that has ended, before its last output is due.

    ``new_text`` makes an answer's text by its params; None for engines of token ids.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        forget: Callable[[Group], None],
    ) -> None:
        self.outputs: list[StepOutput] = []
        self._scheduler = scheduler
        self._stats = stats
        self.new_text: Callable[[SamplingParams], OutputText] | None = None
        self._forget = forget

    def take(self) -> list[StepOutput]:
        """Return what is due, once."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def deliver(self, request: Request, choice: Choice, now: float) -> None:
        """Give a request what a step chose for it."""
        group = request.group
        if group.prompt_logprobs is not None:
            group.prompt_logprobs += choice.prompt_logprobs
        if group.beams is not None:
            if choice.log_probs is not None and group.beams.hear(request, choice.log_probs):
                self._advance(group, group.beams, now)
        elif not choice.tokens:
            return
        elif group.branched:
            self._append(request, choice.tokens, choice.logprobs, now)
        else:
            group.branched = True
            samples = [request, *(self._branch(request, index) for index in range(1, group.params.n))]
            for index, sample in enumerate(samples):
                own = slice(index, index + 1)
                self._append(sample, choice.tokens[own], choice.logprobs[own], now)

    def abort(self, group: Group, now: float) -> None:
        """End all of a request's samples; a beam search, and samples that have not parted, with one output."""
        if group.beams is not None:
            for beam in group.requests[1:]:
                self._scheduler.remove(beam)
            del group.requests[1:]
        for request in tuple(group.requests):
            self._scheduler.remove(request)
            self._finish(request, "abort", now)

    def _branch(self, request: Request, index: int) -> Request:
        twin = self._scheduler.branch(request)
        twin.index, twin.seed = index, (request.seed + index) & MAX_SEED
        twin.text = None if self.new_text is None else self.new_text(request.params)
        return twin

    def _append(self, request: Request, tokens: Sequence[int], logprobs: Sequence[Logprob], now: float) -> None:
        """Give a sample its tokens up to its end."""
        reason: FinishReason | None = None
        taken = 0
        while reason is None and taken < len(tokens):
            reason = request.append(tokens[taken], now)
            taken += 1
        self._stats.new_tokens += taken
        if reason is None:
            text = "" if request.text is None else request.text.take()
            self._put(request, tokens[:taken], logprobs[:taken], text=text)
        else:
            self._scheduler.remove(request)
            self._finish(request, reason, now, tokens[:taken], logprobs[:taken])

    def _advance(self, group: Group, search: BeamSearch, now: float) -> None:
        """Let a search's beams become the next ones: some part, some end."""
        children = search.advance()
        if search.done:
            self._finish_beams(group, search, now)
            return
        parents = {child.parent for child in children}
        for beam in tuple(group.requests):
            if beam not in parents:
                self._scheduler.remove(beam)
                group.requests.remove(beam)
        beams = self._descendants(children)
        for beam, child in zip(beams, children, strict=True):
            beam.tokens.append(child.token)
            beam.token_times.append(now)
        self._stats.new_tokens += len(beams)
        search.follow([(beam, child.logprob) for beam, child in zip(beams, children, strict=True)])

    def _descendants(self, children: Sequence[Child]) -> list[Request]:
        """Return a request for each child: its parent's own for the first one, and a branch of it for every other."""
        taken: set[Request] = set()
        beams = []
        for child in children:
            beams.append(self._scheduler.branch(child.parent) if child.parent in taken else child.parent)
            taken.add(child.parent)
        return beams

    def _finish_beams(self, group: Group, search: BeamSearch, now: float) -> None:
        first = group.requests[0]
        for beam in group.requests:
            self._scheduler.remove(beam)
        group.requests = [first, *(first.branch() for _ in range(1, group.params.n))][: group.params.n]
        for index, (request, found) in enumerate(zip(tuple(group.requests), search.finished, strict=False)):
            request.index = index
            request.tokens[request.prompt_tokens :] = found.tokens
            del request.token_times[len(found.tokens) - 1 :]
            request.token_times.append(now)
            request.text = None if self.new_text is None else self.new_text(request.params)
            shown = found.tokens[:-1] if found.stopped else found.tokens
            if request.text is not None:
                for token in shown:
                    request.text.push(token)
            self._finish(request, "stop" if found.stopped else "length", now, found.tokens, score=found.score)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        tokens: Sequence[int] = (),
        logprobs: Sequence[Logprob] = (),
        *,
        score: float | None = None,
    ) -> None:
        group = request.group
        group.requests.remove(request)
        if not group.requests:
            self._forget(group)
        self._stats.cached_tokens += request.cached_tokens or 0
        self._stats.refound_tokens += request.refound_tokens
        self._stats.finished[reason] += 1
        text = "" if request.text is None else request.text.finish()
        self._put(request, tokens, logprobs, text=text, reason=reason, now=now, score=score)

    def _put(
        self,
        request: Request,
        tokens: Sequence[int],
        logprobs: Sequence[Logprob],
        *,
        text: str,
        reason: FinishReason | None = None,
        now: float = 0.0,
        score: float | None = None,
    ) -> None:
        group = request.group
        prompt_logprobs = None
        if tokens and group.prompt_logprobs is not None and not group.told:
            group.told = True
            prompt_logprobs = tuple(group.prompt_logprobs)
        self.outputs.append(
            StepOutput(
                request.request_id,
                tuple(tokens),
                text,
                finish_reason=reason,
                metrics=None if reason is None else request.metrics(now),
                index=request.index,
                others=0 if reason is None else len(group.requests),
                logprobs=tuple(logprobs),
                prompt_logprobs=prompt_logprobs,
                score=score,
            )
        )

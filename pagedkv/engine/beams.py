"""Beam search over requests: which texts go on, which are finished, when to stop.

Takes each running beam's log-probabilities, gives the next beams as (parent, token); refuses to touch sequences: the
step loop forks, feeds and closes them. Beams may be heard in any order and steps; the search goes on when it has heard
all.

The rules are transformers' ``generate(num_beams=…)``: candidates are the best ``(stop ids + 1) × num_beams``
continuations, a finished text counts only among the best ``num_beams`` of them, and scores are summed float32
log-probabilities / length ** length_penalty, over generated tokens with the stop token. Ties go to the earlier beam,
then to the lower id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pagedkv.engine.ranks import largest_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pagedkv.engine.params import SamplingParams
    from pagedkv.engine.request import Request


class Child(NamedTuple):
    """A continuation: one more token after a beam's text, with the summed log-probability."""

    parent: Request
    token: int
    logprob: float


class Finished(NamedTuple):
    """A finished beam: its generated tokens, its score, and whether a stop token ended it."""

    score: float
    tokens: tuple[int, ...]
    stopped: bool


class BeamSearch:
    """One prompt's search.

    Attributes:
        finished: the best finished beams so far, best first, at most ``num_beams``.
        done: whether no running beam can change them any more.
    """

    def __init__(self, params: SamplingParams, stop_ids: Collection[int]) -> None:
        """Begin with the prompt as the only beam: whichever is heard first."""
        self._params = params
        self._stop_ids = stop_ids
        self._running: list[tuple[Request, float]] = []
        self._heard: dict[Request, torch.Tensor] = {}
        self.finished: list[Finished] = []
        self.done = False

    @staticmethod
    def num_candidates(num_beams: int, num_stop_ids: int) -> int:
        """Return how many continuations are looked at: enough that ``num_beams`` of them are unfinished."""
        return max(2, 1 + num_stop_ids) * num_beams

    def hear(self, request: Request, log_probs: torch.Tensor) -> bool:
        """Take a beam's float32 log-probabilities ``[vocab]``; say whether all beams have been heard."""
        self._heard[request] = log_probs
        if not self._running:
            self._running = [(request, 0.0)]
        return len(self._heard) == len(self._running)

    def advance(self) -> list[Child]:
        """Return the next beams, best first, after all have been heard; none when the search is `done`."""
        candidates = self._candidates()
        length = candidates[0].parent.new_tokens + 1
        last = length == self._params.max_new_tokens
        ends = [last or child.token in self._stop_ids for child in candidates]
        for child, end in zip(candidates[: self._params.num_beams], ends, strict=False):
            if end:
                self._finish(child, length)
        children = [child for child, end in zip(candidates, ends, strict=True) if not end][: self._params.num_beams]
        self._heard.clear()
        self.done = not children or self._settled(children[0].logprob, length)
        return [] if self.done else children

    def follow(self, children: Sequence[tuple[Request, float]]) -> None:
        """Say which requests the next beams have become, with their summed log-probabilities."""
        self._running = list(children)

    def _candidates(self) -> list[Child]:
        scores = torch.stack([self._heard[request] for request, _ in self._running])
        sums = scores + torch.tensor([total for _, total in self._running], device=scores.device)[:, None]
        vocab = sums.shape[-1]
        count = min(self.num_candidates(self._params.num_beams, len(self._stop_ids)), sums.numel())
        places = largest_ids(sums.view(1, -1), count)[0]
        values = sums.view(-1)[places].tolist()
        return [
            Child(self._running[place // vocab][0], place % vocab, value)
            for place, value in zip(places.tolist(), values, strict=True)
        ]

    def _finish(self, child: Child, length: int) -> None:
        tokens = (*child.parent.tokens[child.parent.prompt_tokens :], child.token)
        score = child.logprob / length**self._params.length_penalty
        self.finished.append(Finished(score, tokens, child.token in self._stop_ids))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self._params.num_beams :]

    def _settled(self, best: float, length: int) -> bool:
        """Whether the finished beams stand, with ``best`` the best running sum, at ``length`` generated tokens."""
        params = self._params
        if len(self.finished) < params.num_beams:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_new_tokens
        return bool(best / length**params.length_penalty <= self.finished[-1].score)

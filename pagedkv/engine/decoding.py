"""From a step's logits to what each request gets: which rows are wanted, what is drawn, which drafts hold.

Takes a step's work and its logits, gives a `Choice` for each request, and changes nothing, so that a failing step can
be taken back. A draft token holds if it is the token that the request draws at that place, by the same
(seed, position) rule: so speculation cannot change a text, only its speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pagedkv.engine.logprobs import Logprob, logprobs_of
from pagedkv.engine.sampler import SampleRow, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine.request import Request


@dataclass(frozen=True, slots=True)
class Work:
    """A request's part of a step: the tokens that are fed, of which the last ones are its draft."""

    request: Request
    fed: list[int]
    draft: list[int]

    @property
    def complete(self) -> bool:
        """Whether its text is stored after this step, so that a next token can be chosen."""
        return len(self.fed) - len(self.draft) == self.request.pending

    @property
    def num_rows(self) -> int:
        """How many of its last rows' logits are wanted."""
        return len(self.fed) if self.request.wants_prompt_logprobs else 1 + len(self.draft)

    def sample_rows(self) -> list[SampleRow]:
        """Return what its next tokens depend on: one for each seed, or for each place of the draft."""
        request = self.request
        params, here, prompt = request.params, len(request.tokens), request.prompt_tokens
        if not self.draft:
            banned = request.banned()
            return [SampleRow(params, seed, here, request.tokens, prompt, banned) for seed in request.seeds]
        text = request.tokens + self.draft
        return [
            SampleRow(params, request.seed, here + ahead, text, prompt, request.banned(ahead))
            for ahead in range(len(self.draft) + 1)
        ]


@dataclass(slots=True)
class Choice:
    """What a step brought one request.

    Attributes:
        tokens: its next tokens, the last one beyond what held of the draft; a first one for each sample where
            samples part; none before the prompt is stored, or for a beam.
        logprobs: theirs, where asked for.
        prompt_logprobs: of the prompt tokens that this step's rows predict.
        log_probs: a beam's float32 log-softmax ``[vocab]``.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    log_probs: torch.Tensor | None = None


def wanted_rows(works: Sequence[Work]) -> list[int] | None:
    """Return the rows of the step's tokens whose logits are wanted; None: just each request's last."""
    if all(work.num_rows == 1 for work in works):
        return None
    rows: list[int] = []
    end = 0
    for work in works:
        end += len(work.fed)
        rows += range(end - work.num_rows, end)
    return rows


def choose(logits: torch.Tensor, works: Sequence[Work]) -> list[Choice]:
    """Return what each of ``works`` gets from its rows of ``logits`` ``[sum of num_rows, vocab]``."""
    choices = [Choice() for _ in works]
    places: list[int] = []
    rows: list[SampleRow] = []
    owners: list[int] = []
    end = 0
    for index, work in enumerate(works):
        end += work.num_rows
        if work.request.wants_prompt_logprobs:
            choices[index].prompt_logprobs = _prompt_logprobs(logits[end - work.num_rows : end], work)
        if not work.complete:
            continue
        if work.request.group.beams is not None:
            choices[index].log_probs = logits[end - 1].log_softmax(dim=-1)
            continue
        own = work.sample_rows()
        first = end - 1 - len(work.draft)
        places += range(first, end) if work.draft else [first] * len(own)
        rows += own
        owners += [index] * len(own)
    if not rows:
        return choices
    picked = logits if places == list(range(len(logits))) else logits[torch.tensor(places, device=logits.device)]
    drawn = sample(picked, rows)
    for owner, token in zip(owners, drawn, strict=True):
        choices[owner].tokens.append(token)
    _add_logprobs(choices, owners, picked, rows, drawn)
    for work, choice in zip(works, choices, strict=True):
        _cut_at_first_miss(work.draft, choice)
    return choices


def _cut_at_first_miss(draft: list[int], choice: Choice) -> None:
    """Drop what follows the first draft token that was not drawn: it was computed after another text."""
    for index, token in enumerate(draft):
        if choice.tokens[index] != token:
            del choice.tokens[index + 1 :]
            del choice.logprobs[index + 1 :]
            return


def _add_logprobs(
    choices: list[Choice], owners: list[int], logits: torch.Tensor, rows: list[SampleRow], drawn: list[int]
) -> None:
    asked = [place for place, row in enumerate(rows) if row.params.logprobs is not None]
    if asked:
        own = logits[torch.tensor(asked, device=logits.device)]
        counts = [rows[place].params.logprobs or 0 for place in asked]
        for place, found in zip(asked, logprobs_of(own, [drawn[place] for place in asked], counts), strict=True):
            choices[owners[place]].logprobs.append(found)


def _prompt_logprobs(logits: torch.Tensor, work: Work) -> list[Logprob]:
    """Return those of the prompt tokens that are not known yet; row i of ``logits`` predicts token start + i + 1."""
    request = work.request
    known = request.group.prompt_logprobs or []
    start = request.num_stored
    first, end = len(known), min(start + len(work.fed) + 1, request.prompt_tokens)
    tokens = request.tokens[first:end]
    if not tokens:
        return []
    count = request.params.prompt_logprobs or 0
    return logprobs_of(logits[first - 1 - start : end - 1 - start], tokens, [count] * len(tokens))

"""A request: what its caller asked for, and how far the engine has come with it.

Takes a prompt as token ids and `SamplingParams`; holds state for the scheduler and the step loop; refuses to decide
anything. A caller's request is a `Group` of one `Request` per sample or beam, each with a sequence of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from pagedkv.engine.beams import BeamSearch
from pagedkv.engine.drafts import PromptLookup
from pagedkv.engine.outputs import FinishReason, RequestMetrics
from pagedkv.engine.params import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pagedkv.backend import CacheSequence
    from pagedkv.engine.logprobs import Logprob
    from pagedkv.engine.stops import OutputText


@dataclass(eq=False, slots=True)
class Group:
    """What its caller knows as one request.

    Attributes:
        requests: its unfinished samples or beams; one until the prompt is computed.
        beams: the beam search that they belong to.
        prompt_logprobs: of the prompt's first tokens so far, None for the very first, which nothing predicts; None
            where nobody asked.
        branched: whether the samples have parted.
        told: whether the prompt's log-probabilities have been given out.
        priority: smaller goes first, where the engine schedules by it.
    """

    request_id: Hashable
    params: SamplingParams
    requests: list[Request] = field(default_factory=list)
    beams: BeamSearch | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    branched: bool = False
    told: bool = False
    priority: int = 0

    @classmethod
    def of(cls, request_id: Hashable, params: SamplingParams, stop_ids: frozenset[int], *, priority: int = 0) -> Self:
        """Return the group of a new request, which is still to get its first member."""
        return cls(
            request_id,
            params,
            beams=BeamSearch(params, stop_ids) if params.num_beams > 1 else None,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            branched=params.n == 1 or params.num_beams > 1,
            priority=priority,
        )


@dataclass(eq=False, slots=True)
class Request:
    """One sample's or beam's state. Two requests are equal only if they are the same object.

    Attributes:
        tokens: prompt and generated tokens so far.
        stop_ids: the tokens that end it.
        seed: the one it draws with, its own or the engine's choice.
        arrival: its place in the order of arrival.
        index: its number among the samples.
        sequence: its KV while it runs; None while it waits.
        swapped: instead, its KV in host memory while it waits.
        deadline: what it is ranked by before its arrival (`Scheduler`); None before it was queued.
        swaps: how often it came back from host memory.
        num_stored: the sequence's ``num_tokens`` between steps, kept here because it is asked ten times a step.
        prefill_end: where its current prefill ends: the length of ``tokens`` when it was admitted.
        passed: how many younger requests were admitted while this one waited for pages.
        token_times: the engine's clock at each generated token.
    """

    group: Group
    tokens: list[int]
    stop_ids: frozenset[int]
    seed: int
    arrival: int
    arrived_at: float
    text: OutputText | None = None
    index: int = 0
    prompt_tokens: int = field(init=False)
    sequence: CacheSequence | None = None
    swapped: CacheSequence | None = None
    deadline: int | None = None
    num_stored: int = 0
    prefill_end: int = 0
    passed: int = 0
    preemptions: int = 0
    swaps: int = 0
    cached_tokens: int | None = None
    refound_tokens: int = 0
    prefill_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    admitted_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    _lookup: PromptLookup | None = None

    def __post_init__(self) -> None:
        """Remember where the prompt ends."""
        self.prompt_tokens = len(self.tokens)

    @property
    def request_id(self) -> Hashable:
        """The caller's."""
        return self.group.request_id

    @property
    def params(self) -> SamplingParams:
        """What the caller asked for."""
        return self.group.params

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first, the smaller one: by deadline, then by arrival."""
        return self.deadline or 0, self.arrival

    @property
    def unparted(self) -> int:
        """Samples or beams that will yet part from it and share what is stored by then."""
        if self.group.beams is not None:
            return self.params.num_beams - 1 if len(self.group.requests) == 1 else 0
        return 0 if self.group.branched else self.params.n - 1

    @property
    def pending(self) -> int:
        """Tokens known but not stored: the input still to be fed. 1 for a request that decodes.

        0 for a beam that waits for the others of its search.
        """
        return len(self.tokens) - self.num_stored

    @property
    def remaining(self) -> int:
        """Tokens still to be stored by the very end; the last token generated never is."""
        return self.prompt_tokens + self.params.max_new_tokens - 1 - self.num_stored

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing."""
        known = self.group.prompt_logprobs
        return known is not None and len(known) < self.prompt_tokens

    @property
    def most_cached(self) -> int | None:
        """The most tokens that may be taken from the prefix cache; None: any number."""
        known = self.group.prompt_logprobs
        return len(known) - 1 if known is not None and len(known) < self.prompt_tokens else None

    @property
    def seeds(self) -> list[int]:
        """What its next token is drawn with; a seed for each sample where all of them still stand in it."""
        if self.group.branched:
            return [self.seed]
        return [(self.seed + index) & MAX_SEED for index in range(self.params.n)]

    def banned(self, drafted: int = 0) -> Sequence[int] | frozenset[int]:
        """Return the tokens that may not come after ``drafted`` more ones: what would end it too early."""
        return self.stop_ids if self.new_tokens + drafted < self.params.min_new_tokens else ()

    def draft(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that may come next, guessed from its own text."""
        most = min(most, self.params.draft_tokens, self.params.max_new_tokens - self.new_tokens - 1)
        if most < 1 or not self.new_tokens:
            return []
        if self._lookup is None:
            self._lookup = PromptLookup()
        return self._lookup.draft(self.tokens, most)

    def branch(self) -> Request:
        """Return a second request with the same text so far and no sequence; it joins the group."""
        twin = copy.copy(self)
        twin.tokens, twin.token_times = list(self.tokens), list(self.token_times)
        twin.sequence = twin.swapped = twin.text = twin._lookup = None
        twin.num_stored = twin.passed = twin.preemptions = twin.swaps = 0
        twin.cached_tokens = twin.refound_tokens = twin.prefill_tokens = 0
        twin.drafted_tokens = twin.accepted_tokens = 0
        self.group.requests.append(twin)
        return twin

    def note_stored(self) -> None:
        """Ask the sequence how far it has come."""
        self.num_stored = 0 if self.sequence is None else self.sequence.num_tokens

    def append(self, token: int, now: float) -> FinishReason | None:
        """Take a token generated at ``now``; say whether it is the last and why."""
        self.tokens.append(token)
        self.token_times.append(now)
        if token in self.stop_ids:
            return "stop"  # a stop token is no part of the text
        armed = self.new_tokens >= self.params.min_new_tokens
        if self.text is not None and self.text.push(token, armed=armed):
            return "stop"
        return "length" if self.new_tokens == self.params.max_new_tokens else None

    def metrics(self, now: float) -> RequestMetrics:
        """Return what it cost, finished at ``now``."""
        return RequestMetrics(
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            cached_tokens=self.cached_tokens or 0,
            refound_tokens=self.refound_tokens,
            prefill_tokens=self.prefill_tokens,
            preemptions=self.preemptions,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            arrived_at=self.arrived_at,
            admitted_at=self.admitted_at,
            token_times=tuple(self.token_times),
            finished_at=now,
            swaps=self.swaps,
        )

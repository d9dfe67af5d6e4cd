"""What an engine gives: one output per sample and step, a completion per finished request, counters.

Plain frozen records; they refuse to know how they came about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Hashable

    from pagedkv.engine.logprobs import Logprob

FinishReason = Literal["stop", "length", "abort"]
"""Why a sample ended: EOS, a stop token or a stop string; ``max_new_tokens``; or `Engine.abort`.

A stop token that is also the last one allowed counts as ``"stop"``.
"""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What a finished sample cost. Times are the engine's clock, in seconds; None for what never came.

    Attributes:
        prompt_tokens: length of the prompt.
        new_tokens: tokens generated, the stop token included.
        cached_tokens: prompt tokens found stored when the request was first admitted: the prefix cache's gift.
        refound_tokens: tokens found stored when it came back after a preemption; they are its own work, not a gift.
        prefill_tokens: tokens computed to bring the text up to date, once at admission and again after a preemption;
            at most twice the request's length. A second sample has none: it shares the first one's.
        preemptions: 0 or 1; a beam may be called back once more.
        swaps: how many of them it came back from out of host memory, with nothing computed again.
        drafted_tokens: tokens that prompt lookup drafted.
        accepted_tokens: those of them that held.
        arrived_at, admitted_at, finished_at: when it was added, first ran, and ended.
        token_times: when each new token came; those of one step came together.
    """

    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    refound_tokens: int
    prefill_tokens: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    arrived_at: float
    admitted_at: float | None
    token_times: tuple[float, ...]
    finished_at: float
    swaps: int = 0

    @property
    def first_token_at(self) -> float | None:
        """When the first token came."""
        return self.token_times[0] if self.token_times else None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that ran it."""
        return None if self.admitted_at is None else self.admitted_at - self.arrived_at

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrived_at if self.token_times else None

    @property
    def between_tokens(self) -> tuple[float, ...]:
        """Seconds from each new token to the next."""
        return tuple(later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False))

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that held."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step brought one sample of a request.

    Attributes:
        request_id: the caller's.
        token_ids: the step's new tokens, a stop token included; empty for an abort. Of a beam all, at its end.
        text: the text that became certain by them, "" without a tokenizer; never a stop token's or stop string's.
        finish_reason: None while the sample goes on.
        metrics: of a finished sample.
        index: the sample's number, 0 to n - 1; of beams the best is 0.
        others: of a finished sample: how many others of its request go on.
        logprobs: one for each of ``token_ids``, where asked for.
        prompt_logprobs: with the request's first tokens, where asked for: one for each prompt token, the first None.
        score: of a finished beam.
    """

    request_id: Hashable
    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    index: int = 0
    others: int = 0
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    score: float | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the sample's last output."""
        return self.finish_reason is not None

    @property
    def ends_request(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None and not self.others


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished answer: its step outputs, joined."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    metrics: RequestMetrics
    logprobs: tuple[Logprob, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request, whole. Its own figures are those of its first sample, the only one unless ``n`` says more."""

    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[Logprob | None, ...] | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sample's tokens."""
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sample ended."""
        return self.samples[0].finish_reason

    @property
    def metrics(self) -> RequestMetrics:
        """What the first sample cost, the prompt included."""
        return self.samples[0].metrics

    @property
    def logprobs(self) -> tuple[Logprob, ...]:
        """The first sample's log-probabilities, where asked for."""
        return self.samples[0].logprobs


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made, over all samples; meanings as in `RequestMetrics`.

    ``decode_tokens`` counts input tokens of decode rows, drafts included, so ``prefill_tokens + decode_tokens`` is all
    that went through the model. ``cached_tokens`` and ``refound_tokens`` count at a sample's end; ``finished`` counts
    samples by finish reason. Of the ``preemptions`` ``swapped_out`` went to host memory, ``swapped_in`` came back from
    there, and ``damaged_swaps`` did not, since a checksum was wrong: they were computed again.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    refound_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    damaged_swaps: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})

"""What an engine gives: one output per request and step, a completion per finished request, counters.

Plain frozen records; they refuse to know how they came about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Hashable

FinishReason = Literal["stop", "length", "abort"]
"""Why a request ended: its own EOS or a stop token, ``max_new_tokens``, or `Engine.abort`.

A stop token that is also the last one allowed counts as ``"stop"``.
"""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What a finished request cost.

    Attributes:
        prompt_tokens: length of the prompt.
        new_tokens: tokens generated, the stop token included.
        cached_tokens: prompt tokens found stored when the request was first admitted: the prefix cache's gift.
        refound_tokens: tokens found stored when it came back after a preemption; they are its own work, not a gift.
        prefill_tokens: tokens computed to bring the text up to date, once at admission and again after a preemption;
            at most twice the request's length.
        preemptions: 0 or 1.
        arrived_at, first_token_at, finished_at: the engine's clock, in seconds; None for what never came.
    """

    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    refound_tokens: int
    prefill_tokens: int
    preemptions: int
    arrived_at: float
    first_token_at: float | None
    finished_at: float


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step brought one request.

    Attributes:
        request_id: the caller's.
        token_ids: the step's new tokens, a stop token included; empty for an abort.
        text: the text that became certain by them, "" without a tokenizer; never a stop token's text.
        finish_reason: None while the request goes on.
        metrics: of a finished request.
    """

    request_id: Hashable
    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request, whole: ``token_ids`` and ``text`` are those of its step outputs, joined."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    metrics: RequestMetrics


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made, over all requests; meanings as in `RequestMetrics`.

    ``decode_tokens`` counts input tokens of decode rows, so ``prefill_tokens + decode_tokens`` is all that went
    through the model. ``cached_tokens`` and ``refound_tokens`` count at a request's end; ``finished`` counts requests
    by finish reason.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    refound_tokens: int = 0
    preemptions: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})

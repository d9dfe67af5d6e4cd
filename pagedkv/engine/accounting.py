"""What a committed step has stored and computed, noted in each request's and in the engine's counters.

Takes a step's works and choices, gives what it did as `StepCost`, and refuses to decide anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine.decoding import Choice, Work
    from pagedkv.engine.outputs import EngineStats


class StepCost(NamedTuple):
    """A step's input tokens, how many of them were prefill, and whether the cache keeps committed tokens."""

    tokens: int
    prefill: int
    kept: bool


def count_step(stats: EngineStats, works: Sequence[Work], choices: Sequence[Choice], started: float) -> StepCost:
    """Note a step that began at ``started`` and has been committed."""
    stats.steps += 1
    tokens = prefilled = 0
    kept = True
    for work, choice in zip(works, choices, strict=True):
        request, count = work.request, len(work.fed)
        start = request.num_stored
        prefill = max(0, min(start + count, request.prefill_end) - start)
        request.prefill_tokens += prefill
        tokens += count
        prefilled += prefill
        if request.admitted_at is None:
            request.admitted_at = started
        if work.draft:
            request.drafted_tokens += len(work.draft)
            request.accepted_tokens += len(choice.tokens) - 1
            stats.drafted_tokens += len(work.draft)
            stats.accepted_tokens += len(choice.tokens) - 1
        request.note_stored()
        kept = kept and request.num_stored > start
    stats.prefill_tokens += prefilled
    stats.decode_tokens += tokens - prefilled
    return StepCost(tokens, prefilled, kept)

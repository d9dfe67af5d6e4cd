"""A request: what its caller asked for, and how far the engine has come with it.

Takes a prompt as token ids and `SamplingParams`; holds state for the scheduler and the step loop; refuses to decide
anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedkv.engine.checks import require_int, require_number, require_token_ids
from pagedkv.engine.outputs import FinishReason, RequestMetrics

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pagedkv.backend import CacheSequence

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Checked at construction.

    Attributes:
        temperature: logits are divided by it; 0 is greedy: the lowest id among the largest logits. Finite, at least 0.
        top_p: keep the smallest set of most likely tokens whose probability reaches it (after temperature), at least
            the top one; 1 turns the filter off. 0 to 1.
        max_new_tokens: the most tokens to generate, at least 1.
        seed: 0 to 2**64 - 1; the same seed, prompt and model give the same tokens, whatever else runs. None: the
            engine draws one.
        stop_token_ids: tokens that end the request, besides the engine's EOS ids.
        ignore_eos: go on past EOS; ``stop_token_ids`` still end the request.

    Raises:
        ValueError, TypeError: for values outside these ranges and types.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every field and keep it in its plain type."""
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, was {self.ignore_eos!r}")
        checked = {
            "temperature": require_number("temperature", self.temperature, 0),
            "top_p": require_number("top_p", self.top_p, 0, 1),
            "max_new_tokens": require_int("max_new_tokens", self.max_new_tokens, 1),
            "seed": None if self.seed is None else require_int("seed", self.seed, 0, MAX_SEED),
            "stop_token_ids": tuple(require_token_ids("stop_token_ids", self.stop_token_ids, None)),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


@dataclass(eq=False, slots=True)
class Request:
    """One request's state. Two requests are equal only if they are the same object.

    Attributes:
        tokens: prompt and generated tokens so far.
        stop_ids: the tokens that end it.
        seed: the one it draws with, its own or the engine's choice.
        arrival: its place in the order of arrival.
        sequence: its KV while it runs; None while it waits.
        num_stored: the sequence's ``num_tokens`` between steps, kept here because it is asked ten times a step.
        prefill_end: where its current prefill ends: the length of ``tokens`` when it was admitted.
        passed: how many younger requests were admitted while this one waited for pages.
    """

    request_id: Hashable
    tokens: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    arrival: int
    arrived_at: float
    prompt_tokens: int = field(init=False)
    sequence: CacheSequence | None = None
    num_stored: int = 0
    prefill_end: int = 0
    passed: int = 0
    preemptions: int = 0
    cached_tokens: int | None = None
    refound_tokens: int = 0
    prefill_tokens: int = 0
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        """Remember where the prompt ends."""
        self.prompt_tokens = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens known but not stored: the input still to be fed. 1 for a request that decodes."""
        return len(self.tokens) - self.num_stored

    @property
    def remaining(self) -> int:
        """Tokens still to be stored by the very end; the last token generated never is."""
        return self.prompt_tokens + self.params.max_new_tokens - 1 - self.num_stored

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    def note_stored(self) -> None:
        """Ask the sequence how far it has come."""
        self.num_stored = 0 if self.sequence is None else self.sequence.num_tokens

    def append(self, token: int) -> FinishReason | None:
        """Take a generated token; say whether it is the last and why."""
        self.tokens.append(token)
        if token in self.stop_ids:
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
            arrived_at=self.arrived_at,
            first_token_at=self.first_token_at,
            finished_at=now,
        )

"""What an engine can ever serve: every request is checked here once, and refused with both numbers.

Takes a prompt and its params, gives plain token ids and the ids that end it; touches the cache only when it is built,
so that requests can be checked from any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedkv.engine.beams import BeamSearch
from pagedkv.engine.checks import require_token_ids
from pagedkv.engine.params import SamplingParams, require_bias_ids
from pagedkv.engine.scheduler import longest_fitting

if TYPE_CHECKING:
    from collections.abc import Collection

    from pagedkv.backend import CacheBackend

_NO_LIMIT = 2**31


class Door:
    """The bounds of one engine.

    Attributes:
        capacity: the pages that the cache has now, in the backend's own unit.
        max_stored: the most tokens that one sequence could store in them.
        has_text: whether answers have text, so that stop strings can end them.
    """

    def __init__(
        self,
        backend: CacheBackend,
        *,
        vocab_size: int | None,
        max_len: int | None,
        eos_token_ids: Collection[int],
        max_batch: int,
        max_step_tokens: int,
    ) -> None:
        """Measure the cache."""
        self.has_text = False
        self.capacity = backend.room([0]).available
        self.max_stored = longest_fitting(backend, self.capacity, max_len or _NO_LIMIT, max_step_tokens)
        self._vocab_size = vocab_size
        self._max_len = max_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_batch = max_batch
        # Beams wait for each other, so all must fit at once; at worst they share nothing and copy a page each.
        shares = [self.capacity // beams - 1 for beams in range(2, max_batch + 1)]
        self._longest = [
            self.max_stored,
            *(longest_fitting(backend, share, self.max_stored, max_step_tokens) for share in shares),
        ]

    def check(self, prompt: Any, params: SamplingParams) -> tuple[list[int], frozenset[int]]:
        """Return the prompt's token ids and the tokens that end the request, or raise by the argument's name."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, was {type(params).__name__}")
        tokens = require_token_ids("prompt", prompt, self._vocab_size)
        if not tokens:
            raise ValueError("prompt must hold at least one token, was empty")
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        self._require_params(params, stop_ids)
        self._require_fits(len(tokens), params)
        return tokens, stop_ids

    def _require_params(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Refuse what this engine's vocabulary, batch or lack of text rules out."""
        require_token_ids("stop_token_ids", params.stop_token_ids, self._vocab_size)
        require_bias_ids(params, self._vocab_size)
        if params.stop and not self.has_text:
            raise ValueError(f"stop must be empty for an engine without a tokenizer, was {params.stop!r:.60}")
        for name, value in (("num_beams", params.num_beams), ("n", params.n)):
            if value > self._max_batch:
                raise ValueError(f"{name} must be at most max_batch = {self._max_batch}, was {value}")
        candidates = BeamSearch.num_candidates(params.num_beams, len(stop_ids))
        if params.num_beams > 1 and self._vocab_size is not None and candidates > self._vocab_size:
            raise ValueError(
                f"num_beams must leave its {candidates} candidates within the vocabulary of {self._vocab_size}, "
                f"was {params.num_beams}"
            )

    def _require_fits(self, prompt_tokens: int, params: SamplingParams) -> None:
        beams, new = params.num_beams, params.max_new_tokens
        total = prompt_tokens + new
        # The last token generated is never fed back, so it needs no slot.
        most, why = self._longest[beams - 1] + 1, "all that the cache can ever hold"
        if beams > 1:
            why += f" of {beams} beams at once"
        if self._max_len is not None and self._max_len <= most:
            most, why = self._max_len, "the model's context"
        if total > most:
            raise ValueError(
                f"prompt and max_new_tokens must together be at most {most} tokens, {why}, "
                f"were {prompt_tokens} + {new} = {total}"
            )

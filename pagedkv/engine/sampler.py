"""From logits to tokens, one vectorised call for a whole batch of greedy and sampled rows.

Takes logits and a `SampleRow` for each of their rows, gives one token a row; refuses to know requests. A row's token
depends on that row alone.

The order, the same on every path: bias, penalties and bans (`pagedkv.engine.penalties`), temperature, top-k, top-p,
min-p (`pagedkv.engine.filters`), then the draw; temperature 0 takes the largest logit after the first three. A sampled
token is found by inverting the cumulative distribution, summed in order of token id over what the filters left, at
the row's one uniform number (`pagedkv.engine.philox`). Order of id, not of probability: a last-bit change in the
logits then moves a boundary by a last bit, where a sort would swap whole tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from pagedkv.engine.filters import filter_weights
from pagedkv.engine.penalties import adjust
from pagedkv.engine.philox import uniforms
from pagedkv.native import step_ops
from pagedkv.native.library import LibraryUnavailableError, load

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pagedkv.engine.params import SamplingParams

_COMPILED = {torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What a row's token depends on, besides its logits.

    Attributes:
        params: of the request.
        seed: 0 to 2**64 - 1.
        position: where the token will stand in its text.
        tokens: the text; its first ``position`` tokens are those before the new one. Only penalties read it.
        num_prompt: how many of them are the prompt.
        banned: tokens that may not come here.
    """

    params: SamplingParams
    seed: int
    position: int
    tokens: Sequence[int] = ()
    num_prompt: int = 0
    banned: Collection[int] = ()

    @property
    def adjusted(self) -> bool:
        """Whether its logits are changed before they are looked at."""
        return bool(self.banned) or self.params.adjusts


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Return one token per row of ``logits`` ``[n, vocab]``, of any float dtype and device; nothing is mutated.

    Temperature 0 takes the lowest id among the largest logits, whatever the dtype and the other rows. Logits of -inf
    are never drawn.

    Raises:
        ValueError: if a row has NaN, no finite logit, or +inf: there is no distribution to draw from.
    """
    tokens = [0] * len(rows)
    plain = [index for index, row in enumerate(rows) if row.params.temperature == 0 and not row.adjusted]
    adjusted = [index for index, row in enumerate(rows) if row.params.temperature == 0 and row.adjusted]
    sampled = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if plain:
        for index, token in zip(plain, _greedy(_pick(logits, plain), plain), strict=True):
            tokens[index] = token
    if adjusted:
        for index, token in zip(adjusted, _greedy(_scores(logits, rows, adjusted), adjusted), strict=True):
            tokens[index] = token
    if sampled:
        drawn = _draw(_scores(logits, rows, sampled), [rows[index] for index in sampled], sampled)
        for index, token in zip(sampled, drawn, strict=True):
            tokens[index] = token
    return tokens


def _pick(logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
    return logits if len(indices) == len(logits) else logits[torch.tensor(indices, device=logits.device)]


def _scores(logits: torch.Tensor, rows: Sequence[SampleRow], indices: list[int]) -> torch.Tensor:
    """Return a float64 copy of some rows, changed as they ask."""
    scores = _pick(logits, indices).detach().to(torch.float64, copy=True)
    changed = [place for place, index in enumerate(indices) if rows[index].adjusted]
    if changed:
        chosen = torch.tensor(changed, device=scores.device)
        own = scores[chosen]
        adjust(own, [rows[indices[place]] for place in changed])
        scores[chosen] = own
    return scores


def _greedy(logits: torch.Tensor, indices: list[int]) -> list[int]:
    best = _argmax(logits.detach())
    _require_maximum(logits.gather(-1, best[:, None]), indices)
    return [int(token) for token in best.tolist()]


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest of each row, int64 ``[n]``; the first NaN where there is one.

    On the CPU by the compiled library, else by NumPy, whose argmax is defined to give the first of a tie; torch's own
    takes milliseconds on wide rows.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    if logits.dtype in _COMPILED and logits.stride(-1) == 1 and _has_library():
        return step_ops.argmax(logits)
    array = (logits.float() if logits.dtype.itemsize < 4 else logits).numpy()  # widening half precision is exact
    return torch.from_numpy(array.argmax(axis=-1))


@cache
def _has_library() -> bool:
    try:
        load()
    except LibraryUnavailableError:
        return False
    return True


def _draw(scores: torch.Tensor, rows: Sequence[SampleRow], indices: list[int]) -> list[int]:
    """Draw from each row of ``scores``, which is changed: float64 rows are wide, and every copy is felt."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    maximum = scores.amax(dim=-1, keepdim=True)
    _require_maximum(maximum, indices)
    uniform: list[float] = uniforms([row.seed for row in rows], [row.position for row in rows]).tolist()
    # The largest score becomes 0 before the division, so that no temperature can overflow it.
    weights = scores.sub_(maximum).div_(column([row.params.temperature for row in rows])).exp_()
    weights = filter_weights(weights, [row.params for row in rows])
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, column(uniform) * total, right=True)
    # The product may round up to the total itself: the last token with any weight is meant.
    token = torch.minimum(token, torch.searchsorted(cumulative, total))
    return [int(value) for value in token[:, 0].tolist()]


def _require_maximum(maximum: torch.Tensor, indices: list[int]) -> None:
    """Refuse rows without a finite maximum; NaN anywhere in a row is its maximum."""
    finite = maximum[:, 0].isfinite().tolist()
    if not all(finite):
        row = finite.index(False)
        value = float(maximum[row, 0])
        raise ValueError(f"logits of row {indices[row]} must have a finite maximum and no NaN, the maximum was {value}")

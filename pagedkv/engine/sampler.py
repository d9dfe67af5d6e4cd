"""From logits to tokens, one vectorised call for a whole batch of greedy and sampled rows.

Takes logits, each row's `SamplingParams`, seed and position; gives one token a row; refuses to know requests. A row's
token depends on that row alone.

The order, the same on every path (it is transformers' and vLLM's): temperature, then top-p, then the draw. A sampled
token is found by inverting the cumulative distribution, summed in order of token id over what the filters left, at
the row's one uniform number (`pagedkv.engine.philox`). Order of id, not of probability: a last-bit change in the
logits then moves a boundary by a last bit, where a sort would swap whole tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.engine.philox import uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine.request import SamplingParams


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """Return one token per row of ``logits`` ``[n, vocab]``, of any float dtype and device; nothing is mutated.

    ``positions[i]`` is where row i's token will stand in its text. Temperature 0 takes the lowest id among the
    largest logits, whatever the dtype and the other rows. Logits of -inf are never drawn.

    Raises:
        ValueError: if a row has NaN, no finite logit, or +inf: there is no distribution to draw from.
    """
    tokens = [0] * len(params)
    greedy = [row for row, p in enumerate(params) if p.temperature == 0]
    sampled = [row for row, p in enumerate(params) if p.temperature > 0]
    if greedy:
        for row, token in zip(greedy, _greedy(_rows(logits, greedy), greedy), strict=True):
            tokens[row] = token
    if sampled:
        drawn = _draw(
            _rows(logits, sampled),
            sampled,
            temperature=[params[row].temperature for row in sampled],
            top_p=[params[row].top_p for row in sampled],
            uniform=uniforms([seeds[row] for row in sampled], [positions[row] for row in sampled]).tolist(),
        )
        for row, token in zip(sampled, drawn, strict=True):
            tokens[row] = token
    return tokens


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]


def _greedy(logits: torch.Tensor, rows: list[int]) -> list[int]:
    if logits.device.type == "cpu":
        # NumPy's argmax is defined to give the first of a tie, and takes a third of torch's time on wide rows; widening
        # half precision is exact.
        array = (logits.float() if logits.dtype.itemsize < 4 else logits).detach().numpy()
        best = torch.from_numpy(array.argmax(axis=-1))
    else:
        best = logits.argmax(dim=-1)
    _require_maximum(logits.gather(-1, best[:, None]), rows)
    return [int(token) for token in best.tolist()]


def _draw(
    logits: torch.Tensor, rows: list[int], temperature: list[float], top_p: list[float], uniform: list[float]
) -> list[int]:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scores = logits.double()
    maximum = scores.amax(dim=-1, keepdim=True)
    _require_maximum(maximum, rows)
    # The largest score becomes 0 before the division, so that no temperature can overflow it.
    weights = ((scores - maximum) / column(temperature)).exp()
    filtered = [row for row, p in enumerate(top_p) if p < 1]
    if filtered:
        chosen = torch.tensor(filtered, device=logits.device)
        weights[chosen] = _keep_top_p(weights[chosen], column([top_p[row] for row in filtered]))
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, column(uniform) * total, right=True)
    # The product may round up to the total itself: the last token with any weight is meant.
    token = torch.minimum(token, torch.searchsorted(cumulative, total))
    return [int(value) for value in token[:, 0].tolist()]


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to 0 what stands behind the smallest set of largest weights that reaches ``top_p`` of the whole.

    A token stays if what is before it, by falling weight and then by id, is less than ``top_p``; the first always.
    """
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(dim=-1)
    before = cumulative.roll(1, dims=-1)
    before[:, 0] = -1
    kept = before < top_p * cumulative[:, -1:]
    return torch.zeros_like(weights).scatter_(-1, ids, ordered * kept)


def _require_maximum(maximum: torch.Tensor, rows: list[int]) -> None:
    """Refuse rows without a finite maximum; NaN anywhere in a row is its maximum."""
    finite = maximum[:, 0].isfinite().tolist()
    if not all(finite):
        row = finite.index(False)
        value = float(maximum[row, 0])
        raise ValueError(f"logits of row {rows[row]} must have a finite maximum and no NaN, the maximum was {value}")

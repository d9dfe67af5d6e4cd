"""Log-probabilities: of the tokens that came, and of the likeliest that could have.

Takes the model's own logits, before any bias, penalty, temperature or filter, and gives their log-softmax in float64;
refuses to know how the token was chosen. So a token's figure is the model's belief, whatever a request's params.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pagedkv.engine.ranks import largest_ids

if TYPE_CHECKING:
    from collections.abc import Sequence


class Logprob(NamedTuple):
    """One token's log-probability, and the likeliest tokens at its place by falling probability and rising id."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprob]:
    """Return the `Logprob` of ``tokens[i]`` by row i of ``logits`` ``[n, vocab]``, with its ``counts[i]`` likeliest."""
    scores = logits.detach().double()
    normaliser = scores.logsumexp(dim=-1)
    chosen = torch.tensor(tokens, device=scores.device)[:, None]
    own = (scores.gather(-1, chosen)[:, 0] - normaliser).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    most = min(max(counts, default=0), scores.shape[-1])
    if most:
        ids = largest_ids(scores, most)
        values = (scores.gather(-1, ids) - normaliser[:, None]).tolist()
        for row, (row_ids, row_values) in enumerate(zip(ids.tolist(), values, strict=True)):
            tops[row] = tuple(zip(row_ids, row_values, strict=True))[: counts[row]]
    return [Logprob(token, value, top) for token, value, top in zip(tokens, own, tops, strict=True)]

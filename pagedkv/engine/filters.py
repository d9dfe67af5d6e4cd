"""Which tokens a row may draw from: top-k, top-p, min-p, in this order.

Takes weights (probabilities up to a factor), gives them back with 0 for what is filtered out, and refuses to draw. The
top token always stays. Of equally likely tokens those with lower ids come first.

Sources: top-k: Fan et al., "Hierarchical neural story generation", ACL 2018; top-p: Holtzman et al., "The curious case
of neural text degeneration", ICLR 2020; min-p: Nguyen et al., "Turning up the heat", ICLR 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.engine.ranks import falling, largest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine.params import SamplingParams


def filter_weights(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return ``weights``, float64 ``[n, vocab]``, filtered as each row's params ask; the tensor may be changed.

    Each row's largest weight is 1. Rows without a filter cost nothing.
    """
    vocab = weights.shape[-1]
    ranked = [row for row, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < vocab]
    if ranked:
        top_k = [min(params[row].top_k or vocab, vocab) for row in ranked]
        top_p = [params[row].top_p for row in ranked]
        if len(ranked) == len(params):
            weights = _keep_top(weights, top_k, top_p)
        else:
            chosen = torch.tensor(ranked, device=weights.device)
            weights[chosen] = _keep_top(weights[chosen], top_k, top_p)
    if any(p.min_p > 0 for p in params):
        least = torch.tensor([p.min_p for p in params], dtype=weights.dtype, device=weights.device)[:, None]
        weights = weights.where(weights >= least, 0.0)
    return weights


def _keep_top(weights: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Keep the first ``top_k`` tokens by falling weight, and of those the fewest whose sum reaches ``top_p`` of it.

    A token stays if what is before it is less than ``top_p`` of the k tokens' sum; the first always.
    """
    k = torch.tensor(top_k, device=weights.device)[:, None]
    p = torch.tensor(top_p, dtype=weights.dtype, device=weights.device)[:, None]
    ordered = falling(weights)
    cumulative = ordered.cumsum(dim=-1)
    total = cumulative.gather(-1, k - 1)
    before = cumulative.roll(1, dims=-1)
    before[:, 0] = -1
    # With top_p at 1 rounding must not drop the last tokens, whose weight may vanish beside the sum.
    kept = torch.minimum((before < p * total).sum(dim=-1, keepdim=True), k).where(p < 1, k)
    return weights.where(largest(weights, kept, ordered.gather(-1, kept - 1)), 0.0)

"""The largest numbers of each row, of equal ones those with the lowest ids: the one rule for ties.

Takes numbers, gives masks and ids; refuses to know what they mean. `torch.topk` leaves open which of equal numbers it
gives, and on some devices the answer changes with the batch.
"""

from __future__ import annotations

import numpy as np
import torch


def falling(values: torch.Tensor) -> torch.Tensor:
    """Return each row of ``values`` ``[n, width]`` sorted, largest first."""
    if values.device.type == "cpu":
        # NumPy's vectorised sort takes an eighth of torch's time on a vocabulary of 49,152 float64.
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values


def largest(values: torch.Tensor, counts: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Return where a row's ``counts`` largest values are, bool ``[n, width]``; of equal ones the lowest ids.

    Args:
        values: ``[n, width]`` without NaN.
        counts: int64 ``[n, 1]``, 1 to width.
        threshold: ``[n, 1]``: the smallest of them, ``falling(values)[counts - 1]``.
    """
    chosen = values >= threshold
    excess = chosen.sum(dim=-1, keepdim=True) - counts
    tied = excess[:, 0].nonzero()[:, 0]
    if len(tied):
        equal = values[tied] == threshold[tied]
        spare = equal.sum(dim=-1, keepdim=True) - excess[tied]
        chosen[tied] &= ~equal | (equal.cumsum(dim=-1) <= spare)
    return chosen


def largest_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of each row's ``count`` largest values, int64 ``[n, count]``, by falling value and rising id."""
    rows = len(values)
    threshold = values.topk(count, dim=-1).values[:, -1:]
    counts = torch.full((rows, 1), count, device=values.device)
    ids = largest(values, counts, threshold).nonzero()[:, 1].view(rows, count)
    order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)

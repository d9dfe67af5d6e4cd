"""What changes logits before they are looked at: bias, penalties, tokens that may not come yet.

Takes scores and each row's text so far, changes the scores in place, and refuses to choose. Order: bias, repetition,
presence and frequency, then the ban. One indexed operation each for the whole batch; a row's scores depend on that row
alone.

Sources: the repetition penalty is that of Keskar et al., "CTRL", 2019, section 4.1, over prompt and answer;
presence and frequency penalties are those of the OpenAI API, over the answer.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from pagedkv.engine.sampler import SampleRow

    Ids = NDArray[np.int64]


def adjust(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Change ``scores``, float64 ``[n, vocab]``, contiguous, as each row's params and text ask."""
    vocab = scores.shape[-1]
    flat = scores.view(-1)
    biased = {index: dict(row.params.logit_bias) for index, row in enumerate(rows) if row.params.logit_bias}
    if biased:
        places = torch.from_numpy(_places(biased, vocab)).to(flat.device)
        flat[places] += _numbers(flat, chain.from_iterable(bias.values() for bias in biased.values()))
    repeats = {i: row.tokens[: row.position] for i, row in enumerate(rows) if row.params.repetition_penalty != 1}
    if repeats:
        found = np.unique(_places(repeats, vocab))
        by = _numbers(flat, (rows[index].params.repetition_penalty for index in (found // vocab).tolist()))
        places = torch.from_numpy(found).to(flat.device)
        old = flat[places]
        flat[places] = torch.where(old > 0, old / by, old * by)
    answers = {i: row.tokens[row.num_prompt : row.position] for i, row in enumerate(rows) if _counts(row)}
    if answers:
        found, counts = np.unique(_places(answers, vocab), return_counts=True)
        params = [rows[index].params for index in (found // vocab).tolist()]
        by = _numbers(flat, (p.presence_penalty for p in params))
        by += _numbers(flat, (p.frequency_penalty for p in params)) * torch.from_numpy(counts).to(flat.device)
        flat[torch.from_numpy(found).to(flat.device)] -= by
    banned = {index: row.banned for index, row in enumerate(rows) if row.banned}
    if banned:
        # Added, not set: a NaN must stay one.
        flat[torch.from_numpy(_places(banned, vocab)).to(flat.device)] += float("-inf")


def _counts(row: SampleRow) -> bool:
    return bool(row.params.presence_penalty or row.params.frequency_penalty)


def _places(tokens: Mapping[int, Collection[int]], vocab: int) -> Ids:
    """Return where the tokens of each row stand in the flattened scores."""
    lengths = [len(ids) for ids in tokens.values()]
    ids = np.fromiter(chain.from_iterable(tokens.values()), dtype=np.int64, count=sum(lengths))
    return ids + np.repeat(np.fromiter(tokens, dtype=np.int64), lengths) * vocab


def _numbers(like: torch.Tensor, values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=like.dtype, device=like.device)

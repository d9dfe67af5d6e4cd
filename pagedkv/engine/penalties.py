"""What changes logits before they are looked at: bias, penalties, tokens that may not come yet.

Takes scores and each row's text so far, changes the scores in place, and refuses to choose. Order: bias, repetition,
presence and frequency, then the ban. One indexed operation each for the whole batch; a row's scores depend on that row
alone.

Sources: the repetition penalty is that of Keskar et al., "CTRL", 2019, section 4.1, over prompt and answer;
presence and frequency penalties are those of the OpenAI API, over the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from pagedkv.engine.sampler import SampleRow


def adjust(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Change ``scores``, float64 ``[n, vocab]``, as each row's params and text ask."""
    _each(scores, [(index, *_bias(row)) for index, row in enumerate(rows) if row.params.logit_bias], torch.add)
    repeats = [(index, *_repeated(row)) for index, row in enumerate(rows) if row.params.repetition_penalty != 1]
    _each(scores, repeats, lambda old, by: torch.where(old > 0, old / by, old * by))
    counted = [(index, row) for index, row in enumerate(rows) if _counts(row)]
    _each(scores, [(index, *_generated(row)) for index, row in counted], torch.sub)
    banned = [(index, _ids(row.banned), np.full(len(row.banned), -np.inf)) for index, row in enumerate(rows)]
    _each(scores, [entry for entry in banned if len(entry[1])], torch.add)


def _bias(row: SampleRow) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    biases = dict(row.params.logit_bias)
    return _ids(biases), np.fromiter(biases.values(), dtype=np.float64)


def _repeated(row: SampleRow) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids = np.unique(_ids(row.tokens[: row.position]))
    return ids, np.full(len(ids), row.params.repetition_penalty)


def _counts(row: SampleRow) -> bool:
    return bool(row.params.presence_penalty or row.params.frequency_penalty)


def _generated(row: SampleRow) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids, counts = np.unique(_ids(row.tokens[row.num_prompt : row.position]), return_counts=True)
    return ids, row.params.presence_penalty + counts.astype(np.float64) * row.params.frequency_penalty


def _ids(tokens: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, dtype=np.int64)


def _each(
    scores: torch.Tensor,
    entries: Sequence[tuple[int, NDArray[np.int64], NDArray[np.float64]]],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Set ``scores[row, ids] = change(scores[row, ids], values)``, all entries at once; a row's ids are distinct."""
    if not entries:
        return
    index = np.repeat([row for row, _, _ in entries], [len(ids) for _, ids, _ in entries])
    rows = torch.from_numpy(index).to(scores.device)
    ids = torch.from_numpy(np.concatenate([ids for _, ids, _ in entries])).to(scores.device)
    values = torch.from_numpy(np.concatenate([values for _, _, values in entries])).to(scores.device)
    scores[rows, ids] = change(scores[rows, ids], values)

"""Attention over histories that were handed out: K and V of many sequences, one after the other.

Takes what a model made of gathered K and V, token by token, and cuts it by the lengths of the histories; it knows
neither stores nor models. Gathered K and V are pages of one token each, so that the one operator serves them too.
A layer that attends within chunks is, to the operator, a batch in which each chunk is a sequence of its own.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagedkv.attention import AttentionBatch, paged_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pagedkv.attention import LayerSpec


class Histories(NamedTuple):
    """How gathered K and V are laid out.

    Attributes:
        total_kv: gathered tokens.
        batch: the step's queries over them, pages being single tokens.
    """

    total_kv: int
    batch: AttentionBatch


def lay_out(
    held: Sequence[NDArray[np.int64]], q_lens: Sequence[int], chunk: int | None, device: torch.device
) -> Histories:
    """Return the layout of gathered histories.

    Args:
        held: per sequence the positions that were gathered, ascending; the last is the step's last token.
        q_lens: per sequence the queries, its last positions.
        chunk: tokens in a chunk that no query sees beyond, counted from position 0; None for no such bound.
        device: where K and V are.
    """
    rows: list[tuple[int, int, int]] = []  # (first gathered token, gathered tokens, queries)
    offset = 0
    for positions, q_len in zip(held, q_lens, strict=True):
        end = int(positions[-1]) + 1
        for start, stop in _parts(end - q_len, end, chunk):
            first, last = np.searchsorted(positions, [start if chunk else 0, stop])
            rows.append((offset + int(first), int(last - first), stop - max(start, end - q_len)))
        offset += len(positions)
    longest = max(kv_len for _, kv_len, _ in rows)
    # Entries past a row's own tokens are never read, but must name pages that exist.
    tables = np.minimum(np.array([[first] for first, _, _ in rows]) + np.arange(longest), offset - 1)
    queries = [q_len for _, _, q_len in rows]
    batch = AttentionBatch(
        block_tables=torch.from_numpy(tables.astype(np.int32)).to(device),
        kv_lens=torch.tensor([kv_len for _, kv_len, _ in rows], dtype=torch.int32, device=device),
        cu_q_lens=torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device),
        max_q_len=max(queries),
        max_kv_len=longest,
    )
    return Histories(offset, batch)


def _parts(start: int, stop: int, chunk: int | None) -> list[tuple[int, int]]:
    """Return the spans of positions ``start`` to ``stop`` that see each other: (first position seen, end)."""
    if chunk is None:
        return [(0, stop)]
    return [(first, min(stop, first + chunk)) for first in range(start - start % chunk, stop, chunk)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, histories: Histories, spec: LayerSpec) -> torch.Tensor:
    """Attend from q ``[total_q, num_q_heads, k_dim]`` to its histories: ``[total_q, num_q_heads, v_dim]``.

    ``k`` is ``[total_kv, num_kv_heads, k_dim]``, ``v`` ``[total_kv, num_kv_heads, v_dim]``, any strides.
    """
    return paged_attention(q, k.unsqueeze(2), v.unsqueeze(2), histories.batch, spec)

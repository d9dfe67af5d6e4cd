"""One step of a paged cache, laid out for the operator: tables, lengths and the slots to write.

Takes sequences, their new tokens and the allocator's block tables; gives tensors; refuses to know where pages
come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedkv.attention import AttentionBatch
from pagedkv.backend import StepBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagedkv.allocator import Sequence as PagedSequence


class StepBuffers:
    """A step's metadata tensors at addresses that never change, so that a decode step can be captured.

    Sized by ``max_batch`` sequences of ``max_len`` tokens; each step fills and hands out the leading part.
    """

    def __init__(self, max_batch: int, max_len: int, page_size: int, device: torch.device) -> None:
        """Allocate them, zeroed: every unused table entry names the null page."""
        self.page_size = page_size
        self.device = device
        self.block_tables = self._zeros(max_batch, -(-max_len // page_size))
        self.kv_lens = self._zeros(max_batch)
        self.cu_q_lens = self._zeros(max_batch + 1)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def fill(self, tables: NDArray[np.int32], kv_lens: NDArray[np.int64], q_lens: NDArray[np.int64]) -> AttentionBatch:
        """Return the batch of sequences whose block tables are ``tables`` ``[num_sequences, width]``."""
        rows, width = tables.shape
        self.block_tables[:rows, :width].copy_(torch.from_numpy(tables))
        self.kv_lens[:rows].copy_(torch.from_numpy(kv_lens))
        self.cu_q_lens[1 : rows + 1].copy_(torch.from_numpy(q_lens.cumsum()))
        return AttentionBatch(
            block_tables=self.block_tables[:rows, :width],
            kv_lens=self.kv_lens[:rows],
            cu_q_lens=self.cu_q_lens[: rows + 1],
            max_q_len=int(q_lens.max()),
            max_kv_len=int(kv_lens.max()),
        )


StepRow = list[int] | int
"""What a sequence takes into a step: its next token ids, or, where no token names the KV, how many."""


class PagedStep(StepBatch):
    """A `StepBatch` with what the paged operator needs.

    Attributes:
        tokens: the new token ids of each sequence, or their count.
        slot_mapping: int64 ``[total_q]``: where each new token's K and V go.
        attention: the `AttentionBatch` that every layer of the step shares.
    """

    def __init__(
        self,
        sequences: list[PagedSequence],
        tokens: list[StepRow],
        block_tables: NDArray[np.int32],
        buffers: StepBuffers,
    ) -> None:
        """Lay out ``tokens[i]`` as the next ones of ``sequences[i]``, whose pages are reserved in ``block_tables``."""
        starts = [sequence.num_tokens for sequence in sequences]
        super().__init__(sequences, tokens, starts, buffers.device)
        self.tokens = tokens
        q_lens = np.asarray(self.q_lens, dtype=np.int64)
        kv_lens = np.asarray(starts, dtype=np.int64) + q_lens
        width = -(-int(kv_lens.max()) // buffers.page_size)
        tables = block_tables[[sequence.row for sequence in sequences], :width]
        positions = self.position_ids.cpu().numpy()
        pages = tables[np.repeat(np.arange(len(sequences)), q_lens), positions // buffers.page_size].astype(np.int64)
        slots = pages * buffers.page_size + positions % buffers.page_size
        self.slot_mapping = torch.from_numpy(slots).to(buffers.device)
        self._tables, self._kv_lens, self._page_size = tables, kv_lens, buffers.page_size
        self.attention = buffers.fill(tables, kv_lens, q_lens)

    def held_positions(self) -> list[NDArray[np.int64]]:
        """Return for each row the positions that are still held, ascending, this step's included."""
        blocks = [
            row[: -(-int(length) // self._page_size)] for row, length in zip(self._tables, self._kv_lens, strict=True)
        ]
        held = [
            (np.flatnonzero(pages)[:, None] * self._page_size + np.arange(self._page_size)).ravel() for pages in blocks
        ]
        return [positions[positions < length] for positions, length in zip(held, self._kv_lens, strict=True)]

    def held_slots(self) -> torch.Tensor:
        """Return the slots of `held_positions`, row after row, int64 ``[total]``."""
        slots = [
            row[positions // self._page_size].astype(np.int64) * self._page_size + positions % self._page_size
            for row, positions in zip(self._tables, self.held_positions(), strict=True)
        ]
        return torch.from_numpy(np.concatenate(slots)).to(self.slot_mapping.device)

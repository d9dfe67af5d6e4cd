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
        self.max_len = max_len
        self.device = device
        self._padded: dict[int, PaddedStep] = {}
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

    def pad(self, step: PagedStep, rows: int) -> PaddedStep:
        """Return ``step`` as one of ``rows`` rows, in the same memory whenever ``rows`` is the same."""
        if rows not in self._padded:
            self._padded[rows] = PaddedStep(rows, self.block_tables.shape[1], self.max_len, self.device)
        self._padded[rows].load(step)
        return self._padded[rows]


class PagedStep(StepBatch):
    """A `StepBatch` with what the paged operator needs.

    Attributes:
        tokens: the new token ids of each sequence.
        slot_mapping: int64 ``[total_q]``: where each new token's K and V go.
        attention: the `AttentionBatch` that every layer of the step shares.
    """

    def __init__(
        self,
        sequences: list[PagedSequence],
        tokens: list[list[int]],
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
        self.attention = buffers.fill(tables, kv_lens, q_lens)


class PaddedStep(StepBatch):
    """A decode step of a fixed number of rows, at addresses that stay: what a captured step reads.

    Rows past the sequences are padding: token 0 at position 0, of length 0, written to the null page; their logits mean
    nothing. The bound on lengths is the cache's, so that a captured grid fits every later step. The sequences' own
    bounds are not looked at, so that nothing of a captured launch depends on them.

    Attributes:
        slot_mapping: int64 ``[rows]``.
        attention: the `AttentionBatch` of all rows, new after every `load`.
    """

    def __init__(self, rows: int, width: int, max_len: int, device: torch.device) -> None:
        super().__init__((), [[0]] * rows, [0] * rows, device)
        self.rows = rows
        self.slot_mapping = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._kv_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._cu_q_lens = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._max_len = max_len
        self.attention = self._batch()

    def _batch(self) -> AttentionBatch:
        return AttentionBatch(self._tables, self._kv_lens, self._cu_q_lens, 1, self._max_len)

    def load(self, step: PagedStep) -> None:
        """Take over the rows of ``step``, one token each; copies on the device, nothing waits."""
        count = len(step.sequences)
        if count > self.rows or any(length != 1 for length in step.q_lens):
            raise ValueError(
                f"step must bring one token for each of at most {self.rows} sequences, brings {step.q_lens}"
            )
        self.sequences = step.sequences
        tables = step.attention.block_tables
        for padded, own in (
            (self.input_ids, step.input_ids),
            (self.position_ids, step.position_ids),
            (self.slot_mapping, step.slot_mapping),
            (self._kv_lens, step.attention.kv_lens),
        ):
            padded[:count].copy_(own)
            padded[count:].zero_()
        self._tables.zero_()
        self._tables[:count, : tables.shape[1]].copy_(tables)
        self.attention = self._batch()

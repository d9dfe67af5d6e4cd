"""One step of a paged cache, laid out for the operator: tables, lengths and the slots to write, per layer group.

Takes sequences, their new tokens and the allocator's block tables; gives tensors, on every device that a group has
layers on; refuses to know where pages come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagedkv.attention import AttentionBatch
from pagedkv.backend import StepBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from pagedkv.allocator import Sequence as PagedSequence

StepRow = list[int] | int
"""What a sequence takes into a step: its next token ids, or, where no token names the KV, how many."""

Home = tuple[int, torch.device]
"""Where a layer stands: its group and its device."""


class GroupStep(NamedTuple):
    """What all layers of one home share in a step.

    Attributes:
        attention: the `AttentionBatch`.
        slot_mapping: int64 ``[total_q]``: where each new token's K and V go.
    """

    attention: AttentionBatch
    slot_mapping: torch.Tensor


class StepBuffers:
    """A step's metadata tensors at addresses that never change, so that a decode step can be captured.

    Sized by ``max_batch`` sequences of ``max_len`` tokens; each step fills and hands out the leading part.
    """

    def __init__(
        self, max_batch: int, max_len: int, page_size: int, homes: Iterable[Home], device: torch.device
    ) -> None:
        """Allocate them for all ``homes``, zeroed: every unused table entry names the null page.

        ``device`` is where a step's token ids and positions are wanted.
        """
        self.page_size = page_size
        self.device = device
        width = -(-max_len // page_size)
        self._tables = {home: _zeros(home[1], max_batch, width) for home in dict.fromkeys(homes)}
        self._kv_lens = {device: _zeros(device, max_batch) for _, device in self._tables}
        self._cu_q_lens = {device: _zeros(device, max_batch + 1) for _, device in self._tables}
        self.groups = sorted({group for group, _ in self._tables})

    def fill(
        self,
        tables: dict[int, NDArray[np.int32]],
        slots: dict[int, NDArray[np.int64]],
        kv_lens: NDArray[np.int64],
        q_lens: NDArray[np.int64],
    ) -> dict[Home, GroupStep]:
        """Return what each home needs, from each group's block tables ``[num_sequences, width]`` and slots."""
        rows = len(kv_lens)
        for device, lens in self._kv_lens.items():
            lens[:rows].copy_(torch.from_numpy(kv_lens))
            self._cu_q_lens[device][1 : rows + 1].copy_(torch.from_numpy(q_lens.cumsum()))
        max_q_len, max_kv_len = int(q_lens.max()), int(kv_lens.max())
        steps = {}
        for (group, device), buffer in self._tables.items():
            mirror = buffer[:rows, : tables[group].shape[1]]
            mirror.copy_(torch.from_numpy(tables[group]))
            attention = AttentionBatch(
                block_tables=mirror,
                kv_lens=self._kv_lens[device][:rows],
                cu_q_lens=self._cu_q_lens[device][: rows + 1],
                max_q_len=max_q_len,
                max_kv_len=max_kv_len,
            )
            steps[group, device] = GroupStep(attention, torch.from_numpy(slots[group]).to(device))
        return steps


def _zeros(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


class PagedStep(StepBatch):
    """A `StepBatch` with what the paged operator needs.

    Attributes:
        tokens: the new token ids of each sequence, or their count.
        groups: by home what its layers share.
    """

    def __init__(
        self,
        sequences: list[PagedSequence],
        tokens: list[StepRow],
        block_tables: Sequence[NDArray[np.int32]],
        buffers: StepBuffers,
    ) -> None:
        """Lay out ``tokens[i]`` as the next ones of ``sequences[i]``.

        Their pages are reserved in ``block_tables``, one live array per group.
        """
        lengths = [sequence.num_tokens for sequence in sequences]
        super().__init__(sequences, tokens, lengths, buffers.device)
        self.tokens = tokens
        self._page_size = size = buffers.page_size
        starts, q_lens = np.array(lengths, np.int64), np.array(self.q_lens, np.int64)
        self._kv_lens = starts + q_lens
        width = -(-int(self._kv_lens.max()) // size)
        rows = [sequence.row for sequence in sequences]
        self._tables = {group: block_tables[group][rows, :width] for group in buffers.groups}
        owners = np.repeat(np.arange(len(sequences)), q_lens)
        positions = np.arange(len(owners)) + np.repeat(self._kv_lens - q_lens.cumsum(), q_lens)
        blocks, offsets = positions // size, positions % size
        slots = {
            group: table[owners, blocks].astype(np.int64) * size + offsets for group, table in self._tables.items()
        }
        self.groups = buffers.fill(self._tables, slots, self._kv_lens, q_lens)

    def kept(self, keep: Mapping[PagedSequence, int]) -> list[StepRow]:
        """Return each row's first ``keep[sequence]`` tokens, or that count; all of them where ``keep`` is silent.

        Raises:
            ValueError: ``keep`` names a sequence outside the step, or a count outside 0 to its new tokens.
        """
        unknown = set(keep) - set(self.sequences)
        if unknown:
            raise ValueError(f"keep must name sequences of the step, named {unknown.pop()!r}")
        rows: list[StepRow] = []
        for sequence, row, most in zip(self.sequences, self.tokens, self.q_lens, strict=True):
            count = keep.get(sequence, most)
            if not 0 <= count <= most:
                raise ValueError(f"keep[{sequence!r}] must be 0 to {most}, was {count}")
            rows.append(count if isinstance(row, int) else row[:count])
        return rows

    def held_positions(self, group: int) -> list[NDArray[np.int64]]:
        """Return for each row the positions that a group still holds, ascending, this step's included."""
        offsets = np.arange(self._page_size)
        held = []
        for pages, length in zip(self._tables[group], self._kv_lens, strict=True):
            blocks = np.flatnonzero(pages[: -(-length // self._page_size)])
            positions = (blocks[:, None] * self._page_size + offsets).ravel()
            held.append(positions[positions < length])
        return held

    def held_slots(self, home: Home) -> torch.Tensor:
        """Return the slots of `held_positions` on a home's device, row after row, int64 ``[total]``."""
        group, device = home
        slots = [
            pages[positions // self._page_size].astype(np.int64) * self._page_size + positions % self._page_size
            for pages, positions in zip(self._tables[group], self.held_positions(group), strict=True)
        ]
        return torch.from_numpy(np.concatenate(slots)).to(device)

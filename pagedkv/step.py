"""One step of a paged cache, laid out for the operator: tables, lengths and the slots to write, per layer group.

Takes sequences, their new tokens and the allocator's block tables; gives tensors, on every device that a group has
layers on, and a decode step also padded to a size whose memory stays; refuses to know where pages come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import torch

from pagedkv.allocator.tokens import count_of
from pagedkv.attention import AttentionBatch
from pagedkv.attention.shared_prefix import Mode, find_when_asked
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
        self,
        max_batch: int,
        max_len: int,
        page_size: int,
        homes: Iterable[Home],
        device: torch.device,
        *,
        shared_prefix: Mode = "auto",
    ) -> None:
        """Allocate them for all ``homes``, zeroed: every unused table entry names the null page.

        ``device`` is where a step's token ids and positions are wanted. ``shared_prefix`` as in `PagedKVCache`.

        Raises:
            ValueError: if ``shared_prefix`` is something else.
        """
        if shared_prefix not in get_args(Mode):
            raise ValueError(f"shared_prefix must be one of {get_args(Mode)}, was {shared_prefix!r}")
        self.page_size = page_size
        self.max_batch = max_batch
        self.max_len = max_len
        self.device = device
        self._shared_prefix = shared_prefix
        self._padded: dict[int, PaddedStep] = {}
        width = -(-max_len // page_size)
        self._tables = {home: _zeros(home[1], max_batch, width) for home in dict.fromkeys(homes)}
        self._kv_lens = {device: _zeros(device, max_batch) for _, device in self._tables}
        self._cu_q_lens = {device: _zeros(device, max_batch + 1) for _, device in self._tables}
        self.groups = sorted({group for group, _ in self._tables})

    def require_fits(self, sequences: list[PagedSequence], rows: list[StepRow], counts: list[int]) -> None:
        """Refuse ``rows`` of ``counts`` tokens that no step can take; raises as `PagedKVCache.begin_step`."""
        if not 1 <= len(sequences) <= self.max_batch:
            raise ValueError(f"inputs must hold 1 to max_batch = {self.max_batch} sequences, held {len(sequences)}")
        for sequence, row, count in zip(sequences, rows, counts, strict=True):
            if isinstance(row, bool):
                raise TypeError(f"inputs must be token ids or a whole number of tokens, were {row!r} for {sequence!r}")
            if count < 1:
                raise ValueError(f"inputs must hold at least one token for each sequence, held {row} for {sequence!r}")
            if sequence.num_tokens + count > self.max_len:
                raise ValueError(
                    f"inputs must keep each sequence within max_len = {self.max_len} tokens, "
                    f"would take {sequence!r} to {sequence.num_tokens + count}"
                )
            if not isinstance(row, int):
                sequence.require_next(row)

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
            if self._shared_prefix == "always" or (self._shared_prefix == "auto" and device.type == "cuda"):
                find_when_asked(
                    attention,
                    self.page_size,
                    tables=tables[group],
                    kv_lens=kv_lens,
                    q_lens=q_lens,
                    mode=self._shared_prefix,
                )
            steps[group, device] = GroupStep(attention, torch.from_numpy(slots[group]).to(device))
        return steps

    def pad(self, step: PagedStep, rows: int) -> PaddedStep:
        """Return ``step`` as one of ``rows`` rows, in the same memory whenever ``rows`` is the same.

        Raises:
            ValueError: the step is not `PagedStep.is_decode`, has more rows, or its layers are on several devices.
        """
        if len(self._kv_lens) > 1:
            raise ValueError(f"step must have its layers on one device to be padded, has them on {[*self._kv_lens]}")
        if rows not in self._padded:
            width = next(iter(self._tables.values())).shape[1]
            self._padded[rows] = PaddedStep(rows, width, self.max_len, list(self._tables), self.device)
        self._padded[rows].load(step)
        return self._padded[rows]


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

    @property
    def is_decode(self) -> bool:
        """Whether every sequence brings one token, known by its id."""
        return self.has_input_ids and all(length == 1 for length in self.q_lens)

    def kept(self, keep: Mapping[PagedSequence, int]) -> list[StepRow]:
        """Return each row's first ``keep[sequence]`` tokens, or that count; all of them where ``keep`` is silent.

        Raises:
            TypeError: a count is no whole number.
            ValueError: ``keep`` names a sequence outside the step, or a count outside 0 to its new tokens.
        """
        unknown = set(keep) - set(self.sequences)
        if unknown:
            raise ValueError(f"keep must name sequences of the step, named {unknown.pop()!r}")
        rows: list[StepRow] = []
        for sequence, row, most in zip(self.sequences, self.tokens, self.q_lens, strict=True):
            count = count_of(keep.get(sequence, most), f"keep[{sequence!r}]", 0, most)
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


class PaddedStep(StepBatch):
    """A decode step of a fixed number of rows, at addresses that stay: what a captured step reads.

    Rows past the sequences are padding: token 0 at position 0, of length 0, written to the null page; their logits mean
    nothing. The bound on lengths is the cache's, so that a captured grid fits every later step. The sequences' own
    bounds are not looked at, so that nothing of a captured launch depends on them; nor are shared beginnings.

    Attributes:
        groups: by home what its layers share, new after every `load`.
    """

    def __init__(self, rows: int, width: int, max_len: int, homes: list[Home], device: torch.device) -> None:
        """Allocate it for ``homes``, all of one device, with tables of ``width`` pages."""
        super().__init__((), [[0]] * rows, [0] * rows, device)
        self._max_len = max_len
        on = homes[0][1]
        self._kv_lens = _zeros(on, rows)
        self._cu_q_lens = torch.arange(rows + 1, dtype=torch.int32, device=on)
        self._tables = {home: _zeros(on, rows, width) for home in homes}
        self._slots = {home: torch.zeros(rows, dtype=torch.int64, device=on) for home in homes}
        self.groups: dict[Home, GroupStep] = {}

    def load(self, step: PagedStep) -> None:
        """Take over the rows of ``step``, one token each; copies on the device, nothing waits."""
        rows, count = len(self.q_lens), len(step.q_lens)
        if count > rows or not step.is_decode:
            raise ValueError(
                f"step must bring one token, known by its id, for each of at most {rows} sequences, "
                f"brings {step.q_lens}{'' if step.has_input_ids else ' without ids'}"
            )
        self.sequences = step.sequences
        some = next(iter(step.groups.values()))
        pairs = [
            (self.input_ids, step.input_ids),
            (self.position_ids, step.position_ids),
            (self._kv_lens, some.attention.kv_lens),
        ]
        for home, own in step.groups.items():
            tables = own.attention.block_tables
            self._tables[home].zero_()
            self._tables[home][:count, : tables.shape[1]].copy_(tables)
            pairs.append((self._slots[home], own.slot_mapping))
        for padded, source in pairs:
            padded[:count].copy_(source)
            padded[count:].zero_()
        self.groups = {
            home: GroupStep(AttentionBatch(tables, self._kv_lens, self._cu_q_lens, 1, self._max_len), self._slots[home])
            for home, tables in self._tables.items()
        }

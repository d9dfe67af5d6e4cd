"""What the "torch" backend prepares per step: which rows go together, which slots they read, which of those count.

Takes an `AttentionBatch` and what a layer says about visibility, and gives index tensors that all such layers share. It
touches no K, V or query.

A row's path and padding follow from its own ``q_len`` and ``kv_len``: one query is *decode*, more are *prefill*.
Decode rows whose visible tokens pad to the same length are computed together, the others one sequence at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from .batch import AttentionBatch
    from .rows import RowFactors

_DECODE_ELEMENTS = 1 << 21
"""K elements gathered at once in decode: 8 MiB in fp32, so that a chunk is read again while it is in the cache."""

_KEPT_ELEMENTS = 1 << 20
"""Prefill masks up to this size stay for the step's other layers; larger ones cost little beside their tile."""


class Visibility(NamedTuple):
    """What the plan needs to know of a layer; layers that agree share a plan.

    ``spare`` asks for one column more, after the visible ones, for a sink logit.
    ``tile`` is the number of queries that a prefill sequence computes at once.
    """

    page_size: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    num_sink_tokens: int
    spare: bool
    tile: int


@dataclass
class Slots:
    """The slots that ``n`` sequences read, ``[n, length]`` page ids and offsets, and their rows in page tensors.

    Columns that stand for no visible token repeat a visible one: what a masked slot holds (NaN, perhaps) is never read.
    """

    pages: torch.Tensor
    offsets: torch.Tensor
    _rows: dict[tuple[int, RowFactors], torch.Tensor] = field(default_factory=dict)

    def rows(self, num_kv_heads: int, factors: RowFactors) -> torch.Tensor:
        """Return int64 ``[n * num_kv_heads * length]``: the row of each sequence, KV head and column."""
        key = (num_kv_heads, factors)
        found = self._rows.get(key)
        if found is None:
            heads = torch.arange(num_kv_heads, device=self.pages.device) * factors.head
            first = self.pages * factors.page + self.offsets * factors.slot
            found = (first[:, None, :] + heads[None, :, None]).flatten()
            self._rows[key] = found
        return found


@dataclass
class DecodeGroup:
    """Sequences with one query each, all padded to the same length.

    ``rows`` are their query rows, int64 ``[n]``; ``whole`` says that these are all query rows in order.
    ``q_positions`` is ``[n, 1]``, ``k_positions`` ``[n, length]``, and ``mask`` 0 or -inf, fp32 ``[n, length]``.
    """

    rows: torch.Tensor
    whole: bool
    slots: Slots
    q_positions: torch.Tensor
    k_positions: torch.Tensor
    mask: torch.Tensor
    _full_masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def full_mask(self, num_kv_heads: int, group: int) -> torch.Tensor:
        """Return the mask for every head, ``[n * num_kv_heads, group, length]``."""
        key = (num_kv_heads, group)
        found = self._full_masks.get(key)
        if found is None:
            n, length = self.mask.shape
            by_head = self.mask[:, None, None].expand(n, num_kv_heads, group, length)
            found = by_head.reshape(n * num_kv_heads, group, length)
            self._full_masks[key] = found
        return found

    def distances(self) -> torch.Tensor:
        """Return key position minus query position, fp32 ``[n, 1, 1, 1, length]``."""
        return (self.k_positions - self.q_positions).to(torch.float32)[:, None, None, None]


@dataclass
class Tile:
    """Some consecutive queries of a prefill sequence and the gathered columns they may see.

    ``columns`` picks the columns; ``distances`` is key minus query position, ``[queries, columns]``, made when needed.
    """

    start: int
    stop: int
    columns: slice | torch.Tensor
    q_positions: torch.Tensor
    k_positions: torch.Tensor
    visibility: Visibility
    _mask: torch.Tensor | None = None

    def distances(self) -> torch.Tensor:
        """Return key position minus query position, fp32 ``[queries, columns]``."""
        return (self.k_positions - self.q_positions[:, None]).to(torch.float32)

    def mask(self) -> torch.Tensor:
        """Return fp32 ``[queries, columns]``: 0 where the key is seen, else -inf."""
        if self._mask is not None:
            return self._mask
        behind = self.q_positions[:, None] - self.k_positions
        seen = behind >= 0
        if self.visibility.window is not None:
            seen &= (behind < self.visibility.window) | (self.k_positions < self.visibility.num_sink_tokens)
        mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        if mask.numel() <= _KEPT_ELEMENTS:
            self._mask = mask
        return mask


@dataclass
class PrefillRow:
    """A sequence with several queries: query ``rows``, int64, from ``start`` on, see the columns of ``slots``.

    ``causal`` says that it is a whole prompt with nothing but causality to ask for.
    """

    start: int
    rows: torch.Tensor
    slots: Slots
    causal: bool
    tiles: list[Tile]


@dataclass
class Plan:
    """Everything a step does for layers of one visibility.

    ``zero_rows`` are queries that see nothing; ``buffers`` is memory that those layers use one after the other.
    """

    zero_rows: torch.Tensor | None
    decode: list[DecodeGroup]
    prefill: list[PrefillRow]
    buffers: dict[Hashable, Any] = field(default_factory=dict)

    def most_columns(self) -> int:
        """Return the most columns that are gathered at once."""
        slots = [group.slots for group in self.decode] + [row.slots for row in self.prefill]
        return max((one.pages.numel() for one in slots), default=0)


def plan_for(batch: AttentionBatch, total_q: int, visibility: Visibility) -> Plan:
    """Return the plan that hangs on ``batch``, made on first use (which waits for the device, if there is one)."""
    plan: Plan | None = batch.prepared.get((visibility, total_q))
    if plan is None:
        plan = _make_plan(batch, total_q, visibility)
        batch.prepared[visibility, total_q] = plan
    return plan


def padded_length(columns: int) -> int:
    """Return how many columns a decode row of ``columns`` is padded to: at most 31 or an eighth more.

    A multiple of 32, so that every row's K, V and scores begin at a multiple of 64 bytes: a matrix product may round
    differently at another alignment, and a row's alignment must not follow from its place in the batch.
    """
    step = max(32, (1 << (columns.bit_length() - 1)) // 8)
    return -(-columns // step) * step


def _make_plan(batch: AttentionBatch, total_q: int, visibility: Visibility) -> Plan:
    cu_q_lens, kv_lens = batch.lengths()
    if cu_q_lens[-1] != total_q:
        raise ValueError(f"q must have cu_q_lens[-1] = {cu_q_lens[-1]} rows, got {total_q}")
    zero_rows: list[int] = []
    decode: dict[int, list[tuple[int, int]]] = {}
    prefill = []
    for sequence, kv_len in enumerate(kv_lens):
        start, stop = cu_q_lens[sequence], cu_q_lens[sequence + 1]
        first = max(start, stop - kv_len)
        zero_rows.extend(range(start, first))
        if stop - first == 1:
            window_start, sinks = _first_seen(kv_len - 1, visibility)
            columns = sinks + kv_len - window_start + visibility.spare
            decode.setdefault(padded_length(columns), []).append((sequence, first))
        elif stop > first:
            prefill.append(_prefill_row(batch, sequence, range(first, stop), visibility))
    groups = []
    for length in sorted(decode):
        members = decode[length]
        at_once = max(1, _DECODE_ELEMENTS // (length * visibility.num_kv_heads * visibility.head_dim))
        for i in range(0, len(members), at_once):
            groups.append(_decode_group(batch, members[i : i + at_once], length, visibility))  # noqa: PERF401
    zeros = torch.tensor(zero_rows, device=batch.kv_lens.device) if zero_rows else None
    return Plan(zeros, groups, prefill)


def _first_seen(position: int, visibility: Visibility) -> tuple[int, int]:
    """Return where the window of a query at ``position`` starts, and how many sink tokens lie before that."""
    start = 0 if visibility.window is None else max(0, position - visibility.window + 1)
    return start, min(visibility.num_sink_tokens, start)


def _decode_group(
    batch: AttentionBatch, members: list[tuple[int, int]], length: int, visibility: Visibility
) -> DecodeGroup:
    """Lay out ``members``, (sequence, query row) each, whose visible columns all pad to ``length``."""
    device = batch.block_tables.device
    sequences = [sequence for sequence, _ in members]
    q_rows = [row for _, row in members]
    cu_q_lens, kv_lens = batch.lengths()
    total_q = cu_q_lens[-1]
    last = [kv_lens[sequence] - 1 for sequence in sequences]
    seen = [_first_seen(position, visibility) for position in last]
    facts = torch.tensor([[start, sinks, p] for (start, sinks), p in zip(seen, last, strict=True)], device=device)
    start, sinks, position = (facts[:, i : i + 1] for i in range(3))
    columns = torch.arange(length, device=device)
    keys = columns + torch.where(columns < sinks, 0, start - sinks)
    dead = keys > position
    keys = torch.minimum(keys, position)
    tables = batch.block_tables[torch.tensor(sequences, device=device)]
    slots = Slots(
        tables.gather(1, keys // visibility.page_size).to(torch.int64),
        keys % visibility.page_size,
    )
    mask = torch.zeros(dead.shape, device=device).masked_fill_(dead, -torch.inf)
    return DecodeGroup(
        rows=torch.tensor(q_rows, device=device),
        whole=q_rows == list(range(total_q)),
        slots=slots,
        q_positions=position,
        k_positions=keys,
        mask=mask,
    )


def _prefill_row(batch: AttentionBatch, sequence: int, rows: range, visibility: Visibility) -> PrefillRow:
    """Lay out the query ``rows`` of ``sequence``, which see at least one token each."""
    device = batch.block_tables.device
    count, kv_len = len(rows), batch.lengths()[1][sequence]
    first_position = kv_len - count
    window_start, sinks = _first_seen(first_position, visibility)
    keys = torch.cat([torch.arange(sinks), torch.arange(window_start, kv_len)]).to(device)
    if visibility.spare:
        keys = torch.cat([keys, keys[-1:]])
    slots = Slots(
        batch.block_tables[sequence][keys // visibility.page_size].to(torch.int64)[None],
        (keys % visibility.page_size)[None],
    )
    tiles = []
    for begin in range(0, count, visibility.tile):
        end = min(count, begin + visibility.tile)
        tile_start, tile_sinks = _first_seen(first_position + begin, visibility)
        positions = torch.cat([torch.arange(tile_sinks), torch.arange(tile_start, first_position + end)])
        columns = torch.where(positions < sinks, positions, positions - (window_start - sinks))
        if visibility.spare:
            columns = torch.cat([columns, torch.tensor([len(keys) - 1])])
            positions = torch.cat([positions, positions[-1:]])
        low, high = int(columns[0]), int(columns[-1]) + 1
        pick = slice(low, high) if high - low == len(columns) else columns.to(device)
        queries = torch.arange(first_position + begin, first_position + end, device=device)
        tiles.append(Tile(begin, end, pick, queries, positions.to(device), visibility))
    causal = count == kv_len and (visibility.window is None or visibility.window >= kv_len)
    return PrefillRow(rows.start, torch.arange(rows.start, rows.stop, device=device), slots, causal, tiles)

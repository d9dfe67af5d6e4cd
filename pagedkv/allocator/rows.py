"""Rows: what the allocator knows of each open sequence, as arrays with a row per sequence.

Takes row numbers, gives views, and refuses to know pages' references or the index. Arrays grow by doubling in rows
and in width, so a view taken earlier may be stale after the next `open`, `fork` or `reserve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .index_node import Node, Root
    from .prefix_index import PageArray
    from .sequence import Sequence

NEVER = 2**62  # a position that no sequence reaches

_Scalar = TypeVar("_Scalar", bound=np.generic)


def _doubled(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    return np.concatenate([array, np.zeros_like(array)])


class Rows:
    """One row per open sequence; row numbers are reused.

    Attributes:
        tables: per layer group int32 ``[rows, width]``: the page of each block, the null page past the last one.
        firsts: per layer group int64 ``[rows]``: the first block, sinks apart, that has not been given back.
        window_held: bool ``[rows]``: nothing is given back until the next truncate.
        num_tokens: int64 ``[rows]``: tokens whose KV is stored.
        ends: int64 ``[rows]``: ``num_tokens`` and the tokens of the open reservation.
        prompt_len: int64 ``[rows]``: tokens that commits are checked against.
        opaque_from: int64 ``[rows]``: the first position whose KV may not be indexed.
        tail_locked: bool ``[rows]``: the partial last page may be shared or indexed; look before writing.
        tail_borrowed: bool ``[rows]``: the partial last page came from a sub-page hit.
        tail_tokens: uint32 ``[rows, page_size]``: the ids in the partial last page.
        space: int64 ``[rows]``: the namespace's serial number.
        root: per row the top of its namespace's index tree.
        cursor: per row the index node that its indexed pages end in or above.
        sequences: per row the handle, or None.
    """

    def __init__(self, page_size: int, num_groups: int) -> None:
        """Start with room for eight sequences of eight pages."""
        self.page_size = page_size
        rows, width = 8, 8
        self.tables: list[PageArray] = [np.zeros((rows, width), np.int32) for _ in range(num_groups)]
        self.firsts = [np.zeros(rows, np.int64) for _ in range(num_groups)]
        self.window_held = np.zeros(rows, np.bool_)
        self.num_tokens = np.zeros(rows, np.int64)
        self.ends = np.zeros(rows, np.int64)
        self.prompt_len = np.zeros(rows, np.int64)
        self.opaque_from = np.zeros(rows, np.int64)
        self.space = np.zeros(rows, np.int64)
        self.tail_locked = np.zeros(rows, np.bool_)
        self.tail_borrowed = np.zeros(rows, np.bool_)
        self.tail_tokens = np.zeros((rows, page_size), np.uint32)
        self.root: list[Root | None] = [None] * rows
        self.cursor: list[Node | None] = [None] * rows
        self.sequences: list[Sequence | None] = [None] * rows
        self._unused = list(range(rows - 1, -1, -1))

    @property
    def capacity(self) -> int:
        """Rows that exist."""
        return len(self.sequences)

    @property
    def width(self) -> int:
        """Blocks that a table has room for."""
        return int(self.tables[0].shape[1])

    def live(self) -> list[int]:
        """Return the rows in use, ascending."""
        return [row for row, sequence in enumerate(self.sequences) if sequence is not None]

    def blocks(self, tokens: int) -> int:
        """Return how many pages ``tokens`` tokens take."""
        return -(-tokens // self.page_size)

    def held(self, row: int) -> int:
        """Return how many pages the row's table names."""
        return self.blocks(self.ends.item(row))

    def reserved(self, row: int) -> int:
        """Return the tokens of the row's open reservation; 0 means that none is open."""
        return self.ends.item(row) - self.num_tokens.item(row)

    def claim(self) -> int:
        """Return an unused row, all zero."""
        if not self._unused:
            self._grow_rows()
        return self._unused.pop()

    def give_up(self, row: int) -> None:
        """Clear a row for its next user."""
        for table in self.tables:
            table[row] = 0
        for first in self.firsts:
            first[row] = 0
        for array in (self.num_tokens, self.ends, self.prompt_len, self.opaque_from, self.space):
            array[row] = 0
        self.tail_locked[row] = self.tail_borrowed[row] = self.window_held[row] = False
        self.root[row] = self.cursor[row] = self.sequences[row] = None
        self._unused.append(row)

    def ensure_width(self, blocks: int) -> None:
        """Make every table at least ``blocks`` wide."""
        if blocks > self.width:
            width = max(blocks, 2 * self.width)
            self.tables = [np.pad(table, ((0, 0), (0, width - self.width))) for table in self.tables]

    def _grow_rows(self) -> None:
        more = self.capacity
        self.tables = [_doubled(table) for table in self.tables]
        self.firsts, self.window_held = [_doubled(first) for first in self.firsts], _doubled(self.window_held)
        self.num_tokens, self.ends = _doubled(self.num_tokens), _doubled(self.ends)
        self.prompt_len, self.opaque_from = _doubled(self.prompt_len), _doubled(self.opaque_from)
        self.space, self.tail_tokens = _doubled(self.space), _doubled(self.tail_tokens)
        self.tail_locked, self.tail_borrowed = _doubled(self.tail_locked), _doubled(self.tail_borrowed)
        self.root += [None] * more
        self.cursor += [None] * more
        self.sequences += [None] * more
        self._unused = list(range(2 * more - 1, more - 1, -1))

"""The decode step: every sequence takes one token, none is inside its prompt, no tail needs a copy.

This is what a batch engine does nearly always, so it is done for all rows in a few array operations, and what is
known of the batch is kept from step to step. It writes the same books as `reserving` and `committing`, which do
every other case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .committing import index_full_tail
from .errors import OutOfPages
from .tokens import token_array

if TYPE_CHECKING:
    from .ledger import Ledger
    from .sequence import Sequence
    from .tokens import TokenArray

IntArray = npt.NDArray[np.int64]


class _Due:
    """The members of a batch that reach a page's end in the same step, and the block each is filling."""

    __slots__ = ("at", "blocks", "members", "rows")

    def __init__(self, members: list[int], at: IntArray, lengths: IntArray, page_size: int) -> None:
        self.members = np.array(members, np.int64)
        self.at = at[self.members]
        self.rows = self.at.tolist()
        self.blocks = lengths[self.members] // page_size


class DecodeBatch:
    """A batch of sequences at rest, each ready for one more token; valid until any other call changes the books.

    All members move together, so when each reaches a page's end is known from the start: members of equal
    ``length % page_size`` are one `_Due`, and a step looks at the two that begin or end a page.
    """

    def __init__(self, ledger: Ledger, sequences: list[Sequence], rows: list[int]) -> None:
        """Remember the rows' lengths; change nothing."""
        size = ledger.page_size
        self._ledger = ledger
        self.sequences = sequences
        self.rows = rows
        self.ones = [1] * len(rows)
        self.serials = [sequence.serial for sequence in sequences]
        self.is_reserved = False
        at = np.array(rows, np.int64)
        self._at = at
        self._lengths = ledger.rows.num_tokens[at]
        offsets = self._lengths % size
        self._tails = at * size + offsets
        self._longest = int(self._lengths.max(initial=0))
        self._steps = 0
        members: dict[int, list[int]] = {}
        for member, offset in enumerate(offsets.tolist()):
            members.setdefault(offset, []).append(member)
        self._due = {offset: _Due(those, at, self._lengths, size) for offset, those in members.items()}

    @staticmethod
    def suits(ledger: Ledger, rows: list[int]) -> bool:
        """Whether there is one full-attention group and every row is past its prompt and may write its last page."""
        if not ledger.is_plain:
            return False
        books, at = ledger.rows, np.array(rows, np.int64)
        return not (books.tail_locked[at].any() or (books.num_tokens[at] < books.prompt_len[at]).any())

    def reserve(self) -> None:
        """Make room for one token each, or raise `OutOfPages` with nothing changed."""
        ledger = self._ledger
        due = self._due.get(-self._steps % ledger.page_size)
        if due is not None:
            count = len(due.rows)
            if count > ledger.pool.available:
                raise OutOfPages(count, ledger.pool.available)
            ledger.rows.ensure_width(self._longest // ledger.page_size + 1)
            pages = ledger.pool.take(count)
            ledger.tables[due.at, due.blocks] = pages
            if ledger.scrubs.many:
                ledger.scrubs.note(pages, ledger.rows.space[due.at])
        self._lengths += 1
        ledger.rows.ends[self._at] = self._lengths
        self.is_reserved = True

    def commit(self, tokens: TokenArray) -> None:
        """Store one token each; pages that are full now become findable."""
        books, size = self._ledger.rows, self._ledger.page_size
        books.tail_tokens.reshape(-1)[self._tails] = tokens
        books.num_tokens[self._at] = self._lengths
        self.is_reserved = False
        self._tails += 1
        self._longest += 1
        self._steps += 1
        due = self._due.get(-self._steps % size)
        if due is not None:
            for row, block in zip(due.rows, due.blocks.tolist(), strict=True):
                index_full_tail(self._ledger, row, block)
            due.blocks += 1
            self._tails[due.members] -= size


def all_one(counts: Any, ones: list[int]) -> bool:
    """Whether ``counts`` says one token for every sequence."""
    if type(counts) is int:
        return counts == 1
    if isinstance(counts, np.ndarray | tuple):
        counts = list(counts) if isinstance(counts, tuple) else counts.tolist()
    # By type too: True and 1.0 are equal to 1 and are no counts.
    return type(counts) is list and counts == ones and set(map(type, counts)) == {int}


def one_each(tokens: Any, length: int) -> Any:
    """Return ``tokens`` as an array of one id per sequence, or None where they are something else."""
    try:
        ids = token_array(tokens)
    except TypeError:
        return None
    return ids if len(ids) == length else None

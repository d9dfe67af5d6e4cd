"""The decode step: every sequence takes one token, none is inside its prompt, no tail needs a copy.

This is what a batch engine does nearly always, so it is done for all rows in a few array operations, and what is
known of the batch is kept from step to step. It writes the same books as `reserving` and `committing`, which do
every other case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from .committing import index_full_tails
from .errors import OutOfPages
from .tokens import token_array

if TYPE_CHECKING:
    from .ledger import Ledger
    from .sequence import Sequence
    from .tokens import TokenArray

IntArray = npt.NDArray[np.int64]


_FEW = 8  # pages that are moved one by one faster than as an array


class DecodeBatch:
    """A batch of sequences at rest, each ready for one more token; valid until any other call changes the books.

    All members move together, so when each reaches a page's end is known from the start: those of equal
    ``length % page_size`` are due together, and a step looks at the ones that begin or end a page and at no other.
    """

    __slots__ = (
        "_at", "_blocks", "_due", "_ledger", "_lengths", "_longest", "_one_each", "_steps", "_tail_tokens", "_tails",
        "is_reserved", "ones", "rows", "sequences",
    )  # fmt: skip

    def __init__(self, ledger: Ledger, sequences: list[Sequence], rows: list[int], at: IntArray) -> None:
        """Remember the rows' lengths; change nothing. ``at`` has the rows once more."""
        size = ledger.page_size
        self._ledger = ledger
        self.sequences = sequences
        self.rows = rows
        self.ones = [1] * len(rows)
        self.is_reserved = False
        self._at = at
        self._one_each = np.ones(len(rows), np.int64)  # to add which is faster than to add the number
        self._lengths = ledger.rows.num_tokens[at]
        self._tail_tokens = ledger.rows.tail_tokens.reshape(-1)
        self._tails = at * size + self._lengths % size
        self._steps = 0
        lengths: list[int] = self._lengths.tolist()
        self._longest = max(lengths, default=0)
        self._blocks = [length // size for length in lengths]  # that each member fills next
        self._due: dict[int, list[int]] = {}  # by the step, modulo the page size, the members that then begin a page
        for member, length in enumerate(lengths):
            begins = -length % size
            if begins in self._due:
                self._due[begins].append(member)
            else:
                self._due[begins] = [member]

    @classmethod
    def of(cls, ledger: Ledger, sequences: list[Sequence], rows: list[int]) -> Self | None:
        """Return the batch, or None unless each row is past its prompt and its last page its own."""
        books, at = ledger.rows, np.array(rows, np.int64)
        if books.tail_locked[at].any() or (books.num_tokens[at] < books.prompt_len[at]).any():
            return None
        return cls(ledger, sequences, rows, at)

    def reserve(self) -> None:
        """Make room for one token each, or raise `OutOfPages` with nothing changed."""
        ledger = self._ledger
        due = self._due.get(self._steps % ledger.page_size)
        if due is not None:
            self._begin_pages(due)
        self._lengths += self._one_each
        ledger.rows.ends[self._at] = self._lengths
        self.is_reserved = True

    def _begin_pages(self, due: list[int]) -> None:
        ledger, pool, count = self._ledger, self._ledger.pool, len(due)
        if count > pool.available:
            raise OutOfPages(count, pool.available)
        books, rows, blocks = ledger.rows, self.rows, self._blocks
        books.ensure_width((self._longest + self._steps) // ledger.page_size + 1)
        pages = pool.take_few(count) if count <= _FEW else pool.take(count).tolist()
        table = books.tables[0]
        for member, page in zip(due, pages, strict=True):
            table[rows[member], blocks[member]] = page
        if ledger.scrubs.many:
            ledger.scrubs.note(np.array(pages, np.int32), books.space[[rows[member] for member in due]])

    def commit(self, tokens: TokenArray) -> None:
        """Store one token each; pages that are full now become findable."""
        ledger, size = self._ledger, self._ledger.page_size
        self._tail_tokens[self._tails] = tokens
        ledger.rows.num_tokens[self._at] = self._lengths
        self.is_reserved = False
        self._tails += self._one_each
        self._steps += 1
        due = self._due.get(self._steps % size, [])
        if due and ledger.prefix_cache:
            index_full_tails(ledger, [(self.rows[member], self._blocks[member]) for member in due])
        for member in due:
            self._blocks[member] += 1
            self._tails[member] -= size


def all_one(counts: Any, length: int) -> bool:
    """Whether ``counts`` says one token for each of ``length`` sequences."""
    if type(counts) is int:
        return counts == 1
    if isinstance(counts, np.ndarray | tuple):
        counts = list(counts) if isinstance(counts, tuple) else counts.tolist()
    # By type too: True and 1.0 are equal to 1 and are no counts.
    return type(counts) is list and counts == [1] * length and set(map(type, counts)) == {int}


def one_each(tokens: Any, length: int) -> Any:
    """Return ``tokens`` as an array of one id per sequence, or None where they are something else."""
    try:
        ids = token_array(tokens)
    except TypeError:
        return None
    return ids if len(ids) == length else None

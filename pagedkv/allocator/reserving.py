"""Reserve: pages for tokens about to be written, for many sequences at once, all or nothing.

Takes rows and counts, plans without changing anything, then carries the plan out, which cannot fail. After it no
page that will be written is shared or indexed.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from .errors import OutOfPages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .ledger import Ledger


class Tail(Enum):
    """What must happen to a partial last page before it is written."""

    WRITE = "it is this sequence's own"
    UNINDEX = "take it out of the index"
    COPY = "somebody else holds it, or others may still find it"
    SPARE = "worth a copy that keeps it findable; where no page is left for that, take it out of the index"


class Plan:
    """What reserving ``counts[i]`` tokens for ``rows[i]`` takes.

    Attributes:
        fresh: per row the pages for new blocks.
        tails: per row what happens to the partial last page; after planning never SPARE.
        needed: pages in all, copies included.
    """

    def __init__(self, ledger: Ledger, rows: Iterable[int], counts: Iterable[int]) -> None:
        """Look at the books; change nothing."""
        self._ledger = ledger
        self.items = list(zip(rows, counts, strict=True))
        books = ledger.rows
        self.fresh: list[int] = []
        self.tails: list[Tail] = []
        leaving: dict[int, int] = {}
        for row, count in self.items:
            num_tokens = int(books.num_tokens[row])
            self.fresh.append(books.blocks(num_tokens + count) - books.blocks(num_tokens))
            self.tails.append(self._tail(row, num_tokens, leaving) if count else Tail.WRITE)
        self.needed = sum(self.fresh)
        self._settle_spares(self.needed + self.tails.count(Tail.COPY) + self.tails.count(Tail.SPARE))

    def _tail(self, row: int, num_tokens: int, leaving: dict[int, int]) -> Tail:
        books, pool, index = self._ledger.rows, self._ledger.pool, self._ledger.index
        block, offset = divmod(num_tokens, self._ledger.page_size)
        if not offset or not books.tail_locked[row]:
            return Tail.WRITE
        page = int(self._ledger.tables[row, block])
        if index.indexed[page]:
            if pool.refs[page] > 1:
                return Tail.COPY
            return Tail.SPARE if books.tail_borrowed[row] or index.is_followed(page, block) else Tail.UNINDEX
        # What leaves while a step is in flight goes on being held by it.
        gone = 0 if pool.deferred.steps else leaving.get(page, 0)
        if self._ledger.writers(page) - gone > 1:
            leaving[page] = leaving.get(page, 0) + 1
            return Tail.COPY
        return Tail.WRITE

    def _settle_spares(self, wished: int) -> None:
        """Copy spare tails as far as there is room; what follows one is idle, so un-indexing it costs no page."""
        short = max(wished - self._ledger.pool.available, 0)
        for at in reversed(range(len(self.tails))):
            if self.tails[at] is Tail.SPARE:
                self.tails[at] = Tail.UNINDEX if short else Tail.COPY
                short = max(short - 1, 0)
        self.needed += self.tails.count(Tail.COPY)


def reserve_rows(ledger: Ledger, rows: list[int], counts: list[int]) -> None:
    """Make room for ``counts[i]`` more tokens of ``rows[i]``.

    Raises:
        OutOfPages: the rows together need more pages than there are; nothing has changed.
    """
    plan = Plan(ledger, rows, counts)
    if plan.needed > ledger.pool.available:
        raise OutOfPages(plan.needed, ledger.pool.available)
    books = ledger.rows
    books.ensure_width(max((books.blocks(int(books.num_tokens[row]) + count) for row, count in plan.items), default=0))
    for (row, _), tail in zip(plan.items, plan.tails, strict=True):
        if tail is Tail.UNINDEX:
            block = int(books.num_tokens[row]) // ledger.page_size
            ledger.pool.unindex(int(ledger.tables[row, block]), block)
    pages = ledger.pool.take(plan.needed)
    at = 0
    for (row, count), tail, fresh in zip(plan.items, plan.tails, plan.fresh, strict=True):
        if not count:
            continue
        block = int(books.num_tokens[row]) // ledger.page_size
        end = books.blocks(int(books.num_tokens[row]) + count)
        taken = fresh + (tail is Tail.COPY)
        mine = pages[at : at + taken]
        at += taken
        if ledger.scrubs.many:
            ledger.scrubs.note(mine, int(books.space[row]))
        if tail is Tail.COPY:
            ledger.copies.add(int(ledger.tables[row, block]), int(mine[0]))
            ledger.tables[row, block] = mine[0]
            mine = mine[1:]
        ledger.tables[row, end - fresh : end] = mine
        books.ends[row] += count
        books.tail_locked[row] = books.tail_borrowed[row] = False

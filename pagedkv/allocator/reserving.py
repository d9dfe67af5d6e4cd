"""Reserve: pages for tokens about to be written, for many sequences at once, all or nothing.

Takes rows and counts, plans without changing anything, then carries the plan out, which cannot fail. After it no
page that will be written is shared or indexed.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from .errors import OutOfPages
from .ledger import Room

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
        fresh: per row the pages for new blocks, for each group.
        tails: per row what happens to the partial last page; after planning never SPARE.
        copied: per row the groups whose partial last page is copied if its tail is COPY.
        needed: pages in all, copies included.
        available: pages that can be had: free, idle, and those that leave a window while no step is in flight.
    """

    def __init__(self, ledger: Ledger, rows: Iterable[int], counts: Iterable[int]) -> None:
        """Look at the books; change nothing."""
        self._ledger = ledger
        self.items = list(zip(rows, counts, strict=True))
        books = ledger.rows
        self.fresh: list[int] = []
        self.tails: list[Tail] = []
        self.copied: list[list[int]] = []
        leaving: dict[int, int] = {}
        for row, count in self.items:
            num_tokens = int(books.num_tokens[row])
            self.fresh.append(books.blocks(num_tokens + count) - books.blocks(num_tokens))
            tail, copied = self._tail(row, num_tokens, leaving) if count else (Tail.WRITE, [])
            self.tails.append(tail)
            self.copied.append(copied)
        self.available = ledger.pool.available + (self._room_made() if ledger.windows else 0)
        self.needed = sum(self.fresh) * len(ledger.spans)
        self._settle_spares()

    def _tail(self, row: int, num_tokens: int, leaving: dict[int, int]) -> tuple[Tail, list[int]]:
        books, pool, index = self._ledger.rows, self._ledger.pool, self._ledger.index
        block, offset = divmod(num_tokens, self._ledger.page_size)
        if not offset or not books.tail_locked[row]:
            return Tail.WRITE, []
        pages = [int(table[row, block]) for table in books.tables]
        everywhere = list(range(len(pages)))
        if index.indexed[pages[0]]:
            if any(pool.refs[page] > 1 for page in pages):
                return Tail.COPY, everywhere
            spare = books.tail_borrowed[row] or index.is_followed(pages[0], block)
            return (Tail.SPARE if spare else Tail.UNINDEX), everywhere
        copied = []
        for group, page in enumerate(pages):
            # What leaves while a step is in flight goes on being held by it.
            gone = 0 if pool.deferred.steps else leaving.get(page, 0)
            if self._ledger.writers(page) - gone > 1:
                leaving[page] = leaving.get(page, 0) + 1
                copied.append(group)
        return (Tail.COPY if copied else Tail.WRITE), copied

    def _room_made(self) -> int:
        """Count the pages that nobody holds any more once those outside the windows have been given back."""
        ledger, going = self._ledger, dict[int, int]()
        if ledger.pool.deferred.steps:
            return 0  # the steps in flight hold them back
        for row, count in self.items:
            for group in ledger.windows if count else ():
                for page in ledger.rows.tables[group][row, ledger.leaving(group, row)].tolist():
                    going[page] = going.get(page, 0) + 1
        return sum(int(ledger.pool.refs[page]) == times for page, times in going.items())

    def _settle_spares(self) -> None:
        """Copy spare tails as far as there is room; what follows one is idle, so un-indexing it costs no page."""
        every = len(self._ledger.spans)
        self.needed += sum(len(copied) for tail, copied in self._wished() if tail is Tail.COPY)
        short = max(self.needed + every * self.tails.count(Tail.SPARE) - self.available, 0)
        for at in reversed(range(len(self.tails))):
            if self.tails[at] is Tail.SPARE:
                self.tails[at] = Tail.UNINDEX if short else Tail.COPY
                self.needed += 0 if short else every
                short = max(short - every, 0)

    def _wished(self) -> Iterable[tuple[Tail, list[int]]]:
        return zip(self.tails, self.copied, strict=True)


def room_to_grow(ledger: Ledger, row: int, count: int, chunk: int | None) -> Room:
    """Say what ``count`` more tokens of a row would take, ``chunk`` at most in one reserve (None: all at once).

    In several reserves a window group's own pages, shared ones apart, make room for those that come.
    """
    plan = Plan(ledger, [row], [count])
    if chunk is None or chunk >= count or not ledger.windows or ledger.rows.window_held[row]:
        return Room(plan.needed, plan.available)
    books, needed, fresh = ledger.rows, plan.needed, plan.fresh[0]
    blocks = books.blocks(int(books.num_tokens[row]))
    for group in ledger.windows:
        span = ledger.spans[group]
        own = int(np.count_nonzero(ledger.pool.refs[books.tables[group][row, span.sink_blocks : blocks]] == 1))
        sinks = min(max(span.sink_blocks - blocks, 0), fresh)
        needed += min(fresh - sinks, max(span.widest(chunk) - own, 0)) + sinks - fresh
    return Room(needed, ledger.pool.available)


def reserve_rows(ledger: Ledger, rows: list[int], counts: list[int]) -> None:
    """Make room for ``counts[i]`` more tokens of ``rows[i]``; pages that have left their window go back first.

    Raises:
        OutOfPages: the rows together need more pages than there are; nothing has changed.
    """
    plan = Plan(ledger, rows, counts)
    if plan.needed > plan.available:
        raise OutOfPages(plan.needed, plan.available)
    books = ledger.rows
    books.ensure_width(max((books.blocks(int(books.num_tokens[row]) + count) for row, count in plan.items), default=0))
    _slide_windows(ledger, plan)
    for (row, _), tail in zip(plan.items, plan.tails, strict=True):
        if tail is Tail.UNINDEX:
            block = int(books.num_tokens[row]) // ledger.page_size
            ledger.pool.unindex([int(table[row, block]) for table in books.tables], block)
    pages = ledger.pool.take(plan.needed)
    at = 0
    for (row, count), tail, copied, fresh in zip(plan.items, plan.tails, plan.copied, plan.fresh, strict=True):
        if not count:
            continue
        block = int(books.num_tokens[row]) // ledger.page_size
        end = books.blocks(int(books.num_tokens[row]) + count)
        for group, table in enumerate(books.tables):
            copy = tail is Tail.COPY and group in copied
            mine = pages[at : at + fresh + copy]
            at += len(mine)
            if ledger.scrubs.many:
                ledger.scrubs.note(mine, int(books.space[row]))
            if copy:
                ledger.copies.add(int(table[row, block]), int(mine[0]))
                table[row, block] = mine[0]
                mine = mine[1:]
            table[row, end - fresh : end] = mine
        books.ends[row] += count
        books.tail_locked[row] = books.tail_borrowed[row] = False


def _slide_windows(ledger: Ledger, plan: Plan) -> None:
    """Give back the pages that no token to come will see; the null page takes their place."""
    books = ledger.rows
    for group in ledger.windows:
        for row, count in plan.items:
            blocks = ledger.leaving(group, row)
            if count and blocks.size:
                pages = books.tables[group][row, blocks]
                books.tables[group][row, blocks] = 0
                books.firsts[group][row] = blocks[-1] + 1
                ledger.give_back(pages)

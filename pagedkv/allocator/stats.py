"""Numbers about an allocator at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .ledger import Ledger


@dataclass(frozen=True, slots=True)
class Stats:
    """Pages, tokens and counters.

    Attributes:
        num_pages: usable pages, the null page not counted; always ``free + idle + referenced``.
        free: pages on the free list.
        idle: pages that nobody holds but a prefix can still be found in.
        referenced: pages that sequences, pins, pending copies or steps in flight hold, each once.
        deferred: of the referenced pages, those that only steps in flight hold back.
        sequences: open sequences.
        swapped: further open sequences, which lie in a host pool.
        stored_tokens: tokens whose KV lies in referenced pages, a shared page's once; each layer group counts its own.
        held_slots: token slots of the referenced pages.
        prompt_tokens: tokens of all prompts ever opened.
        hit_tokens: of these, the ones that were stored already. Prompts opened again after a preemption count like
            any other: only the caller can tell them apart.
        evictions: idle pages given up for new tokens.
        copies: pages copied on write.
        merged_pages: pages freed at commit since an equal one was indexed.
    """

    num_pages: int
    free: int
    idle: int
    referenced: int
    deferred: int
    sequences: int
    swapped: int
    stored_tokens: int
    held_slots: int
    prompt_tokens: int
    hit_tokens: int
    evictions: int
    copies: int
    merged_pages: int

    @property
    def in_use(self) -> int:
        """The same as ``referenced``."""
        return self.referenced

    @property
    def usage(self) -> float:
        """The fraction of pages that are referenced."""
        return self.referenced / self.num_pages

    @property
    def waste(self) -> float:
        """The fraction of held slots without a token; 0 where nothing is held."""
        return 1 - self.stored_tokens / self.held_slots if self.held_slots else 0.0


def collect(ledger: Ledger) -> Stats:
    """Count; changes nothing. Cost: one pass over the rows, not over the pages."""
    pool, counters = ledger.pool, ledger.counters
    usable = pool.num_pages - 1
    referenced = usable - pool.available
    held_slots = referenced * ledger.page_size
    return Stats(
        num_pages=usable,
        free=pool.num_free,
        idle=pool.num_idle,
        referenced=referenced,
        deferred=sum(int(pool.refs[page]) == 1 for page in pool.deferred.pages),
        sequences=len(ledger.rows.live()),
        swapped=sum(swap.row < 0 for swap in ledger.swaps.values()),
        stored_tokens=held_slots - _empty_slots(ledger),
        held_slots=held_slots,
        prompt_tokens=counters.prompt_tokens,
        hit_tokens=counters.hit_tokens,
        evictions=pool.evictions,
        copies=ledger.copies.made,
        merged_pages=counters.merged_pages,
    )


def _empty_slots(ledger: Ledger) -> int:
    """Count the slots without a token in referenced pages: partial tails, reserved blocks, sources about to go."""
    rows, pool, size = ledger.rows, ledger.pool, ledger.page_size
    live = np.array(rows.live(), np.int64)
    lengths = rows.num_tokens[live]
    blocks = -(-lengths // size)
    reserved = -(-rows.ends[live] // size) - blocks
    filled = dict.fromkeys((page for page in pool.pins if pool.table_refs(page) == 0), 0)
    partial = (lengths % size).nonzero()[0]
    for table in rows.tables:
        tails = table[live[partial], blocks[partial] - 1]
        for page, block, fill in zip(
            tails.tolist(), (blocks[partial] - 1).tolist(), (lengths[partial] % size).tolist(), strict=True
        ):
            if page not in filled and pool.table_refs(page) > 1:
                # A fork may have more in it than this sequence, which was cut.
                longest = int(lengths[table[live, block] == page].max())
                filled[page] = min(longest - block * size, size)
            else:
                filled[page] = max(filled.get(page, 0), fill)
    findable = ledger.index.indexed
    # A pin holds full pages only, also where a reset has made them unfindable.
    full = {page for pin in ledger.pins.values() for page in pin.pages().tolist()}
    empty = sum(size - fill for page, fill in filled.items() if not findable[page] and page not in full)
    return int(reserved.sum()) * size * len(rows.tables) + empty

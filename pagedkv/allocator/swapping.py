"""Swap: a sequence's pages leave the device for a host pool and come back, by plans that somebody else carries out.

Takes rows at rest and host pools, gives plans of page copies, and refuses to move bytes. Until a plan is finished or
cancelled both ends stay held: the device pages by the sequence's row, the host pages by the record here. Every page is
copied, also shared and indexed ones, and taken from nobody; on the way back, full pages that the prefix index has by
then are shared instead of copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from .committing import index_blocks
from .errors import CopiesPending, OutOfPages, PlanSettled
from .index_node import Blocks, Match
from .lifecycle import close_row, pages_of
from .sequence import CLOSED, SWAPPED

if TYPE_CHECKING:
    from .holding import Holding
    from .host_pool import HostPool
    from .index_node import Node
    from .ledger import Ledger
    from .prefix_index import PageArray
    from .sequence import Sequence
    from .tokens import TokenArray

Place = tuple[int, int]


class SwapPlan:
    """Page copies between the device and a host pool; a context manager that finishes, or cancels on an exception.

    Attributes:
        sequence: whose pages they are.
        to_host: the direction: true out of the device, false into it.
        copies: int32 ``[n, 2]``: device page, host page. Run `BlockAllocator.take_scrubs` before copies into the
            device, since a scrub clears whole pages.
    """

    __slots__ = ("_allocator", "_open", "copies", "sequence", "to_host")

    def __init__(self, allocator: Holding, sequence: Sequence, copies: PageArray, *, to_host: bool) -> None:
        """Remember; the books are changed by then."""
        self._allocator = allocator
        self._open = True
        self.sequence = sequence
        self.copies = copies
        self.to_host = to_host

    def __repr__(self) -> str:
        way = "out" if self.to_host else "in"
        return (
            f"<SwapPlan of {self.sequence!r}, {way}, {len(self.copies)} copies, {'open' if self._open else 'settled'}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._open:
            if kind is None:
                self.finish()
            else:
                self.cancel()

    def finish(self) -> None:
        """Say that the copies have run: the end they came from is given back.

        Raises:
            PlanSettled: it was finished or cancelled before.
        """
        self._allocator.finish_swap(self)

    def cancel(self) -> None:
        """Say that the copies are not wanted (none is running any more): the end they go to is given back.

        Raises:
            PlanSettled: it was finished or cancelled before.
        """
        self._allocator.cancel_swap(self)

    def settle(self) -> None:
        """Close the plan; the allocator does it."""
        if not self._open:
            raise PlanSettled(f"{self!r} was finished or cancelled before")
        self._open = False


class Swap:
    """A sequence that is swapped out or on its way.

    Attributes:
        sequence: the handle.
        host_pool: where it goes.
        places: (layer group, block) of all that was moved.
        host_pages: the page of each of these there.
        num_tokens: its length.
        prompt_len, opaque_from, tail: what its row had (`rows.Rows`).
        window_held: likewise.
        firsts: likewise, per group.
        known: uint32 ids of its findable full pages.
        row: its row while a plan is open, else -1.
        plan: the open plan, or None.
        num_hits: full pages of each group that the way in did not copy, since they could be found.
    """

    def __init__(self, ledger: Ledger, row: int, sequence: Sequence, host_pool: HostPool, places: list[Place]) -> None:
        """Note all that a row must get back; take host pages for it, or raise `OutOfPages`."""
        rows = ledger.rows
        self.sequence = sequence
        self.host_pool = host_pool
        self.places = places
        self.host_pages = host_pool.take(len(places), sequence)
        self.num_tokens = int(rows.num_tokens[row])
        self.prompt_len = int(rows.prompt_len[row])
        self.opaque_from = int(rows.opaque_from[row])
        self.window_held = bool(rows.window_held[row])
        self.firsts = [_first(ledger, row, group) for group in range(len(ledger.spans))]
        self.tail: TokenArray = rows.tail_tokens[row].copy()
        self.known = ledger.path_tokens(row, min(self.num_tokens, self.opaque_from) // ledger.page_size)
        self.row = row
        self.plan: SwapPlan | None = None
        self.num_hits = 0

    def forget_prefix(self) -> None:
        """Never let its KV be found again: the prefix cache was reset."""
        if self.num_tokens:
            self.known, self.opaque_from = b"", 0


def start_out(ledger: Ledger, row: int, host_pool: HostPool) -> tuple[Swap, PageArray]:
    """Take host pages for all of a row that is at rest; return the record and the copies to run.

    Raises:
        CopiesPending: a page of the row is still to be copied into.
        OutOfPages: the host pool has too few pages.
    """
    sequence = ledger.rows.sequences[row]
    assert sequence is not None
    places = _places(ledger, row)
    pages = [int(ledger.rows.tables[group][row, block]) for group, block in places]
    unready = next((page for page in pages if page in ledger.copies.source_of), None)
    if unready is not None:
        raise CopiesPending(
            f"page {unready} of {sequence!r} is still to be copied into: run take_copies(), then call "
            "acknowledge_copies()"
        )
    swap = Swap(ledger, row, sequence, host_pool, places)
    ledger.swaps[sequence.serial] = swap
    sequence._row, sequence._swap = SWAPPED, swap
    return swap, _pairs(pages, swap.host_pages)


def _first(ledger: Ledger, row: int, group: int) -> int:
    """Return the first block of a group, sinks apart, that a row takes with it."""
    held = int(ledger.rows.firsts[group][row])
    if ledger.rows.window_held[row]:
        return held
    return max(held, ledger.spans[group].keep_from(int(ledger.rows.num_tokens[row])))


def _places(ledger: Ledger, row: int) -> list[Place]:
    """Return (group, block) of all that a row takes with it."""
    held = range(ledger.rows.held(row))
    return [
        (group, block)
        for group, span in enumerate(ledger.spans)
        for block in held
        if block < span.sink_blocks or block >= _first(ledger, row, group)
    ]


def start_in(ledger: Ledger, swap: Swap) -> PageArray:
    """Make a row for a swapped sequence and take its device pages; return the copies to run.

    Raises:
        OutOfPages: the device has too few pages, those that the prefix index has counted as had.
    """
    pool, rows = ledger.pool, ledger.rows
    num_hits, node, found = _found(ledger, swap)
    hits = np.array(list(found.values()), np.int32)
    rest = [at for at, place in enumerate(swap.places) if place not in found]
    available = pool.available - pool.num_idle_among(hits)
    if len(rest) > available:
        raise OutOfPages(len(rest), available)
    root = ledger.index.enter(swap.sequence.prompt.namespace)
    row = rows.claim()
    rows.ensure_width(rows.blocks(swap.num_tokens))
    if hits.size:
        pool.policy.hit(hits.tolist())
        pool.hold(hits)
    ledger.scrubs.enter(root.serial, pool.num_used)
    fresh = pool.take(len(rest))
    if ledger.scrubs.many:
        ledger.scrubs.note(fresh, root.serial)
    pages = found | dict(zip((swap.places[at] for at in rest), fresh.tolist(), strict=True))
    for (group, block), page in pages.items():
        rows.tables[group][row, block] = page
    for group, first in enumerate(swap.firsts):
        rows.firsts[group][row] = first
    rows.window_held[row] = swap.window_held
    rows.num_tokens[row] = rows.ends[row] = swap.num_tokens
    rows.prompt_len[row] = swap.prompt_len
    # What is copied is not there yet, so until then only the hits may be found.
    rows.opaque_from[row] = min(swap.opaque_from, num_hits * ledger.page_size)
    rows.tail_tokens[row] = swap.tail
    rows.root[row], rows.space[row] = root, root.serial
    rows.cursor[row] = root if node is None else node
    rows.sequences[row] = swap.sequence
    swap.row, swap.num_hits = row, num_hits
    return _pairs(fresh.tolist(), [swap.host_pages[at] for at in rest])


def _found(ledger: Ledger, swap: Swap) -> tuple[int, Node | None, dict[Place, int]]:
    """Return how many full blocks need no copy, the index node they end in, and their page by place.

    All or nothing: where the index lacks a page that the sequence holds within these blocks (one kept by
    `Sequence.hold_window`), everything is copied.
    """
    prompt, limit = swap.sequence.prompt, len(swap.known) // 4
    match = Match(None, [], 0, 0)
    if limit:
        match = ledger.index.match(prompt.namespace, Blocks(swap.known, prompt.media), limit)
    num_hits = len(match.pages)
    wanted = {place for place in swap.places if place[1] < num_hits}
    found = {
        (group, block): page
        for group in range(len(ledger.spans))
        for block, page in pages_of(ledger, match, group)
        if (group, block) in wanted
    }
    if len(found) < len(wanted):
        return 0, None, {}
    return num_hits, match.node, found


def leave_device(ledger: Ledger, swap: Swap) -> None:
    """Give back the row and its device pages: a finished way out, or a cancelled way in."""
    close_row(ledger, swap.row)
    swap.row, swap.plan = -1, None


def leave_host(ledger: Ledger, swap: Swap) -> None:
    """Give back the host pages and let the row be an ordinary one: a finished way in, or a cancelled way out."""
    sequence = swap.sequence
    swap.host_pool.give_back(swap.host_pages)
    del ledger.swaps[sequence.serial]
    sequence._row, sequence._swap = swap.row, None


def make_findable(ledger: Ledger, swap: Swap) -> None:
    """Index what was copied in, as a commit would; of two equal pages the indexed one stays."""
    ledger.rows.opaque_from[swap.row] = swap.opaque_from
    copied = np.frombuffer(swap.known, np.uint32)[swap.num_hits * ledger.page_size :]
    if copied.size:
        index_blocks(ledger, swap.row, swap.num_hits, copied)


def close_swapped(ledger: Ledger, swap: Swap) -> None:
    """Close a sequence that lies in a host pool."""
    swap.host_pool.give_back(swap.host_pages)
    del ledger.swaps[swap.sequence.serial]
    swap.sequence._row, swap.sequence._swap = CLOSED, None


def _pairs(device: list[int], host: list[int]) -> PageArray:
    return np.array([device, host], np.int32).T

"""Opening, forking, cutting and closing sequences; dropping the prefix cache.

Takes checked prompts and rows, changes the books, and raises nothing: what could fail was asked before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import BeyondWindow
from .group_index import GroupIndex
from .index_node import Blocks, Match
from .ledger import Room

if TYPE_CHECKING:
    from .groups import Span
    from .ledger import Ledger
    from .prefix_index import PageArray
    from .prompt import Prompt
    from .sequence import Sequence


def find(ledger: Ledger, prompt: Prompt) -> Match:
    """Find what of the prompt is stored; changes nothing."""
    if not ledger.prefix_cache or not ledger.index.roots or not prompt.limit:
        return Match(None, [], 0, 0)
    return ledger.index.match(prompt.namespace, Blocks(prompt.tokens.tobytes(), prompt.media), prompt.limit)


def room_for(ledger: Ledger, prompt: Prompt, growth: int, chunk: int | None) -> Room:
    """Count the pages that the prompt and ``growth`` tokens more would take; changes nothing.

    Idle hits count on neither side: not as needed, and not as available either. A sub-page hit saves no page: its
    tokens are copied into one. ``chunk`` is the most tokens that one reserve will take; None: all at once.
    """
    match = find(ledger, prompt)
    whole = min(len(match.pages), len(prompt.tokens) // ledger.page_size)
    end = ledger.rows.blocks(len(prompt.tokens) + growth)
    needed = 0
    if not ledger.is_plain:
        step = len(prompt.tokens) + growth - whole * ledger.page_size
        step = step if chunk is None else min(chunk, step)
        for group in ledger.windows:
            hits = np.array([page for block, page in pages_of(ledger, match, group) if block < whole], np.int32)
            needed += _window_room(ledger.spans[group], whole, end, step=step, idle=ledger.pool.num_idle_among(hits))
    needed += (end - whole) * (len(ledger.spans) - len(ledger.windows))
    return Room(needed, ledger.pool.available - ledger.pool.num_idle_among(hits_of(ledger, match, whole)))


def _window_room(span: Span, whole: int, end: int, *, step: int, idle: int) -> int:
    """Count the pages that a window group takes from block ``whole`` to ``end``, in steps of ``step`` tokens.

    Pages that leave the window make room for those that come, also the ``idle`` ones that were found.
    """
    sinks = max(min(span.sink_blocks, end) - whole, 0)
    idle = max(idle - min(span.sink_blocks, whole), 0)
    return sinks + min(end - whole - sinks, max(span.widest(step) - idle, 0))


def pages_of(ledger: Ledger, match: Match, group: int) -> list[tuple[int, int]]:
    """Return (block, page) of all that a group has of a match, first block first."""
    index = ledger.index
    if not isinstance(index, GroupIndex) or group == index.lead:
        return list(enumerate([*match.pages, match.tail_page] if match.tail_tokens else match.pages))
    return list(match.sheets[index.others.index(group)].items()) if match.sheets else []


def hits_of(ledger: Ledger, match: Match, end: int) -> PageArray:
    """Return the pages before block ``end`` of a match, of all groups, full attention's first."""
    if ledger.is_plain:
        return np.array([*match.pages, match.tail_page][:end], np.int32)
    groups = sorted(range(len(ledger.spans)), key=lambda group: not ledger.spans[group].is_full)
    return np.array([page for g in groups for block, page in pages_of(ledger, match, g) if block < end], np.int32)


def open_row(ledger: Ledger, prompt: Prompt, sequence: Sequence) -> int:
    """Make a row for ``sequence``, holding all pages of its prompt that are stored already."""
    pool, rows, size = ledger.pool, ledger.rows, ledger.page_size
    match = find(ledger, prompt)
    whole, tail = len(match.pages), match.tail_tokens
    hits = hits_of(ledger, match, whole + (tail > 0))
    if tail and pool.available - pool.num_idle_among(hits) < len(ledger.spans):
        # The first write would have to copy the last pages, and there is no room for that.
        match = whole_hit(ledger, match)
        whole, tail = len(match.pages), 0
        hits = hits_of(ledger, match, whole)
    root = ledger.index.enter(prompt.namespace)
    row = rows.claim()
    rows.ensure_width(whole + (tail > 0))
    num_tokens = whole * size + tail
    if hits.size:
        pool.policy.hit(hits.tolist())
        pool.hold(hits)
        _lay_out(ledger, row, match, hits, num_tokens)
    rows.num_tokens[row] = rows.ends[row] = num_tokens
    rows.prompt_len[row] = len(prompt.tokens)
    rows.opaque_from[row] = ledger.nothing_opaque
    if prompt.opaque_from is not None:
        rows.opaque_from[row] = min(ledger.nothing_opaque, prompt.opaque_from)
    rows.tail_tokens[row, :tail] = prompt.tokens[whole * size : num_tokens]
    rows.tail_locked[row] = rows.tail_borrowed[row] = tail > 0
    rows.root[row], rows.space[row] = root, root.serial
    ledger.scrubs.enter(root.serial, pool.num_used)
    rows.cursor[row] = root if match.node is None else match.node
    rows.sequences[row] = sequence
    ledger.counters.opened += 1
    ledger.counters.prompt_tokens += len(prompt.tokens)
    ledger.counters.hit_tokens += num_tokens
    return row


def whole_hit(ledger: Ledger, match: Match) -> Match:
    """Return the match without its sub-page tail; the groups may then have to give up more."""
    if isinstance(ledger.index, GroupIndex):
        return ledger.index.without_tail(match)
    return match._replace(tail_page=0, tail_tokens=0)


def _lay_out(ledger: Ledger, row: int, match: Match, hits: PageArray, num_tokens: int) -> None:
    """Write the pages found into the row's tables."""
    if ledger.is_plain:
        ledger.tables[row, : len(hits)] = hits
        return
    for group, (table, span) in enumerate(zip(ledger.rows.tables, ledger.spans, strict=True)):
        for block, page in pages_of(ledger, match, group):
            table[row, block] = page
        ledger.rows.firsts[group][row] = span.keep_from(num_tokens)


def fork_row(ledger: Ledger, parent: int, sequence: Sequence) -> int:
    """Make a row for ``sequence`` that shares every page of row ``parent``."""
    rows = ledger.rows
    row = rows.claim()
    held = rows.held(parent)
    for table, span, first in zip(rows.tables, ledger.spans, rows.firsts, strict=True):
        pages = table[parent, :held]
        table[row, :held] = pages
        first[row] = first[parent]
        ledger.pool.hold(pages if span.is_full else pages[pages != 0])
    if rows.num_tokens[parent] % ledger.page_size:
        rows.tail_locked[parent] = True
    for array in (rows.num_tokens, rows.ends, rows.prompt_len, rows.opaque_from, rows.space):
        array[row] = array[parent]
    for flags in (rows.tail_locked, rows.tail_borrowed, rows.window_held):
        flags[row] = flags[parent]
    rows.tail_tokens[row] = rows.tail_tokens[parent]
    root = rows.root[row] = rows.root[parent]
    if root is not None:
        root.users += 1
    rows.cursor[row] = rows.cursor[parent]
    rows.sequences[row] = sequence
    return row


def check_truncate(ledger: Ledger, row: int, num_tokens: int) -> None:
    """Raise `BeyondWindow` where a window group has given back pages that it needs after ``num_tokens`` tokens."""
    for group in ledger.windows:
        table = ledger.rows.tables[group]
        lost = [block for block in ledger.spans[group].needed(num_tokens) if not table[row, block]]
        if lost:
            raise BeyondWindow(
                f"num_tokens must be a length whose window group {group} still holds, was {num_tokens}: "
                f"{ledger.rows.sequences[row]!r} has given back block {lost[0]}; see hold_window()"
            )


def truncate_row(ledger: Ledger, row: int, num_tokens: int) -> None:
    """Forget the row's tokens from ``num_tokens``, which is less than it has, on."""
    rows, index, size = ledger.rows, ledger.index, ledger.page_size
    before, opaque = int(rows.num_tokens[row]), int(rows.opaque_from[row])
    block, offset = divmod(num_tokens, size)
    same_tail = block == before // size
    known = num_tokens <= opaque
    if offset and not same_tail:
        page = int(ledger.tables[row, block])
        if index.indexed[page]:
            rows.tail_tokens[row] = np.frombuffer(index.page_tokens(page, block), np.uint32)
        else:
            # The tokens of a full page that was not indexed are not kept, so it can never be indexed.
            known, rows.opaque_from[row] = False, min(opaque, block * size)
    if known:
        rows.opaque_from[row] = ledger.nothing_opaque
    ledger.drop_blocks(row, rows.blocks(num_tokens), rows.blocks(before))
    for group in ledger.windows:
        rows.firsts[group][row] = min(int(rows.firsts[group][row]), rows.blocks(num_tokens))
    rows.num_tokens[row] = rows.ends[row] = num_tokens
    rows.prompt_len[row] = min(int(rows.prompt_len[row]), num_tokens)
    rows.tail_locked[row] = offset > 0
    rows.tail_borrowed[row] = offset > 0 and same_tail and bool(rows.tail_borrowed[row])
    cursor = rows.cursor[row]
    if cursor is not None:
        rows.cursor[row] = index.at_depth(cursor, min(num_tokens, opaque) // size)
        ledger.pool.settle(cursor)


def close_row(ledger: Ledger, row: int) -> None:
    """Give back all that the row holds, last block first."""
    rows = ledger.rows
    ledger.drop_blocks(row, 0, rows.held(row))
    root, cursor = rows.root[row], rows.cursor[row]
    rows.give_up(row)
    if cursor is not None:
        ledger.pool.settle(cursor)
    if root is not None:
        ledger.index.leave(root)


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What `reset_prefix_cache` did; true where nothing of the old KV is held any more.

    Attributes:
        dropped: idle pages that were freed.
        still_held: pages that open sequences go on holding, those in host pools included. No later sequence can find
            these, nor pages that these sequences fill from now on, since their KV descends from the old.
    """

    dropped: int
    still_held: int

    def __bool__(self) -> bool:
        return self.still_held == 0


def reset(ledger: Ledger) -> ResetReport:
    """Make everything stored unfindable, for ever; free what nobody holds."""
    rows, pool, index = ledger.rows, ledger.pool, ledger.index
    dropped = pool.clear_index()
    swapped = 0
    for swap in ledger.swaps.values():
        swap.forget_prefix()
        swapped += len(swap.host_pages)
    for row in rows.live():
        old = rows.root[row]
        if old is None:
            continue
        rows.root[row] = rows.cursor[row] = root = index.enter(old.namespace)
        rows.space[row] = root.serial
        if rows.ends[row]:
            rows.opaque_from[row] = 0
    return ResetReport(dropped, pool.num_pages - 1 - pool.available + swapped)

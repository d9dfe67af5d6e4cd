"""Opening, forking, cutting and closing sequences; dropping the prefix cache.

Takes checked prompts and rows, changes the books, and raises nothing: what could fail was asked before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .index_node import Blocks, Match
from .ledger import Room

if TYPE_CHECKING:
    from .ledger import Ledger
    from .prompt import Prompt
    from .sequence import Sequence


def find(ledger: Ledger, prompt: Prompt) -> Match:
    """Find what of the prompt is stored; changes nothing."""
    if not ledger.prefix_cache or not ledger.index.roots or not prompt.limit:
        return Match(None, [], 0, 0)
    return ledger.index.match(prompt.namespace, Blocks(prompt.tokens.tobytes(), prompt.media), prompt.limit)


def room_for(ledger: Ledger, prompt: Prompt, growth: int) -> Room:
    """Count the pages that the prompt and ``growth`` tokens more would take; changes nothing.

    Idle hits count on neither side: not as needed, and not as available either. A sub-page hit saves no page: its
    tokens are copied into one.
    """
    hits = np.array(find(ledger, prompt).pages, np.int32)
    needed = ledger.rows.blocks(len(prompt.tokens) + growth) - len(hits)
    return Room(needed, ledger.pool.available - ledger.pool.num_idle_among(hits))


def open_row(ledger: Ledger, prompt: Prompt, sequence: Sequence) -> int:
    """Make a row for ``sequence``, holding all pages of its prompt that are stored already."""
    pool, rows, size = ledger.pool, ledger.rows, ledger.page_size
    match = find(ledger, prompt)
    whole = len(match.pages)
    hits = np.array([*match.pages, match.tail_page] if match.tail_page else match.pages, np.int32)
    tail = match.tail_tokens
    if tail and pool.available - pool.num_idle_among(hits) < 1:
        hits, tail = hits[:-1], 0  # the first write would have to copy this page, and there is no room for that
    root = ledger.index.enter(prompt.namespace)
    row = rows.claim()
    rows.ensure_width(len(hits))
    if hits.size:
        pool.policy.hit(hits.tolist())
        pool.hold(hits)
        ledger.tables[row, : len(hits)] = hits
    num_tokens = whole * size + tail
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


def fork_row(ledger: Ledger, parent: int, sequence: Sequence) -> int:
    """Make a row for ``sequence`` that shares every page of row ``parent``."""
    rows = ledger.rows
    row = rows.claim()
    pages = ledger.tables[parent, : rows.held(parent)]
    ledger.tables[row, : len(pages)] = pages
    ledger.pool.hold(pages)
    if rows.num_tokens[parent] % ledger.page_size:
        rows.tail_locked[parent] = True
    for array in (rows.num_tokens, rows.ends, rows.prompt_len, rows.opaque_from, rows.space):
        array[row] = array[parent]
    for flags in (rows.tail_locked, rows.tail_borrowed):
        flags[row] = flags[parent]
    rows.tail_tokens[row] = rows.tail_tokens[parent]
    root = rows.root[row] = rows.root[parent]
    if root is not None:
        root.users += 1
    rows.cursor[row] = rows.cursor[parent]
    rows.sequences[row] = sequence
    return row


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
    rows.num_tokens[row] = rows.ends[row] = num_tokens
    rows.prompt_len[row] = min(int(rows.prompt_len[row]), num_tokens)
    rows.tail_locked[row] = offset > 0
    rows.tail_borrowed[row] = offset > 0 and same_tail and bool(rows.tail_borrowed[row])
    cursor = rows.cursor[row]
    if cursor is not None:
        rows.cursor[row] = index.at_depth(cursor, min(num_tokens, opaque) // size)


def close_row(ledger: Ledger, row: int) -> None:
    """Give back all that the row holds, last block first."""
    rows = ledger.rows
    ledger.drop_blocks(row, 0, rows.held(row))
    root = rows.root[row]
    rows.give_up(row)
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

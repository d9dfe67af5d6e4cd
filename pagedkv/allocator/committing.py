"""Commit: KV has been written; full pages become findable, duplicates are merged.

Takes rows with their tokens, checks them without changing anything, then writes the books, which cannot fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import CopiesPending, NotReserved, PromptMismatch
from .group_committing import index_group_blocks
from .group_index import GroupIndex
from .index_node import Blocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .ledger import Ledger
    from .tokens import TokenArray


def require_prompt(ledger: Ledger, row: int, tokens: TokenArray) -> None:
    """Raise `PromptMismatch` where ``tokens``, the row's next, are inside its prompt and differ from it."""
    start, sequence = int(ledger.rows.num_tokens[row]), ledger.rows.sequences[row]
    inside = min(int(ledger.rows.prompt_len[row]) - start, len(tokens))
    if inside <= 0 or sequence is None:
        return
    prompt = sequence.prompt.tokens[start : start + inside]
    unlike = prompt != tokens[:inside]
    if unlike.any():
        at = int(unlike.argmax())
        raise PromptMismatch(
            f"tokens must equal the prompt of {sequence!r}: at position {start + at} it has {prompt[at]}, "
            f"{tokens[at]} was given"
        )


def check_commit(ledger: Ledger, row: int, count: int, tokens: TokenArray | None) -> None:
    """Raise where ``count`` tokens (None: that no token names) may not be committed to the row."""
    rows, size = ledger.rows, ledger.page_size
    start, reserved = int(rows.num_tokens[row]), rows.reserved(row)
    if count > reserved:
        raise NotReserved(f"{count} tokens committed to {rows.sequences[row]!r}, {reserved} are reserved")
    if tokens is not None:
        require_prompt(ledger, row, tokens)
    if count and ledger.copies:
        written = slice(start // size, rows.blocks(start + count))
        page = ledger.copies.touch(np.concatenate([table[row, written] for table in rows.tables]))
        if page is not None:
            raise CopiesPending(
                f"page {page} of {rows.sequences[row]!r} is part of a copy that was not acknowledged: run "
                "take_copies() before writing, then call acknowledge_copies()"
            )


def commit_row(ledger: Ledger, row: int, count: int, tokens: TokenArray | None) -> None:
    """Store that the row's next ``count`` tokens have their KV, and give the rest of the reservation back."""
    rows, size = ledger.rows, ledger.page_size
    start, held = int(rows.num_tokens[row]), rows.held(row)
    end = start + count
    rows.num_tokens[row] = rows.ends[row] = end
    if tokens is None and count:
        rows.opaque_from[row] = min(int(rows.opaque_from[row]), start)
    named = min(end, int(rows.opaque_from[row])) - start
    if tokens is not None and named > 0:
        data = np.concatenate([rows.tail_tokens[row, : start % size], tokens[:named]])
        rest = len(data) % size
        if len(data) >= size:
            index_blocks(ledger, row, start // size, data[: len(data) - rest])
        rows.tail_tokens[row, :rest] = data[len(data) - rest :]
    ledger.drop_blocks(row, rows.blocks(end), held)


def index_blocks(ledger: Ledger, row: int, block: int, tokens: TokenArray) -> None:
    """Make the row's full pages from ``block`` on findable; of two equal pages the indexed one stays."""
    if isinstance(ledger.index, GroupIndex):
        index_group_blocks(ledger, ledger.index, row, block, tokens)
        return
    rows = ledger.rows
    cursor, sequence = rows.cursor[row], rows.sequences[row]
    assert cursor is not None
    assert sequence is not None
    entries = ledger.tables[row, block : block + len(tokens) // ledger.page_size]
    node, found = ledger.index.insert(cursor, Blocks(tokens.tobytes(), sequence.prompt.media, block), entries)
    rows.cursor[row] = node
    if found:
        twins = entries[: len(found)].copy()
        indexed = np.array(found, np.int32)
        ledger.pool.hold(indexed)
        entries[: len(found)] = indexed
        ledger.give_back(twins[::-1])
        ledger.counters.merged_pages += len(found)
    ledger.tell_stored(row, block + len(found), tokens[len(found) * ledger.page_size :])


def index_full_tails(ledger: Ledger, filled: Iterable[tuple[int, int]]) -> None:
    """Make blocks (row, block), just filled with their rows' tail tokens, findable where their KV may be."""
    rows, table, append = ledger.rows, ledger.tables, ledger.index.append
    for row, block in filled:
        if rows.opaque_from.item(row) < (block + 1) * ledger.page_size:
            continue
        cursor, sequence = rows.cursor[row], rows.sequences[row]
        assert cursor is not None
        assert sequence is not None
        tokens = rows.tail_tokens[row]
        if sequence.prompt.media or not append(cursor, block, tokens.tobytes(), table.item(row, block)):
            index_blocks(ledger, row, block, tokens)
        elif ledger.content_policy is not None:
            ledger.tell_stored(row, block, tokens)

"""Commit with several layer groups: the pages of every group become findable, or give way to the indexed ones.

Takes a row's full pages with their tokens and writes the books, which cannot fail; `committing` has checked them.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from .content_hash import DIGEST_BYTES, chain, namespace_digest
from .index_node import Blocks

if TYPE_CHECKING:
    from .group_index import GroupIndex
    from .index_node import Node
    from .ledger import Ledger
    from .tokens import TokenArray


def index_group_blocks(ledger: Ledger, index: GroupIndex, row: int, block: int, tokens: TokenArray) -> None:
    """Make the row's full pages from ``block`` on findable, group by group; of two equal ones the indexed one stays."""
    rows = ledger.rows
    cursor, sequence = rows.cursor[row], rows.sequences[row]
    assert cursor is not None
    assert sequence is not None
    count = len(tokens) // ledger.page_size
    added = Blocks(tokens.tobytes(), sequence.prompt.media, block)
    entries = np.zeros(count, np.int32) if index.lead is None else rows.tables[index.lead][row, block : block + count]
    node, found = index.insert(cursor, added, entries)
    rows.cursor[row] = node
    new = list[tuple[int, int, int]]()
    if index.lead is not None:
        new += [(index.lead, at, page) for at, page in enumerate(entries.tolist()) if at >= len(found)]
        _merge(ledger, row, index.lead, block, [*found, *entries[len(found) :].tolist()])
    for sheet, group in enumerate(index.others):
        mine = rows.tables[group][row, block : block + count].tolist()
        kept = _adopt(index, node, sheet, block, mine)
        new += [(group, at, page) for at, page in enumerate(mine) if page and kept[at] == page]
        _merge(ledger, row, group, block, kept)
    if ledger.content_policy is not None and new:
        _tell_stored(ledger, index, row, added, new)


def _adopt(index: GroupIndex, node: Node, sheet: int, block: int, pages: list[int]) -> list[int]:
    """Name one group's pages on the path that ends in ``node``; return the pages named there now.

    The null page stands where a sequence that comes back from a host pool has none: its window has left the block.
    """
    kept = list(pages)
    for at in reversed(range(len(pages))):
        node = index.at_depth(node, block + at + 1)
        if pages[at]:
            kept[at] = index.adopt(node, sheet, block + at, pages[at])
    return kept


def _merge(ledger: Ledger, row: int, group: int, block: int, kept: list[int]) -> None:
    """Put the indexed pages in the table's place of their twins, and give the twins back."""
    entries = ledger.rows.tables[group][row, block : block + len(kept)]
    indexed = np.array(kept, np.int32)
    unlike = indexed != entries
    if unlike.any():
        twins = entries[unlike]
        ledger.pool.hold(indexed[unlike])
        entries[:] = indexed
        ledger.give_back(twins[::-1])
        ledger.counters.merged_pages += len(twins)


def _tell_stored(ledger: Ledger, index: GroupIndex, row: int, added: Blocks, new: list[tuple[int, int, int]]) -> None:
    """Tell a policy that asks for it what the new pages, (group, place, page), hold; the groups' names differ."""
    policy, sequence = ledger.content_policy, ledger.rows.sequences[row]
    assert policy is not None
    assert sequence is not None
    count = len(added.tokens) // index.page_bytes
    before = ledger.path_tokens(row, added.first)
    media, start = sequence.prompt.media, namespace_digest(sequence.namespace)
    digests = chain(start, before + added.tokens, added.first + count, media)[added.first :]
    for group in range(len(ledger.spans)):
        mine = [(page, digests[at]) for where, at, page in new if where == group]
        if mine:
            salt = b"" if group == index.lead else group.to_bytes(2, "little")
            names = [blake2b(name + salt, digest_size=DIGEST_BYTES).digest() if salt else name for _, name in mine]
            policy.stored([page for page, _ in mine], names)

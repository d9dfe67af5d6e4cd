"""The audit of what only allocators with several layer groups have: sheets, windows and dead blocks.

Takes a ledger, gives silence or an `InvariantViolation`, and changes nothing; `audit` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InvariantViolation

if TYPE_CHECKING:
    from .group_index import GroupIndex
    from .index_node import Node
    from .ledger import Ledger


def audit_groups(ledger: Ledger, index: GroupIndex) -> None:
    """Raise `InvariantViolation` at the first invariant of the groups that does not hold."""
    _windows(ledger)
    needed = ledger.anchors()
    for root in index.roots.values():
        _alive(ledger, index, root, needed, [])
    for row in ledger.rows.live():
        _on_path(ledger, index, row)


def _windows(ledger: Ledger) -> None:
    """Prove that every sequence has the pages that its next token sees."""
    rows = ledger.rows
    for row in rows.live():
        for group, span in enumerate(ledger.spans):
            if any(not rows.tables[group][row, block] for block in span.needed(int(rows.num_tokens[row]))):
                owner = rows.sequences[row]
                raise InvariantViolation(f"group {group} has given back a page of the window", owner=owner)


def _alive(
    ledger: Ledger, index: GroupIndex, node: Node, needed: dict[Node, int], above: list[list[int | None]]
) -> bool:
    """Prove that each block below ``node`` ends a hit, or leads to one, or is needed; return whether there is any.

    ``above`` has, for each block before the node, the page of every sheet; hits are judged from these alone.
    """
    refs = ledger.pool.refs
    blocks = [[sheet.get(block) for sheet in node.sheets] for block in range(node.start, node.end)]
    here = above + blocks
    for sheet in node.sheets:
        if any(not node.start <= block < node.end for block in sheet):
            raise InvariantViolation("a sheet has a block outside its node's run", page=next(iter(sheet.values())))
    useful = False
    for child in node.children.nodes.values() if node.children else ():
        useful |= _alive(ledger, index, child, needed, here)
    spans = [ledger.spans[group] for group in index.others]
    for depth in range(node.end, node.start, -1):
        tokens = depth * ledger.page_size
        useful |= all(here[b][at] is not None for at, span in enumerate(spans) for b in span.needed(tokens))
        useful |= needed.get(node, 0) >= depth if index.lead is None else bool(refs[node.pages[depth - 1 - node.start]])
        if not useful:
            pages = [page for page in (node.pages[depth - 1 - node.start], *blocks[depth - 1 - node.start]) if page]
            raise InvariantViolation(f"block {depth - 1} can be hit no more", page=next(iter(pages), None))
    return useful


def _on_path(ledger: Ledger, index: GroupIndex, row: int) -> None:
    """Prove that the window pages of a sequence's findable blocks are those that its path in the index names."""
    rows = ledger.rows
    depth = int(min(rows.num_tokens[row], rows.opaque_from[row])) // ledger.page_size
    node = rows.cursor[row]
    assert node is not None
    for block in reversed(range(depth)):
        node = index.at_depth(node, block + 1)
        for sheet, group in enumerate(index.others):
            page = int(rows.tables[group][row, block])
            if page and node.sheets[sheet].get(block) != page:
                owner = rows.sequences[row]
                raise InvariantViolation(
                    "a window page is not the one of its path in the index", page=page, owner=owner
                )

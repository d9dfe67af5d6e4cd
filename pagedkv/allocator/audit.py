"""The audit: every invariant of the books, recounted from nothing.

Takes a ledger, gives silence or an `InvariantViolation` that names the page, its owner and its origin, and changes
nothing. Each check is one function, so that a test can break one thing and see the right one speak.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from .audit_groups import audit_groups
from .errors import InvariantViolation
from .group_index import GroupIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .index_node import Node, Root
    from .ledger import Ledger
    from .swapping import Swap


def audit(ledger: Ledger) -> None:
    """Raise `InvariantViolation` at the first invariant that does not hold."""
    for check in (_tables, _references, _states, _index, _paths, _copies, _pins, _writable, _swaps, _unused_rows):
        check(ledger)
    if isinstance(ledger.index, GroupIndex):
        audit_groups(ledger, ledger.index)


def _fail(ledger: Ledger, what: str, *, page: int | None = None, row: int | None = None) -> NoReturn:
    """Raise, naming the row's sequence, or the first whose table has the page."""
    rows = ledger.rows
    if row is None and page is not None:
        row = next((r for r in rows.live() if any(page in table[r, : rows.held(r)] for table in rows.tables)), None)
    owner = None if row is None else rows.sequences[row]
    raise InvariantViolation(what, page=page, owner=owner, origin=None if owner is None else owner.origin)


def _tables(ledger: Ledger) -> None:
    """Prove that lengths fit tables: a different page for each block that is held, the null page for all others."""
    rows, num_pages = ledger.rows, ledger.pool.num_pages
    for row in rows.live():
        if min(rows.num_tokens[row], rows.reserved(row), rows.opaque_from[row]) < 0:
            _fail(ledger, "a length is negative", row=row)
        held = rows.held(row)
        if held > rows.width:
            _fail(ledger, f"the table is too short for {held} blocks", row=row)
        for table, span, firsts in zip(rows.tables, ledger.spans, rows.firsts, strict=True):
            gone = slice(min(span.sink_blocks, held), max(int(firsts[row]), min(span.sink_blocks, held)))
            if table[row, gone].any():
                _fail(ledger, "a table names a page that left the window", page=int(table[row, gone].max()), row=row)
            entries = np.delete(table[row, :held], gone)
            outside = entries[(entries <= 0) | (entries >= num_pages)]
            if outside.size:
                _fail(ledger, "a block has no page of the pool", page=int(outside[0]), row=row)
            values, counts = np.unique(entries, return_counts=True)
            if (counts > 1).any():
                _fail(ledger, "one table names a page twice", page=int(values[counts > 1][0]), row=row)
            stale = table[row, held:]
            if stale.any():
                _fail(ledger, "a table names a page past its last block", page=int(stale[stale != 0][0]), row=row)


def _references(ledger: Ledger) -> None:
    """Prove that references = table occurrences + pins."""
    rows, pool = ledger.rows, ledger.pool
    expected = np.zeros(pool.num_pages, np.int64)
    for row in rows.live():
        for table in rows.tables:
            expected[table[row, : rows.held(row)]] += 1
    expected[0] = 0
    for page, pins in pool.pins.items():
        if pins < 1:
            _fail(ledger, "a page has no pin in the pin list", page=page)
        expected[page] += pins
    wrong = np.flatnonzero(expected != pool.refs)
    if wrong.size:
        page = int(wrong[0])
        _fail(ledger, f"{pool.refs[page]} references counted, tables and pins hold {expected[page]}", page=page)


def _states(ledger: Ledger) -> None:
    """Prove that each page is in exactly one state, and that the counts of each state are right."""
    pool, indexed = ledger.pool, ledger.index.indexed
    free = np.zeros(pool.num_pages, np.int64)
    np.add.at(free, pool.free_pages, 1)
    if pool.refs[0] or free[0] or indexed[0]:
        _fail(ledger, "the null page is in use", page=0)
    idle = indexed & (pool.refs == 0)
    states = free + idle + (pool.refs > 0)
    wrong = np.flatnonzero(states[1:] != 1) + 1
    if wrong.size:
        page = int(wrong[0])
        what = f"free {free[page]} times, idle {bool(idle[page])}, {pool.refs[page]} references"
        _fail(ledger, f"a page must be in exactly one state: {what}", page=page)
    if pool.num_idle != idle.sum():
        _fail(ledger, f"{pool.num_idle} idle pages counted, there are {idle.sum()}")
    candidates = sorted(pool.policy.victims(pool.num_idle))
    if candidates != np.flatnonzero(idle).tolist():
        unlike = set(candidates).symmetric_difference(np.flatnonzero(idle).tolist())
        _fail(ledger, "the eviction policy's candidates are not the idle pages", page=min(unlike, default=None))


def _nodes(ledger: Ledger) -> Iterator[tuple[Root, Node]]:
    for root in ledger.index.roots.values():
        stack: list[Node] = [root]
        while stack:
            node = stack.pop()
            yield root, node
            if node.children is not None:
                stack += node.children.nodes.values()


def _index(ledger: Ledger) -> None:
    """Prove that index and pages agree both ways, nodes are well formed, and whoever holds a page holds its parents."""
    index, refs = ledger.index, ledger.pool.refs
    seen = np.zeros(len(index.indexed), np.int64)
    for root, node in _nodes(ledger):
        if node is not root and not node.pages:
            _fail(ledger, "an index node has no pages")
        if node is root and (root.pages or root.parent or not (root.users or root.children)):
            _fail(ledger, "a namespace's root has pages, or neither users nor children")
        if len(node.tokens) != len(node.pages) * index.page_bytes:
            _fail(ledger, "an index node's tokens do not fit its pages", page=node.pages[0])
        if any(not node.start <= block < node.end for block in node.media):
            _fail(ledger, "an index node has media outside its run", page=node.pages[0])
        named = [page for page in node.pages if page] + [page for sheet in node.sheets for page in sheet.values()]
        for page in named:
            seen[page] += 1
            if index.node_of[page] is not node:
                _fail(ledger, "a page does not know the index node that names it", page=page)
        held = refs[np.array(node.pages, np.int64)] > 0
        if (held[1:] & ~held[:-1]).any():
            _fail(ledger, "a page is held, its parent is not", page=node.pages[int(held.argmax())])
        _children(ledger, node)
    wrong = np.flatnonzero((seen != index.indexed) | (seen != np.array([n is not None for n in index.node_of])))
    if wrong.size:
        _fail(ledger, f"{seen[wrong[0]]} index nodes name a page marked otherwise", page=int(wrong[0]))


def _children(ledger: Ledger, node: Node) -> None:
    if node.children is None:
        return
    refs, keys = ledger.pool.refs, list(node.children.in_order())
    if not keys or keys != sorted(node.children.nodes):
        _fail(ledger, "an index node's children are not in order", page=node.pages[0] if node.pages else None)
    for key, child in node.children.nodes.items():
        first = ledger.index.first_key(child)
        if child.parent is not node or child.start != node.end or not key == child.key == first:
            _fail(ledger, "an index node's child is not linked to it", page=child.pages[0])
        if node.pages and refs[child.pages[0]] and not refs[node.pages[-1]]:
            _fail(ledger, "a page is held, its parent is not", page=child.pages[0])


def _paths(ledger: Ledger) -> None:
    """Prove that a sequence's findable full pages are, block by block, the index path that its cursor ends."""
    rows, index = ledger.rows, ledger.index
    lead = index.lead if isinstance(index, GroupIndex) else 0
    for row in rows.live():
        node, root = rows.cursor[row], rows.root[row]
        if node is None or root is None or index.roots.get(root.namespace) is not root:
            _fail(ledger, "a sequence's namespace is not in the index", row=row)
        depth = int(min(rows.num_tokens[row], rows.opaque_from[row])) // ledger.page_size
        node = index.at_depth(node, depth)
        path: list[int] = []
        end = depth
        while node.parent is not None:
            path[:0] = node.pages[: end - node.start]
            end, node = node.start, node.parent
        mine = path if lead is None else rows.tables[lead][row, :depth].tolist()
        if node is not root or path != mine:
            unlike = [page for page in mine if page not in path]
            _fail(ledger, "a sequence's pages are not its path in the index", page=next(iter(unlike), None), row=row)


def _writable(ledger: Ledger) -> None:
    """Prove that no page that may be written, reserved or an unlocked tail, is indexed or in another table."""
    rows, size = ledger.rows, ledger.page_size
    for row in rows.live():
        start, reserved = int(rows.num_tokens[row]), rows.reserved(row)
        first = start // size if start % size == 0 or reserved or not rows.tail_locked[row] else rows.held(row)
        for page in (page for table in rows.tables for page in table[row, first : rows.held(row)].tolist()):
            if ledger.index.indexed[page] or ledger.writers(page) != 1:
                _fail(ledger, "a page that may be written is indexed or shared", page=page, row=row)


def _copies(ledger: Ledger) -> None:
    """Prove that copies may be run all at once, and somebody holds each destination."""
    pool, sources = ledger.pool, ledger.copies.source_of
    for page, source in sources.items():
        if source in sources:
            _fail(ledger, "a page is source and destination of pending copies", page=source)
        if not pool.table_refs(page):
            _fail(ledger, "nobody holds the destination of a pending copy", page=page)


def _pins(ledger: Ledger) -> None:
    """Prove that pins are those of pending copies (each holds its source), callers' pins and steps in flight."""
    deferred = ledger.pool.deferred
    held = [page for pin in ledger.pins.values() for page in pin.pages().tolist()]
    pins = Counter([*ledger.copies.source_of.values(), *held, *deferred.pages])
    if pins != ledger.pool.pins:
        unlike = set(pins.items()) ^ set(ledger.pool.pins.items())
        _fail(ledger, "the pins are not those of pending copies, pins and steps in flight", page=min(unlike)[0])
    for page, newest in deferred.pages.items():
        if newest < min(deferred.steps, default=newest + 1):
            _fail(ledger, "a page waits for a step that is not in flight", page=page)


def _swaps(ledger: Ledger) -> None:
    """Prove that the books of each host pool balance, and that swapped sequences lie where their handles say."""
    for swap in ledger.swaps.values():
        sequence, pool, pages = swap.sequence, swap.host_pool, swap.host_pages
        row = next((row for row, owner in enumerate(ledger.rows.sequences) if owner is sequence), -1)
        if sequence._swap is not swap or not sequence.swapped or row != swap.row or (row < 0) != (swap.plan is None):
            _fail_swap(swap, "a swapped sequence is not where its handle says")
        needed = {(group, block) for group, span in enumerate(ledger.spans) for block in span.needed(swap.num_tokens)}
        fits = len(pages) == len(swap.places) and needed <= set(swap.places)
        if not fits or swap.opaque_from < len(swap.known) // 4:
            _fail_swap(swap, "a swapped sequence's length does not fit its host pages")
        held = sorted(page for page, owner in pool.owners.items() if owner is sequence)
        if sorted(pages) != held:
            unlike = set(pages).symmetric_difference(held)
            _fail_swap(swap, "a host page's owner is not the sequence swapped into it", min(unlike, default=None))
        states = Counter([*pool.owners, *pool.free_pages])
        wrong = next((page for page in range(pool.num_pages) if states[page] != 1), None)
        if wrong is not None or len(states) != pool.num_pages:
            _fail_swap(swap, "a host page must be either free or held, once", wrong)
        strangers = [page for page, owner in pool.owners.items() if owner.closed or not owner.swapped]
        if strangers:
            _fail_swap(swap, "a host page is held by a sequence that is not swapped", strangers[0])


def _fail_swap(swap: Swap, what: str, page: int | None = None) -> NoReturn:
    raise InvariantViolation(what, page=page, owner=swap.sequence, origin=swap.sequence.origin)


def _unused_rows(ledger: Ledger) -> None:
    """Prove that a row without a sequence is all zero, and that namespaces know how many sequences they have."""
    rows = ledger.rows
    unused = np.array([sequence is None for sequence in rows.sequences])
    lengths = (rows.num_tokens, rows.ends, rows.prompt_len, rows.opaque_from, rows.space, *rows.firsts)
    if any(table[unused].any() for table in rows.tables) or any(values[unused].any() for values in lengths):
        _fail(ledger, "a row that nobody uses is not empty")
    users: dict[int, int] = {}
    for root in rows.root:
        if root is not None:
            users[id(root)] = users.get(id(root), 0) + 1
    for root in ledger.index.roots.values():
        if root.users != users.get(id(root), 0):
            _fail(ledger, "a namespace's users are not its open sequences")

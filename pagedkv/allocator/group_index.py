"""The prefix index for several layer groups: each block of a path names the page of every group that still has one.

Takes what `PrefixIndex` takes and the groups' spans, gives hits that every group can serve, and refuses to know rows.
The tree is the same: blocks of tokens. Its own ``pages`` are those of the *lead*, the first full-attention group;
every other group has a sheet per node, ``{block: page}``, which may have gaps where window pages were evicted. Where
there is no full-attention group, nobody leads and the tree's own pages are all the null page.

A prefix of n tokens can be hit where every group has the blocks that it needs after n tokens. A block is *dead* when
neither it nor any block below ends such a prefix. Dead blocks that nobody needs are taken out at once, with the pages
of all groups, since they could only take room from pages that can be hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .index_node import Match
from .prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from .groups import Span
    from .index_node import Blocks, Node
    from .prefix_index import PageArray

_NO_PAGES = np.empty(0, np.int32)


class GroupIndex(PrefixIndex):
    """A `PrefixIndex` with sheets.

    Attributes:
        lead: the group whose pages the nodes' own runs hold, or None.
        others: the groups with sheets, in order; `sheets[i]` of a node belongs to ``others[i]``.
    """

    def __init__(
        self, num_pages: int, page_size: int, spans: tuple[Span, ...], anchors: Callable[[], dict[Node, int]]
    ) -> None:
        """Make an empty index.

        Args:
            num_pages: page ids are below this.
            page_size: tokens in a page.
            spans: what each group needs.
            anchors: asked only where nobody leads: for each node that open sequences' paths run through, how deep.
        """
        super().__init__(num_pages, page_size)
        self.lead = next((group for group, span in enumerate(spans) if span.is_full), None)
        self.others = [group for group in range(len(spans)) if group != self.lead]
        self._spans = [spans[group] for group in self.others]
        self._anchors = anchors
        self._needed: dict[Node, int] | None = None
        self._sheet_of = np.full(num_pages, -1, np.int16)
        self._block_of = np.zeros(num_pages, np.int32)
        self.refs = np.zeros(num_pages, np.int32)

    # Finding.

    def match(self, namespace: Hashable, prompt: Blocks, limit: int) -> Match:
        """Find the longest stored prefix of the first ``limit`` tokens that every group can serve."""
        found = super().match(namespace, prompt, limit)
        if found.node is None:
            return found
        whole, tail = len(found.pages), found.tail_node
        if tail is not None and self._has_every_page(tail, whole):
            tokens = whole * self.page_size + found.tail_tokens
            if all(self._gap(found.node, sheet, tokens, whole) is None for sheet in range(len(self.others))):
                sheets = self._sheets_for(found.node, tokens, whole)
                for sheet, extra in zip(sheets, tail.sheets, strict=True):
                    sheet[whole] = extra[whole]
                return found._replace(sheets=sheets)
        return self.without_tail(found)

    def without_tail(self, found: Match) -> Match:
        """Return the longest whole-page hit within a match."""
        assert found.node is not None
        whole = self.usable_depth(found.node, len(found.pages))
        sheets = self._sheets_for(found.node, whole * self.page_size, whole)
        return Match(self.at_depth(found.node, whole), found.pages[:whole], 0, 0, None, sheets)

    def usable_depth(self, node: Node, depth: int, floor: int = 0) -> int:
        """Return the greatest depth up to ``depth`` on the node's path that can be hit, or any at most ``floor``."""
        while depth > floor:
            gaps = (self._gap(node, sheet, depth * self.page_size, depth) for sheet in range(len(self.others)))
            # Without block b of its window, no prefix that ends behind b, up to here, can be hit either.
            gap = next((gap for gap in gaps if gap is not None), None)
            if gap is None:
                return depth
            depth = gap
        return depth

    def _gap(self, node: Node, sheet: int, tokens: int, depth: int) -> int | None:
        """Return a block before ``depth`` that a group needs after ``tokens`` tokens and does not have, or None."""
        span = self._spans[sheet]
        first = span.keep_from(tokens)
        block = depth - 1
        while block >= first:
            while block < node.start:
                assert node.parent is not None
                node = node.parent
            if block not in node.sheets[sheet]:
                return block
            block -= 1
        block = min(first, span.sink_blocks, depth) - 1
        lowest: int | None = None
        while block >= 0:
            while block < node.start:
                assert node.parent is not None
                node = node.parent
            if block not in node.sheets[sheet]:
                lowest = block
            block -= 1
        return lowest

    def _sheets_for(self, node: Node, tokens: int, depth: int) -> tuple[dict[int, int], ...]:
        """Return for each sheet the pages before block ``depth`` that its group needs after ``tokens`` tokens."""
        path: list[Node] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        sheets: tuple[dict[int, int], ...] = tuple({} for _ in self.others)
        for sheet, (found, span) in enumerate(zip(sheets, self._spans, strict=True)):
            at = len(path) - 1
            for block in span.needed(tokens):
                if block < depth:
                    while block >= path[at].end:
                        at -= 1
                    found[block] = path[at].sheets[sheet][block]
        return sheets

    # Adding.

    def adopt(self, node: Node, sheet: int, block: int, page: int) -> int:
        """Name ``page`` for a block of the node's run, unless the group has a page there; return the one it has."""
        there = node.sheets[sheet].setdefault(block, page)
        if there == page:
            self.node_of[page] = node
            self.indexed[page] = True
            self._sheet_of[page] = sheet
            self._block_of[page] = block
        return there

    def append(self, node: Node, depth: int, tokens: bytes, page: int) -> bool:
        """Never: the pages of all groups are added together, by `insert` and `adopt`."""
        return False

    def insert(self, node: Node, added: Blocks, pages: PageArray) -> tuple[Node, list[int]]:
        """Add the lead's pages (null pages where nobody leads); see `PrefixIndex.insert`."""
        node, found = super().insert(node, added, pages)
        self._sheet_of[pages] = -1
        self._clean_null_page()
        return node, found

    def _grow(self, node: Node, key: bytes, added: Blocks, pages: PageArray) -> Node:
        node = super()._grow(node, key, added, pages)
        if not node.sheets:
            node.sheets = [{} for _ in self.others]
        return node

    def _split(self, node: Node, offset: int) -> Node:
        upper = super()._split(node, offset)
        upper.sheets = []
        for sheet in node.sheets:
            moved = {block: sheet.pop(block) for block in list(sheet) if block < node.start}
            upper.sheets.append(moved)
            for page in moved.values():
                self.node_of[page] = upper
        self._clean_null_page()
        return upper

    def _clean_null_page(self) -> None:
        self.node_of[0], self.indexed[0] = None, False

    # Taking out.

    def cut(self, node: Node, offset: int) -> PageArray:
        """Take the run's blocks from ``offset`` on and everything below out, the pages of all groups; leaves first."""
        below: list[PageArray] = []
        stack = list(node.children.nodes.values()) if node.children else []
        while stack:
            child = stack.pop()
            below.append(self._drop_sheets(child, child.start))
            if child.children:
                stack += child.children.nodes.values()
        below.reverse()
        return _real(*below, super().cut(node, offset))

    def release_block(self, node: Node, block: int, pages: list[int]) -> PageArray:
        """Make pages that one sequence is about to write unfindable; return these and all that leave with them."""
        if self.lead is not None:
            return self.cut(node, block - node.start)
        self._needed = None
        # Other sequences' paths may run through this block, so only its pages go.
        dropped = [self._drop_page(page) for page in pages if self.indexed[page]]
        return _real(*dropped, *self._settle_below(node, block, for_ever=False))

    def evict(self, victims: list[int]) -> PageArray:
        """Take pages out, none of which anybody holds: at least as many as there are victims; return them.

        A full-attention victim goes after everything below it; a window victim goes alone. What is dead then goes too.
        """
        self._needed = None
        dropped: list[PageArray] = []
        missing = len(victims)
        for victim in victims:
            while missing > 0 and self.node_of[victim] is not None:
                node: Node = self.node_of[victim]
                sheet, block = int(self._sheet_of[victim]), int(self._block_of[victim])
                if sheet < 0 or self._spans[sheet].is_full:
                    while node.children:
                        node = node.children.nodes[next(node.children.in_order())]
                    gone = [self._cut_run(node, len(node.pages) - 1), *self._settle(node)]
                else:
                    gone = [self._drop_page(victim)]
                    gone += self._settle_below(node, block, for_ever=block < self._spans[sheet].sink_blocks)
                dropped += gone
                # Where nobody leads, a page may go that a sequence holds on to, as its partial tail.
                missing -= sum(int(np.count_nonzero(self.refs[_real(pages)] == 0)) for pages in gone)
        return _real(*dropped)

    def settle_nodes(self, nodes: Iterable[Node]) -> PageArray:
        """Take out what is dead at the ends of ``nodes``, deepest first, now that nobody may need it."""
        self._needed = None
        return _real(*(pages for node in nodes for pages in self._settle(node)))

    def settle_released(self, pages: PageArray) -> PageArray:
        """Take out what is dead now that nobody holds ``pages``, given last block first.

        Where nobody leads, what sequences need is told by their paths, not by who holds what.
        """
        if self.lead is None:
            return _NO_PAGES
        leading = pages[self._sheet_of[pages] < 0]
        return self.settle_nodes(dict.fromkeys(node for node in self.node_of[leading] if node is not None))

    def _drop_page(self, page: int) -> PageArray:
        del self.node_of[page].sheets[self._sheet_of[page]][self._block_of[page]]
        return self._forget([page])

    def _drop_sheets(self, node: Node, first: int) -> PageArray:
        pages = [sheet.pop(block) for sheet in node.sheets for block in sorted(sheet, reverse=True) if block >= first]
        return self._forget(pages) if pages else _NO_PAGES

    def _cut_run(self, node: Node, offset: int) -> PageArray:
        return _real(self._drop_sheets(node, node.start + offset), super()._cut_run(node, offset))

    def _settle_below(self, node: Node, block: int, *, for_ever: bool) -> list[PageArray]:
        """Settle every node that a page missing at ``block`` of ``node`` can have made dead, children first."""
        size = self.page_size
        reach = max((span.reach for span in self._spans if not span.is_full), default=0)
        last = block + reach // size + 2
        order: list[Node] = []
        stack = [node]
        while stack:
            here = stack.pop()
            order.append(here)
            if here.children and (for_ever or here.end <= last):
                stack += here.children.nodes.values()
        return [pages for here in reversed(order) for pages in self._settle(here)]

    def _settle(self, node: Node) -> list[PageArray]:
        """Take out the dead end of a leaf's run, and then of its parent's where it has gone whole, and so on."""
        dropped: list[PageArray] = []
        while node.parent is not None:
            if node.pages:
                if node.children:
                    break
                end = max(self._needed_until(node), node.start)
                if end < node.end:
                    end = max(self.usable_depth(node, node.end, end), end)
                if end == node.end:
                    break
                dropped.append(self._cut_run(node, end - node.start))
                if node.pages:
                    break
            node = node.parent
        return dropped

    def _needed_until(self, node: Node) -> int:
        """Return up to which depth open sequences need the node's run."""
        if self.lead is None:
            if self._needed is None:
                self._needed = self._anchors()
            return self._needed.get(node, 0)
        held = self.refs[np.array(node.pages, np.int64)] > 0
        return node.start + (len(held) - int(held[::-1].argmax()) if held.any() else 0)


def _real(*parts: PageArray) -> PageArray:
    """Join arrays of pages, without the null page."""
    pages: PageArray = np.concatenate(parts) if parts else _NO_PAGES
    real: PageArray = pages[pages != 0]
    return real

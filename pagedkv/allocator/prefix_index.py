"""The prefix index: which page holds the KV of which tokens, found by comparing the tokens themselves.

Takes runs of full pages with their tokens, gives the longest stored prefix of a prompt, and refuses to know who
holds a page. It is a radix tree at page granularity, path-compressed: a node is a run of consecutive pages, and its
children differ in their first page. No hash stands for tokens, so no collision can serve another prompt's KV.

A node keeps its identity at the *end* of its run: a split puts a new node above it, and pages are appended only to a
leaf. So a cursor ``(node, depth)`` that a sequence remembers stays right: when ``depth`` is no longer past the
node's start, the place is found by walking up (`at_depth`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .children import Children
from .index_node import Blocks, Match, Node, Root, page_key
from .tokens import same_prefix

if TYPE_CHECKING:
    from collections.abc import Hashable

PageArray = npt.NDArray[np.int32]


class PrefixIndex:
    """All trees, and for each page the node that names it.

    ``indexed`` is a bool per page, ``node_of`` its node or None: the same fact, once for arrays of pages.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Make an empty index over page ids below ``num_pages``."""
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.roots: dict[Hashable, Root] = {}
        self.indexed = np.zeros(num_pages, np.bool_)
        self.node_of: npt.NDArray[Any] = np.full(num_pages, None, np.object_)
        self._serial = 0
        # The namespace that went last, with its number: come again, it is no stranger to its own pages.
        self._left: tuple[Hashable, int] = ((), 0)

    # Namespaces: a root lives while a sequence is open in it or a page is stored under it.

    def enter(self, namespace: Hashable) -> Root:
        """Return the namespace's root, made if need be, with one user more."""
        root = self.roots.get(namespace)
        if root is None:
            serial = self._left[1] if self._left[0] == namespace else self._serial + 1
            self._serial = max(self._serial, serial)
            root = self.roots[namespace] = Root(namespace, serial)
        root.users += 1
        return root

    def leave(self, root: Root) -> None:
        """Take one user away."""
        root.users -= 1
        self._drop_if_unused(root)

    def _drop_if_unused(self, root: Root) -> None:
        if not root.users and not root.children and self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]
            self._left = root.namespace, root.serial

    # Finding.

    def match(self, namespace: Hashable, prompt: Blocks, limit: int) -> Match:
        """Find the longest stored prefix of the first ``limit`` tokens of a prompt; changes nothing."""
        node: Node | None = self.roots.get(namespace)
        pages: list[int] = []
        if node is None:
            return Match(None, pages, 0, 0)
        tokens, size, whole = prompt.tokens[: limit * 4], self.page_bytes, limit // self.page_size
        while True:
            depth = len(pages)
            rest = tokens[depth * size : (depth + 1) * size]
            key = page_key(rest, prompt.media.get(depth))
            child = node.children.nodes.get(key) if node.children and depth < whole else None
            if child is None:
                return Match(node, pages, *self._nearest_child(node, key, rest))
            count = self._common_pages(child, 0, prompt, whole)
            pages += child.pages[:count]
            node, depth = child, depth + count
            if count < len(child.pages):
                rest = tokens[depth * size : (depth + 1) * size]
                stored = bytes(child.tokens[count * size : (count + 1) * size])
                same = child.media.get(depth) == prompt.media.get(depth)
                common = same_prefix(stored, rest) if same and rest else 0
                return Match(node, pages, child.pages[count] if common else 0, common, child if common else None)

    def _nearest_child(self, node: Node, key: bytes, rest: bytes) -> tuple[int, int, Node | None]:
        """Return the child page that shares most leading tokens with ``rest``, how many, and the child."""
        best: tuple[int, int, Node | None] = (0, 0, None)
        if not rest or not node.children:
            return best
        head = key[: len(key) - len(rest)]
        for candidate in node.children.neighbours(key):
            if candidate.startswith(head):
                common = same_prefix(candidate[len(head) :], rest)
                child = node.children.nodes[candidate]
                if common > best[1] and self._has_every_page(child, child.start):
                    best = (child.pages[0], common, child)
        return best

    @staticmethod
    def _has_every_page(node: Node, block: int) -> bool:
        """Whether every layer group has a page for a block of the node's run."""
        return all(block in sheet for sheet in node.sheets)

    def _common_pages(self, node: Node, offset: int, wanted: Blocks, end: int) -> int:
        """Count the run's pages from ``offset`` on that equal those of ``wanted`` before block ``end``."""
        depth, size = node.start + offset, self.page_bytes
        count, at = min(len(node.pages) - offset, end - depth), depth - wanted.first
        ours = node.tokens[offset * size : (offset + count) * size]
        theirs = wanted.tokens[at * size : (at + count) * size]
        if ours != theirs:
            count = same_prefix(ours, theirs) // self.page_size
        if node.media or wanted.media:
            unlike = (b for b in range(depth, depth + count) if node.media.get(b) != wanted.media.get(b))
            count = next(unlike, depth + count) - depth
        return count

    @staticmethod
    def at_depth(node: Node, depth: int) -> Node:
        """Return the node in or above ``node`` whose run ``depth`` ends in: start < depth <= end, or the root."""
        while depth <= node.start and node.parent is not None:
            node = node.parent
        return node

    def page_tokens(self, page: int, block: int) -> bytes:
        """Return the tokens of an indexed page that stands at ``block``."""
        node: Node = self.node_of[page]
        place = (block - node.start) * self.page_bytes
        return bytes(node.tokens[place : place + self.page_bytes])

    def first_key(self, node: Node) -> bytes:
        """Return the key that ``node`` must have in its parent."""
        return page_key(bytes(node.tokens[: self.page_bytes]), node.media.get(node.start))

    def is_followed(self, page: int, block: int) -> bool:
        """Whether any indexed page has this one, which stands at ``block``, for its parent."""
        node: Node = self.node_of[page]
        return block + 1 < node.end or bool(node.children)

    # Changing.

    def append(self, node: Node, depth: int, tokens: bytes, page: int) -> bool:
        """Add one page without media at the end of a leaf's run; return False where this is not such a place."""
        if not node.pages or node.children or depth != node.start + len(node.pages):
            return False
        node.pages.append(page)
        node.tokens += tokens
        self.node_of[page] = node
        self.indexed[page] = True
        return True

    def insert(self, node: Node, added: Blocks, pages: PageArray) -> tuple[Node, list[int]]:
        """Add full pages; where a page of equal tokens is indexed already, that one stays.

        Args:
            node: a cursor of depth ``added.first``.
            added: the pages' tokens.
            pages: their ids.

        Returns:
            The node the last page is in, and for the leading pages that were there already the indexed ids.
        """
        first, size, total = added.first, self.page_bytes, len(pages)
        node, found = self.at_depth(node, first), list[int]()
        while len(found) < total:
            done = len(found)
            offset = first + done - node.start
            if offset < len(node.pages):
                common = self._common_pages(node, offset, added, first + total)
                found += node.pages[offset : offset + common]
                if len(found) < total and offset + common < len(node.pages):
                    node = self._split(node, offset + common)
                continue
            key = page_key(added.tokens[done * size : (done + 1) * size], added.media.get(first + done))
            child = node.children.nodes.get(key) if node.children else None
            if child is None:
                return self._grow(
                    node, key, Blocks(added.tokens[done * size :], added.media, first + done), pages[done:]
                ), found
            node = child
        return node, found

    def _grow(self, node: Node, key: bytes, added: Blocks, pages: PageArray) -> Node:
        """Add new pages after the end of ``node``: to its run where it is a leaf, else as a new child."""
        if node.parent is None or node.children:
            child = Node(node, key, added.first, added.tokens, pages.tolist())
            if node.children is None:
                node.children = Children()
            node.children[key] = child
            node = child
        else:
            node.pages += pages.tolist()
            node.tokens += added.tokens
        if added.media:
            blocks = range(added.first, added.first + len(pages))
            node.media.update({block: added.media[block] for block in blocks if block in added.media})
        self.node_of[pages] = node
        self.indexed[pages] = True
        return node

    def _split(self, node: Node, offset: int) -> Node:
        """Cut a run in two and return the new upper node; ``node`` keeps the lower part and the children."""
        parent, size = node.parent, self.page_bytes
        assert parent is not None
        assert parent.children is not None
        upper = Node(parent, node.key, node.start, bytes(node.tokens[: offset * size]), node.pages[:offset])
        parent.children[node.key] = upper
        del node.pages[:offset], node.tokens[: offset * size]
        node.parent = upper
        node.start += offset
        upper.media = {block: node.media.pop(block) for block in list(node.media) if block < node.start}
        node.key = self.first_key(node)
        upper.children = Children()
        upper.children[node.key] = node
        self.node_of[np.array(upper.pages, np.int32)] = upper
        return upper

    def cut(self, node: Node, offset: int) -> PageArray:
        """Take the run's pages from ``offset`` on and everything below out of the index; children come first."""
        below: list[int] = []
        stack = list(node.children.nodes.values()) if node.children else []
        while stack:
            child = stack.pop()
            below += child.pages
            if child.children:
                stack += child.children.nodes.values()
        node.children = None
        below.reverse()
        return np.concatenate([self._forget(below), self._cut_run(node, offset)])

    def release_block(self, node: Node, block: int, pages: list[int]) -> PageArray:
        """Make ``pages``, of one block of a path, unfindable; return these and all that leave with them."""
        return self.cut(node, block - node.start)

    def _cut_run(self, node: Node, offset: int) -> PageArray:
        dropped = self._forget(node.pages[: offset - 1 if offset else None : -1])
        del node.pages[offset:], node.tokens[offset * self.page_bytes :]
        if node.media:
            node.media = {block: key for block, key in node.media.items() if block < node.end}
        if not node.pages:
            self._unlink(node)
        return dropped

    def _unlink(self, node: Node) -> None:
        """Take a node that has lost its last page off its parent."""
        parent = node.parent
        if parent is not None and parent.children is not None:
            del parent.children[node.key]
            if not parent.children:
                parent.children = None
                if isinstance(parent, Root):
                    self._drop_if_unused(parent)

    def _forget(self, pages: list[int]) -> PageArray:
        ids = np.array(pages, np.int32)
        self.node_of[ids] = None
        self.indexed[ids] = False
        return ids

    def evict(self, victims: list[int]) -> PageArray:
        """Take as many pages out as there are victims, none of which anybody holds; return them.

        The victims go, except that where one still has pages below it those go in its place, deepest first: a page
        whose parent is gone could never be found again.
        """
        dropped: list[PageArray] = []
        at, missing = 0, len(victims)
        while missing:
            node: Node | None = self.node_of[victims[at]]
            if node is None:
                at += 1
            elif node.children:
                leaf = node
                while leaf.children:
                    leaf = leaf.children.nodes[next(leaf.children.in_order())]
                dropped.append(self._cut_run(leaf, len(leaf.pages) - 1))
                missing -= 1
            else:
                count = self._streak(node.pages, victims, at, missing)
                dropped.append(self._cut_run(node, len(node.pages) - max(count, 1)))
                at += count
                missing -= max(count, 1)
        return dropped[0] if len(dropped) == 1 else np.concatenate(dropped)

    def evict_few(self, victims: list[int]) -> list[int]:
        """Do what `evict` does page by page: for a handful that is faster."""
        dropped: list[int] = []
        at = 0
        while len(dropped) < len(victims):
            node: Node | None = self.node_of[victims[at]]
            if node is None:
                at += 1
                continue
            while node.children:
                node = node.children.nodes[next(node.children.in_order())]
            page = node.pages.pop()
            del node.tokens[-self.page_bytes :]
            self.node_of[page] = None
            self.indexed[page] = False
            if node.media:
                node.media.pop(node.end, None)
            if not node.pages:
                self._unlink(node)
            dropped.append(page)
        return dropped

    @staticmethod
    def _streak(run: list[int], victims: list[int], at: int, limit: int) -> int:
        """Count how many of the next ``limit`` victims are the run's pages from its end backwards."""
        limit = min(limit, len(run))
        tail = run[: -limit - 1 : -1]
        if tail == victims[at : at + limit]:
            return limit
        return next(
            (i for i, (page, victim) in enumerate(zip(tail, victims[at : at + limit], strict=False)) if page != victim),
            limit,
        )

    def clear(self) -> None:
        """Forget every page and every tree."""
        self.roots = {}
        self.indexed[:] = False
        self.node_of[:] = None

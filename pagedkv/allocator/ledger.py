"""The books: pool, index, rows, copies and scrubs of one allocator, and what any two of them do together.

Takes rows and pages that the door has checked, and refuses to judge what a caller may ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .content_hash import Identities, namespace_digest
from .copies import PendingCopies
from .eviction import ContentPolicy
from .group_index import GroupIndex
from .groups import Span
from .pages import PagePool
from .prefix_index import PrefixIndex
from .rows import NEVER, Rows
from .scrubs import Scrubs

if TYPE_CHECKING:
    from collections.abc import Hashable

    from .eviction import EvictionPolicy
    from .groups import LayerGroup
    from .index_node import Node
    from .pins import Pin
    from .prefix_index import PageArray
    from .swapping import Swap
    from .tokens import TokenArray


class Room(NamedTuple):
    """Pages that a call would take, and pages that can be had for it: free plus idle."""

    needed: int
    available: int

    @property
    def fits(self) -> bool:
        """Whether the call would succeed at this moment."""
        return self.needed <= self.available


@dataclass(slots=True)
class Counters:
    """What has happened since the allocator was made."""

    opened: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    merged_pages: int = 0


class Ledger:
    """All state of an allocator.

    ``spans`` says what each of the ``groups`` needs, ``windows`` which of them give pages back, and ``is_plain`` that
    there is one full-attention group and no other. ``nothing_opaque`` is the ``opaque_from`` of a row whose KV may all
    be indexed; without a prefix cache none may.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        groups: tuple[LayerGroup, ...],
        *,
        prefix_cache: bool,
        policy: EvictionPolicy,
    ) -> None:
        """Start with every page free."""
        self.groups = groups
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.nothing_opaque = NEVER if prefix_cache else 0
        self.spans = tuple(Span.of(group, page_size) for group in groups)
        self.is_plain = len(groups) == 1 and self.spans[0].is_full
        self.windows = [group for group, span in enumerate(self.spans) if not span.is_full]
        self._closing = sorted(range(len(groups)), key=lambda group: self.spans[group].is_full)
        self.index = (
            PrefixIndex(num_pages, page_size)
            if self.is_plain
            else GroupIndex(num_pages, page_size, self.spans, self.anchors)
        )
        self.pool = PagePool(num_pages, self.index, policy)
        self.rows = Rows(page_size, len(groups))
        self.copies = PendingCopies(self.pool)
        self.scrubs = Scrubs(num_pages)
        self.counters = Counters()
        self.pins: dict[int, Pin] = {}
        self.swaps: dict[int, Swap] = {}
        self.content_policy = policy if isinstance(policy, ContentPolicy) else None
        self.identities = Identities(num_pages if self.content_policy else 0)

    @property
    def tables(self) -> PageArray:
        """The block tables of the first layer group, int32 ``[rows, width]``."""
        return self.rows.tables[0]

    def give_back(self, pages: PageArray) -> None:
        """Take one table reference from each page, given last block first."""
        if self.copies:
            # Before the release: a source must become idle before its parents do.
            self.copies.drop_dead(pages)
        self.pool.release(pages)

    def writers(self, page: int) -> int:
        """Count the references that forbid each other to write the page: all but those of pending copies.

        A pending copy only reads the page, and runs before anything is written.
        """
        refs = int(self.pool.refs[page])
        return refs - list(self.copies.source_of.values()).count(page) if self.copies else refs

    def require_named(self, namespace: Hashable) -> None:
        """Raise where the policy asks what pages hold and the namespace has no name that outlives the process."""
        if self.content_policy is not None:
            namespace_digest(namespace)

    def tell_stored(self, row: int, block: int, tokens: TokenArray) -> None:
        """Tell a policy that asks for it what the row's pages from ``block`` on, findable since now, hold."""
        if self.content_policy is None or not len(tokens):
            return
        sequence = self.rows.sequences[row]
        assert sequence is not None
        pages = self.tables[row, block : block + len(tokens) // self.page_size].tolist()
        parent = int(self.tables[row, block - 1]) if block else namespace_digest(sequence.namespace)
        digests = self.identities.store(parent, tokens.tobytes(), pages, sequence.prompt.media, block)
        self.content_policy.stored(pages, digests)

    def drop_blocks(self, row: int, first: int, end: int) -> None:
        """Give back the pages of blocks ``first`` to ``end`` of a row, full attention's last."""
        if first < end:
            for group in self._closing:
                entries = self.rows.tables[group][row, first:end]
                pages = entries[::-1].copy()
                entries[:] = 0
                self.give_back(pages if self.spans[group].is_full else pages[pages != 0])

    def leaving(self, group: int, row: int) -> PageArray:
        """Return a window group's blocks of a row that its next token does not see any more, ascending."""
        span, first = self.spans[group], int(self.rows.firsts[group][row])
        start = max(first, span.sink_blocks)
        end = 0 if self.rows.window_held[row] else span.keep_from(int(self.rows.num_tokens[row]))
        return np.arange(start, max(start, end), dtype=np.int32)

    def path_tokens(self, row: int, depth: int) -> bytes:
        """Return the tokens of a row's first ``depth`` blocks, all findable, as the index has them."""
        node, parts = self.rows.cursor[row], list[bytes]()
        assert node is not None
        node = self.index.at_depth(node, depth)
        while node.parent is not None:
            parts.append(bytes(node.tokens[: (depth - node.start) * self.index.page_bytes]))
            node, depth = node.parent, node.start
        return b"".join(reversed(parts))

    def anchors(self) -> dict[Node, int]:
        """Return every index node that an open sequence's path runs through, with the depth it needs."""
        rows = self.rows
        deepest: dict[Node, int] = {}
        for row in rows.live():
            cursor = rows.cursor[row]
            if cursor is None:
                continue
            depth = int(min(rows.num_tokens[row], rows.opaque_from[row])) // self.page_size
            node = self.index.at_depth(cursor, depth)
            while node.parent is not None and deepest.get(node, 0) < depth:
                deepest[node] = depth
                node, depth = node.parent, node.start
        return deepest

"""The books: pool, index, rows, copies and scrubs of one allocator, and what any two of them do together.

Takes rows and pages that the door has checked, and refuses to judge what a caller may ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .content_hash import Identities, namespace_digest
from .copies import PendingCopies
from .eviction import ContentPolicy
from .pages import PagePool
from .prefix_index import PrefixIndex
from .rows import NEVER, Rows
from .scrubs import Scrubs

if TYPE_CHECKING:
    from collections.abc import Hashable

    from .eviction import EvictionPolicy
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

    ``nothing_opaque`` is the ``opaque_from`` of a row whose KV may all be indexed; without a prefix cache none may.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_groups: int, *, prefix_cache: bool, policy: EvictionPolicy
    ) -> None:
        """Start with every page free."""
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.nothing_opaque = NEVER if prefix_cache else 0
        self.index = PrefixIndex(num_pages, page_size)
        self.pool = PagePool(num_pages, self.index, policy)
        self.rows = Rows(page_size, num_groups)
        self.copies = PendingCopies(self.pool)
        self.scrubs = Scrubs(num_pages)
        self.counters = Counters()
        self.pins: dict[int, Pin] = {}
        self.swaps: dict[int, Swap] = {}
        self.content_policy = policy if isinstance(policy, ContentPolicy) else None
        self.identities = Identities(num_pages if self.content_policy else 0)

    @property
    def tables(self) -> PageArray:
        """The block tables of the one layer group, int32 ``[rows, width]``."""
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
        """Give back the pages of blocks ``first`` to ``end`` of a row."""
        if first < end:
            entries = self.tables[row, first:end]
            pages = entries[::-1].copy()
            entries[:] = 0
            self.give_back(pages)

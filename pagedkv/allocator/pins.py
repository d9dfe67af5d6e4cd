"""Pins: pages that stay findable although no sequence holds them.

Takes what of a prompt is stored, gives a handle that holds it, and refuses to know why. A pin is a reference like a
table's: references = table occurrences + pins. A pinned page is therefore never idle, never evicted, and copied before
anybody writes into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from .errors import AlreadyUnpinned
from .index_node import Blocks
from .lifecycle import hits_of, whole_hit

if TYPE_CHECKING:
    from .holding import Holding
    from .ledger import Ledger
    from .prefix_index import PageArray
    from .prompt import Prompt


class Pin:
    """Holds pages until `unpin`; a context manager. Made by `BlockAllocator.pin`.

    Attributes:
        num_tokens: tokens of the prompt that the pinned pages hold.
        serial: its number among the allocator's pins, from 1.
        origin: the allocator's clock when it was made.
        where: the caller's file and line, where the allocator's ``debug`` is on.
    """

    __slots__ = ("_allocator", "_pages", "num_tokens", "origin", "serial", "where")

    def __init__(
        self, allocator: Holding, pages: PageArray, *, serial: int, num_tokens: int, origin: float, where: str | None
    ) -> None:
        """Remember the pages; holding them is the allocator's work."""
        self._allocator = allocator
        self._pages: PageArray | None = pages
        self.serial = serial
        self.num_tokens = num_tokens
        self.origin = origin
        self.where = where

    def __repr__(self) -> str:
        return f"<Pin, {'unpinned' if self._pages is None else f'{self.num_tokens} tokens'}>"

    def __enter__(self) -> Self:
        self.pages()
        return self

    def __exit__(self, *error: object) -> None:
        if self._pages is not None:
            self.unpin()

    def pages(self) -> PageArray:
        """Return the pages held, int32 ``[pages]``: group by group, full attention's first, each first block first."""
        if self._pages is None:
            raise AlreadyUnpinned("a pin was used after unpin()")
        return self._pages

    def unpin(self) -> None:
        """Let the pages go; those that nobody else holds are idle now.

        Raises:
            AlreadyUnpinned: it was unpinned before.
        """
        self._allocator.unpin(self)

    def _forget(self) -> None:
        self._pages = None


def pin_prefix(ledger: Ledger, prompt: Prompt) -> tuple[PageArray, int]:
    """Hold the full pages that are stored of the whole prompt, from its start on; return them and their tokens."""
    limit = len(prompt.tokens) if prompt.opaque_from is None else prompt.opaque_from
    match = ledger.index.match(prompt.namespace, Blocks(prompt.tokens.tobytes(), prompt.media), limit)
    if match.tail_tokens:
        match = whole_hit(ledger, match)
    pages = hits_of(ledger, match, len(match.pages))
    if pages.size:
        ledger.pool.policy.hit(pages.tolist())
        ledger.pool.hold(pages)
    for page in pages.tolist():
        ledger.pool.pins[page] = ledger.pool.pins.get(page, 0) + 1
    return pages, len(match.pages) * ledger.page_size


def unpin_prefix(ledger: Ledger, pages: PageArray) -> None:
    """Take one pin from each page, last block first."""
    for page in pages[::-1].tolist():
        ledger.pool.unpin(page)

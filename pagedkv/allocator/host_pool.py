"""A second pool: pages outside the device, by plain ids, that swapped sequences lie in.

Takes owners and counts, gives page ids, and refuses to know what memory stands behind an id. Every page has one owner:
nothing is shared here, so there are no references to count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import OutOfPages
from .tokens import count_of

if TYPE_CHECKING:
    from .sequence import Sequence


class HostPool:
    """Pages 0 to ``num_pages - 1``; there is no null page. One pool may serve several allocators of one thread.

    Attributes:
        owners: by page that is held, the sequence swapped into it; reading it is for audits and reports.
    """

    def __init__(self, num_pages: int) -> None:
        """Start with every page free, lowest ids first.

        Raises:
            TypeError, ValueError: ``num_pages`` is not a number of at least 1.
        """
        self.num_pages = count_of(num_pages, "num_pages", 1)
        self.owners: dict[int, Sequence] = {}
        self._free = list(range(num_pages - 1, -1, -1))

    def __repr__(self) -> str:
        return f"<HostPool, {self.num_free} of {self.num_pages} pages free>"

    @property
    def num_free(self) -> int:
        """Pages that can be had."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that sequences lie in, or are on their way into or out of."""
        return len(self.owners)

    @property
    def free_pages(self) -> list[int]:
        """The free pages, next to go last."""
        return list(self._free)

    def take(self, count: int, owner: Sequence) -> list[int]:
        """Hand out ``count`` pages, or raise `OutOfPages` with nothing changed."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        self.owners.update(dict.fromkeys(pages, owner))
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Free pages, lowest block on top."""
        for page in reversed(pages):
            del self.owners[page]
            self._free.append(page)

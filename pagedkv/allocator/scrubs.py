"""Scrubs: pages that came from another namespace and must be cleared before they are written.

Takes each page's new namespace as pages are handed out, gives the pages that changed, and refuses to know what a
namespace is (a serial number above 0; 0 stands for a page never used).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from .prefix_index import PageArray


class Scrubs:
    """Who used each page last, and which pages await a scrub.

    ``many`` says whether there has ever been more than one namespace.
    """

    def __init__(self, num_pages: int) -> None:
        """Start with pages that nobody has used."""
        self._space = np.zeros(num_pages, np.int64)
        self._pending: dict[int, None] = {}
        self._first = 0
        self.many = False

    def enter(self, space: int, num_used: int) -> None:
        """Expect sequences of ``space``; pages below ``num_used`` have been handed out before.

        While there is one namespace only, pages are not recorded one by one: `note` need not be called.
        """
        if self.many or space == self._first:
            return
        self.many = self._first != 0
        if self.many:
            self._space[:num_used] = self._first
        self._first = space

    def note(self, pages: PageArray, spaces: npt.NDArray[np.int64] | int) -> None:
        """Record that ``pages`` were handed out to sequences of ``spaces``."""
        before = self._space[pages]
        self._space[pages] = spaces
        changed = (before != spaces) & (before != 0)
        if changed.any():
            self._pending.update(dict.fromkeys(pages[changed].tolist()))

    def take(self) -> PageArray:
        """Return the pages to scrub, int32 ``[n]``, and forget them."""
        pages = np.array(list(self._pending), np.int32)
        self._pending = {}
        return pages

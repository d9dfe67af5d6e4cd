"""The children of an index node: exact by their first page, nearest by sorted order.

Takes keys (bytes) and nodes, gives the node of a key or the keys beside one, and refuses to know what a key says.
Of all keys, one of the two neighbours in sorted order shares the longest prefix with a query, so the best partial
match needs no scan. Keys lie in sorted runs of bounded length: a root with 100,000 children inserts as fast as one
with a hundred.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .index_node import Node

_RUN = 512


class Children:
    """A dictionary of nodes whose keys are kept in order too."""

    __slots__ = ("_lows", "_runs", "nodes")

    def __init__(self) -> None:
        """Start empty."""
        self.nodes: dict[bytes, Node] = {}
        self._runs: list[list[bytes]] = [[]]
        self._lows: list[bytes] = [b""]

    def __len__(self) -> int:
        return len(self.nodes)

    def __setitem__(self, key: bytes, node: Node) -> None:
        """Add ``node`` under ``key``, or put it in the place of the node that has the key."""
        if key not in self.nodes:
            at = bisect_right(self._lows, key) - 1
            run = self._runs[at]
            insort(run, key)
            if len(run) > _RUN:
                half = len(run) // 2
                self._runs.insert(at + 1, run[half:])
                self._lows.insert(at + 1, run[half])
                del run[half:]
        self.nodes[key] = node

    def __delitem__(self, key: bytes) -> None:
        """Remove ``key``."""
        del self.nodes[key]
        at = bisect_right(self._lows, key) - 1
        run = self._runs[at]
        del run[bisect_left(run, key)]
        if not run and at:
            del self._runs[at], self._lows[at]

    def neighbours(self, key: bytes) -> list[bytes]:
        """Return the last key before ``key`` and the first at or after it, as far as there are such."""
        at = bisect_right(self._lows, key) - 1
        run = self._runs[at]
        place = bisect_left(run, key)
        found = []
        if place:
            found.append(run[place - 1])
        elif at:
            found += self._runs[at - 1][-1:]
        if place < len(run):
            found.append(run[place])
        elif at + 1 < len(self._runs):
            found.append(self._runs[at + 1][0])
        return found

    def in_order(self) -> Iterator[bytes]:
        """Yield all keys, sorted."""
        for run in self._runs:
            yield from run

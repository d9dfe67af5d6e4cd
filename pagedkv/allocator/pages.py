"""The page pool: which page is free, idle or referenced.

Takes counts and page ids, gives page ids, and refuses to know sequences and tokens. A page is *free* on the stack
here, *idle* when nobody holds it but the prefix index names it, *referenced* when tables or pins hold it;
``refs`` = table occurrences + pins. Page 0, the null page, is none of these and is never handed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .group_index import GroupIndex
from .steps import Deferred

if TYPE_CHECKING:
    from collections.abc import Callable

    from .eviction import EvictionPolicy
    from .index_node import Node
    from .prefix_index import PageArray, PrefixIndex
    from .steps import StepInFlight


class PagePool:
    """Free stack, reference counts and pins; taking or giving back n pages is one slice."""

    def __init__(self, num_pages: int, index: PrefixIndex, policy: EvictionPolicy) -> None:
        """Start with every page but the null page free, lowest ids first."""
        self.num_pages = num_pages
        self.index = index
        self.policy = policy
        self.refs = index.refs if isinstance(index, GroupIndex) else np.zeros(num_pages, np.int32)
        self.pins: dict[int, int] = {}
        self.num_free = num_pages - 1
        self.num_idle = 0
        self.evictions = 0
        self.deferred = Deferred()
        self.on_evicted: Callable[[list[int]], None] | None = None
        self._least_free = num_pages - 1
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)

    @property
    def available(self) -> int:
        """Pages that can be had: free plus idle, exactly."""
        return self.num_free + self.num_idle

    @property
    def num_used(self) -> int:
        """Page ids from this one on have never been handed out."""
        return self.num_pages - self._least_free

    @property
    def free_pages(self) -> PageArray:
        """The free stack, bottom first."""
        return self._stack[: self.num_free]

    def take(self, count: int) -> PageArray:
        """Hand out ``count`` <= `available` pages, each with one reference; idle ones are evicted as needed."""
        if count > self.num_free:
            self._evict(count - self.num_free)
        bottom = self.num_free - count
        self._least_free = min(self._least_free, bottom)
        pages = self._stack[bottom : self.num_free][::-1].copy()
        self.num_free = bottom
        self.refs[pages] = 1
        return pages

    def take_few(self, count: int) -> list[int]:
        """Hand out pages like `take`, in the same order, moving them one by one: for a handful that is faster."""
        if count > self.num_free:
            self._evict_few(count - self.num_free)
        bottom, refs = self.num_free - count, self.refs
        pages: list[int] = self._stack[bottom : self.num_free].tolist()
        pages.reverse()
        for page in pages:
            refs[page] = 1
        self.num_free = bottom
        self._least_free = min(self._least_free, bottom)
        return pages

    def hold(self, pages: PageArray) -> None:
        """Add a reference to each of the (different) pages; idle ones are idle no more."""
        before = self.refs[pages]
        self.refs[pages] = before + 1
        revived = pages[before == 0]
        if revived.size:
            self.num_idle -= revived.size
            self.policy.held(revived.tolist())

    def release(self, pages: PageArray) -> None:
        """Take a reference from each of the (different) pages, given last block first."""
        if self.deferred.steps:
            self._defer(pages)
            return
        left = self.refs[pages] - 1
        self.refs[pages] = left
        gone = pages[left == 0]
        if gone.size:
            self._let_go(gone)

    def _defer(self, pages: PageArray) -> None:
        """Hand the references to the steps in flight, one for each page however often it is released."""
        for page in pages.tolist():
            if page in self.deferred.pages:
                self.refs[page] -= 1
            else:
                self.pins[page] = self.pins.get(page, 0) + 1
        self.deferred.add(pages)

    def end_step(self, step: StepInFlight) -> None:
        """Give back what has waited for the step, and for no other that is in flight."""
        pages = self.deferred.end(step)
        for page in pages.tolist():
            if self.pins[page] == 1:
                del self.pins[page]
            else:
                self.pins[page] -= 1
        left = self.refs[pages] - 1
        self.refs[pages] = left
        self._let_go(pages[left == 0])

    def _let_go(self, gone: PageArray) -> None:
        """Make pages that have lost their last reference idle or free."""
        findable = self.index.indexed[gone]
        idle = gone[findable]
        if idle.size:
            self.num_idle += idle.size
            self.policy.released(idle.tolist())
            gone = gone[~findable]
        self._put_back(gone)
        if idle.size and isinstance(self.index, GroupIndex):
            self._forget(self.index.settle_released(idle), evicted=False)

    def num_idle_among(self, pages: PageArray) -> int:
        """Count the indexed pages that nobody holds."""
        return int(np.count_nonzero(self.refs[pages] == 0))

    def table_refs(self, page: int) -> int:
        """Return how many table entries name the page."""
        return int(self.refs[page]) - self.pins.get(page, 0)

    def pin(self, page: int) -> None:
        """Hold a page that is referenced already, apart from any table."""
        self.refs[page] += 1
        self.pins[page] = self.pins.get(page, 0) + 1

    def unpin(self, page: int) -> None:
        """Take one pin away."""
        if self.pins[page] == 1:
            del self.pins[page]
        else:
            self.pins[page] -= 1
        self.release(np.array([page], np.int32))

    def unindex(self, pages: list[int], block: int) -> None:
        """Take a block's pages, held by one table alone, out of the index, so that they may be written.

        What follows the block is freed, or made unfindable where a step in flight still holds it.
        """
        self._forget(self.index.release_block(self.index.node_of[pages[0]], block, pages), evicted=False)

    def settle(self, node: Node) -> None:
        """Free what at the end of an index node is dead, now that a sequence does not need it any more."""
        if isinstance(self.index, GroupIndex):
            self._forget(self.index.settle_nodes([node]), evicted=False)

    def clear_index(self) -> int:
        """Free every idle page and forget the whole index; return how many pages that were."""
        indexed = np.flatnonzero(self.index.indexed).astype(np.int32)
        idle = indexed[self.refs[indexed] == 0]
        self.policy.removed(indexed.tolist(), evicted=False)
        self.index.clear()
        self.num_idle = 0
        self._put_back(idle[::-1])
        return len(idle)

    def _evict(self, count: int) -> None:
        self.evictions += self._forget(self.index.evict(self._victims(count)), evicted=True)

    def _victims(self, count: int) -> list[int]:
        """Ask the policy, which may be anybody's, and take no other number than was asked for."""
        victims = self.policy.victims(count)
        if len(victims) != count:
            name = type(self.policy).__name__
            raise ValueError(f"{name}.victims({count}) must return {count} of its candidates, returned {len(victims)}")
        return victims

    def _evict_few(self, count: int) -> None:
        if isinstance(self.index, GroupIndex):
            self._evict(count)
            return
        dropped = self.index.evict_few(self._victims(count))
        self.policy.removed(dropped, evicted=True)
        if self.on_evicted is not None:
            self.on_evicted(dropped)
        self.evictions += count
        self.num_idle -= count
        self._stack[self.num_free : self.num_free + count] = dropped
        self.num_free += count

    def _forget(self, dropped: PageArray, *, evicted: bool) -> int:
        """Free those of the pages, just taken out of the index, that nobody holds; return how many."""
        if not dropped.size:
            return 0
        held = self.refs[dropped] > 0
        if held.any():
            self.policy.removed(dropped[held].tolist(), evicted=False)
            dropped = dropped[~held]
        if dropped.size:
            self.policy.removed(dropped.tolist(), evicted=evicted)
            if evicted and self.on_evicted is not None:
                self.on_evicted(dropped.tolist())
        self.num_idle -= dropped.size
        self._put_back(dropped)
        return int(dropped.size)

    def _put_back(self, pages: PageArray) -> None:
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

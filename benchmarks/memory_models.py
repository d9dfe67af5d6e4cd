"""Ways to hold the KV of growing sequences in one memory of slots, as plain arithmetic.

Takes lengths, gives yes or no and how many slots are held, and refuses to know tokens, time and queues. A *slot* is
room for one token over all layers. `Paged` is the real allocator; the others are what it replaces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from pagedkv.allocator import BlockAllocator, OutOfPages, Sequence


class Memory(Protocol):
    """What the fragmentation benchmark asks of a way to hold memory.

    Attributes:
        highest: the most slots held at any moment since it was last set to `held`.
    """

    highest: int

    @property
    def held(self) -> int:
        """Slots that live requests hold now."""

    def ever_fits(self, final: int) -> bool:
        """Whether a request of ``final`` tokens at its end fits into the empty memory."""

    def admit(self, request: int, length: int, final: int) -> bool:
        """Hold ``length`` tokens of a new request that will have ``final``; False, and nothing done, without room."""

    def grow(self, requests: list[int]) -> int:
        """Make room for one token more of each, in order; return for how many there was room."""

    def free(self, request: int) -> None:
        """Give back all that a request holds."""


class Region:
    """One address range handed out in contiguous pieces: first fit, free neighbours joined at once."""

    def __init__(self, size: int) -> None:
        """Start with one hole."""
        self.size = size
        self.free = size
        self._starts = [0]
        self._length = {0: size}

    def take(self, length: int) -> int | None:
        """Return the lowest address with room for ``length`` >= 1 slots, or None."""
        for at, start in enumerate(self._starts):
            hole = self._length[start]
            if hole >= length:
                del self._length[start]
                if hole == length:
                    del self._starts[at]
                else:
                    self._starts[at] = start + length
                    self._length[start + length] = hole - length
                self.free -= length
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Take a piece back."""
        self.free += length
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + length:
            length += self._length.pop(self._starts.pop(at))
        if at and self._starts[at - 1] + self._length[self._starts[at - 1]] == start:
            self._length[self._starts[at - 1]] += length
        else:
            self._starts.insert(at, start)
            self._length[start] = length

    @property
    def largest_hole(self) -> int:
        """Slots of the largest free piece."""
        return max(self._length.values(), default=0)


class ReserveMaximum:
    """Every request holds ``max_len`` slots from its admission to its end, as serving systems did before paging."""

    def __init__(self, size: int, max_len: int) -> None:
        """Cut the memory into slabs."""
        self.max_len = max_len
        self.slabs = size // max_len
        self.highest = 0
        self._taken = 0

    @property
    def held(self) -> int:
        """Slots of the slabs that are taken."""
        return self._taken * self.max_len

    def ever_fits(self, final: int) -> bool:
        """Whether a slab is long enough."""
        return self.slabs > 0 and final <= self.max_len

    def admit(self, request: int, length: int, final: int) -> bool:
        """Take a slab."""
        if self._taken == self.slabs:
            return False
        self._taken += 1
        self.highest = max(self.highest, self.held)
        return True

    def grow(self, requests: list[int]) -> int:
        """Grow inside the slabs."""
        return len(requests)

    def free(self, request: int) -> None:
        """Give the slab back."""
        self._taken -= 1


class Contiguous:
    """Exactly as many slots as tokens, in one piece; each new token takes a new piece, copies, and frees the old one.

    That is ``torch.cat`` per token: both copies are alive at once.
    """

    def __init__(self, size: int) -> None:
        """Start empty."""
        self._region = Region(size)
        self._piece: dict[int, tuple[int, int]] = {}
        self.highest = 0

    @property
    def held(self) -> int:
        """Slots of all pieces."""
        return self._region.size - self._region.free

    def ever_fits(self, final: int) -> bool:
        """Whether the last token's two copies fit."""
        return 2 * final - 1 <= self._region.size

    def admit(self, request: int, length: int, final: int) -> bool:
        """Take a piece for the prompt."""
        start = self._region.take(length)
        if start is None:
            return False
        self._piece[request] = (start, length)
        self.highest = max(self.highest, self.held)
        return True

    def grow(self, requests: list[int]) -> int:
        """Move each to a piece that is one slot longer."""
        return next((done for done, request in enumerate(requests) if not self._grow(request)), len(requests))

    def _grow(self, request: int) -> bool:
        start, length = self._piece[request]
        new = self._region.take(length + 1)
        if new is None:
            return False
        self.highest = max(self.highest, self.held)
        self._region.give(start, length)
        self._piece[request] = (new, length + 1)
        return True

    def free(self, request: int) -> None:
        """Give the piece back."""
        self._region.give(*self._piece.pop(request))


class Buddy:
    """Blocks of 2**k slots, split and joined in halves; a full block is copied into one of twice the size.

    Source: Knowlton, CACM 8(10), 1965.
    """

    def __init__(self, size: int) -> None:
        """Start with one block; ``size`` must be a power of two."""
        if size < 1 or size & (size - 1):
            raise ValueError(f"size must be a power of two, was {size}")
        self.size = size
        self._free: list[list[int]] = [[] for _ in range(size.bit_length())]
        self._free[-1].append(0)
        self._block: dict[int, tuple[int, int, int]] = {}
        self.highest = 0
        self._held = 0

    @property
    def held(self) -> int:
        """Slots of all blocks."""
        return self._held

    def ever_fits(self, final: int) -> bool:
        """Whether the largest block fits beside the one it is copied from."""
        order = (final - 1).bit_length()
        return 2**order <= self.size and (final == 1 or 2**order < self.size)

    def admit(self, request: int, length: int, final: int) -> bool:
        """Take the smallest block for the prompt."""
        order = (length - 1).bit_length()
        start = self._take(order)
        if start is None:
            return False
        self._block[request] = (start, order, length)
        return True

    def grow(self, requests: list[int]) -> int:
        """Use the next slot of each block; a full block is copied into one of twice the size."""
        return next((done for done, request in enumerate(requests) if not self._grow(request)), len(requests))

    def _grow(self, request: int) -> bool:
        start, order, length = self._block[request]
        if length == 2**order:
            new = self._take(order + 1)
            if new is None:
                return False
            self._give(start, order)
            start, order = new, order + 1
        self._block[request] = (start, order, length + 1)
        return True

    def free(self, request: int) -> None:
        """Give the block back."""
        start, order, _ = self._block.pop(request)
        self._give(start, order)

    def _take(self, order: int) -> int | None:
        at = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if at is None:
            return None
        start = self._free[at].pop(0)
        while at > order:
            at -= 1
            insort(self._free[at], start + 2**at)
        self._held += 2**order
        self.highest = max(self.highest, self._held)
        return start

    def _give(self, start: int, order: int) -> None:
        self._held -= 2**order
        while order < len(self._free) - 1:
            free = self._free[order]
            buddy = start ^ 2**order
            at = bisect_left(free, buddy)
            if at == len(free) or free[at] != buddy:
                break
            del free[at]
            start = min(start, buddy)
            order += 1
        insort(self._free[order], start)


class Paged:
    """The real `BlockAllocator` without a prefix cache; its null page is paid for out of the same memory."""

    def __init__(self, size: int, page_size: int) -> None:
        """Cut the memory into pages."""
        self.page_size = page_size
        self.allocator = BlockAllocator(size // page_size, page_size, prefix_cache=False)
        self._sequence: dict[int, Sequence] = {}
        self.highest = 0

    @property
    def held(self) -> int:
        """Slots of referenced pages."""
        return self.allocator.stats().held_slots

    def ever_fits(self, final: int) -> bool:
        """Whether there are pages enough."""
        return -(-final // self.page_size) < self.allocator.num_pages

    def admit(self, request: int, length: int, final: int) -> bool:
        """Take pages for the prompt."""
        sequence = self.allocator.open(())
        try:
            sequence.reserve(length)
        except OutOfPages:
            sequence.close()
            return False
        sequence.commit(count=length)
        self._sequence[request] = sequence
        return True

    def grow(self, requests: list[int]) -> int:
        """Take a slot of each last page, and a page where it is full: in one call if they all fit."""
        if self._grow(requests):
            return len(requests)
        return next((done for done, request in enumerate(requests) if not self._grow([request])), len(requests))

    def _grow(self, requests: list[int]) -> bool:
        sequences = [self._sequence[request] for request in requests]
        try:
            self.allocator.reserve_batch(sequences, 1)
        except OutOfPages:
            return False
        self.allocator.commit_batch(sequences, [0] * len(sequences))
        return True

    def free(self, request: int) -> None:
        """Close the sequence."""
        self._sequence.pop(request).close()

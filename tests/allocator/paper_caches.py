"""The caches of the papers, as plain lists, and a driver that turns a policy into such a cache.

A cache holds ``capacity`` keys; ``access`` returns the key it evicted, or None. One difference to the papers is kept
throughout, since it is the allocator's: room is made before it is known what will be stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedkv.allocator import EvictionPolicy


def digest_of(key: int) -> bytes:
    """Return the identity that stands for a key."""
    return key.to_bytes(16, "big")


class PolicyCache:
    """A policy as a cache of one-page entries: page ids are reused, and nothing is held between accesses."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.free = list(range(capacity, 0, -1))
        self.page_of: dict[int, int] = {}

    def access(self, key: int) -> int | None:
        """Use a key: hit, hold and release it, or evict for it and store it."""
        evicted = None
        if key in self.page_of:
            self.policy.hit([self.page_of[key]])
            self.policy.held([self.page_of[key]])
        else:
            if not self.free:
                (page,) = self.policy.victims(1)
                self.policy.removed([page], evicted=True)
                evicted = next(other for other, at in self.page_of.items() if at == page)
                del self.page_of[evicted]
                self.free.append(page)
            self.page_of[key] = self.free.pop()
            if hasattr(self.policy, "stored"):
                self.policy.stored([self.page_of[key]], [digest_of(key)])
        self.policy.released([self.page_of[key]])
        return evicted

    def victims(self, count: int) -> list[int]:
        """Return the keys that would go."""
        key_of = {page: key for key, page in self.page_of.items()}
        return [key_of[page] for page in self.policy.victims(count)]


class PaperSLRU:
    """Karedla et al.: two lists, oldest first; the protected one has at most ``protected`` lines."""

    def __init__(self, capacity: int, protected: int) -> None:
        self.capacity, self.most = capacity, protected
        self.probation: list[int] = []
        self.protected: list[int] = []

    def access(self, key: int) -> int | None:
        """Use a key."""
        evicted = None
        if key in self.probation + self.protected:
            (self.probation if key in self.probation else self.protected).remove(key)
            self.protected.append(key)
            if len(self.protected) > self.most:
                self.probation.append(self.protected.pop(0))
            return None
        if len(self.probation) + len(self.protected) == self.capacity:
            evicted = (self.probation or self.protected).pop(0)
        self.probation.append(key)
        return evicted


class PaperLFU:
    """Arlitt et al., LFU-DA: a key's value is its uses plus the age at its last use; the lowest goes."""

    def __init__(self, capacity: int, ageing: bool) -> None:
        self.capacity, self.ageing = capacity, ageing
        self.age = self.now = 0
        self.uses: dict[int, int] = {}
        self.value: dict[int, tuple[int, int]] = {}

    def access(self, key: int) -> int | None:
        """Use a key."""
        self.now += 1
        evicted = None
        if key not in self.uses and len(self.uses) == self.capacity:
            evicted = min(self.value, key=lambda other: self.value[other])
            value, _ = self.value.pop(evicted)
            self.age = value if self.ageing else 0
            del self.uses[evicted]
        self.uses[key] = self.uses.get(key, 0) + 1
        self.value[key] = (self.age + self.uses[key], self.now)
        return evicted


class PaperARC:
    """Megiddo and Modha: two lists, two ghost lists, and the target ``p``, in whole keys."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def access(self, key: int) -> int | None:
        """Use a key."""
        evicted = None
        if key in self.t1 + self.t2:
            (self.t1 if key in self.t1 else self.t2).remove(key)
            self.t2.append(key)
            return None
        if len(self.t1) + len(self.t2) == self.c:
            evicted = self._replace()
        if key in self.b1:
            self.p = min(self.c, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)
        while len(self.t1) + len(self.b1) > self.c:
            self.b1.pop(0)
        while len(self.t1 + self.t2 + self.b1 + self.b2) > 2 * self.c:
            self.b2.pop(0)
        return evicted

    def _replace(self) -> int:
        if self.t1 and (len(self.t1) > self.p + 1e-9 or not self.t2):
            self.b1.append(self.t1.pop(0))
            return self.b1[-1]
        self.b2.append(self.t2.pop(0))
        return self.b2[-1]


class PaperS3FIFO:
    """Yang et al.: a small, a main and a ghost queue, oldest first, and up to three uses per key."""

    def __init__(self, capacity: int, small: float, ghosts: float) -> None:
        self.capacity, self.share, self.most_ghosts = capacity, small, ghosts * capacity
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}

    def access(self, key: int) -> int | None:
        """Use a key."""
        evicted = None
        if key in self.small + self.main:
            self.uses[key] = min(3, self.uses[key] + 1)
            return None
        if len(self.small) + len(self.main) == self.capacity:
            evicted = self._evict()
        (self.main if key in self.ghosts else self.small).append(key)
        if key in self.ghosts:
            self.ghosts.remove(key)
        while len(self.ghosts) > self.most_ghosts:
            self.ghosts.pop(0)
        self.uses[key] = 0
        return evicted

    def _evict(self) -> int:
        while True:
            if self.small and (len(self.small) >= self.share * self.capacity or not self.main):
                key = self.small.pop(0)
                if self.uses[key] <= 1:
                    self.ghosts.append(key)
                    return key
                self.uses[key] = 0
            else:
                key = self.main.pop(0)
                if self.uses[key] == 0:
                    return key
                self.uses[key] -= 1
            self.main.append(key)

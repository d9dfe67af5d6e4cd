"""Eviction: in which order idle pages are given up.

Takes what happens to indexed pages, gives victims, and refuses to know tokens, tables or trees. The allocator sees to
it that children go before parents, whatever a policy says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .policies import ARC, LFU, LRU, S3FIFO, SLRU, Priority

if TYPE_CHECKING:
    from collections.abc import Callable


class EvictionPolicy(Protocol):
    """What the allocator asks of a policy. A *candidate* is a page that is idle: findable, held by nobody.

    Calls come in batches and in the order in which things happened; a policy keeps its own books of candidates and
    never raises.
    """

    def hit(self, pages: list[int]) -> None:
        """Indexed pages were found by a new sequence, first block first; idle ones are then also `held`."""

    def held(self, pages: list[int]) -> None:
        """Candidates are candidates no more: somebody holds them."""

    def released(self, pages: list[int]) -> None:
        """Pages became candidates, last block first."""

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Pages left the index.

        ``evicted``: these candidates were given up for new tokens, directly after `victims` was asked for as many.
        They need not be the ones it named: where one has pages below it, those go in its place. Otherwise what they
        hold became void (an overwritten page and all below it, a reset); they may be held.
        """

    def victims(self, count: int) -> list[int]:
        """Return ``count`` different candidates, the first to go first; changes nothing. There are that many."""


@runtime_checkable
class ContentPolicy(EvictionPolicy, Protocol):
    """A policy that also wants to know what pages hold, by a name that outlives the page id.

    Having the method `stored` is all it takes: digests cost a few microseconds a page and are made for these policies
    alone. Namespaces must then be made of plain values (`content_hash.namespace_digest`).
    """

    def stored(self, pages: list[int], identities: list[bytes]) -> None:
        """Pages that somebody holds entered the index, first block first; digests are as in `content_hashes`."""


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "slru": SLRU,
    "lfu": LFU,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "priority": Priority,
}
"""The policies that have a name."""


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return the policy of a name, or the object itself.

    Raises:
        ValueError: no policy has this name.
        TypeError: neither a name nor an object with the protocol's methods.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {sorted(POLICIES)} or an object, was {policy!r}")
        return POLICIES[policy]()
    missing = [name for name in ("hit", "held", "released", "removed", "victims") if not hasattr(policy, name)]
    if missing:
        raise TypeError(f"policy must have the methods of EvictionPolicy, {type(policy).__name__} lacks {missing}")
    return policy

"""The observer: what an allocator tells about itself while it works.

One hook for recording, events, metrics and debugging. An observer is told after a call has succeeded, in the order of
the calls; a call that raised is not told. It must not raise, must not call the allocator back, and must copy an array
that it wants to keep. Sequences are named by their serial number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from .namespace import Media
    from .tokens import TokenArray


_EVENTS = (
    "attached", "opened", "reserved", "committed", "forked", "truncated", "closed", "evicted", "was_reset", "pinned",
    "unpinned", "step_began", "step_ended", "swapped",
)  # fmt: skip


class Observer(Protocol):
    """What ``BlockAllocator(observer=…)`` calls."""

    def attached(self, num_pages: int, page_size: int) -> None:
        """Hear that the allocator was made; ``num_pages`` counts the null page. The first call, once."""

    def opened(
        self,
        sequence: int,
        tokens: TokenArray,
        cached: int,
        *,
        namespace: Hashable,
        media: tuple[Media, ...],
        at: float,
    ) -> None:
        """Hear that a sequence was opened on a prompt of which ``cached`` tokens were found stored.

        ``tokens`` is uint32 ``[n]``, ``at`` the clock's reading.
        """

    def reserved(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Hear that ``sequences[i]`` reserved ``counts[i]`` tokens: one call per `reserve` or `reserve_batch`."""

    def committed(self, sequences: Sequence[int], tokens: Sequence[TokenArray | None], counts: Sequence[int]) -> None:
        """Hear that the next ``counts[i]`` tokens are stored: one call per `commit` or `commit_batch`.

        ``tokens[i]`` has their ids, uint32 ``[counts[i]]``, or is None where ``commit(count=…)`` named none.
        """

    def forked(self, parent: int, child: int, at: float) -> None:
        """Hear that ``child`` was forked from ``parent``."""

    def truncated(self, sequence: int, num_tokens: int) -> None:
        """Hear that all tokens from ``num_tokens`` on were forgotten."""

    def closed(self, sequence: int) -> None:
        """Hear that a sequence gave everything back."""

    def evicted(self, pages: Sequence[int]) -> None:
        """Hear that idle pages were given up, in this order; told before the call that needed them."""

    def was_reset(self) -> None:
        """Hear that everything stored so far was made unfindable."""

    def pinned(self, pin: int, num_tokens: int, at: float) -> None:
        """Hear that a pin holds the pages of ``num_tokens`` tokens; ``pin`` is its number."""

    def unpinned(self, pin: int) -> None:
        """Hear that a pin let its pages go."""

    def step_began(self, step: int, at: float) -> None:
        """Hear that a step is in flight: what is given back from now on waits for its end."""

    def step_ended(self, step: int) -> None:
        """Hear that a step has ended, and what has waited for it alone was given back."""

    def swapped(self, sequence: int, *, to_host: bool) -> None:
        """Hear that a swap was finished: the sequence lies in a host pool now, or on the device again.

        Plans are not told, nor that one was cancelled: the sequence is where it was then.
        """


def require_observer(observer: Observer) -> Observer:
    """Return the observer, or raise TypeError where it lacks one of the protocol's methods."""
    missing = [name for name in _EVENTS if not hasattr(observer, name)]
    if missing:
        raise TypeError(f"observer must have the methods of Observer, {type(observer).__name__} lacks {missing}")
    return observer

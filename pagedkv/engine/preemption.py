"""How a request that must leave gives its pages back, and how it returns: computed again, or swapped.

Takes a request, decides by cost, and refuses to choose who leaves or when it returns: that is the scheduler's.

*Cost*, in seconds, of what both ways have to do: the tokens stored times the seconds of a prefill token, measured over
this engine's own steps; against the bytes to move, out and in again, at the rate measured over this swap space's own
moves, checksums included. Before the first move that rate is taken to be `ASSUMED_RATE`, before the first prefill
swapping is taken to be dearer. A text that is computed again may find some of its pages still stored; that gift is not
counted on, since pages are short.

Where host memory is full, or a page has come to harm there, the text is computed again: nothing stalls, and no model
reads a damaged page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

from pagedkv.allocator import OutOfPages
from pagedkv.swap_space import DamagedPage

if TYPE_CHECKING:
    from pagedkv.backend import CacheSequence
    from pagedkv.engine.accounting import StepCost
    from pagedkv.engine.outputs import EngineStats
    from pagedkv.engine.request import Request
    from pagedkv.swap_space import SwapSpace

PreemptionMode = Literal["auto", "recompute", "swap"]
PREEMPTIONS: Final = get_args(PreemptionMode)
ASSUMED_RATE: Final = 5e8  # bytes per second: one core that copies twice and sums
_WEIGHT = 0.2  # of the newest step in the measured rate


class Preemption:
    """The two ways out of a cache and back.

    Args:
        stats: counted into.
        swap_space: host memory for swapped pages; None: everything is computed again.
        mode: ``"auto"`` by cost; ``"swap"`` whenever there is room; ``"recompute"`` always.
    """

    def __init__(self, stats: EngineStats, swap_space: SwapSpace | None = None, mode: PreemptionMode = "auto") -> None:
        """Start with nothing measured."""
        if mode not in PREEMPTIONS:
            raise ValueError(f"preemption must be one of {', '.join(PREEMPTIONS)}, was {mode!r}")
        if mode == "swap" and swap_space is None:
            raise ValueError("preemption 'swap' needs swap_memory, was None")
        self.swap_space = None if mode == "recompute" else swap_space
        self._stats = stats
        self._mode = mode
        self._prefill_seconds: float | None = None  # per token

    def note_step(self, cost: StepCost, seconds: float) -> None:
        """Learn what a prefill token costs from a step that was mostly prefill."""
        if 2 * cost.prefill >= cost.tokens:
            fresh, known = seconds / cost.tokens, self._prefill_seconds
            self._prefill_seconds = fresh if known is None else known + _WEIGHT * (fresh - known)

    def leave(self, request: Request) -> None:
        """Take a running request's pages; it has no sequence afterwards."""
        assert request.sequence is not None
        request.preemptions += 1
        self._stats.preemptions += 1
        if not self._swap_out(request, request.sequence):
            request.sequence.close()
        request.sequence = None
        request.note_stored()

    def _swap_out(self, request: Request, sequence: CacheSequence) -> bool:
        if self.swap_space is None or not self._swaps(self.swap_space, sequence):
            return False
        try:
            self.swap_space.swap_out(sequence)  # type: ignore[arg-type]  # a swap space is one for this cache
        except OutOfPages:
            return False
        request.swapped = sequence
        self._stats.swapped_out += 1
        return True

    def _swaps(self, space: SwapSpace, sequence: CacheSequence) -> bool:
        """Whether swapping costs less than computing again."""
        if not sequence.num_tokens:
            return False
        if self._mode == "swap":
            return True
        if self._prefill_seconds is None:
            return False
        rate = space.bytes_moved / space.seconds if space.seconds else ASSUMED_RATE
        moving = 2 * space.bytes_of(sequence) / rate  # type: ignore[arg-type]
        return moving < sequence.num_tokens * self._prefill_seconds

    def come_back(self, request: Request) -> CacheSequence | None:
        """Return the sequence of a request with its pages on the device again; None: its text is to be computed."""
        sequence, request.swapped = request.swapped, None
        if sequence is None or self.swap_space is None:
            return None
        try:
            self.swap_space.swap_in(sequence)  # type: ignore[arg-type]
        except (DamagedPage, OutOfPages) as error:
            self._stats.damaged_swaps += isinstance(error, DamagedPage)
            sequence.close()
            return None
        request.swaps += 1
        self._stats.swapped_in += 1
        return sequence

    def forget(self, request: Request) -> None:
        """Give back what a waiting request has in host memory."""
        if request.swapped is not None:
            request.swapped.close()
            request.swapped = None

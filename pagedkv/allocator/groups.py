"""Layer groups: layers whose pages live and die together.

Takes the few numbers that decide when a group's pages may go, gives which blocks of a sequence a group needs, and
refuses to know layers, heads or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .tokens import count_of

_EVERYTHING = 2**62


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Layers in which every token sees everything before it: their pages stay as long as the sequence."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers in which a token sees itself, the ``window - 1`` tokens before it and the sink tokens.

    Attributes:
        window: tokens seen, the token itself included; at least 1.
        num_sink_tokens: first positions of the sequence that stay visible outside the window.
    """

    window: int
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse counts that describe no window."""
        if count_of(self.window, "window") < 1:
            raise ValueError(f"window must be at least 1, was {self.window}")
        count_of(self.num_sink_tokens, "num_sink_tokens")


LayerGroup = FullAttention | SlidingWindow


class Span(NamedTuple):
    """Which blocks a group needs.

    Attributes:
        page_size: tokens in a block.
        reach: tokens before the next one that it may still see, sink tokens apart; at least 1, so that what the index
            names ends in a page (a window of 1 is kept as one of 2).
        sink_blocks: blocks that hold sink tokens.
    """

    page_size: int
    reach: int
    sink_blocks: int

    @classmethod
    def of(cls, group: LayerGroup, page_size: int) -> Span:
        """Return the blocks that ``group`` needs."""
        if isinstance(group, FullAttention):
            return cls(page_size, _EVERYTHING, 0)
        return cls(page_size, max(group.window - 1, 1), -(-group.num_sink_tokens // page_size))

    @property
    def is_full(self) -> bool:
        """Whether nothing ever leaves."""
        return self.reach == _EVERYTHING

    def keep_from(self, num_tokens: int) -> int:
        """Return the first block, sinks apart, that the token after ``num_tokens`` tokens still sees."""
        return max(num_tokens - self.reach, 0) // self.page_size

    def needed(self, num_tokens: int) -> list[int]:
        """Return the blocks that must be there to go on after ``num_tokens`` tokens, ascending."""
        end, first = -(-num_tokens // self.page_size), self.keep_from(num_tokens)
        return [*range(min(self.sink_blocks, first, end)), *range(first, end)]

    def widest(self, step_tokens: int) -> int:
        """Return the most blocks, sinks apart, held by the window and ``step_tokens`` new tokens, however they lie."""
        return _EVERYTHING if self.is_full else (self.reach + step_tokens + self.page_size - 2) // self.page_size + 1

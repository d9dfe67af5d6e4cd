"""Layer groups: layers whose pages live and die together.

Takes the few numbers that decide when a group's pages may go, and refuses to know layers, heads or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Layers in which every token sees everything before it: their pages stay as long as the sequence."""

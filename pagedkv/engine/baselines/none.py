"""No cache at all: every step computes the whole text again (1 + 2 + … + n tokens of work for n).

The first stage of the way to a paged cache, and the yardstick for what any cache is worth.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from pagedkv.allocator import Room
from pagedkv.backend import CacheUsage
from pagedkv.engine.baselines.base import DenseCache, DenseSequence, DenseStep

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from pagedkv.backend import StepBatch
    from pagedkv.spec import KVSpec


class NoCache(DenseCache):
    """The backend that stores nothing: `num_tokens` stays 0, so that each step is fed everything from the start.

    K and V live as long as their step does. There is no bound: nothing is held between steps.
    """

    keeps_tokens = False

    def __init__(self, spec: KVSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, dtype=dtype, device=device)
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def open(self, tokens: Sequence[int], *, namespace: Hashable = None) -> DenseSequence:
        """Open a sequence of which nothing is ever stored."""
        return DenseSequence(self)

    def room(
        self, tokens: Sequence[int], *, growth: int = 0, chunk: int | None = None, namespace: Hashable = None
    ) -> Room:
        """Return that any number of tokens fits."""
        return Room(len(tokens) + growth, sys.maxsize)

    def growth_room(self, sequences: Sequence[DenseSequence], counts: Sequence[int]) -> Room:
        """Return that any number of tokens fits."""
        return Room(sum(counts), sys.maxsize)

    def take(self, step: DenseStep) -> None:
        """Forget what an earlier step wrote."""
        self._layers.clear()

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Hold K ``[total_q, num_kv_heads, k_dim]`` and V for the rest of the step."""
        self.current(batch)
        self._layers[layer] = (k.transpose(0, 1), v.transpose(0, 1))

    def stored(self, layer: int, step: DenseStep, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row's part of what this step wrote."""
        k, v = self._layers[layer]
        rows = slice(step.offsets[row], step.offsets[row + 1])
        return k[:, rows], v[:, rows]

    def fork(self, sequence: DenseSequence) -> DenseSequence:
        """Return another empty sequence."""
        return DenseSequence(self)

    def cut(self, sequence: DenseSequence, num_tokens: int) -> None:
        """Do nothing: nothing is stored."""

    def end_step(self, batch: StepBatch, *, keep: Mapping[DenseSequence, int] | None = None) -> None:
        """Let the step's K and V go; no token is kept, whatever ``keep`` says."""
        super().end_step(batch, keep=keep)
        self._layers.clear()

    def release(self, sequence: DenseSequence) -> None:
        """Do nothing: nothing is stored."""

    def usage(self) -> CacheUsage:
        """Return zeros: nothing is held between steps."""
        return CacheUsage(0, 0, 0, 0, 0)

"""The cache that everyone writes first: K and V per sequence, grown by `torch.cat` at every token.

Each growth copies all that is stored, and a batch is padded to its longest sequence to be attended in one call.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagedkv.allocator import Room
from pagedkv.backend import CacheUsage
from pagedkv.engine.baselines.base import DenseCache, DenseSequence, DenseStep

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pagedkv.backend import StepBatch
    from pagedkv.spec import KVSpec


class _Stored(NamedTuple):
    """K and V of one sequence per layer, ``[num_kv_heads, length, dim]``; forks hold the same object."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class ConcatCache(DenseCache):
    """K and V per sequence and layer, ``[num_kv_heads, length, dim]`` from length 0, grown by `torch.cat`.

    Args:
        spec: what the model stores per token.
        max_tokens: the most tokens over all sequences; None for as many as the machine bears.
        dtype: of K and V.
        device: where they live.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        max_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be None or at least 1, was {max_tokens}")
        super().__init__(spec, dtype=dtype, device=device)
        self.max_tokens = max_tokens
        self._stored: dict[DenseSequence, _Stored] = {}

    def open(self, tokens: Sequence[int], *, namespace: Hashable = None) -> DenseSequence:
        """Open an empty sequence that will hold ``tokens``."""
        layers = self.spec.layers
        sequence = DenseSequence(self)
        self._stored[sequence] = _Stored(
            [self._empty(layer.num_kv_heads, layer.k_dim) for layer in layers],
            [self._empty(layer.num_kv_heads, layer.v_dim) for layer in layers],
        )
        return sequence

    def _empty(self, num_heads: int, dim: int) -> torch.Tensor:
        return torch.empty(num_heads, 0, dim, dtype=self.dtype, device=self.device)

    def room(
        self, tokens: Sequence[int], *, growth: int = 0, chunk: int | None = None, namespace: Hashable = None
    ) -> Room:
        """Return the slots that ``tokens`` and ``growth`` more would take now, and those available."""
        return Room(len(tokens) + growth, self._available())

    def growth_room(self, sequences: Sequence[DenseSequence], counts: Sequence[int]) -> Room:
        """Return the slots that ``counts`` more tokens of ``sequences`` would take, and those available.

        A sequence whose tensors are a fork's too takes its whole length: the next `torch.cat` parts them.
        """
        after = self._distinct(without=set(sequences))
        grown = sum(sequence.num_tokens + count for sequence, count in zip(sequences, counts, strict=True))
        return Room(sum(after.values()) + grown - self._held(), self._available())

    def _distinct(self, without: set[DenseSequence]) -> dict[int, int]:
        """Return the length of each set of tensors that sequences other than ``without`` hold; forks share theirs."""
        stored = ((one, kv) for one, kv in self._stored.items() if one not in without)
        return {id(kv): sequence.num_tokens for sequence, kv in stored}

    def _held(self) -> int:
        return sum(self._distinct(set()).values())

    def _available(self) -> int:
        return sys.maxsize if self.max_tokens is None else self.max_tokens - self._held()

    def take(self, step: DenseStep) -> None:
        """Part each sequence from its forks: from here on it grows its own lists of tensors."""
        for sequence in step.sequences:
            kv = self._stored[sequence]
            self._stored[sequence] = _Stored(list(kv.keys), list(kv.values))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Append K ``[total_q, num_kv_heads, k_dim]`` and V ``[total_q, num_kv_heads, v_dim]`` of the step."""
        step = self.current(batch)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        for row, sequence in enumerate(step.sequences):
            new = slice(step.offsets[row], step.offsets[row + 1])
            kv = self._stored[sequence]
            kv.keys[layer] = torch.cat([kv.keys[layer], k[:, new]], dim=1)
            kv.values[layer] = torch.cat([kv.values[layer], v[:, new]], dim=1)

    def stored(self, layer: int, step: DenseStep, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one row's sequence: ``[num_kv_heads, kv_len, dim]``."""
        kv = self._stored[step.sequences[row]]
        return kv.keys[layer], kv.values[layer]

    def fork(self, sequence: DenseSequence) -> DenseSequence:
        """Return a second sequence on the same tensors; the first `torch.cat` parts them."""
        twin = DenseSequence(self)
        twin.num_tokens = sequence.num_tokens
        self._stored[twin] = self._stored[sequence]
        return twin

    def cut(self, sequence: DenseSequence, num_tokens: int) -> None:
        """Drop what is stored from ``num_tokens`` on; the copy lets the rest of the memory go."""
        kv = self._stored[sequence]
        self._stored[sequence] = _Stored(_cut(kv.keys, num_tokens), _cut(kv.values, num_tokens))

    def release(self, sequence: DenseSequence) -> None:
        """Give back all that ``sequence`` holds."""
        del self._stored[sequence]

    def usage(self) -> CacheUsage:
        """Return what live sequences hold; tensors that forks share count once."""
        lengths = [length for length in self._distinct(set()).values() if length]
        tokens = sum(lengths)
        held = tokens * self.spec.bytes_per_token(self.dtype)
        return CacheUsage(tokens, tokens, held, held, len(lengths))


def _cut(states: list[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
    return [one[:, :num_tokens].clone() if one.shape[1] > num_tokens else one for one in states]

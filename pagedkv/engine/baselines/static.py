"""The cache that reserves the longest length for every sequence, once: no growth, no copies, and mostly air.

What transformers' static cache and early serving systems do; the waste that pages do away with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.allocator import Room
from pagedkv.backend import CacheUsage
from pagedkv.engine.baselines.base import DenseCache, DenseSequence, DenseStep
from pagedkv.engine.baselines.dense import attend_decode

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pagedkv.backend import StepBatch
    from pagedkv.spec import KVSpec


class StaticCache(DenseCache):
    """A slab of ``max_len`` tokens for each of ``max_batch`` sequences, held from its first step to its close.

    Args:
        spec: what the model stores per token.
        max_batch: slabs, so the most sequences with stored tokens.
        max_len: tokens per slab; by default the model's own context.
        dtype: of K and V.
        device: where they live.

    K and V of a layer are ``[max_batch, num_kv_heads, max_len, dim]``.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        max_batch: int = 32,
        max_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, was {max_batch}")
        if max_len is not None and max_len < 1:
            raise ValueError(f"max_len must be at least 1, was {max_len}")
        super().__init__(spec, dtype=dtype, device=device)
        self.max_batch = max_batch
        self.max_len = spec.max_len if max_len is None else max_len
        self._keys = [self._slabs(layer.num_kv_heads, layer.k_dim) for layer in spec.layers]
        self._values = [self._slabs(layer.num_kv_heads, layer.v_dim) for layer in spec.layers]
        self._free = list(reversed(range(max_batch)))
        self._slab: dict[DenseSequence, int] = {}

    def _slabs(self, num_heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(self.max_batch, num_heads, self.max_len, dim, dtype=self.dtype, device=self.device)

    def open(self, tokens: Sequence[int], *, namespace: Hashable = None) -> DenseSequence:
        """Open an empty sequence that will hold ``tokens``; its slab comes with its first step."""
        return DenseSequence(self)

    def room(
        self, tokens: Sequence[int], *, growth: int = 0, chunk: int | None = None, namespace: Hashable = None
    ) -> Room:
        """Return the slots of the slab that ``tokens`` and ``growth`` more would take, and those of free slabs.

        What is longer than a slab fits nowhere: then the longest that fits is said to be available.
        """
        length = len(tokens) + growth
        if length > self.max_len:
            return Room(length, self.max_len if self._free else 0)
        return Room(self.max_len, len(self._free) * self.max_len)

    def growth_room(self, sequences: Sequence[DenseSequence], counts: Sequence[int]) -> Room:
        """Return the slots of new slabs for ``counts`` more tokens of ``sequences``, and those of free slabs."""
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.num_tokens + count > self.max_len:
                return Room(sequence.num_tokens + count, self.max_len)
        new = sum(sequence not in self._slab for sequence in sequences)
        return Room(new * self.max_len, len(self._free) * self.max_len)

    def take(self, step: DenseStep) -> None:
        """Give a slab to each sequence that has none, and lay out where the step writes and decodes."""
        for sequence in step.sequences:
            if sequence not in self._slab:
                self._slab[sequence] = self._free.pop()
        slabs = torch.tensor([self._slab[sequence] for sequence in step.sequences])
        self._written = (slabs.repeat_interleave(torch.tensor(step.q_lens)).to(self.device), step.position_ids)
        self._order, self._decoded = self._decode_order(slabs[step.decode_rows])

    def _decode_order(self, slabs: torch.Tensor) -> tuple[torch.Tensor, slice | torch.Tensor]:
        """Return the decode rows in the order of their slabs, and those slabs: neighbours as a slice."""
        slabs, order = slabs.sort()
        if len(slabs) and int(slabs[-1] - slabs[0]) == len(slabs) - 1:
            return order.to(self.device), slice(int(slabs[0]), int(slabs[-1]) + 1)
        return order.to(self.device), slabs.to(self.device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store K ``[total_q, num_kv_heads, k_dim]`` and V ``[total_q, num_kv_heads, v_dim]`` of the step."""
        self.current(batch)
        slabs, positions = self._written
        self._keys[layer][slabs, :, positions] = k
        self._values[layer][slabs, :, positions] = v

    def stored(self, layer: int, step: DenseStep, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the filled part of a row's slab: ``[num_kv_heads, kv_len, dim]``."""
        slab, length = self._slab[step.sequences[row]], step.kv_lens[row]
        return self._keys[layer][slab, :, :length], self._values[layer][slab, :, :length]

    def attend_decode(self, layer: int, q: torch.Tensor, step: DenseStep) -> torch.Tensor:
        """Attend from the rows that decode, q ``[decode_rows, num_q_heads, k_dim]``, over slabs to the longest."""
        spec = self.layer_specs[layer]
        kv_lens = [step.kv_lens[row] for row in step.decode_rows]
        longest = max(kv_lens)
        k = self._keys[layer][self._decoded, :, :longest]
        v = self._values[layer][self._decoded, :, :longest]
        mask = step.decode_mask([kv_lens[row] for row in self._order.tolist()], longest, spec)
        ordered = attend_decode(q[self._order], k, v, spec, mask)
        out = torch.empty_like(ordered)
        out[self._order] = ordered
        return out

    def fork(self, sequence: DenseSequence) -> DenseSequence:
        """Return a second sequence with a copy of the slab's filled part.

        Raises:
            OutOfPages: if no slab is free.
        """
        twin = DenseSequence(self)
        if sequence not in self._slab:
            return twin
        if not self._free:
            from pagedkv.allocator import OutOfPages

            raise OutOfPages(needed=self.max_len, available=0)
        source, target = self._slab[sequence], self._free.pop()
        for slabs in (*self._keys, *self._values):
            slabs[target, :, : sequence.num_tokens] = slabs[source, :, : sequence.num_tokens]
        self._slab[twin] = target
        twin.num_tokens = sequence.num_tokens
        return twin

    def cut(self, sequence: DenseSequence, num_tokens: int) -> None:
        """Clear the slab from ``num_tokens`` on; give it back if nothing is left.

        Cleared, so that a NaN that one sequence left there cannot reach another's masked sums.
        """
        slab = self._slab.get(sequence)
        if slab is None:
            return
        for slabs in (*self._keys, *self._values):
            slabs[slab, :, num_tokens : self._filled(sequence)] = 0
        if num_tokens == 0:
            del self._slab[sequence]
            self._free.append(slab)
            self._free.sort(reverse=True)

    def _filled(self, sequence: DenseSequence) -> int:
        """Return how far a sequence's slab may have been written, the step in flight included."""
        step = self._step
        if step is None or sequence not in step.sequences:
            return sequence.num_tokens
        return step.kv_lens[step.sequences.index(sequence)]

    def release(self, sequence: DenseSequence) -> None:
        """Give the sequence's slab back, cleared."""
        self.cut(sequence, 0)

    def usage(self) -> CacheUsage:
        """Return what live sequences hold: whole slabs, whatever is in them."""
        tokens = sum(sequence.num_tokens for sequence in self._slab)
        slots = len(self._slab) * self.max_len
        per_token = self.spec.bytes_per_token(self.dtype)
        return CacheUsage(tokens, slots, tokens * per_token, slots * per_token, len(self._slab))

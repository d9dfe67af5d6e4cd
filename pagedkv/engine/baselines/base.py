"""What the baselines share: handles, the step's rules, and attention row by row.

Takes tokens and each layer's K and V, gives attention over them; how K and V are kept is each baseline's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedkv.attention import LayerSpec
from pagedkv.backend import CacheUsage, StepBatch
from pagedkv.engine.baselines.dense import attend_decode, attend_row, pad, visible

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    from pagedkv.allocator import Room
    from pagedkv.spec import KVSpec


class DenseSequence:
    """A handle on one sequence of a baseline; what is stored for it is its cache's business.

    Attributes:
        num_tokens: tokens whose K and V are stored.
        num_cached_tokens: 0: baselines share nothing between sequences that were opened apart.
    """

    num_cached_tokens = 0

    def __init__(self, cache: DenseCache) -> None:
        self.cache = cache
        self.num_tokens = 0
        self.closed = False

    def room(self, num_tokens: int, *, chunk: int | None = None) -> Room:
        """Return the slots that ``num_tokens`` more tokens would take, and those available."""
        self.cache.require_idle(self)
        return self.cache.growth_room([self], [num_tokens])

    def fork(self) -> DenseSequence:
        """Return a second sequence with the same stored tokens.

        Raises:
            OutOfPages: if it needs memory of its own and there is none.
        """
        self.cache.require_idle(self)
        return self.cache.fork(self)

    def truncate(self, num_tokens: int) -> None:
        """Forget all stored tokens from ``num_tokens`` on."""
        self.cache.require_idle(self)
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens must be 0 to {self.num_tokens}, was {num_tokens}")
        self.cache.cut(self, num_tokens)
        self.num_tokens = num_tokens

    def close(self) -> None:
        """Give everything back; using the handle afterwards is an error."""
        self.cache.require_idle(self)
        self.cache.release(self)
        self.closed = True


class DenseCache(ABC):
    """A `CacheBackend` that keeps K and V as dense tensors.

    Args:
        spec: what the model stores per token.
        dtype: of K and V.
        device: where they live.

    Attributes:
        keeps_tokens: whether K and V outlive a step; where not, every step is fed the whole sequence.
    """

    keeps_tokens = True

    def __init__(self, spec: KVSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self.layer_specs = [LayerSpec(scale=layer.k_dim**-0.5, window=layer.window) for layer in spec.layers]
        self._step: DenseStep | None = None

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """Say how ``layer`` attends.

        Raises:
            ValueError: for ALiBi, which the baselines do not know.
        """
        if spec.alibi_slopes is not None:
            raise ValueError(f"spec.alibi_slopes of layer {layer} must be None for a baseline cache, were given")
        self.layer_specs[layer] = spec

    @abstractmethod
    def open(self, tokens: Sequence[int], *, namespace: Hashable = None) -> DenseSequence:
        """Open an empty sequence that will hold ``tokens``."""

    @abstractmethod
    def room(
        self, tokens: Sequence[int], *, growth: int = 0, chunk: int | None = None, namespace: Hashable = None
    ) -> Room:
        """Return the slots that ``tokens`` and ``growth`` more would take now, and those available."""

    @abstractmethod
    def growth_room(self, sequences: Sequence[DenseSequence], counts: Sequence[int]) -> Room:
        """Return the slots that ``counts`` more tokens of ``sequences`` would take, and those available."""

    @abstractmethod
    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store K ``[total_q, num_kv_heads, k_dim]`` and V ``[total_q, num_kv_heads, v_dim]`` of the step."""

    @abstractmethod
    def stored(self, layer: int, step: DenseStep, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one row of a step, its own tokens included: ``[num_kv_heads, kv_len, dim]``."""

    @abstractmethod
    def fork(self, sequence: DenseSequence) -> DenseSequence:
        """Return a second sequence with the same stored tokens."""

    @abstractmethod
    def cut(self, sequence: DenseSequence, num_tokens: int) -> None:
        """Drop what is stored, written or committed, from ``num_tokens`` on."""

    @abstractmethod
    def release(self, sequence: DenseSequence) -> None:
        """Give back all that ``sequence`` holds."""

    @abstractmethod
    def usage(self) -> CacheUsage:
        """Return what is held now."""

    @abstractmethod
    def take(self, step: DenseStep) -> None:
        """Make room for a step that fits."""

    def require_idle(self, sequence: DenseSequence) -> None:
        """Raise if ``sequence`` is closed or in the step in flight."""
        if sequence.closed:
            from pagedkv.allocator import SequenceClosed

            raise SequenceClosed("the sequence is closed; open another one")
        if self._step is not None and sequence in self._step.sequences:
            raise RuntimeError("the sequence is in the step in flight; end or abandon it first")

    def begin_step(self, inputs: Mapping[DenseSequence, Sequence[int]]) -> DenseStep:
        """Make room for the next tokens of each sequence, all or none.

        Raises:
            ValueError: if there is no sequence, or one without tokens.
            RuntimeError: if a step is in flight.
            OutOfPages: if there is no room for the whole step.
        """
        if self._step is not None:
            raise RuntimeError("begin_step needs the step in flight to be ended or abandoned first")
        sequences, tokens = list(inputs), [list(row) for row in inputs.values()]
        if not sequences or not all(tokens):
            raise ValueError(f"inputs must hold sequences with at least one token each, held {tokens}")
        for sequence in sequences:
            self.require_idle(sequence)
        counts = [len(row) for row in tokens]
        needed, available = self.growth_room(sequences, counts)
        if needed > available:
            from pagedkv.allocator import OutOfPages

            raise OutOfPages(needed=needed, available=available)
        step = DenseStep(sequences, tokens, self.device)
        self.take(step)
        self._step = step
        return step

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Attend from q ``[total_q, num_q_heads, k_dim]`` to all that is stored: ``[total_q, num_q_heads, v_dim]``."""
        step = self.current(batch)
        if self.spec.layers[layer].chunked:
            raise ValueError(f"layer must attend by a window that slides, layer {layer} attends within chunks: gather")
        spec = self.layer_specs[layer]
        if len(step.decode_rows) == len(step.sequences) > 1:
            return self.attend_decode(layer, q, step)
        out = q.new_empty(*q.shape[:2], self.spec.layers[layer].v_dim)
        rows = list(range(len(step.sequences)))
        if len(step.decode_rows) > 1:
            tokens = [step.offsets[row] for row in step.decode_rows]
            out[tokens] = self.attend_decode(layer, q[tokens], step)
            rows = [row for row in rows if step.q_lens[row] > 1]
        for row in rows:
            start, stop = step.offsets[row], step.offsets[row + 1]
            out[start:stop] = attend_row(q[start:stop], *self.stored(layer, step, row), spec)
        return out

    def gather(self, layer: int, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's stored K and V, row after row, each ``[total_kv, num_kv_heads, dim]``."""
        step = self.current(batch)
        rows = [self.stored(layer, step, row) for row in range(len(step.sequences))]
        k, v = torch.cat([k for k, _ in rows], dim=1), torch.cat([v for _, v in rows], dim=1)
        return k.transpose(0, 1), v.transpose(0, 1)

    def held_positions(self, layer: int, batch: StepBatch) -> list[NDArray[np.int64]]:
        """Return all positions of each row: nothing is given back."""
        return [np.arange(length) for length in self.current(batch).kv_lens]

    def attend_decode(self, layer: int, q: torch.Tensor, step: DenseStep) -> torch.Tensor:
        """Attend from the rows that decode, q ``[decode_rows, num_q_heads, k_dim]``, padded to the longest."""
        spec = self.layer_specs[layer]
        stored = [self.stored(layer, step, row) for row in step.decode_rows]
        longest = max(step.kv_lens[row] for row in step.decode_rows)
        if spec.window is not None and not spec.num_sink_tokens and spec.window < longest:
            longest = spec.window
            stored = [(k[:, -longest:], v[:, -longest:]) for k, v in stored]
        k = pad([k for k, _ in stored], longest)
        v = pad([v for _, v in stored], longest)
        mask = step.decode_mask([one.shape[1] for one, _ in stored], longest, spec)
        return attend_decode(q, k, v, spec, mask)

    def end_step(self, batch: StepBatch, *, keep: Mapping[DenseSequence, int] | None = None) -> None:
        """Commit the step; with ``keep`` only the first ``keep[seq]`` tokens of a sequence stand.

        Raises:
            ValueError: if ``keep`` names a sequence outside the step, or a count outside 0 to its new tokens.
        """
        step = self.current(batch)
        keep = keep or {}
        if not keep.keys() <= set(step.sequences):
            raise ValueError("keep must name sequences of the step only")
        kept = [keep.get(sequence, count) for sequence, count in zip(step.sequences, step.q_lens, strict=True)]
        for count, most in zip(kept, step.q_lens, strict=True):
            if not 0 <= count <= most:
                raise ValueError(f"keep must be 0 to {most} tokens, was {count}")
        self._settle(step, kept)

    def abandon_step(self, batch: StepBatch) -> None:
        """Take the step back: every length is as before `begin_step`."""
        step = self.current(batch)
        self._settle(step, [0] * len(step.q_lens))

    def _settle(self, step: DenseStep, kept: Sequence[int]) -> None:
        for sequence, count, written in zip(step.sequences, kept, step.q_lens, strict=True):
            if count < written:
                self.cut(sequence, sequence.num_tokens + count)
            if self.keeps_tokens:
                sequence.num_tokens += count
        self._step = None

    def current(self, batch: StepBatch) -> DenseStep:
        """Return ``batch`` as this cache's step in flight, or raise."""
        if batch is not self._step or self._step is None:
            raise RuntimeError("batch must be the step in flight; this one has ended, or is another cache's")
        return self._step


class DenseStep(StepBatch):
    """A `StepBatch` with what dense attention needs.

    Attributes:
        sequences: the step's sequences, in row order.
        offsets: where each row's tokens begin, and one more: where they end.
        kv_lens: each row's length with this step's tokens.
        decode_rows: the rows that feed one token.
    """

    sequences: tuple[DenseSequence, ...]

    def __init__(
        self, sequences: Sequence[DenseSequence], tokens: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        """Lay out ``tokens[i]`` as the next ones of ``sequences[i]``."""
        starts = [sequence.num_tokens for sequence in sequences]
        super().__init__(sequences, tokens, starts, device)
        self.offsets = [0]
        for count in self.q_lens:
            self.offsets.append(self.offsets[-1] + count)
        self.kv_lens = [start + count for start, count in zip(starts, self.q_lens, strict=True)]
        self.decode_rows = [row for row, count in enumerate(self.q_lens) if count == 1]
        self._masks: dict[tuple[int, int | None, int], torch.Tensor | None] = {}

    def decode_mask(self, kv_lens: Sequence[int], longest: int, spec: LayerSpec) -> torch.Tensor | None:
        """Return what the decode rows see, bool ``[decode_rows, 1, 1, longest]``, or None if they see everything.

        ``kv_lens`` are the decode rows' lengths as laid out for ``spec``'s layer. The same question is asked by
        every layer of a kind, so that the answer is kept for the step.
        """
        key = (longest, spec.window, spec.num_sink_tokens)
        if key not in self._masks:
            unseen = min(kv_lens) < longest or (spec.window is not None and spec.window < longest)
            lengths = torch.tensor(kv_lens, device=self.input_ids.device)
            positions = torch.arange(longest, device=self.input_ids.device)
            mask = visible(positions, lengths.view(-1, 1, 1, 1) - 1, spec)
            self._masks[key] = mask if unseen else None
        return self._masks[key]

"""The cache backend: everything a batch engine needs of a KV cache, as one small protocol.

Takes nothing but tokens and tensors, gives attention over everything a sequence has stored, and refuses to
know how the memory behind it is organised. `PagedKVCache` implements it; so do the baselines `none`,
`concat` and `static` of `pagedkv.engine.baselines`, which is how they can be measured side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pagedkv.allocator import Room
    from pagedkv.attention import LayerSpec


class CacheUsage(NamedTuple):
    """How much KV memory a backend holds at one moment.

    ``tokens_stored`` counts distinct stored tokens (a shared page once), ``slots_held`` the token slots of all
    memory that live sequences hold, ``bytes_held`` the bytes of those slots over all layers, ``bytes_used``
    the bytes of the stored tokens alone, and ``in_use`` the pages (or sequences' slabs) that are held.
    """

    tokens_stored: int
    slots_held: int
    bytes_used: int
    bytes_held: int
    in_use: int


class CacheSequence(Protocol):
    """A handle on one sequence's stored K and V."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose K and V are stored: a step's input starts here."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were already stored when the sequence was opened (the prefix cache's gift)."""

    def room(self, num_tokens: int, *, chunk: int | None = None) -> Room:
        """Say what ``num_tokens`` more tokens would take, and what there is; change nothing.

        ``chunk`` is the most of them that one step will store; see `CacheBackend.room`.
        """

    def fork(self) -> Self:
        """Return a second sequence with the same stored tokens; memory is shared where the backend can."""

    def truncate(self, num_tokens: int) -> None:
        """Forget all stored tokens from ``num_tokens`` on."""

    def close(self) -> None:
        """Give everything back; using the handle afterwards is an error."""


class StepBatch:
    """One step's input, ragged: the tokens of each sequence one after the other.

    Attributes:
        sequences: the step's sequences, in row order.
        q_lens: new tokens per sequence.
        has_input_ids: whether every sequence's new tokens are known by id, and not by their count alone.
        position_ids: int64 ``[total_q]``: the text's own positions, ``num_tokens`` onwards.
        last_rows: int64 ``[num_sequences]``: the row of each sequence's last token.

    Backends subclass it with what they prepare per step.
    """

    def __init__(
        self,
        sequences: Sequence[Any],
        tokens: Sequence[Sequence[int] | int],
        starts: Sequence[int],
        device: torch.device,
    ) -> None:
        """Lay out ``tokens[i]``, or so many, which begin at position ``starts[i]`` of ``sequences[i]``."""
        self.sequences = tuple(sequences)
        named = [row for row in tokens if not isinstance(row, int)]
        self.q_lens = [row if isinstance(row, int) else len(row) for row in tokens]
        positions = [p for start, count in zip(starts, self.q_lens, strict=True) for p in range(start, start + count)]
        self.has_input_ids = len(named) == len(tokens)
        flat = [token for row in named for token in row]
        self._input_ids = torch.tensor(flat, dtype=torch.int64, device=device)
        self.position_ids = torch.tensor(positions, dtype=torch.int64, device=device)
        self.last_rows = torch.tensor(self.q_lens, dtype=torch.int64, device=device).cumsum(0) - 1

    @property
    def input_ids(self) -> torch.Tensor:
        """The new tokens, int64 ``[total_q]`` on the backend's device.

        Raises:
            RuntimeError: if those of a sequence are known by their count alone (`has_input_ids`).
        """
        if not self.has_input_ids:
            raise RuntimeError("batch has no input_ids: a sequence's new tokens are known by their count alone")
        return self._input_ids


class CacheBackend(Protocol):
    """Where a batch engine keeps K and V.

    A step is ``begin_step``, then for every layer ``write`` followed by ``attend``, then ``end_step``; after an
    exception ``abandon_step`` instead, which leaves every sequence as it was before ``begin_step``.
    """

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """Say how a layer attends (scale, window, softcap, …); once, before the first step."""

    def open(self, tokens: Sequence[int], *, namespace: Hashable = None) -> CacheSequence:
        """Open a sequence that will hold ``tokens``; what is already stored of them is `num_tokens`."""

    def room(
        self, tokens: Sequence[int], *, growth: int = 0, chunk: int | None = None, namespace: Hashable = None
    ) -> Room:
        """Say what ``tokens`` plus ``growth`` more would take now, hits counted; change nothing.

        ``chunk`` is the most tokens that one step will store, by default all at once: what forgets (a sliding window)
        then never holds more than what it remembers and a chunk.
        """

    def begin_step(self, inputs: Mapping[Any, Sequence[int]]) -> StepBatch:
        """Make room for each sequence's next input tokens; all sequences or none (``OutOfPages``)."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store a layer's K ``[total_q, num_kv_heads, k_dim]`` and V ``[total_q, num_kv_heads, v_dim]``."""

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Attend from q ``[total_q, num_q_heads, k_dim]`` to everything stored: ``[total_q, num_q_heads, v_dim]``."""

    def gather(self, layer: int, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's stored K and V, sequence after sequence, ``[total_kv, num_kv_heads, dim]``."""

    def held_positions(self, layer: int, batch: StepBatch) -> Sequence[NDArray[np.int64]]:
        """Return per sequence the positions that `gather` returns, ascending; a window may lack the first."""

    def end_step(self, batch: StepBatch, *, keep: Mapping[Any, int] | None = None) -> None:
        """Commit the step; with ``keep`` only the first ``keep[seq]`` tokens of a sequence stand."""

    def abandon_step(self, batch: StepBatch) -> None:
        """Take the step back."""

    def usage(self) -> CacheUsage:
        """Return what is held now."""

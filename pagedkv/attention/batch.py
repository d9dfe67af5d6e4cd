"""What stays the same in a step for one layer group: block tables, lengths, and what backends prepare from them.

Takes tensors and two bounds, checks their shapes, dtypes and devices once, and never waits for a device while
being built. It knows no page size and no layer: those come with the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from .layer_spec import LayerSpec

_INDEX_DTYPES = (torch.int32, torch.int64)


class AttentionBatch:
    """The ragged batch of one step: sequence ``r`` owns query rows ``cu_q_lens[r]`` to ``cu_q_lens[r + 1]``.

    Query ``i`` of a sequence stands at position ``kv_len - q_len + i``. A position below 0 sees nothing, so a row
    of ``kv_len`` 0 (padding of a captured step) gives zeros whatever its ``q_len``.

    The object describes one step. Backends hang what they derive from the tensors' contents on ``prepared``; after
    writing other contents into the same tensors, build a new one.

    Attributes:
        block_tables: int32 or int64 ``[num_sequences, width]``, any strides: the page id of each logical block.
            Entries past a sequence's own blocks, and blocks that lie wholly outside a layer's window, may hold
            anything.
        kv_lens: int32 or int64 ``[num_sequences]``: tokens stored, this step's included.
        cu_q_lens: int32 or int64 ``[num_sequences + 1]``: running sum of query rows, from 0.
        max_q_len: no sequence has more query rows.
        max_kv_len: no sequence is longer.
        looks: device and dtypes of the tensors: all that a choice of backend may read of a batch.
        prepared: what backends keep for the step, by keys of their own.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or device, or a bound is negative.
    """

    __slots__ = ("_lengths", "block_tables", "cu_q_lens", "kv_lens", "looks", "max_kv_len", "max_q_len", "prepared")

    def __init__(
        self,
        block_tables: torch.Tensor,
        kv_lens: torch.Tensor,
        cu_q_lens: torch.Tensor,
        max_q_len: int,
        max_kv_len: int,
    ) -> None:
        _require_indices("block_tables", block_tables, ("num_sequences", "width"))
        _require_indices("kv_lens", kv_lens, ("num_sequences",))
        _require_indices("cu_q_lens", cu_q_lens, ("num_sequences + 1",))
        num_sequences = block_tables.shape[0]
        if kv_lens.shape[0] != num_sequences:
            raise ValueError(f"kv_lens must be [{num_sequences}], one per row of block_tables, got {[*kv_lens.shape]}")
        if cu_q_lens.shape[0] != num_sequences + 1:
            raise ValueError(
                f"cu_q_lens must be [{num_sequences + 1}], one more than block_tables has rows, "
                f"got {[*cu_q_lens.shape]}"
            )
        for name, tensor in (("kv_lens", kv_lens), ("cu_q_lens", cu_q_lens)):
            if tensor.device != block_tables.device:
                raise ValueError(f"{name} must be on {block_tables.device} like block_tables, got {tensor.device}")
        for name, bound in (("max_q_len", max_q_len), ("max_kv_len", max_kv_len)):
            if isinstance(bound, bool) or not isinstance(bound, int):
                raise TypeError(f"{name} must be an integer, got {type(bound).__name__}")
            if bound < 0:
                raise ValueError(f"{name} must be at least 0, got {bound}")
        self.block_tables = block_tables
        self.kv_lens = kv_lens
        self.cu_q_lens = cu_q_lens
        self.max_q_len = max_q_len
        self.max_kv_len = max_kv_len
        self.looks = block_tables.device, block_tables.dtype, kv_lens.dtype, cu_q_lens.dtype
        self.prepared: dict[Hashable, Any] = {}
        self._lengths: tuple[list[int], list[int]] | None = None

    @property
    def num_sequences(self) -> int:
        """Rows of the block tables."""
        return self.block_tables.shape[0]

    def lengths(self) -> tuple[list[int], list[int]]:
        """Return ``(cu_q_lens, kv_lens)`` as lists, read once. Waits for the device if they are on one."""
        if self._lengths is None:
            self._lengths = self.cu_q_lens.tolist(), self.kv_lens.tolist()
        return self._lengths

    def check_contents(self, *, num_pages: int, page_size: int, total_q: int, spec: LayerSpec) -> None:
        """Prove what the shapes cannot: lengths, sums and every page id that the layer will read.

        Waits for the device; the operator calls it when it is given ``check=True``.

        Raises:
            ValueError: names the tensor, the row, what it must be and what it was.
        """
        cu_q_lens, kv_lens = self.lengths()
        if cu_q_lens[0] != 0 or cu_q_lens[-1] != total_q:
            raise ValueError(
                f"cu_q_lens must run from 0 to the rows of q, {total_q}, got {cu_q_lens[0]} to {cu_q_lens[-1]}"
            )
        capacity = self.block_tables.shape[1] * page_size
        for row, kv_len in enumerate(kv_lens):
            q_len = cu_q_lens[row + 1] - cu_q_lens[row]
            if not 0 <= q_len <= self.max_q_len:
                raise ValueError(
                    f"cu_q_lens must grow by 0 to max_q_len ({self.max_q_len}) at row {row}, got a step of {q_len}"
                )
            limit = min(self.max_kv_len, capacity)
            if not 0 <= kv_len <= limit:
                raise ValueError(
                    f"kv_lens[{row}] must be 0 to {limit} (max_kv_len {self.max_kv_len}, table holds {capacity}), "
                    f"got {kv_len}"
                )
            if 0 < kv_len < q_len:
                raise ValueError(f"kv_lens[{row}] must be 0 or at least its q_len, {q_len}, got {kv_len}")
            if q_len and kv_len:
                start = 0 if spec.window is None else max(0, kv_len - q_len - spec.window + 1)
                seen = [*range(min(spec.num_sink_tokens, start)), *range(start, kv_len)]
                self._check_pages(row, sorted({position // page_size for position in seen}), num_pages)

    def _check_pages(self, row: int, blocks: list[int], num_pages: int) -> None:
        """Refuse a visible block of ``row`` that names the null page or no page at all."""
        table = self.block_tables[row].tolist()
        for block in blocks:
            if not 1 <= table[block] < num_pages:
                raise ValueError(
                    f"block_tables[{row}, {block}] must be a page id from 1 to {num_pages - 1}, got {table[block]}"
                )


def _require_indices(name: str, tensor: object, shape: tuple[str, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tensor.dim() != len(shape):
        raise ValueError(f"{name} must be [{', '.join(shape)}], got {[*tensor.shape]}")

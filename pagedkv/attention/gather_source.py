"""One side's pages (K or V), gathered slot by slot into fp32 buffers that a step's layers share.

Takes pages of any strides and dtype, and scales where they are quantised; gives what a plan's slots hold. It knows no
queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .quantise import is_quantised
from .rows import as_rows, row_factors

if TYPE_CHECKING:
    from .gather_plan import Plan, Slots


class Buffers(NamedTuple):
    """Where one side's slots are gathered, views of memory that the step's layers share.

    ``stored`` is ``[rows, head_dim]`` in the pages' dtype, ``exact`` the same in fp32 (the same tensor where the pages
    are fp32), and ``result`` is ``exact`` seen as ``[n * num_kv_heads, length, head_dim]``.
    """

    stored: torch.Tensor
    exact: torch.Tensor
    result: torch.Tensor


class Source:
    """One side's pages (K or V), ready to be gathered."""

    __slots__ = ("dtype", "factors", "num_kv_heads", "plan", "rows", "scale_factors", "scale_rows", "side")

    def __init__(self, pages: torch.Tensor, scales: torch.Tensor | None, plan: Plan, side: str) -> None:
        self.side = side
        self.plan = plan
        self.dtype = pages.dtype
        self.num_kv_heads = pages.shape[1]
        self.factors = row_factors(pages)
        # index_select knows no fp8, but bytes are bytes.
        self.rows = as_rows(pages.view(torch.uint8) if is_quantised(pages.dtype) else pages)
        self.scale_rows = None
        if scales is not None:
            self.scale_factors = row_factors(scales.unsqueeze(-1))
            self.scale_rows = as_rows(scales.unsqueeze(-1))

    def gather(self, slots: Slots) -> torch.Tensor:
        """Return the slots' contents, fp32 ``[n * num_kv_heads, length, head_dim]``, valid until the next gather."""
        index = slots.rows(self.num_kv_heads, self.factors)
        buffers = self._buffers(slots)
        torch.index_select(self.rows, 0, index, out=buffers.stored)
        if buffers.exact is not buffers.stored:
            buffers.exact.copy_(buffers.stored.view(self.dtype))
        if self.scale_rows is not None:
            scale_index = slots.rows(self.num_kv_heads, self.scale_factors)
            buffers.exact.mul_(self.scale_rows.index_select(0, scale_index))
        return buffers.result

    def _buffers(self, slots: Slots) -> Buffers:
        """Return the buffers for ``slots``, cut once per step from memory that fits the plan's largest part."""
        n, length = slots.pages.shape
        head_dim, kept = self.rows.shape[1], self.plan.buffers
        key = (self.side, self.dtype, head_dim, n, length)
        found: Buffers | None = kept.get(key)
        if found is None:
            stored = self._cut("stored", self.rows.dtype, n * self.num_kv_heads * length)
            same = self.dtype == torch.float32
            exact = stored if same else self._cut("exact", torch.float32, stored.shape[0])
            found = Buffers(stored, exact, exact.view(n * self.num_kv_heads, length, head_dim))
            kept[key] = found
        return found

    def _cut(self, use: str, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
        head_dim = self.rows.shape[1]
        key = (self.side, use, dtype, head_dim)
        memory: torch.Tensor | None = self.plan.buffers.get(key)
        if memory is None:
            size = self.plan.most_columns() * self.num_kv_heads * head_dim
            memory = torch.empty(size, dtype=dtype, device=self.rows.device)
            self.plan.buffers[key] = memory
        return memory[: num_rows * head_dim].view(num_rows, head_dim)

"""Pages seen as a plain list of rows, so that one `index_select` or `index_copy_` reaches any slots.

Takes a page tensor of any strides and gives its memory as ``[num_rows, head_dim]`` with the factors that turn (page,
KV head, offset) into a row; copies nothing. It knows no tables.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class RowFactors(NamedTuple):
    """Row of a slot: ``page_id * page + kv_head * head + offset * slot``."""

    page: int
    head: int
    slot: int


def row_factors(pages: torch.Tensor) -> RowFactors:
    """Return the factors for ``pages``, ``[num_pages, num_kv_heads, page_size, head_dim]``."""
    if pages.is_contiguous():
        return RowFactors(pages.shape[1] * pages.shape[2], pages.shape[2], 1)
    strides = _strides(pages)
    unit = gcd(*strides) or 1
    return RowFactors(*(stride // unit for stride in strides))


def as_rows(pages: torch.Tensor) -> torch.Tensor:
    """Return ``pages`` as ``[num_rows, head_dim]``, a view.

    Where the pages are a strided view of something larger, rows start at every multiple of the strides' greatest common
    divisor; they may overlap and reach elements outside the pages, so only rows named by `row_factors` have a meaning.
    """
    if pages.is_contiguous():
        return pages.view(-1, pages.shape[3])
    strides = _strides(pages)
    unit = gcd(*strides) or 1
    last = sum((size - 1) * stride for size, stride in zip(pages.shape[:3], strides, strict=True)) // unit
    return pages.as_strided((last + 1, pages.shape[3]), (unit, pages.stride(3)))


def _strides(pages: torch.Tensor) -> tuple[int, int, int]:
    """Return the outer strides; a dimension of size 1 has none that matters."""
    page, head, slot = (
        stride if size > 1 else 0 for size, stride in zip(pages.shape[:3], pages.stride()[:3], strict=True)
    )
    return page, head, slot

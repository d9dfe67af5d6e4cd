"""The "torch" backend's writes: K and V into their slots, whole pages onto others.

Takes pages of any strides and dtype and changes them in place; refuses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .quantise import is_quantised, quantise
from .rows import as_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .calls import WriteCall


def cannot_write(call: WriteCall) -> None:
    """Refuse nothing."""


def write(call: WriteCall) -> None:
    """Store all tokens at once, by one `index_copy_` a side where the pages are contiguous."""
    k, v, k_pages, v_pages, slot_mapping, kv_scales, _ = call
    num_heads, page_size = k_pages.shape[1:3]
    page_ids = slot_mapping.div(page_size, rounding_mode="floor")
    # (page * heads + head) * size + offset, with slot = page * size + offset.
    first = torch.add(slot_mapping, page_ids, alpha=(num_heads - 1) * page_size)
    heads = torch.arange(0, num_heads * page_size, page_size, device=slot_mapping.device)
    rows = (first[:, None] + heads).view(-1)
    for side, (values, pages) in enumerate(((k, k_pages), (v, v_pages))):
        if is_quantised(pages.dtype) and kv_scales is not None:
            stored, scales = quantise(values, pages.dtype)
            _put(pages.view(torch.uint8), stored.view(torch.uint8), rows, page_ids, slot_mapping)
            _put(kv_scales[side].unsqueeze(-1), scales.unsqueeze(-1), rows, page_ids, slot_mapping)
        else:
            _put(pages, values, rows, page_ids, slot_mapping)


def _put(
    pages: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, page_ids: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write ``values`` ``[total_q, num_kv_heads, dim]`` into their slots."""
    if pages.is_contiguous():
        as_rows(pages).index_copy_(0, rows, values.reshape(-1, values.shape[2]))
    else:
        # Rows of a strided view may overlap in memory, which index_copy_ refuses; this is four times slower.
        pages[page_ids, :, slots - page_ids * pages.shape[2]] = values


def cannot_copy(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Refuse nothing."""


def copy(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Copy each tensor's pages by one gather and one scatter."""
    sources, destinations = copies.to(torch.int64).unbind(1)
    for tensor in pages:
        # index_select knows no fp8, but bytes are bytes.
        plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        plain.index_copy_(0, destinations, plain.index_select(0, sources))

"""Launching the kernels that write: grids, strides and constants from the tensors' shapes."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from ..quantise import is_quantised
from .launch import on_device
from .tuning import power_of_two
from .write_kernels import copy_kernel, write_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..calls import WriteCall

_HEADS_AT_ONCE = 16
_BLOCK_WORDS = 1024
_WORDS = {4: (torch.int32, tl.int32), 2: (torch.int16, tl.int16), 1: (torch.int8, tl.int8)}


def launch_write(call: WriteCall) -> None:
    """Store K and V of every token; fp8 pages are written as the bytes they are."""
    k, v, k_pages, v_pages, slot_mapping, kv_scales, _ = call
    num_tokens, num_heads, k_dim = k.shape
    if num_tokens == 0:
        return
    quant = "none"
    if is_quantised(k_pages.dtype):
        quant = "int8" if k_pages.dtype == torch.int8 else "fp8_bits"
    if quant == "fp8_bits":
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    k_scales, v_scales = (k_pages[..., 0], v_pages[..., 0]) if kv_scales is None else kv_scales
    heads = min(power_of_two(num_heads), _HEADS_AT_ONCE)
    with on_device(k_pages.device):
        write_kernel[(num_tokens, -(-num_heads // heads))](
            k, v, k_pages, v_pages, k_scales, v_scales, slot_mapping.contiguous(), num_heads,
            *k.stride(), *v.stride(), *k_pages.stride(), *v_pages.stride(), *k_scales.stride(), *v_scales.stride(),
            PAGE_SIZE=k_pages.shape[2], K_DIM=k_dim, V_DIM=v.shape[2],
            K_PAD=power_of_two(k_dim), V_PAD=power_of_two(v.shape[2]), HEADS=heads, QUANT=quant, num_warps=4,
        )  # fmt: skip


def launch_copies(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Copy pages within every tensor, all sources read before any destination is written."""
    moved = [tensor for tensor in pages if tensor.numel()]
    if not moved or not copies.shape[0]:
        return
    shapes = tuple(
        (tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), tensor[0].numel() * tensor.element_size())
        for tensor in moved
    )
    word, align, largest, total, table = _copy_table(shapes, copies.device)
    num_copies = copies.shape[0]
    dtype, element = _WORDS[word]
    scratch = torch.empty(total * num_copies, dtype=dtype, device=copies.device)
    grid = (-(-largest // _BLOCK_WORDS), num_copies, len(moved))
    with on_device(copies.device):
        for side in (0, 1):
            copy_kernel[grid](
                *table, copies, scratch, num_copies, *copies.stride(),
                SIDE=side, WORD=element, BLOCK=_BLOCK_WORDS, ALIGN=align, num_warps=4,
            )  # fmt: skip


@lru_cache(maxsize=16)
def _copy_table(
    shapes: tuple[tuple[int, int, int], ...], device: torch.device
) -> tuple[int, int, int, int, torch.Tensor]:
    """Return word size, alignment in words, words of the largest page and of all pages, and the kernel's table.

    ``shapes`` are (address, page stride, page size) in bytes. The table, int64 ``[4, tensors]``, is made once per set
    of tensors and stays on the device.
    """
    unit = gcd(16, *(value for shape in shapes for value in shape))
    word = min(unit, 4)
    starts, total = [], 0
    for _, _, size in shapes:
        starts.append(total)
        total += size // word
    columns = [
        [address for address, _, _ in shapes],
        [stride // word for _, stride, _ in shapes],
        [size // word for _, _, size in shapes],
        starts,
    ]
    table = torch.tensor(columns, dtype=torch.int64).to(device)
    return word, unit // word, max(columns[2]), total, table

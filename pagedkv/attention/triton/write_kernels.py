"""Writing: a step's K and V into their slots, quantised on the way where the pages are; whole pages onto others.

Each token and KV head is one row; nothing is read but the step's own K and V. The bytes are those of all backends.
"""
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# ruff: noqa: N803, PLR0124, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import to_fp8_bits, to_int8


@triton.jit(do_not_specialize=["num_heads"])
def write_kernel(
    k, v, k_pages, v_pages, k_scales, v_scales, slot_mapping, num_heads,
    k_row, k_head, k_dim, v_row, v_head, v_dim,
    kp_page, kp_head, kp_slot, kp_dim, vp_page, vp_head, vp_slot, vp_dim,
    ks_page, ks_head, ks_slot, vs_page, vs_head, vs_slot,
    PAGE_SIZE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    HEADS: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Store one token's K and V of ``HEADS`` heads. Grid: (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    write_side(
        k + token * k_row, k_pages + page * kp_page + offset * kp_slot, k_scales + page * ks_page + offset * ks_slot,
        heads, num_heads, k_head, k_dim, kp_head, kp_dim, ks_head, K_DIM, K_PAD, QUANT,
    )  # fmt: skip
    write_side(
        v + token * v_row, v_pages + page * vp_page + offset * vp_slot, v_scales + page * vs_page + offset * vs_slot,
        heads, num_heads, v_head, v_dim, vp_head, vp_dim, vs_head, V_DIM, V_PAD, QUANT,
    )  # fmt: skip


@triton.jit
def write_side(
    source, target, scales, heads, num_heads, s_head, s_dim, t_head, t_dim, scale_head,
    DIM: tl.constexpr, PAD: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Store K or V of one token, its heads the rows, and their scales."""
    columns = tl.arange(0, PAD)
    exists = (heads < num_heads)[:, None] & (columns < DIM)[None, :]
    values = tl.load(source + heads[:, None] * s_head + columns[None, :] * s_dim, mask=exists, other=0.0)
    at = target + heads[:, None] * t_head + columns[None, :] * t_dim
    if QUANT == "none":
        tl.store(at, values, mask=exists)
    else:
        largest: tl.constexpr = 127.0 if QUANT == "int8" else 448.0
        exact = values.to(tl.float32)
        size = tl.abs(exact)
        # max skips NaN, but a token that holds one must show it: its scale is NaN.
        is_nan = tl.max((exact != exact).to(tl.int32), 1)
        scale = tl.div_rn(tl.max(size, 1), tl.full([heads.shape[0]], largest, tl.float32))
        scale = tl.where(is_nan > 0, float("nan"), scale)
        divisor = tl.where(scale == 0.0, 1.0, scale)
        scaled = tl.div_rn(exact, divisor[:, None] + tl.zeros_like(exact))
        scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
        stored = to_int8(scaled) if QUANT == "int8" else to_fp8_bits(scaled)
        tl.store(at, stored, mask=exists)
        tl.store(scales + heads * scale_head, scale, mask=heads < num_heads)


@triton.jit(do_not_specialize=["num_copies"])
def copy_kernel(
    pointers, page_strides, page_words, scratch_at, copies, scratch, num_copies, c_row, c_side,
    SIDE: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Move one block of one page of one tensor: from its source into scratch (side 0), or on to its place (side 1).

    All tensors go in one launch: ``pointers`` holds their addresses, ``page_strides`` and ``page_words`` the distance
    and the size of their pages in words, ``scratch_at`` where in the scratch their pages begin, once per copy.
    Grid: (blocks of the largest page, copies, tensors).
    """
    block, copy, tensor = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    words = tl.load(page_words + tensor)
    if block * BLOCK >= words:
        return
    page = tl.load(copies + copy * c_row + SIDE * c_side).to(tl.int64)
    base = tl.load(pointers + tensor).to(tl.pointer_type(WORD))
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    page_at = tl.multiple_of(base, ALIGN) + page * tl.load(page_strides + tensor) + at
    kept_at = scratch + tl.load(scratch_at + tensor) * num_copies + copy * words + at
    if SIDE == 0:
        tl.store(kept_at, tl.load(page_at, mask=at < words), mask=at < words)
    else:
        tl.store(page_at, tl.load(kept_at, mask=at < words), mask=at < words)

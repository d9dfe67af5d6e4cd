"""How a kernel walks a block table: which tiles of tokens a run of queries sees, and how one tile is read.

A *tile* is ``BLOCK_N`` consecutive positions, beginning at a multiple of ``BLOCK_N``. The visible tiles of a run of
queries are those that hold sink tokens, then those from the window's start to the last query; what lies between is
skipped, not masked. Inside a tile only positions that some query of the run sees are loaded: all other memory, the
rest of the last page, pages that left the window, the unused end of a table row, may hold anything.
"""
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import accumulate, bend, widen


@triton.jit
def visible_tiles(first, end, window, num_sinks, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Return what queries at positions ``first`` to ``end - 1`` see.

    Gives ``start``, the window's first position (0 without one); ``sink_tiles``, tiles before the window's that hold
    sink tokens; ``skipped``, tiles between those and the window's; and ``count``, all visible tiles. Visible tile
    ``i`` begins at position ``(i + (skipped if i >= sink_tiles)) * BLOCK_N``.
    """
    if WINDOW:
        start = tl.maximum(first - window + 1, 0)
        window_tile = start // BLOCK_N
        sink_tiles = tl.minimum((tl.minimum(num_sinks, end) + BLOCK_N - 1) // BLOCK_N, window_tile)
    else:
        start = first * 0
        window_tile = start
        sink_tiles = start
    skipped = window_tile - sink_tiles
    count = (end + BLOCK_N - 1) // BLOCK_N - skipped
    return start, sink_tiles, skipped, count


@triton.jit
def split_of(count, SPLIT_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return (tiles per split, splits) of ``count`` visible tiles: fixed splits, longer ones past ``MAX_SPLITS``."""
    per_split = tl.maximum((count + MAX_SPLITS - 1) // MAX_SPLITS, SPLIT_TILES)
    return per_split, tl.maximum((count + per_split - 1) // per_split, 1)


@triton.jit
def attend_tile(
    acc, top, total, q, q_positions, slopes,
    k_pages, v_pages, k_scales, v_scales, table,
    begin, start, end, window, num_sinks, scale, softcap,
    table_stride, k_page, k_slot, k_dim, v_page, v_slot, v_dim, ks_page, ks_slot, vs_page, vs_slot,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    QUANT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend from ``q`` ``[M, K_PAD]`` to the tile of positions from ``begin`` on; return the running softmax.

    ``k_pages`` and the like point at the KV head's part of page 0, ``table`` at the sequence's row. ``start`` and
    ``end`` bound what any query sees. Without ``MASKED`` every query sees every position of the tile.
    """
    positions = begin + tl.arange(0, BLOCK_N)
    if MASKED:
        alive = positions < end
        if WINDOW:
            alive &= (positions >= start) | (positions < num_sinks)
    else:
        alive = positions >= 0
    # Page ids become 64-bit before they meet a stride: a pool may have more than 2**31 elements.
    if PAGE_SIZE >= BLOCK_N:
        page = tl.load(table + (begin // PAGE_SIZE) * table_stride).to(tl.int64)
        pages = tl.full([BLOCK_N], 0, tl.int64) + page
    elif MASKED:
        pages = tl.load(table + (positions // PAGE_SIZE) * table_stride, mask=alive, other=0).to(tl.int64)
    else:
        pages = tl.load(table + (positions // PAGE_SIZE) * table_stride).to(tl.int64)
    offsets = (positions % PAGE_SIZE).to(tl.int64)
    k_columns = tl.arange(0, K_PAD)
    v_columns = tl.arange(0, V_PAD)
    k_at = k_pages + (pages * k_page + offsets * k_slot)[:, None] + k_columns[None, :] * k_dim
    v_at = v_pages + (pages * v_page + offsets * v_slot)[:, None] + v_columns[None, :] * v_dim
    k = load_rows(k_at, alive, k_columns, K_DIM, K_PAD, MASKED)
    v = load_rows(v_at, alive, v_columns, V_DIM, V_PAD, MASKED)

    products = tl.dot(q, tl.trans(widen(k, QUANT, q.dtype)), input_precision="ieee")
    if QUANT != "none":
        k_scale = tl.load(k_scales + pages * ks_page + offsets * ks_slot, mask=alive, other=0.0)
        v_scale = tl.load(v_scales + pages * vs_page + offsets * vs_slot, mask=alive, other=0.0)
        products *= k_scale[None, :]
        # V is scaled before the product: a weight times a small scale would leave fp16's range.
        v = (widen(v, QUANT, tl.float32) * v_scale[:, None]).to(q.dtype)
    scores = bend(products, scale, softcap, slopes, q_positions, positions, SOFTCAP, ALIBI)
    if MASKED:
        behind = q_positions[:, None] - positions[None, :]
        seen = behind >= 0
        if WINDOW:
            seen &= (behind < window) | (positions[None, :] < num_sinks)
        scores = tl.where(seen, scores, float("-inf"))
    return accumulate(acc, top, total, scores, v)


@triton.jit
def load_rows(at, alive, columns, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """Load rows that are alive and columns that exist; the rest is 0 and never touched."""
    if MASKED:
        if DIM == PAD:
            rows = tl.load(at, mask=alive[:, None], other=0.0)
        else:
            rows = tl.load(at, mask=alive[:, None] & (columns < DIM)[None, :], other=0.0)
    elif DIM == PAD:
        rows = tl.load(at)
    else:
        rows = tl.load(at, mask=(columns < DIM)[None, :], other=0.0)
    return rows


@triton.jit
def load_queries(q, tokens, heads, exists, q_row, q_head, q_dim, K_DIM: tl.constexpr, K_PAD: tl.constexpr):
    """Load query rows ``[M, K_PAD]``: of each row its token and head, where it exists."""
    columns = tl.arange(0, K_PAD)
    at = q + (tokens * q_row + heads * q_head)[:, None] + columns[None, :] * q_dim
    return tl.load(at, mask=exists[:, None] & (columns < K_DIM)[None, :], other=0.0)


@triton.jit
def load_per_head(at, heads, M: tl.constexpr, GIVEN: tl.constexpr):
    """Return fp32 ``[M]``: the number at ``at`` of each row's head, zeros where the layer has none."""
    numbers = tl.zeros([M], tl.float32)
    if GIVEN:
        numbers = tl.load(at + heads).to(tl.float32)
    return numbers


@triton.jit
def store_rows(out, tokens, heads, exists, values, o_row, o_head, o_dim, V_DIM: tl.constexpr, V_PAD: tl.constexpr):
    """Store output rows ``[M, V_PAD]`` where they exist."""
    columns = tl.arange(0, V_PAD)
    at = out + (tokens * o_row + heads * o_head)[:, None] + columns[None, :] * o_dim
    tl.store(at, values.to(out.dtype.element_ty), mask=exists[:, None] & (columns < V_DIM)[None, :])

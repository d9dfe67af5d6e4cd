"""Decode: sequences with a few queries each, their K and V read in splits that run side by side, then merged.

A program takes one sequence, one KV head and one split of the visible tiles. All query heads of the KV head, and all
queries of the sequence, lie in the rows of one matrix tile: row ``r`` is query ``r // GROUP``, head ``r % GROUP`` of
the group. So K and V are read once for all of them. A sequence with more queries than fit is none of this kernel's
(`prefill`). Split lengths follow from the sequence's own visible tiles; a sequence of one split is finished at once,
the others leave partial results for `merge_kernel`.
"""
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import LOG2E, begin_softmax, finish
from .walk import attend_tile, load_per_head, load_queries, split_of, store_rows, visible_tiles


@triton.jit(do_not_specialize=["slots", "part_rows", "table_row", "table_stride"])
def decode_kernel(
    q, k_pages, v_pages, k_scales, v_scales, tables, kv_lens, cu_q_lens, prefix_lens, sink_logits, alibi_slopes, out,
    parts, part_lse,
    scale, softcap, window, num_sinks, slots, part_rows,
    table_row, table_stride, q_row, q_head, q_dim, k_page, k_head, k_slot, k_dim, v_page, v_head, v_slot, v_dim,
    ks_page, ks_head, ks_slot, vs_page, vs_head, vs_slot, o_row, o_head, o_dim,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr,
    QUANT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINK_LOGITS: tl.constexpr, CASCADE: tl.constexpr,
):  # fmt: skip
    """Attend from one sequence's queries to one split. Grid: (sequences, KV heads, splits of the longest)."""
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_row = tl.load(cu_q_lens + sequence).to(tl.int64)
    q_len = (tl.load(cu_q_lens + sequence + 1) - first_row).to(tl.int32)
    kv_len = tl.load(kv_lens + sequence).to(tl.int32)
    if (q_len == 0) | (q_len > BLOCK_M // GROUP):
        return
    first = tl.maximum(kv_len - q_len, 0)
    start, sink_tiles, skipped, count = visible_tiles(first, kv_len, window, num_sinks, BLOCK_N, WINDOW)
    if CASCADE:
        base = tl.load(prefix_lens + sequence).to(tl.int32)
        count = (kv_len - base + BLOCK_N - 1) // BLOCK_N
    else:
        base = kv_len * 0
    per_split, splits = split_of(count, SPLIT_TILES, MAX_SPLITS)
    if split >= splits:
        return

    rows = tl.arange(0, BLOCK_M)
    exists = rows < q_len * GROUP
    q_positions = tl.where(exists, kv_len - q_len + rows // GROUP, -1)
    tokens = first_row + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    tile = load_queries(q, tokens, heads, exists, q_row, q_head, q_dim, K_DIM, K_PAD)
    slopes = load_per_head(alibi_slopes, heads, BLOCK_M, ALIBI)

    acc, top, total = begin_softmax(BLOCK_M, V_PAD)
    for index in range(split * per_split, tl.minimum((split + 1) * per_split, count)):
        begin = base + tl.where(index < sink_tiles, index, index + skipped) * BLOCK_N
        acc, top, total = attend_tile(
            acc, top, total, tile, q_positions, slopes,
            k_pages + kv_head * k_head, v_pages + kv_head * v_head,
            k_scales + kv_head * ks_head, v_scales + kv_head * vs_head, tables + sequence * table_row,
            begin, start, kv_len, window, num_sinks, scale, softcap,
            table_stride, k_page, k_slot, k_dim, v_page, v_slot, v_dim, ks_page, ks_slot, vs_page, vs_slot,
            PAGE_SIZE, BLOCK_N, K_DIM, V_DIM, K_PAD, V_PAD, QUANT, WINDOW, SOFTCAP, ALIBI, True,
        )  # fmt: skip

    if (splits == 1) & (base == 0):
        logits = load_per_head(sink_logits, heads, BLOCK_M, SINK_LOGITS)
        store_rows(out, tokens, heads, exists, finish(acc, top, total, logits, SINK_LOGITS),
                   o_row, o_head, o_dim, V_DIM, V_PAD)  # fmt: skip
    else:
        place = ((sequence * slots + split) * tl.num_programs(1) + kv_head) * part_rows + rows
        store_part(parts, part_lse, place, exists, acc, top, total, V_DIM, V_PAD)


@triton.jit
def store_part(parts, part_lse, place, exists, acc, top, total, V_DIM: tl.constexpr, V_PAD: tl.constexpr):
    """Leave a split's rows for the merge: the output over the split alone, and log2 of its weights' sum."""
    columns = tl.arange(0, V_PAD)
    safe = tl.where(total == 0.0, 1.0, total)
    at = parts + (place * V_DIM)[:, None] + columns[None, :]
    tl.store(at, acc / safe[:, None], mask=exists[:, None] & (columns < V_DIM)[None, :])
    tl.store(part_lse + place, tl.where(total == 0.0, float("-inf"), top + tl.log2(safe)), mask=exists)


@triton.jit(do_not_specialize=["slots", "own_slots", "part_rows", "kv_heads"])
def merge_kernel(
    parts, part_lse, kv_lens, cu_q_lens, prefix_lens, sink_logits, out,
    window, num_sinks, slots, own_slots, part_rows, kv_heads, o_row, o_head, o_dim,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    SPLIT_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, SLOTS_PAD: tl.constexpr, CHUNK: tl.constexpr,
    WINDOW: tl.constexpr, SINK_LOGITS: tl.constexpr, CASCADE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query row and head by log-sum-exp. Grid: (sequences, query heads, queries of a tile).

    The splits of a shared prefix, if the sequence has one, stand at slots ``own_slots`` and after.
    """
    sequence, head, query = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_row = tl.load(cu_q_lens + sequence).to(tl.int64)
    q_len = (tl.load(cu_q_lens + sequence + 1) - first_row).to(tl.int32)
    kv_len = tl.load(kv_lens + sequence).to(tl.int32)
    if (q_len > BLOCK_M // GROUP) | (query >= q_len):
        return
    _, _, _, count = visible_tiles(tl.maximum(kv_len - q_len, 0), kv_len, window, num_sinks, BLOCK_N, WINDOW)
    prefix_splits = kv_len * 0
    if CASCADE:
        base = tl.load(prefix_lens + sequence).to(tl.int32)
        count = (kv_len - base + BLOCK_N - 1) // BLOCK_N
        _, prefix_splits = split_of(base // BLOCK_N, SPLIT_TILES, MAX_SPLITS)
        prefix_splits = tl.where(base == 0, 0, prefix_splits)
    _, splits = split_of(count, SPLIT_TILES, MAX_SPLITS)
    if splits + prefix_splits == 1:
        return

    row = query * GROUP + head % GROUP
    first_place = (sequence * slots * kv_heads + head // GROUP) * part_rows + row
    slot_stride = kv_heads * part_rows
    every = tl.arange(0, SLOTS_PAD)
    taken = (every < splits) | ((every >= own_slots) & (every < own_slots + prefix_splits))
    lse = tl.load(part_lse + first_place + every * slot_stride, mask=taken, other=float("-inf"))
    top = tl.max(lse, 0)
    sink = top
    if SINK_LOGITS:
        sink = tl.load(sink_logits + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    denominator = tl.sum(tl.exp2(lse - top), 0)
    if SINK_LOGITS:
        denominator += tl.exp2(sink - top)

    columns = tl.arange(0, V_PAD)
    merged = tl.zeros([V_PAD], tl.float32)
    for chunk in range(0, tl.where(prefix_splits > 0, own_slots + prefix_splits, splits), CHUNK):
        some = chunk + tl.arange(0, CHUNK)
        read = (some < splits) | ((some >= own_slots) & (some < own_slots + prefix_splits))
        places = first_place + some * slot_stride
        weights = tl.exp2(tl.load(part_lse + places, mask=read, other=float("-inf")) - top)
        at = parts + (places * V_DIM)[:, None] + columns[None, :]
        part = tl.load(at, mask=read[:, None] & (columns < V_DIM)[None, :], other=0.0)
        merged += tl.sum(weights[:, None] * part, 0)
    merged = merged / tl.where(denominator == 0.0, 1.0, denominator)
    token = first_row + query
    tl.store(out + token * o_row + head * o_head + columns * o_dim, merged.to(out.dtype.element_ty),
             mask=columns < V_DIM)  # fmt: skip

"""Cascade: a beginning that several sequences share is read once, for the queries of all of them.

A program takes one tile of queries, of up to ``BLOCK_M // GROUP`` sequences of one group, one KV head and one split of
the shared tokens, and leaves partial results where `decode` leaves those of each sequence's own splits; `merge_kernel`
folds all of them. Every query sees the whole beginning, so no tile is masked.
"""
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import begin_softmax
from .decode import store_part
from .walk import attend_tile, load_per_head, load_queries, split_of


@triton.jit(do_not_specialize=["slots", "own_slots", "part_rows", "table_row", "table_stride"])
def cascade_kernel(
    q, k_pages, v_pages, k_scales, v_scales, tables, kv_lens, cu_q_lens, prefix_lens, members, tiles, alibi_slopes,
    parts, part_lse,
    scale, softcap, slots, own_slots, part_rows,
    table_row, table_stride, q_row, q_head, q_dim, k_page, k_head, k_slot, k_dim, v_page, v_head, v_slot, v_dim,
    ks_page, ks_head, ks_slot, vs_page, vs_head, vs_slot,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr,
    QUANT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Attend from some members' queries to one split of what they share. Grid: (tiles, KV heads, splits).

    ``members`` lists batch rows, ``tiles`` ``[tiles, 2]`` where in it each tile's begin and how many they are.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_member = tl.load(tiles + 2 * tile)
    num_members = tl.load(tiles + 2 * tile + 1)
    reader = tl.load(members + first_member).to(tl.int64)
    count = tl.load(prefix_lens + reader).to(tl.int32) // BLOCK_N
    per_split, splits = split_of(count, SPLIT_TILES, MAX_SPLITS)
    if split >= splits:
        return

    rows = tl.arange(0, BLOCK_M)
    exists = rows // GROUP < num_members
    sequences = tl.load(members + first_member + rows // GROUP, mask=exists, other=0).to(tl.int64)
    tokens = tl.load(cu_q_lens + sequences, mask=exists, other=0).to(tl.int64)
    q_positions = tl.load(kv_lens + sequences, mask=exists, other=0).to(tl.int32) - 1
    heads = kv_head * GROUP + rows % GROUP
    q_tile = load_queries(q, tokens, heads, exists, q_row, q_head, q_dim, K_DIM, K_PAD)
    slopes = load_per_head(alibi_slopes, heads, BLOCK_M, ALIBI)

    acc, top, total = begin_softmax(BLOCK_M, V_PAD)
    for index in range(split * per_split, tl.minimum((split + 1) * per_split, count)):
        acc, top, total = attend_tile(
            acc, top, total, q_tile, q_positions, slopes,
            k_pages + kv_head * k_head, v_pages + kv_head * v_head,
            k_scales + kv_head * ks_head, v_scales + kv_head * vs_head, tables + reader * table_row,
            index * BLOCK_N, 0, count * BLOCK_N, 0, 0, scale, softcap,
            table_stride, k_page, k_slot, k_dim, v_page, v_slot, v_dim, ks_page, ks_slot, vs_page, vs_slot,
            PAGE_SIZE, BLOCK_N, K_DIM, V_DIM, K_PAD, V_PAD, QUANT, False, SOFTCAP, ALIBI, False,
        )  # fmt: skip
    place = ((sequences * slots + own_slots + split) * tl.num_programs(1) + kv_head) * part_rows + rows % GROUP
    store_part(parts, part_lse, place, exists, acc, top, total, V_DIM, V_PAD)

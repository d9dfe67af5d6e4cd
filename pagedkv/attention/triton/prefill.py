"""Prefill: sequences with many queries, cut into tiles of queries; whole prompts, chunks, and mixed batches.

A program takes one tile of ``BLOCK_M // GROUP`` queries of one sequence, all query heads of one KV head in its rows,
and walks every visible tile of K and V. Which tile it takes it finds in ``cu_q_lens`` by bisection, so the grid needs
no lengths: it is sized for the worst case, and programs without a tile leave at once. Sequences short enough for
`decode` are left to it.
"""
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# ruff: noqa: N803, N806, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import begin_softmax, finish
from .walk import attend_tile, load_per_head, load_queries, store_rows, visible_tiles


@triton.jit
def sequence_of(tile, cu_q_lens, num_sequences, QUERIES: tl.constexpr):
    """Return the last sequence ``s`` with ``cu_q_lens[s] // QUERIES + s <= tile``: its tiles begin there.

    A sequence of n queries has ``ceil(n / QUERIES)`` tiles and at least that many numbers, so none is lost.
    """
    low, high = tile * 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(cu_q_lens + middle) // QUERIES + middle).to(tl.int32)
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    return low


@triton.jit(do_not_specialize=["num_sequences", "table_row", "table_stride"])
def prefill_kernel(
    q, k_pages, v_pages, k_scales, v_scales, tables, kv_lens, cu_q_lens, sink_logits, alibi_slopes, out,
    scale, softcap, window, num_sinks, num_sequences,
    table_row, table_stride, q_row, q_head, q_dim, k_page, k_head, k_slot, k_dim, v_page, v_head, v_slot, v_dim,
    ks_page, ks_head, ks_slot, vs_page, vs_head, vs_slot, o_row, o_head, o_dim,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DECODE_M: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    QUANT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINK_LOGITS: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of queries to all they see. Grid: (tiles, KV heads), the last tiles first.

    Under causality a prompt's last tile has the most to do, so starting with it leaves the short ones for the end.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = sequence_of(tile, cu_q_lens, num_sequences, QUERIES).to(tl.int64)
    first_row = tl.load(cu_q_lens + sequence).to(tl.int64)
    q_len = (tl.load(cu_q_lens + sequence + 1) - first_row).to(tl.int32)
    kv_len = tl.load(kv_lens + sequence).to(tl.int32)
    first_query = (tile - (first_row // QUERIES + sequence).to(tl.int32)) * QUERIES
    if (first_query >= q_len) | (q_len <= DECODE_M // GROUP):
        return

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    exists = (queries < q_len) & (rows < QUERIES * GROUP)
    last_query = tl.minimum(first_query + QUERIES, q_len) - 1
    q_positions = tl.where(exists, kv_len - q_len + queries, -1)
    tokens = first_row + queries
    heads = kv_head * GROUP + rows % GROUP
    q_tile = load_queries(q, tokens, heads, exists, q_row, q_head, q_dim, K_DIM, K_PAD)
    slopes = load_per_head(alibi_slopes, heads, BLOCK_M, ALIBI)

    first = tl.maximum(kv_len - q_len + first_query, 0)
    end = tl.maximum(kv_len - q_len + last_query + 1, 0)
    start, sink_tiles, skipped, count = visible_tiles(first, end, window, num_sinks, BLOCK_N, WINDOW)
    # Tiles that every query sees whole need no mask: those that end by the first query and begin in the last's window.
    whole_end = tl.maximum((first + 1) // BLOCK_N - skipped, 0)
    whole_begin = count * 0
    if WINDOW:
        whole_begin = (tl.maximum(end - window, 0) + BLOCK_N - 1) // BLOCK_N - skipped
        whole_begin = tl.minimum(tl.maximum(whole_begin, sink_tiles), count)
        whole_end = tl.maximum(whole_end, whole_begin)
    whole_end = tl.minimum(whole_end, count)

    acc, top, total = begin_softmax(BLOCK_M, V_PAD)
    k_base, v_base = k_pages + kv_head * k_head, v_pages + kv_head * v_head
    ks_base, vs_base = k_scales + kv_head * ks_head, v_scales + kv_head * vs_head
    table = tables + sequence * table_row
    if WINDOW:
        for index in range(whole_begin):
            begin = tl.where(index < sink_tiles, index, index + skipped) * BLOCK_N
            acc, top, total = attend_tile(
                acc, top, total, q_tile, q_positions, slopes, k_base, v_base, ks_base, vs_base, table,
                begin, start, end, window, num_sinks, scale, softcap,
                table_stride, k_page, k_slot, k_dim, v_page, v_slot, v_dim, ks_page, ks_slot, vs_page, vs_slot,
                PAGE_SIZE, BLOCK_N, K_DIM, V_DIM, K_PAD, V_PAD, QUANT, WINDOW, SOFTCAP, ALIBI, True,
            )  # fmt: skip
    for index in range(whole_begin, whole_end):
        acc, top, total = attend_tile(
            acc, top, total, q_tile, q_positions, slopes, k_base, v_base, ks_base, vs_base, table,
            (index + skipped) * BLOCK_N, start, end, window, num_sinks, scale, softcap,
            table_stride, k_page, k_slot, k_dim, v_page, v_slot, v_dim, ks_page, ks_slot, vs_page, vs_slot,
            PAGE_SIZE, BLOCK_N, K_DIM, V_DIM, K_PAD, V_PAD, QUANT, WINDOW, SOFTCAP, ALIBI, False,
        )  # fmt: skip
    for index in range(whole_end, count):
        acc, top, total = attend_tile(
            acc, top, total, q_tile, q_positions, slopes, k_base, v_base, ks_base, vs_base, table,
            (index + skipped) * BLOCK_N, start, end, window, num_sinks, scale, softcap,
            table_stride, k_page, k_slot, k_dim, v_page, v_slot, v_dim, ks_page, ks_slot, vs_page, vs_slot,
            PAGE_SIZE, BLOCK_N, K_DIM, V_DIM, K_PAD, V_PAD, QUANT, WINDOW, SOFTCAP, ALIBI, True,
        )  # fmt: skip

    logits = load_per_head(sink_logits, heads, BLOCK_M, SINK_LOGITS)
    store_rows(out, tokens, heads, exists, finish(acc, top, total, logits, SINK_LOGITS),
               o_row, o_head, o_dim, V_DIM, V_PAD)  # fmt: skip

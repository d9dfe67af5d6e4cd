"""Launching the attention kernels: grids, strides and constants, from shapes and the step's two bounds.

Takes a checked call, launches, and never waits: nothing here reads a tensor. What it derives from shapes hangs on the
`AttentionBatch`, so a step's layers that look alike derive it once.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .decode import decode_kernel, merge_kernel
from .prefill import prefill_kernel
from .tuning import (
    SPLIT_TOKENS,
    Layer,
    Tiles,
    decode_tiles,
    layer_of,
    max_splits,
    prefill_tiles,
    target_of,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..batch import AttentionBatch
    from ..calls import AttendCall
    from ..layer_spec import LayerSpec

_MERGED_AT_ONCE = 8


class Plan(NamedTuple):
    """What a step does for the layers of one kind.

    ``splits`` is the most splits that a sequence can have, ``part_rows`` the most query rows of a KV head that a
    decode tile holds in this step.
    """

    layer: Layer
    decode: Tiles
    prefill: Tiles | None
    splits: int
    part_rows: int
    constants: dict[str, Any]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current, where it is a GPU and is not yet."""
    if device.type != "cuda" or device.index in {None, torch.cuda.current_device()}:
        return nullcontext()
    return torch.cuda.device(device)


def launch_attention(call: AttendCall, out: torch.Tensor) -> None:
    """Write every row of ``out``: rows of long queries by `prefill`, all others by `decode` and its merge."""
    batch = call.batch
    if batch.num_sequences == 0 or call.q.shape[0] == 0:
        return
    plan = _plan_for(call)
    with on_device(call.q.device):
        if plan.prefill is not None:
            _launch_prefill(call, out, plan)
        _launch_decode(call, out, plan)


def _plan_for(call: AttendCall) -> Plan:
    """Return the plan that hangs on the batch for layers like this one."""
    spec = call.spec
    target = target_of(call.q.device)
    layer = layer_of(call, target)
    shape = (spec.window, spec.num_sink_tokens, spec.softcap is None, spec.sink_logits is None)
    key = ("triton plan", layer, *shape, spec.alibi_slopes is None)
    plan: Plan | None = call.batch.prepared.get(key)
    if plan is None:
        decode = decode_tiles(layer, target)
        in_tile = decode.block_m // layer.group
        plan = Plan(
            layer=layer,
            decode=decode,
            prefill=prefill_tiles(layer, target) if call.batch.max_q_len > in_tile else None,
            splits=most_splits(call.batch.max_kv_len, in_tile, spec, decode, layer),
            part_rows=min(call.batch.max_q_len, in_tile) * layer.group,
            constants=constants_of(layer, spec),
        )
        call.batch.prepared[key] = plan
    return plan


def constants_of(layer: Layer, spec: LayerSpec) -> dict[str, Any]:
    """Return the constants that every attention kernel is compiled with."""
    return {
        "GROUP": layer.group,
        "K_DIM": layer.k_dim,
        "V_DIM": layer.v_dim,
        "PAGE_SIZE": layer.page_size,
        "QUANT": layer.quant,
        "WINDOW": spec.window is not None,
        "SOFTCAP": spec.softcap is not None,
        "ALIBI": spec.alibi_slopes is not None,
        "SINK_LOGITS": spec.sink_logits is not None,
    }


def most_splits(max_kv_len: int, queries: int, spec: LayerSpec, tiles: Tiles, layer: Layer) -> int:
    """Return a bound on the splits of any sequence in a decode tile of at most ``queries`` queries."""
    size = tiles.block_n
    count = -(-max_kv_len // size)
    if spec.window is not None:
        # A stretch of n tokens touches at most ceil((n - 1) / size) + 1 tiles.
        in_window = -(-(spec.window + queries - 2) // size) + 1
        count = min(count, -(-spec.num_sink_tokens // size) + in_window)
    per_split, most = SPLIT_TOKENS // size, max_splits(layer)
    return max(1, min(most, -(-count // per_split)))


def _sides(call: AttendCall, plan: Plan) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return K, V and their scales as the kernels take them, and their strides; pages stand in for scales not there."""
    k_pages, v_pages = call.k_pages, call.v_pages
    if plan.layer.quant == "fp8_bits":
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    if call.kv_scales is None:
        return (k_pages, v_pages, k_pages, v_pages), (*k_pages.stride(), *v_pages.stride(), *(0,) * 6)
    k_scales, v_scales = call.kv_scales
    strides = (*k_pages.stride(), *v_pages.stride(), *k_scales.stride(), *v_scales.stride())
    return (k_pages, v_pages, k_scales, v_scales), strides


def _numbers(spec: LayerSpec) -> tuple[float, float, int, int]:
    """Return scale, softcap, window and sink tokens as the kernels take them."""
    return spec.scale, spec.softcap or 0.0, spec.window or 0, spec.num_sink_tokens


def _launch_prefill(call: AttendCall, out: torch.Tensor, plan: Plan) -> None:
    batch, spec, tiles = call.batch, call.spec, plan.prefill
    if tiles is None:
        return
    pages, strides = _sides(call, plan)
    queries = tiles.block_m // plan.layer.group
    grid = (call.q.shape[0] // queries + batch.num_sequences, plan.layer.num_kv_heads)
    prefill_kernel[grid](
        call.q, *pages, batch.block_tables, batch.kv_lens.contiguous(), batch.cu_q_lens.contiguous(),
        call.q if spec.sink_logits is None else spec.sink_logits.contiguous(),
        call.q if spec.alibi_slopes is None else spec.alibi_slopes.contiguous(), out,
        *_numbers(spec), batch.num_sequences, *batch.block_tables.stride(), *call.q.stride(), *strides, *out.stride(),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, DECODE_M=plan.decode.block_m, K_PAD=tiles.k_pad,
        V_PAD=tiles.v_pad, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **plan.constants,
    )  # fmt: skip


def _launch_decode(call: AttendCall, out: torch.Tensor, plan: Plan) -> None:
    """Run decode's splits, and their merge unless no sequence can have two."""
    batch, spec, tiles, heads = call.batch, call.spec, plan.decode, plan.layer.num_kv_heads
    pages, strides = _sides(call, plan)
    slots = plan.splits
    parts, part_lse = (out, out) if slots == 1 else _scratch(batch, slots * heads * plan.part_rows, plan, out.device)
    lens = batch.kv_lens.contiguous(), batch.cu_q_lens.contiguous(), batch.kv_lens
    sink_logits = call.q if spec.sink_logits is None else spec.sink_logits.contiguous()
    splits = {"SPLIT_TILES": SPLIT_TOKENS // tiles.block_n, "MAX_SPLITS": max_splits(plan.layer)}
    decode_kernel[(batch.num_sequences, heads, plan.splits)](
        call.q, *pages, batch.block_tables, *lens, sink_logits,
        call.q if spec.alibi_slopes is None else spec.alibi_slopes.contiguous(), out, parts, part_lse,
        *_numbers(spec), slots, plan.part_rows, *batch.block_tables.stride(), *call.q.stride(), *strides, *out.stride(),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, K_PAD=tiles.k_pad, V_PAD=tiles.v_pad, CASCADE=False,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **splits, **plan.constants,
    )  # fmt: skip
    if slots == 1:
        return
    queries = plan.part_rows // plan.layer.group
    merge_kernel[(batch.num_sequences, call.q.shape[1], queries)](
        parts, part_lse, *lens, sink_logits, out, spec.window or 0, spec.num_sink_tokens, slots, plan.splits,
        plan.part_rows, heads, *out.stride(),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, V_PAD=tiles.v_pad, SLOTS_PAD=splits["MAX_SPLITS"],
        CHUNK=_MERGED_AT_ONCE, CASCADE=False, num_warps=4, **splits,
        **{name: plan.constants[name] for name in ("GROUP", "V_DIM", "WINDOW", "SINK_LOGITS")},
    )  # fmt: skip


def _scratch(batch: AttentionBatch, rows: int, plan: Plan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for partial results, which the step's layers use one after the other."""
    rows *= batch.num_sequences
    key = ("triton scratch", rows, plan.layer.v_dim)
    found: tuple[torch.Tensor, torch.Tensor] | None = batch.prepared.get(key)
    if found is None:
        found = torch.empty(rows, plan.layer.v_dim, device=device), torch.empty(rows, device=device)
        batch.prepared[key] = found
    return found

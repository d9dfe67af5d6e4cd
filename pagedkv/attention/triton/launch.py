"""Launching the attention kernels: grids, strides and constants, from shapes and the step's two bounds.

Takes a checked call, launches, and never waits: nothing here reads a tensor. What it derives from shapes hangs on the
`AttentionBatch`, so a step's layers that look alike derive it once.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..shared_prefix import Costs, SharedPrefixes, pays, shared_of
from ..transfer import to_device
from .cascade import cascade_kernel
from .decode import decode_kernel, merge_kernel
from .prefill import prefill_kernel
from .tuning import (
    SPLIT_TOKENS,
    Layer,
    Tiles,
    decode_tiles,
    layer_of,
    max_splits,
    power_of_two,
    prefill_tiles,
    target_of,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..batch import AttentionBatch
    from ..calls import AttendCall
    from ..layer_spec import LayerSpec

_MERGED_AT_ONCE = 8
_CASCADE_ROWS = 64


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
    split_constants: dict[str, int]


class SharedTiles(NamedTuple):
    """A step's shared beginnings for layers of one kind: `cascade_kernel`'s arguments and grid."""

    lengths: torch.Tensor
    members: torch.Tensor
    tiles: torch.Tensor
    num_tiles: int
    block_m: int
    splits: int


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
            split_constants={"SPLIT_TILES": SPLIT_TOKENS // decode.block_n, "MAX_SPLITS": max_splits(layer)},
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
    """Run the tiles of long queries, as many as there can be."""
    batch, spec, tiles = call.batch, call.spec, plan.prefill
    if tiles is None:
        return
    pages, strides = _sides(call, plan)
    queries = tiles.block_m // plan.layer.group
    grid = (call.q.shape[0] // queries + batch.num_sequences, plan.layer.num_kv_heads)
    prefill_kernel[grid](
        call.q, *pages, batch.block_tables, batch.kv_lens.contiguous(), batch.cu_q_lens.contiguous(),
        _per_head(spec.sink_logits, call.q), _per_head(spec.alibi_slopes, call.q), out,
        *_numbers(spec), batch.num_sequences, *batch.block_tables.stride(), *call.q.stride(), *strides, *out.stride(),
        DECODE_M=plan.decode.block_m, **_tile_constants(tiles), **plan.constants,
    )  # fmt: skip


def _launch_decode(call: AttendCall, out: torch.Tensor, plan: Plan) -> None:
    """Run decode's splits, those of shared beginnings, and their merge unless no sequence can have two."""
    batch, spec, tiles, heads = call.batch, call.spec, plan.decode, plan.layer.num_kv_heads
    shared = _shared_for(call, plan)
    own = plan.splits
    slots = own if shared is None else own + shared.splits
    parts, part_lse = (out, out) if slots == 1 else _scratch(batch, slots * heads * plan.part_rows, plan, out.device)
    prefix_lens = batch.kv_lens if shared is None else shared.lengths
    lens = batch.kv_lens.contiguous(), batch.cu_q_lens.contiguous(), prefix_lens
    pages, strides = _sides(call, plan)
    slopes, sink_logits = _per_head(spec.alibi_slopes, call.q), _per_head(spec.sink_logits, call.q)
    scale, softcap, window, num_sinks = _numbers(spec)
    table_strides = batch.block_tables.stride()
    cascade = shared is not None
    decode_kernel[(batch.num_sequences, heads, own)](
        call.q, *pages, batch.block_tables, *lens, sink_logits, slopes, out, parts, part_lse,
        scale, softcap, window, num_sinks, slots, plan.part_rows,
        *table_strides, *call.q.stride(), *strides, *out.stride(),
        CASCADE=cascade, **_tile_constants(tiles), **plan.split_constants, **plan.constants,
    )  # fmt: skip
    if shared is not None:
        cascade_kernel[(shared.num_tiles, heads, shared.splits)](
            call.q, *pages, batch.block_tables, *lens, shared.members, shared.tiles, slopes, parts, part_lse,
            scale, softcap, slots, own, plan.part_rows, *table_strides, *call.q.stride(), *strides,
            **_tile_constants(tiles._replace(block_m=shared.block_m)), **plan.split_constants,
            **_without(plan.constants, "WINDOW", "SINK_LOGITS"),
        )  # fmt: skip
    if slots == 1:
        return
    merge_kernel[(batch.num_sequences, call.q.shape[1], plan.part_rows // plan.layer.group)](
        parts, part_lse, *lens, sink_logits, out, window, num_sinks, slots, own, plan.part_rows, heads, *out.stride(),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, V_PAD=tiles.v_pad, CHUNK=_MERGED_AT_ONCE, CASCADE=cascade,
        SLOTS_PAD=plan.split_constants["MAX_SPLITS"] * (2 if cascade else 1), num_warps=4, **plan.split_constants,
        **{name: plan.constants[name] for name in ("GROUP", "V_DIM", "WINDOW", "SINK_LOGITS")},
    )  # fmt: skip


def _tile_constants(tiles: Tiles) -> dict[str, int]:
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "K_PAD": tiles.k_pad,
        "V_PAD": tiles.v_pad,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _without(constants: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in constants.items() if name not in names}


def _per_head(values: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """Return per-head values as the kernels take them; something else of the device where there are none."""
    return stand_in if values is None else values.contiguous()


def _shared_for(call: AttendCall, plan: Plan) -> SharedTiles | None:
    """Return what to cascade in layers like this one, or None: nothing shared, a window, or it does not pay."""
    batch, layer = call.batch, plan.layer
    if call.spec.window is not None:
        return None
    shared = shared_of(batch)
    if shared is None:
        return None
    key = ("triton cascade", id(shared), layer)
    if key not in batch.prepared:
        token_bytes = call.k_pages.element_size() * layer.num_kv_heads * (layer.k_dim + layer.v_dim)
        partial_bytes = 4 * layer.num_kv_heads * layer.group * (layer.v_dim + 1)
        costs = costs_of(call.q.device)
        wanted = pays(shared, token_bytes, partial_bytes, layer.num_kv_heads, costs)
        batch.prepared[key] = _shared_tiles(shared, plan, call) if wanted else None
    found: SharedTiles | None = batch.prepared[key]
    return found


def _shared_tiles(shared: SharedPrefixes, plan: Plan, call: AttendCall) -> SharedTiles:
    """Cut each group's members into tiles of query rows."""
    group, device = plan.layer.group, call.q.device
    most = max(len(one.rows) for one in shared.groups) * group
    block_m = max(plan.decode.block_m, min(power_of_two(most), _CASCADE_ROWS))
    at_once = block_m // group
    members: list[int] = []
    tiles: list[list[int]] = []
    for one in shared.groups:
        for first in range(0, len(one.rows), at_once):
            some = one.rows[first : first + at_once]
            tiles.append([len(members), len(some)])
            members += some
    longest = max(one.length for one in shared.groups)
    return SharedTiles(
        lengths=shared.lengths,
        members=to_device(members, torch.int32, device),
        tiles=to_device(tiles, torch.int32, device),
        num_tiles=len(tiles),
        block_m=block_m,
        splits=most_splits(longest, 1, call.spec, plan.decode, plan.layer),
    )


def costs_of(device: torch.device) -> Costs:
    """Return what is known of the device for the estimate."""
    if device.type != "cuda":
        return Costs()
    properties = torch.cuda.get_device_properties(device)
    return Costs(cache_bytes=properties.L2_cache_size / 2, processors=properties.multi_processor_count)


def _scratch(batch: AttentionBatch, rows: int, plan: Plan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for partial results, which the step's layers use one after the other."""
    rows *= batch.num_sequences
    key = ("triton scratch", rows, plan.layer.v_dim)
    found: tuple[torch.Tensor, torch.Tensor] | None = batch.prepared.get(key)
    if found is None:
        found = torch.empty(rows, plan.layer.v_dim, device=device), torch.empty(rows, device=device)
        batch.prepared[key] = found
    return found

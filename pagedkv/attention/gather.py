"""The "torch" backend: gather what a row sees, then plain matrix products or `scaled_dot_product_attention`.

Takes the operator's arguments and runs on any torch device, with every feature. It computes in fp32 whatever the dtype
of q and the pages (float64 it refuses). It is the CPU's default where no compiled kernel is.

Decode rows are gathered ``[n, num_kv_heads, length, head_dim]`` with one `index_select` each for K and V, slot by slot
(as fast as page by page), and computed by batched matrix products with the query heads of a KV head folded into the
query length. Not by SDPA: its CPU kernel gives each thread a scratch buffer whose alignment depends on the thread, and
the matrix library rounds by alignment, so with two threads a row's bits depended on its place in the batch. The
products take equal time and keep bit-equality for every shape, batch and thread count that was tried.

Prefill rows go one sequence at a time, by SDPA where it can say what the layer asks, else by products in tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from .gather_plan import Visibility, plan_for
from .gather_source import Source
from .scatter import cannot_copy, cannot_write, copy, write

if TYPE_CHECKING:
    from .calls import AttendCall
    from .gather_plan import DecodeGroup, PrefillRow
    from .layer_spec import LayerSpec

__all__ = ["attend", "cannot_attend", "cannot_copy", "cannot_write", "copy", "write"]

_SDPA_TILE = 256
_PRODUCT_TILE = 64
"""Queries of a prefill sequence at once: SDPA keeps no score matrix, products keep all of theirs."""


def cannot_attend(call: AttendCall) -> str | None:
    """Refuse float64: this backend computes in fp32."""
    if call.q.dtype == torch.float64:
        return "q must be float32, bfloat16 or float16, got torch.float64"
    return None


def attend(call: AttendCall, out: torch.Tensor) -> None:
    """Run the step's decode groups, then its prefill sequences."""
    q, k_pages, v_pages, batch, spec, kv_scales, *_ = call
    fused = (
        spec.softcap is None
        and spec.sink_logits is None
        and spec.alibi_slopes is None
        and k_pages.shape[3] == v_pages.shape[3]
    )
    visibility = Visibility(
        page_size=k_pages.shape[2],
        num_kv_heads=k_pages.shape[1],
        head_dim=max(k_pages.shape[3], v_pages.shape[3]),
        window=spec.window,
        num_sink_tokens=spec.num_sink_tokens,
        spare=spec.sink_logits is not None,
        tile=_SDPA_TILE if fused else _PRODUCT_TILE,
    )
    plan = plan_for(batch, q.shape[0], visibility)
    if plan.zero_rows is not None:
        out.index_fill_(0, plan.zero_rows, 0)
    k_scales, v_scales = kv_scales if kv_scales is not None else (None, None)
    sides = _Sides(q, Source(k_pages, k_scales, plan, "k"), Source(v_pages, v_scales, plan, "v"), spec)
    for group in plan.decode:
        _decode(group, sides, out)
    for row in plan.prefill:
        (_prefill_sdpa if fused else _prefill_products)(row, sides, out[row.start : row.start + len(row.rows)])


class _Sides(NamedTuple):
    """What a layer brings to every group and row of the plan."""

    q: torch.Tensor
    k: Source
    v: Source
    spec: LayerSpec

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the queries of ``rows``, fp32 ``[n, num_q_heads, k_dim]``, in memory of their own.

        A copy whatever q is: the bits of a product must not follow from where the caller's rows lie in memory.
        """
        picked = self.q.index_select(0, rows)
        return picked if picked.dtype == torch.float32 else picked.to(torch.float32)

    def prefill(self, row: PrefillRow) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries ``[num_kv_heads, group, count, k_dim]``, K and V ``[num_kv_heads, columns, dim]``."""
        queries = self.queries(row.rows)
        count, _, k_dim = queries.shape
        by_head = queries.view(count, self.k.num_kv_heads, -1, k_dim).permute(1, 2, 0, 3).contiguous()
        return by_head, self.k.gather(row.slots), self.v.gather(row.slots)


def _decode(group: DecodeGroup, sides: _Sides, out: torch.Tensor) -> None:
    """Compute one query for each of ``n`` sequences."""
    spec, heads = sides.spec, sides.k.num_kv_heads
    n, length = group.slots.pages.shape
    queries = sides.queries(group.rows)
    queries = queries.view(n * heads, -1, queries.shape[2])
    keys = sides.k.gather(group.slots).transpose(1, 2)
    values = sides.v.gather(group.slots)
    mask = group.full_mask(heads, queries.shape[1])
    if spec.softcap is None and spec.alibi_slopes is None:
        scores = torch.baddbmm(mask, queries, keys, alpha=spec.scale)
    else:
        scores = torch.baddbmm(mask, queries, keys, alpha=spec.scale, beta=0)
        _bend(scores.view(n, heads, -1, 1, length), group.distances(), spec)
        scores += mask
    result = torch.bmm(_softmax(scores, heads, spec), values).view(n, out.shape[1], out.shape[2])
    if group.whole:
        out.copy_(result)
    else:
        out.index_copy_(0, group.rows, result.to(out.dtype))


def _prefill_sdpa(row: PrefillRow, sides: _Sides, out: torch.Tensor) -> None:
    """Compute a sequence's queries by SDPA, KV heads as its batch, the group's query heads as its heads."""
    queries, keys, values = sides.prefill(row)
    group, scale = queries.shape[1], sides.spec.scale
    if row.causal:
        result = scaled_dot_product_attention(
            queries, _for_group(keys, group), _for_group(values, group), is_causal=True, scale=scale
        )
        out.copy_(_by_row(result))
        return
    for tile in row.tiles:
        result = scaled_dot_product_attention(
            queries[:, :, tile.start : tile.stop],
            _for_group(keys[:, tile.columns], group),
            _for_group(values[:, tile.columns], group),
            attn_mask=tile.mask(),
            scale=scale,
        )
        out[tile.start : tile.stop] = _by_row(result)


def _prefill_products(row: PrefillRow, sides: _Sides, out: torch.Tensor) -> None:
    """Compute a sequence's queries by explicit products, a tile at a time."""
    queries, keys, values = sides.prefill(row)
    spec, (heads, group, _, k_dim) = sides.spec, queries.shape
    for tile in row.tiles:
        count = tile.stop - tile.start
        tile_queries = queries[:, :, tile.start : tile.stop].reshape(heads, group * count, k_dim)
        scores = torch.bmm(tile_queries, keys[:, tile.columns].transpose(1, 2)).mul_(spec.scale)
        by_head = scores.view(1, heads, group, count, -1)
        if spec.softcap is not None or spec.alibi_slopes is not None:
            _bend(by_head, tile.distances(), spec)
        by_head += tile.mask()
        result = torch.bmm(_softmax(scores, heads, spec), values[:, tile.columns]).view(heads, group, count, -1)
        out[tile.start : tile.stop] = _by_row(result)


def _bend(scores: torch.Tensor, distances: torch.Tensor, spec: LayerSpec) -> None:
    """Apply softcap, then ALiBi, to scaled scores ``[n, num_kv_heads, group, queries, columns]``, in place.

    ``distances`` is key minus query position, broadcastable to the scores.
    """
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if spec.alibi_slopes is not None:
        # Two roundings, multiply and add: a fused one might round a row's tail differently from its middle.
        scores += spec.alibi_slopes.to(torch.float32).view(1, *scores.shape[1:3], 1, 1) * distances


def _softmax(scores: torch.Tensor, num_kv_heads: int, spec: LayerSpec) -> torch.Tensor:
    """Return softmax weights of masked scores ``[n * num_kv_heads, group * queries, columns]``.

    With sink logits the last column is spare: it holds the logit in the softmax and no weight afterwards.
    """
    if spec.sink_logits is None:
        return torch.softmax(scores, dim=-1)
    logits = spec.sink_logits.to(torch.float32).view(1, num_kv_heads, -1, 1)
    last = scores[..., -1].view(-1, num_kv_heads, logits.shape[2], scores.shape[1] // logits.shape[2])
    last.copy_(logits)
    weights = torch.softmax(scores, dim=-1)
    weights[..., -1] = 0
    return weights


def _for_group(kv: torch.Tensor, group: int) -> torch.Tensor:
    """Show ``[num_kv_heads, length, dim]`` to each of ``group`` query heads, without a copy."""
    return kv.unsqueeze(1).expand(-1, group, -1, -1)


def _by_row(result: torch.Tensor) -> torch.Tensor:
    """Turn ``[num_kv_heads, group, count, v_dim]`` into ``[count, num_q_heads, v_dim]``."""
    heads, group, count, v_dim = result.shape
    return result.permute(2, 0, 1, 3).reshape(count, heads * group, v_dim)

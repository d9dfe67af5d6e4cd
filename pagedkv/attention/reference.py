"""The specification of the operator: what every backend must compute, as a loop that can be read.

Takes what the operator takes and computes in the dtype asked, float64 by default. It is torch only, runs anywhere,
refuses nothing and is never fast: one query at a time, one token at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .quantise import dequantise, is_quantised, quantise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .batch import AttentionBatch
    from .calls import AttendCall, Scales, WriteCall
    from .layer_spec import LayerSpec


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    spec: LayerSpec,
    *,
    kv_scales: Scales | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return attention in ``compute_dtype``, every operation rounded to it; see `paged_attention` for the arguments."""
    cu_q_lens, kv_lens = batch.lengths()
    if cu_q_lens[-1] != q.shape[0]:
        raise ValueError(f"q must have cu_q_lens[-1] = {cu_q_lens[-1]} rows, got {q.shape[0]}")
    out = torch.zeros(q.shape[0], q.shape[1], v_pages.shape[3], dtype=compute_dtype, device=q.device)
    page_size = k_pages.shape[2]
    for sequence, kv_len in enumerate(kv_lens):
        start, stop = cu_q_lens[sequence], cu_q_lens[sequence + 1]
        for row in range(start, stop):
            position = kv_len - stop + row
            seen = visible_positions(position, spec).to(q.device)
            if len(seen) == 0:
                continue
            pages = batch.block_tables[sequence, seen // page_size].long()
            offsets = seen % page_size
            k, v = k_pages[pages, :, offsets], v_pages[pages, :, offsets]
            if kv_scales is None:
                k, v = k.to(compute_dtype), v.to(compute_dtype)
            else:
                k = dequantise(k, kv_scales[0][pages, :, offsets], compute_dtype)
                v = dequantise(v, kv_scales[1][pages, :, offsets], compute_dtype)
            out[row] = _attend_one(q[row].to(compute_dtype), k, v, seen - position, spec)
    return out


def visible_positions(position: int, spec: LayerSpec) -> torch.Tensor:
    """Return, in order, the positions that a query at ``position`` sees; none if it is negative."""
    positions = torch.arange(position + 1 if position >= 0 else 0)
    if spec.window is None:
        return positions
    return positions[(position - positions < spec.window) | (positions < spec.num_sink_tokens)]


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distances: torch.Tensor, spec: LayerSpec
) -> torch.Tensor:
    """Attend from one query ``[num_q_heads, k_dim]`` to ``n`` tokens ``[n, num_kv_heads, …]``.

    ``distances`` is key position minus query position, ``[n]``. Returns ``[num_q_heads, v_dim]``.
    """
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,nhd->hn", q, k) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.alibi_slopes is not None:
        scores = scores + spec.alibi_slopes.to(q.dtype)[:, None] * distances.to(q.dtype)
    if spec.sink_logits is not None:
        scores = torch.cat([scores, spec.sink_logits.to(q.dtype)[:, None]], dim=1)
    weights = torch.softmax(scores, dim=1)[:, : len(k)]
    return torch.einsum("hn,nhd->hd", weights, v)


def cannot_attend(call: AttendCall) -> None:
    """Refuse nothing."""


def attend(call: AttendCall, out: torch.Tensor) -> None:
    """Compute in float64 and round once, to ``out``."""
    out.copy_(attention(call.q, call.k_pages, call.v_pages, call.batch, call.spec, kv_scales=call.kv_scales))


def cannot_write(call: WriteCall) -> None:
    """Refuse nothing."""


def write(call: WriteCall) -> None:
    """Store one token at a time."""
    k, v, k_pages, v_pages, slot_mapping, kv_scales, _ = call
    page_size = k_pages.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        page, offset = divmod(slot, page_size)
        for side, (values, pages) in enumerate(((k[token], k_pages), (v[token], v_pages))):
            if is_quantised(pages.dtype) and kv_scales is not None:
                pages[page, :, offset], kv_scales[side][page, :, offset] = quantise(values, pages.dtype)
            else:
                pages[page, :, offset] = values


def cannot_copy(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Refuse nothing."""


def copy(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Copy from a snapshot, one page at a time."""
    for tensor in pages:
        before = tensor.clone()
        for source, destination in copies.tolist():
            tensor[destination] = before[source]

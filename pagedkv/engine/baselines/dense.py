"""Attention over dense K and V, as the baselines keep them: one row at a time, or a padded batch of decode rows.

Takes tensors and a `LayerSpec`, gives the attention's output, and knows nothing of caches. Scale first, then
softcap, then mask. Query heads that share a KV head are folded into the batch or the query length, so that K and
V are never repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from pagedkv.attention import LayerSpec


def attend_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """Attend from one sequence's last queries to all of it.

    Args:
        q: ``[q_len, num_q_heads, k_dim]``; the last query is the sequence's last token.
        k: ``[num_kv_heads, kv_len, k_dim]``.
        v: ``[num_kv_heads, kv_len, v_dim]``.
        spec: how the layer attends.

    Returns:
        ``[q_len, num_q_heads, v_dim]``.
    """
    q_len, num_q_heads, k_dim = q.shape
    if spec.window is not None and not spec.num_sink_tokens:
        seen = spec.window - 1 + q_len
        k, v = k[:, -seen:], v[:, -seen:]
    num_kv_heads, kv_len, _ = k.shape
    group = num_q_heads // num_kv_heads
    queries = q.reshape(q_len, num_kv_heads, group, k_dim).permute(1, 2, 0, 3)
    windowed = spec.window is not None and spec.window < kv_len
    causal = q_len > 1 and q_len == kv_len and not windowed
    mask = None
    if windowed or (q_len > 1 and not causal):
        positions = torch.arange(kv_len, device=q.device)
        mask = visible(positions, positions[kv_len - q_len :, None], spec)
    sinks = None if spec.sink_logits is None else spec.sink_logits.view(num_kv_heads, group, 1, 1)
    out = _attend(
        queries,
        k.unsqueeze(1).expand(-1, group, -1, -1),
        v.unsqueeze(1).expand(-1, group, -1, -1),
        spec,
        mask=mask,
        causal=causal,
        sinks=sinks,
    )
    return out.permute(2, 0, 1, 3).reshape(q_len, num_q_heads, -1)


def attend_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend from one query of each sequence, the group of each KV head as its query length.

    Args:
        q: ``[num_sequences, num_q_heads, k_dim]``.
        k: ``[num_sequences, num_kv_heads, longest, k_dim]``, finite also where masked.
        v: ``[num_sequences, num_kv_heads, longest, v_dim]``, finite also where masked.
        spec: how the layer attends; its window is the mask's business.
        mask: bool ``[num_sequences, 1, 1, longest]``, true where visible, or None for all.

    Returns:
        ``[num_sequences, num_q_heads, v_dim]``.
    """
    rows, num_q_heads, k_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    sinks = None if spec.sink_logits is None else spec.sink_logits.view(1, num_kv_heads, group, 1)
    out = _attend(q.reshape(rows, num_kv_heads, group, k_dim), k, v, spec, mask=mask, sinks=sinks)
    return out.reshape(rows, num_q_heads, -1)


def pad(states: list[torch.Tensor], longest: int) -> torch.Tensor:
    """Return K or V of several sequences, each ``[num_kv_heads, length, dim]``, as one tensor with zeros behind.

    Zeros, not whatever was there: a masked weight of 0 times NaN would still be NaN.
    """
    if all(one.shape[1] == longest for one in states):
        return torch.stack(states)
    num_heads, _, dim = states[0].shape
    padded = states[0].new_empty(len(states), num_heads, longest, dim)
    for row, one in zip(padded, states, strict=True):
        row[:, : one.shape[1]] = one
        row[:, one.shape[1] :] = 0
    return padded


def visible(keys: torch.Tensor, queries: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """Return which key positions each query position sees; both broadcast against each other."""
    seen = keys <= queries
    if spec.window is not None:
        seen &= (keys > queries - spec.window) | (keys < spec.num_sink_tokens)
    return seen


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: LayerSpec,
    *,
    mask: torch.Tensor | None,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over the last two dimensions; ``sinks`` broadcasts to the scores' first column."""
    if spec.softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale)
    scores = (q.float() @ k.float().transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if causal:
        mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([sinks.float().expand(*scores.shape[:-1], 1), scores], dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., 1:]
    return (weights @ v.float()).to(q.dtype)

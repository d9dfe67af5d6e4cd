"""What a GPU's attention is measured beside: contiguous SDPA, gather + SDPA, FlexAttention on pages, and two ceilings.

Takes tensors and gives functions that compute the same as the operator; knows no timing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Callable


def contiguous(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_len: int) -> torch.Tensor:
    """Run SDPA on K and V ``[n, num_kv_heads, length, dim]`` that lie as it likes them; q ``[n * q_len, heads, dim]``.

    With several queries these must be whole prompts: SDPA's causal mask begins at the upper left corner.
    """
    n = k.shape[0]
    by_head = q.view(n, q_len, q.shape[1], q.shape[2]).transpose(1, 2)
    out = scaled_dot_product_attention(by_head, k, v, is_causal=q_len > 1, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], v.shape[3])


def gather(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Copy sequences of one length out of their pages: ``[n, num_kv_heads, length, dim]``."""
    n, width = table.shape
    picked = pages.index_select(0, table.reshape(-1)).view(n, width, *pages.shape[1:])
    return picked.transpose(1, 2).flatten(2, 3)[:, :, :length]


def flex(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor, *, length: int, q_len: int
) -> Callable[[], torch.Tensor]:
    """Return FlexAttention over the whole pool as one sequence, its mask saying which slots are whose and in order.

    The block mask names a sequence's pages only, so that others are skipped, as with its own paged helper.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_pages, num_kv_heads, page_size, dim = k_pages.shape
    n = table.shape[0]
    owner = torch.full((n, num_pages), -1, dtype=torch.int32, device=q.device)
    logical = torch.arange(table.shape[1], dtype=torch.int32, device=q.device).expand(n, -1).contiguous()
    owner.scatter_(1, table.long(), logical)
    k, v = (pages.transpose(0, 1).reshape(1, num_kv_heads, num_pages * page_size, dim) for pages in (k_pages, v_pages))
    by_head = q.view(n, q_len, q.shape[1], dim).transpose(1, 2)

    def visible(b: Any, h: Any, q_index: Any, slot: Any) -> Any:
        block = owner[b, slot // page_size]
        position = block * page_size + slot % page_size
        return (block >= 0) & (position <= length - q_len + q_index)

    mask = create_block_mask(visible, n, None, q_len, num_pages * page_size, device=q.device.type)
    run = torch.compile(flex_attention, dynamic=False) if q.device.type == "cuda" else flex_attention
    wide_k, wide_v = k.expand(n, -1, -1, -1), v.expand(n, -1, -1, -1)

    def call() -> torch.Tensor:
        out: Any = run(by_head, wide_k, wide_v, block_mask=mask, enable_gqa=True)
        return torch.as_tensor(out).transpose(1, 2).reshape(q.shape)

    return call


def copy_bandwidth(device: str, num_bytes: int, seconds: Callable[[Callable[[], object]], float]) -> float:
    """Return the bytes a second that a plain copy reads and writes."""
    source = torch.empty(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def matrix_rate(device: str, size: int, dtype: torch.dtype, seconds: Callable[[Callable[[], object]], float]) -> float:
    """Return the operations a second of a square matrix product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / seconds(lambda: a @ b)

"""The door of the operator: refuses arguments whose shapes, dtypes or devices cannot be meant.

Takes the arguments of the public calls and gives nothing, or raises naming the argument, what it must be and what it
was. It reads no contents; the functions called ``…_contents`` do, for ``check=True``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .quantise import is_quantised

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .calls import AttendCall, Scales, WriteCall

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def _require_tensor(name: str, tensor: object, layout: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor {layout}, got {type(tensor).__name__}")
    if tensor.dim() != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}, got {_shape(tensor)}")


def _require_float(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")


def _require_shape(name: str, tensor: torch.Tensor, shape: list[int], meaning: str) -> None:
    if _shape(tensor) != shape:
        raise ValueError(f"{name} must be {meaning} = {shape}, got {_shape(tensor)}")


def _require_like(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on {other.device} like {other_name}, got {tensor.device}")


def _require_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, kv_scales: Scales | None) -> None:
    _require_tensor("k_pages", k_pages, "[num_pages, num_kv_heads, page_size, k_dim]")
    _require_tensor("v_pages", v_pages, "[num_pages, num_kv_heads, page_size, v_dim]")
    if 0 in k_pages.shape:
        raise ValueError(f"k_pages must have no empty dimension, got {_shape(k_pages)}")
    slots = _shape(k_pages)[:3]
    if _shape(v_pages)[:3] != slots or v_pages.shape[3] == 0:
        raise ValueError(f"v_pages must be {[*slots, 'v_dim']} like k_pages, got {_shape(v_pages)}")
    if v_pages.dtype != k_pages.dtype:
        raise TypeError(f"v_pages must be {k_pages.dtype} like k_pages, got {v_pages.dtype}")
    _require_like("v_pages", v_pages, "k_pages", k_pages)
    if is_quantised(k_pages.dtype):
        _require_scales(k_pages, kv_scales)
    elif kv_scales is not None:
        raise ValueError(f"kv_scales must be None for pages of {k_pages.dtype}, got a {type(kv_scales).__name__}")


def _require_scales(k_pages: torch.Tensor, kv_scales: Scales | None) -> None:
    if kv_scales is None:
        raise ValueError(f"kv_scales must be (k_scales, v_scales) for pages of {k_pages.dtype}, got None")
    if not isinstance(kv_scales, tuple) or len(kv_scales) != 2:
        raise TypeError(f"kv_scales must be a tuple (k_scales, v_scales), got {type(kv_scales).__name__}")
    for name, scales in zip(("kv_scales[0]", "kv_scales[1]"), kv_scales, strict=True):
        _require_tensor(name, scales, "[num_pages, num_kv_heads, page_size]")
        _require_shape(name, scales, _shape(k_pages)[:3], "[num_pages, num_kv_heads, page_size]")
        if scales.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {scales.dtype}")
        _require_like(name, scales, "k_pages", k_pages)


def check_attend(call: AttendCall) -> None:
    """Check the arguments of `paged_attention`."""
    q, k_pages, v_pages, batch, spec, kv_scales, out, _ = call
    _require_tensor("q", q, "[total_q, num_q_heads, k_dim]")
    _require_float("q", q)
    _require_pages(k_pages, v_pages, kv_scales)
    _, num_q_heads, k_dim = q.shape
    if k_pages.shape[3] != k_dim:
        raise ValueError(f"q must have the k_dim of k_pages, {k_pages.shape[3]}, got {k_dim}")
    if num_q_heads == 0 or num_q_heads % k_pages.shape[1]:
        raise ValueError(f"q must have a multiple of the {k_pages.shape[1]} num_kv_heads, got {num_q_heads} heads")
    if not is_quantised(k_pages.dtype) and k_pages.dtype != q.dtype:
        raise TypeError(f"k_pages must be {q.dtype} like q, or int8 or float8_e4m3fn, got {k_pages.dtype}")
    _require_like("k_pages", k_pages, "q", q)
    _require_like("batch", batch.block_tables, "q", q)
    for name in ("sink_logits", "alibi_slopes"):
        per_head = getattr(spec, name)
        if per_head is not None:
            _require_shape(f"spec.{name}", per_head, [num_q_heads], "[num_q_heads]")
            _require_like(f"spec.{name}", per_head, "q", q)
    if out is not None:
        check_out(out, q, v_pages)


def check_out(out: torch.Tensor, q: torch.Tensor, v_pages: torch.Tensor) -> None:
    """Check a given output against queries and pages that are right."""
    shape = [*q.shape[:2], v_pages.shape[3]]
    _require_tensor("out", out, "[total_q, num_q_heads, v_dim]")
    _require_shape("out", out, shape, "[total_q, num_q_heads, v_dim]")
    if out.dtype != q.dtype:
        raise TypeError(f"out must be {q.dtype} like q, got {out.dtype}")
    _require_like("out", out, "q", q)
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out must have memory of its own for every element, got strides {[*out.stride()]}")


def check_write(call: WriteCall) -> None:
    """Check the arguments of `write_kv`."""
    k, v, k_pages, v_pages, slot_mapping, kv_scales, _ = call
    _require_tensor("k", k, "[total_q, num_kv_heads, k_dim]")
    _require_tensor("v", v, "[total_q, num_kv_heads, v_dim]")
    _require_pages(k_pages, v_pages, kv_scales)
    num_tokens, heads = k.shape[0], k_pages.shape[1]
    _require_shape("k", k, [num_tokens, heads, k_pages.shape[3]], "[total_q, num_kv_heads, k_dim]")
    _require_shape("v", v, [num_tokens, heads, v_pages.shape[3]], "[total_q, num_kv_heads, v_dim]")
    for name, tensor in (("k", k), ("v", v)):
        _require_float(name, tensor)
        if not is_quantised(k_pages.dtype) and tensor.dtype != k_pages.dtype:
            raise TypeError(f"{name} must be {k_pages.dtype} like {name}_pages, got {tensor.dtype}")
        _require_like(name, tensor, "k_pages", k_pages)
    _require_tensor("slot_mapping", slot_mapping, "[total_q]")
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
    _require_shape("slot_mapping", slot_mapping, [num_tokens], "[total_q]")
    _require_like("slot_mapping", slot_mapping, "k_pages", k_pages)


def check_slots_contents(slot_mapping: torch.Tensor, num_pages: int, page_size: int) -> None:
    """Refuse slots outside the pages, and two tokens for one slot (the null page's slots excepted)."""
    if slot_mapping.numel() == 0:
        return
    smallest, largest = int(slot_mapping.min()), int(slot_mapping.max())
    if smallest < 0 or largest >= num_pages * page_size:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"slot_mapping must be from 0 to {num_pages * page_size - 1}, got {wrong}")
    repeated = _first_repeated(slot_mapping[slot_mapping >= page_size])
    if repeated is not None:
        raise ValueError(f"slot_mapping must name each slot once, got slot {repeated} twice or more")


def _first_repeated(values: torch.Tensor) -> int | None:
    """Return the smallest value that occurs more than once in a 1-D tensor."""
    ordered = values.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(repeated[0]) if len(repeated) else None


def check_copy(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Check the arguments of `copy_pages`."""
    if not pages:
        raise ValueError("pages must be a tensor or a sequence of at least one, got none")
    for index, tensor in enumerate(pages):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"pages[{index}] must be a tensor [num_pages, …], got {type(tensor).__name__}")
        if tensor.dim() == 0 or tensor.shape[0] != pages[0].shape[0]:
            expected = pages[0].shape[0] if pages[0].dim() else "num_pages"
            raise ValueError(f"pages[{index}] must be [{expected}, …], got {_shape(tensor)}")
    _require_tensor("copies", copies, "[num_copies, 2]")
    if copies.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"copies must be int32 or int64, got {copies.dtype}")
    _require_shape("copies", copies, [copies.shape[0], 2], "[num_copies, 2]")
    for index, tensor in enumerate(pages):
        _require_like(f"pages[{index}]", tensor, "copies", copies)


def check_copies_contents(copies: torch.Tensor, num_pages: int) -> None:
    """Refuse page ids outside the pages, the null page as destination, and two sources for one destination."""
    if copies.numel() == 0:
        return
    if int(copies.min()) < 0 or int(copies.max()) >= num_pages:
        wrong = int(copies.min()) if int(copies.min()) < 0 else int(copies.max())
        raise ValueError(f"copies must hold page ids from 0 to {num_pages - 1}, got {wrong}")
    repeated = _first_repeated(copies[:, 1])
    if repeated is not None:
        raise ValueError(f"copies must name each destination once, got page {repeated} twice or more")
    if int(copies[:, 1].min()) == 0:
        raise ValueError("copies must not write the null page, got destination 0")

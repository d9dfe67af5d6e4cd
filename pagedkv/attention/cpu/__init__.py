"""The "cpu" backend: compiled kernels that read K and V where they lie, on torch's threads.

Takes checked arguments, hands the kernels raw pointers and gives back what they say. The arithmetic is in the C++
sources beside this file; ``docs/kernels.md`` explains them, ``abi.h`` is the interface. Where there is no library for
this process, every ``cannot_…`` says why, once in the log too, since another backend then serves the calls unasked.

What does not change is prepared once: the structs of a step on its `AttentionBatch`, those of a layer in ``call.kept``.
"""

from __future__ import annotations

import logging
from ctypes import c_int64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...native.library import LibraryUnavailableError
from ..checks import check_copies_contents, check_slots_contents
from . import structs
from .structs import DTYPES, BoundLayer, BoundWrite, Layer, Step, Strides, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..batch import AttentionBatch
    from ..calls import AttendCall, Scales, WriteCall
    from ..layer_spec import LayerSpec

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST_QUANTISED_ROW = 4096
_LOGGER = logging.getLogger("pagedkv")


@cache
def why_unavailable() -> str | None:
    """Say why this process has no kernels, or None if it has; the first asking logs it."""
    try:
        structs.functions()
    except LibraryUnavailableError as error:
        reason = f"there is no compiled CPU library for this process: {error}"
        _LOGGER.warning("attention on the CPU goes the slow way, by torch: %s", reason)
        return reason
    return None


def _cannot_use(name: str, tensor: torch.Tensor, pages: Sequence[torch.Tensor]) -> str | None:
    if tensor.device.type != "cpu":
        return f"{name} must be on the CPU, got {tensor.device}"
    if tensor.dtype not in _FLOATS:
        return f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}"
    for side, one in zip(("k_pages", "v_pages"), pages, strict=True):
        if one.dtype not in DTYPES:
            return f"{side} must be {tensor.dtype}, int8 or float8_e4m3fn, got {one.dtype}"
        if one.shape[3] > 1 and one.stride(3) != 1:
            return f"{side} must have a head's channels next to one another, got strides {[*one.stride()]}"
    return why_unavailable()


# ---- Attention ------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """A struct that stays the same for a layer as long as its tensors look the same and its pages stay where they are.

    ``alive`` is the struct itself and what else its pointers point at.
    """

    address: c_void_p
    alive: tuple[object, ...]


def cannot_attend(call: AttendCall) -> str | None:
    """Refuse other devices, float64, and pages whose channels are scattered."""
    return _cannot_use("q", call.q, (call.k_pages, call.v_pages))


def attend(call: AttendCall, out: torch.Tensor) -> None:
    """Run the kernel: one C call."""
    q = call.q
    step: _Step | None = call.batch.prepared.get("cpu")
    total_q = q.shape[0]  # a tensor's len() takes 0.4 us more
    if step is None or step.total_q != total_q:
        step = call.batch.prepared["cpu"] = _prepare_step(call.batch, total_q)
    kept: _Kept | None = call.kept.get("cpu")
    if kept is None:
        kept = call.kept["cpu"] = _keep_layer(call, out)
    status = structs.functions().attend(
        kept.address, step.address, q.data_ptr(), out.data_ptr(), torch.get_num_threads()
    )
    if status:
        _raise(status, "kv_lens and cu_q_lens must stay within the block tables and the rows of q")


class _Step(NamedTuple):
    """The struct of an `AttentionBatch`, and how many query rows it is for."""

    address: c_void_p
    total_q: int
    alive: Step


def _prepare_step(batch: AttentionBatch, total_q: int) -> _Step:
    tables, kv_lens, cu_q_lens = batch.block_tables, batch.kv_lens, batch.cu_q_lens
    rows = int(cu_q_lens[-1])
    if rows != total_q:
        raise ValueError(f"q must have cu_q_lens[-1] = {rows} rows, got {total_q}")
    step = Step(
        tables.data_ptr(), kv_lens.data_ptr(), cu_q_lens.data_ptr(),
        *tables.stride(), kv_lens.stride(0), cu_q_lens.stride(0),
        *tables.shape, total_q,
        8 * tables.element_size(), 8 * kv_lens.element_size(), 8 * cu_q_lens.element_size(), 0,
    )  # fmt: skip
    return _Step(structs.pointer(step), total_q, step)


def _keep_layer(call: AttendCall, out: torch.Tensor) -> _Kept:
    q, k_pages, v_pages, _, spec, kv_scales, *_ = call
    per_head = _per_head(spec)
    layer = Layer(
        q.shape[1], k_pages.shape[1], q.shape[2], v_pages.shape[3], k_pages.shape[2],
        Strides(*q.stride()), Strides(*out.stride()),
        *_page_strides(k_pages, v_pages, kv_scales),
        *(None if one is None else one.data_ptr() for one in per_head),
        spec.window or 0, spec.num_sink_tokens, spec.scale, spec.softcap or 0.0, DTYPES[q.dtype], DTYPES[k_pages.dtype],
    )  # fmt: skip
    bound = BoundLayer(layer, *_pointers(k_pages, v_pages, kv_scales))
    return _Kept(structs.pointer(bound), (bound, per_head))


def _per_head(spec: LayerSpec) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return sink logits and ALiBi slopes as the kernel reads them, contiguous fp32."""
    logits, slopes = spec.sink_logits, spec.alibi_slopes
    return (
        None if logits is None else logits.detach().to(torch.float32).contiguous(),
        None if slopes is None else slopes.detach().to(torch.float32).contiguous(),
    )


def _page_strides(k_pages: torch.Tensor, v_pages: torch.Tensor, kv_scales: Scales | None) -> list[object]:
    """Return the strides of K and V pages, and of their scales (zeros where there are none)."""
    sides = [k_pages.stride()[:3], v_pages.stride()[:3]]
    sides += [(0, 0, 0)] * 2 if kv_scales is None else [one.stride() for one in kv_scales]
    return [Strides(*side) for side in sides]


def _pointers(k_pages: torch.Tensor, v_pages: torch.Tensor, kv_scales: Scales | None) -> tuple[int | None, ...]:
    k_scales, v_scales = (None, None) if kv_scales is None else [one.data_ptr() for one in kv_scales]
    return k_pages.data_ptr(), v_pages.data_ptr(), k_scales, v_scales


def _raise(status: int, must: str) -> None:
    if status == structs.OUT_OF_MEMORY:
        raise MemoryError("the CPU kernel found no room for its scratch memory")
    if status == structs.BAD_ARGUMENT:
        raise ValueError("the CPU library does not know this dtype or size")
    raise ValueError(f"{must}; check=True says where they do not")


# ---- Writing and copying --------------------------------------------------------------------------------------------


def cannot_write(call: WriteCall) -> str | None:
    """Refuse what `cannot_attend` does, and quantised rows that are longer than the kernel's scratch."""
    for name, rows in (("k", call.k), ("v", call.v)):
        if call.kv_scales is not None and rows.shape[2] > _LONGEST_QUANTISED_ROW:
            return (
                f"{name} must have at most {_LONGEST_QUANTISED_ROW} channels where it is quantised, got {rows.shape[2]}"
            )
        if rows.dtype != call.k.dtype:
            return f"{name} must be {call.k.dtype} like k, got {rows.dtype}"
    return _cannot_use("k", call.k, (call.k_pages, call.v_pages))


def write(call: WriteCall) -> None:
    """Run the kernel: one C call. Slots outside the pages are refused, and nothing is written."""
    k, v, _, _, slots, *_ = call
    kept: _Kept | None = call.kept.get("cpu")
    if kept is None:
        kept = call.kept["cpu"] = _keep_write(call)
    status = structs.functions().write_kv(
        kept.address, k.data_ptr(), v.data_ptr(), slots.data_ptr(), k.shape[0], torch.get_num_threads()
    )
    if status:
        check_slots_contents(slots, call.k_pages.shape[0], call.k_pages.shape[2])
        _raise(status, "slot_mapping must stay within the pages")


def _keep_write(call: WriteCall) -> _Kept:
    k, v, k_pages, v_pages, slots, kv_scales, *_ = call
    write = Write(
        *k_pages.shape[:2], k_pages.shape[3], v_pages.shape[3], k_pages.shape[2],
        Strides(*k.stride()), Strides(*v.stride()),
        *_page_strides(k_pages, v_pages, kv_scales),
        slots.stride(0), DTYPES[k.dtype], DTYPES[k_pages.dtype],
    )  # fmt: skip
    bound = BoundWrite(write, *_pointers(k_pages, v_pages, kv_scales))
    return _Kept(structs.pointer(bound), (bound,))


def cannot_copy(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> str | None:
    """Refuse other devices, and tensors whose pages are not one piece of memory each."""
    for index, tensor in enumerate(pages):
        if tensor.device.type != "cpu":
            return f"pages[{index}] must be on the CPU, got {tensor.device}"
        if tensor.shape[0] and not tensor[0].is_contiguous():
            return f"pages[{index}] must have each page in one piece, got strides {[*tensor.stride()]}"
    return why_unavailable()


def copy(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Run the kernel: one C call for all tensors. Page ids outside the pages are refused, and nothing is written."""
    num_tensors, num_pages, pairs = len(pages), pages[0].shape[0], copies.contiguous()
    sizes = [tensor[0].numel() * tensor.element_size() for tensor in pages]
    status = structs.functions().copy_pages(
        (c_void_p * num_tensors)(*(tensor.data_ptr() for tensor in pages)),
        (c_int64 * num_tensors)(*sizes),
        (c_int64 * num_tensors)(*(tensor.stride(0) * tensor.element_size() for tensor in pages)),
        num_tensors, num_pages, pairs.data_ptr(), 8 * pairs.element_size(), pairs.shape[0], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        check_copies_contents(copies, num_pages)
        _raise(status, "copies must name pages of the pool")

"""The "triton" backend: kernels for NVIDIA and AMD GPUs that read K and V in place, through the block tables.

Takes the operator's arguments on a GPU, or on a CPU under ``TRITON_INTERPRET=1``, which is for tests: the interpreter
is slow and cannot multiply bf16. It never waits for the device: what a step needs follows from shapes and from
``max_q_len`` and ``max_kv_len``. docs/kernels.md draws how each kernel walks a table.

Triton is imported when a call is served, not before. Files: ``tuning`` (tile sizes), ``arithmetic``, ``walk``
(through a table), ``decode``, ``prefill``, ``cascade`` (shared prefixes), ``write_kernels``, ``launch`` and
``launch_write``.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from .tuning import LARGEST_DIM, PAGE_SIZES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..calls import AttendCall, WriteCall

__all__ = ["attend", "cannot_attend", "cannot_copy", "cannot_write", "copy", "write"]


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _cannot_run(name: str, device: torch.device) -> str | None:
    """Say why no kernel runs on ``device``."""
    if not _has_triton():
        return "triton must be installed, it is not"
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes"}
    if device.type != "cuda" and not (device.type == "cpu" and interpreted):
        return f"{name} must be on a GPU, or on a CPU with TRITON_INTERPRET=1 in the environment, got {device}"
    return None


def _cannot_page(pages: torch.Tensor, v_pages: torch.Tensor) -> str | None:
    """Say why no kernel takes pages of these shapes."""
    if pages.shape[2] not in PAGE_SIZES:
        return f"k_pages must have a page_size that is a power of two from 1 to 256, got {pages.shape[2]}"
    for name, dim in (("k_pages", pages.shape[3]), ("v_pages", v_pages.shape[3])):
        if dim > LARGEST_DIM:
            return f"{name} must have a head dim of at most {LARGEST_DIM}, got {dim}"
    return None


def cannot_attend(call: AttendCall) -> str | None:
    """Refuse float64, other page sizes than powers of two to 256, head dims over 256, and devices without Triton."""
    q, k_pages = call.q, call.k_pages
    if q.dtype == torch.float64:
        return "q must be float32, bfloat16 or float16, got torch.float64"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "q must be float32 or float16 under Triton's interpreter, got torch.bfloat16"
    return _cannot_run("q", q.device) or _cannot_page(k_pages, call.v_pages)


def attend(call: AttendCall, out: torch.Tensor) -> None:
    """Launch what the step may need: prefill, decode, and the merge of decode's splits."""
    from .launch import launch_attention

    launch_attention(call, out)


def cannot_write(call: WriteCall) -> str | None:
    """Refuse float64 pages, and shapes and devices as `cannot_attend`."""
    if call.k_pages.dtype == torch.float64:
        return "k_pages must be float32, bfloat16, float16, int8 or float8_e4m3fn, got torch.float64"
    return _cannot_run("k_pages", call.k_pages.device) or _cannot_page(call.k_pages, call.v_pages)


def write(call: WriteCall) -> None:
    """Store all tokens in one launch."""
    from .launch_write import launch_write

    launch_write(call)


def cannot_copy(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> str | None:
    """Refuse tensors whose pages are not each in one piece, and devices as `cannot_attend`."""
    for index, tensor in enumerate(pages):
        if tensor.shape[0] and not tensor[0].is_contiguous():
            return f"pages[{index}] must hold each page in one piece, got strides {[*tensor.stride()]}"
    return _cannot_run("copies", copies.device)


def copy(pages: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Move all tensors' pages in two launches: every source into scratch memory, then every page to its place."""
    from .launch_write import launch_copies

    launch_copies(pages, copies)

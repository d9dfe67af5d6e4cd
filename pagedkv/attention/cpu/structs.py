"""The C interface in Python's words: structs, types and return codes of ``abi.h`` and ``bound.h``, field by field.

Takes the loaded library and gives its functions with their types. It knows no tensors.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...native.library import load

if TYPE_CHECKING:
    from collections.abc import Callable

ABI_VERSION = 1

DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}
"""Element types by their number in ``abi.h``."""

OK, BAD_LENGTHS, BAD_ARGUMENT, OUT_OF_MEMORY, BAD_PAGES = range(5)

Strides = c_int64 * 3


class Step(Structure):
    """``pagedkv_step``: one `AttentionBatch` and the rows of its queries."""

    _fields_ = (
        ("block_tables", c_void_p),
        ("kv_lens", c_void_p),
        ("cu_q_lens", c_void_p),
        ("table_row_stride", c_int64),
        ("table_entry_stride", c_int64),
        ("kv_lens_stride", c_int64),
        ("cu_q_lens_stride", c_int64),
        ("num_sequences", c_int64),
        ("width", c_int64),
        ("total_q", c_int64),
        ("table_bits", c_int32),
        ("kv_lens_bits", c_int32),
        ("cu_q_lens_bits", c_int32),
        ("reserved", c_int32),
    )


class Layer(Structure):
    """``pagedkv_layer``: one `LayerSpec` and the looks of the tensors that go with it."""

    _fields_ = (
        ("num_q_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("k_dim", c_int64),
        ("v_dim", c_int64),
        ("page_size", c_int64),
        ("q_strides", Strides),
        ("out_strides", Strides),
        ("k_strides", Strides),
        ("v_strides", Strides),
        ("k_scale_strides", Strides),
        ("v_scale_strides", Strides),
        ("sink_logits", c_void_p),
        ("alibi_slopes", c_void_p),
        ("window", c_int64),
        ("num_sink_tokens", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("q_dtype", c_int32),
        ("kv_dtype", c_int32),
    )


class Write(Structure):
    """``pagedkv_write``: the looks of the tensors of a `write_kv`."""

    _fields_ = (
        ("num_pages", c_int64),
        ("num_kv_heads", c_int64),
        ("k_dim", c_int64),
        ("v_dim", c_int64),
        ("page_size", c_int64),
        ("k_row_strides", Strides),
        ("v_row_strides", Strides),
        ("k_strides", Strides),
        ("v_strides", Strides),
        ("k_scale_strides", Strides),
        ("v_scale_strides", Strides),
        ("slot_stride", c_int64),
        ("source_dtype", c_int32),
        ("kv_dtype", c_int32),
    )


_PAGES = (("k_pages", c_void_p), ("v_pages", c_void_p), ("k_scales", c_void_p), ("v_scales", c_void_p))


class BoundLayer(Structure):
    """``pagedkv_bound_layer``: a layer and its page tensors."""

    _fields_ = (("layer", Layer), *_PAGES)


class BoundWrite(Structure):
    """``pagedkv_bound_write``: the looks of a write and its page tensors."""

    _fields_ = (("write", Write), *_PAGES)


class Functions(NamedTuple):
    """The exported functions; each returns one of the codes above."""

    attend: Callable[..., int]
    write_kv: Callable[..., int]
    copy_pages: Callable[..., int]


@cache
def functions() -> Functions:
    """Return the kernels, typed.

    Raises:
        LibraryUnavailableError: there is no compiled library.
    """
    library = load().functions
    # Pointers arrive as integers or, where they stay the same, as c_void_p objects, which ctypes need not convert.
    attend, write_kv, copy_pages = library.pagedkv_attend_bound, library.pagedkv_write_bound, library.pagedkv_copy_pages
    attend.argtypes = (*(c_void_p,) * 4, c_int32)
    write_kv.argtypes = (*(c_void_p,) * 4, c_int64, c_int32)
    sizes = POINTER(c_int64)
    copy_pages.argtypes = (POINTER(c_void_p), sizes, sizes, c_int64, c_int64, c_void_p, c_int32, c_int64, c_int32)
    return Functions(attend, write_kv, copy_pages)


def pointer(struct: Structure) -> c_void_p:
    """Return a struct's address; whoever keeps it keeps the struct too."""
    return c_void_p(ctypes.addressof(struct))

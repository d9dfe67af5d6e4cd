"""What stands between a model step's matrix products, as one C call each: norm, rotary embedding, gates, argmax.

Takes CPU tensors of float32, bfloat16 or float16 and gives what the models' own code gives, rounded to the dtype where
that rounds. It knows no model: whoever replaces a module by one of these compares them first. Every function refuses
arguments it was not made for, and raises `LibraryUnavailableError` where there is no compiled library.

Rows may have any stride; the channels of a row lie next to one another.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from .library import load

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SILU, _GELU_TANH = 0, 1


class LinearLayer(Structure):
    """``pagedkv_linear_layer`` of ``linear.h``."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("weight_stride", c_int64), ("out_features", c_int64))


@cache
def functions() -> CDLL:
    """Return the loaded library with the types of the functions that are called here.

    Raises:
        LibraryUnavailableError: there is no compiled library.
    """
    functions = load().functions
    rows = (c_int64, c_int64)
    matrix = (c_void_p, c_int64)
    end = (c_int32, c_int32)
    functions.pagedkv_rms_norm.argtypes = (*matrix * 3, c_void_p, *matrix, *rows, c_float, *end)
    functions.pagedkv_rotary.argtypes = (c_void_p, *(c_int64,) * 3, c_void_p, c_void_p, c_int64, *rows, *end)
    functions.pagedkv_gated.argtypes = (c_int32, *matrix * 3, *rows, *end)
    functions.pagedkv_argmax.argtypes = (*matrix, c_void_p, *rows, *end)
    functions.pagedkv_linear.argtypes = (POINTER(LinearLayer), c_int64, *matrix * 2, *rows, *end)
    return functions


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * (x / sqrt(mean(x ** 2) + eps))`` over the last dimension.

    The mean is taken in float32, the quotient is rounded to the dtype before it meets the weight.

    Args:
        x: ``[..., dim]``.
        weight: ``[dim]``, contiguous, in x's dtype.
        eps: added to the mean of squares.
    """
    rows, stride = _rows_of("x", x, x)
    _require_weight(weight, x)
    out = torch.empty(x.shape, dtype=x.dtype)
    dim = x.shape[-1]
    functions().pagedkv_rms_norm(
        x.data_ptr(), stride, None, 0, None, 0, weight.data_ptr(), out.data_ptr(), dim, rows, dim, eps, *_end(x)
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm` of ``x + residual``, and that sum itself, rounded to the dtype.

    Args:
        x: ``[..., dim]``.
        residual: like x.
        weight: as in `rms_norm`.
        eps: as in `rms_norm`.
    """
    rows, stride = _rows_of("x", x, x)
    _, residual_stride = _rows_of("residual", residual, x)
    require_shape("residual", residual, x)
    _require_weight(weight, x)
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    dim = x.shape[-1]
    functions().pagedkv_rms_norm(
        x.data_ptr(), stride, residual.data_ptr(), residual_stride, total.data_ptr(), dim,
        weight.data_ptr(), out.data_ptr(), dim, rows, dim, eps, *_end(x),
    )  # fmt: skip
    return out, total


def rotary_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate queries and keys in place by their positions' angles, the two halves of the channels as pairs.

    ``x * cos + rotate_half(x) * sin`` with each product rounded to the dtype, over the first ``rotary_dim`` channels.

    Args:
        q: ``[tokens, num_q_heads, head_dim]``; written.
        k: ``[tokens, num_kv_heads, head_dim]``; written.
        cos: ``[tokens, rotary_dim]`` in q's dtype, rotary_dim even and at most head_dim.
        sin: like cos.
    """
    tokens, angle_stride = _rows_of("cos", cos, q)
    require_shape("sin", sin, cos)
    if _rows_of("sin", sin, q)[1] != angle_stride:
        raise ValueError(f"sin must have the strides of cos, {[*cos.stride()]}, got {[*sin.stride()]}")
    rotary_dim = cos.shape[-1]
    for name, heads in (("q", q), ("k", k)):
        require(name, heads, q)
        if heads.dim() != 3 or heads.shape[0] != tokens:
            raise ValueError(f"{name} must be [{tokens}, heads, head_dim], a row for each of cos, got {[*heads.shape]}")
        if rotary_dim % 2 or rotary_dim > heads.shape[2]:
            raise ValueError(f"cos must have an even rotary_dim up to {name}'s {heads.shape[2]}, got {rotary_dim}")
        if any(size > 1 and stride == 0 for size, stride in zip(heads.shape, heads.stride(), strict=True)):
            raise ValueError(f"{name} must have memory of its own for every element, got strides {[*heads.stride()]}")
    for heads in (q, k):
        functions().pagedkv_rotary(
            heads.data_ptr(), heads.stride(0), heads.stride(1), heads.shape[1],
            cos.data_ptr(), sin.data_ptr(), angle_stride, tokens, rotary_dim, *_end(q),
        )  # fmt: skip


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, each rounded to the dtype; both ``[..., dim]``, such as the halves of one product."""
    return _gated(_SILU, gate, up)


def gelu_tanh_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(gate, approximate="tanh") * up``, each rounded to the dtype; both ``[..., dim]``."""
    return _gated(_GELU_TANH, gate, up)


GATES = (silu_mul, gelu_tanh_mul)
"""The gates by their numbers in ``step_ops.h``."""


def _gated(activation: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    rows, gate_stride = _rows_of("gate", gate, gate)
    _, up_stride = _rows_of("up", up, gate)
    require_shape("up", up, gate)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    dim = gate.shape[-1]
    functions().pagedkv_gated(
        activation, gate.data_ptr(), gate_stride, up.data_ptr(), up_stride, out.data_ptr(), dim, rows, dim, *_end(gate)
    )
    return out


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest element, int64: the first of equals, the first NaN if there is one.

    Args:
        x: ``[rows, dim]``, dim at least 1.
    """
    rows, stride = _rows_of("x", x, x)
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"x must be [rows, dim] with dim at least 1, got {[*x.shape]}")
    out = torch.empty(rows, dtype=torch.int64)
    functions().pagedkv_argmax(x.data_ptr(), stride, out.data_ptr(), rows, x.shape[1], *_end(x))
    return out


def _end(x: torch.Tensor) -> tuple[int, int]:
    """Return the last two arguments of every function: the dtype's number and the most threads."""
    return DTYPES[x.dtype], torch.get_num_threads()


def require(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Refuse what is no tensor in memory of ``like``'s dtype, a known one, with its channels next to one another."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPES or tensor.dtype != like.dtype:
        wanted = "float32, bfloat16 or float16" if tensor is like else str(like.dtype)
        raise TypeError(f"{name} must be {wanted}, got {tensor.dtype}")
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    if tensor.dim() == 0 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        raise ValueError(f"{name} must have its channels next to one another, got strides {[*tensor.stride()]}")


def _rows_of(name: str, tensor: torch.Tensor, like: torch.Tensor) -> tuple[int, int]:
    """Return how many rows ``[..., dim]`` has and the stride from one to the next."""
    require(name, tensor, like)
    *outer, dim = tensor.shape
    if tensor.is_contiguous():
        return (tensor.numel() // dim if dim else 0), dim
    if not outer or any(size != 1 for size in outer[:-1]):
        raise ValueError(
            f"{name} must have rows at even distances, got {[*tensor.shape]}, strides {[*tensor.stride()]}"
        )
    return outer[-1], tensor.stride(-2)


def require_shape(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Refuse a tensor of another shape than ``like``'s."""
    if tensor.shape != like.shape:
        raise ValueError(f"{name} must be {[*like.shape]}, got {[*tensor.shape]}")


def _require_weight(weight: torch.Tensor, x: torch.Tensor) -> None:
    require("weight", weight, x)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be {[x.shape[-1]]}, got {[*weight.shape]}")

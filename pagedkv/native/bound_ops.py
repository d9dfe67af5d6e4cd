"""The operations of `step_ops` with what stays the same from call to call checked and converted once.

At a few rows the checks and conversions of a call cost more than its arithmetic, and a step makes some hundred calls.
Each function here takes what is constant and gives a callable for the rest; a call whose tensors do not look like the
usual ones goes to `step_ops`, which says what is wrong with it, if anything is.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from . import step_ops
from .step_ops import DTYPES, LinearLayer, functions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NOTHING = c_int64(0)


def rms_norm(weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``x -> step_ops.rms_norm(x, weight, eps)``, where x may also have rows at any distance."""
    call, dtype, dim = functions().pagedkv_rms_norm, weight.dtype, weight.shape[0]
    size, where, number = c_int64(dim), c_void_p(weight.data_ptr()), c_int32(DTYPES[dtype])
    epsilon = c_float(eps)
    step_ops.rms_norm(weight.unsqueeze(0), weight, eps)  # refuses weights of another kind now

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not dtype or x.shape[-1] != dim or not x.is_cpu:
            return step_ops.rms_norm(x, weight, eps)
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty_like(x)
        call(
            x.data_ptr(), size, None, _NOTHING, None, _NOTHING, where, out.data_ptr(), size, x.numel() // dim, size,
            epsilon, number, torch.get_num_threads(),
        )  # fmt: skip
        return out

    return run


def gated(activation: int, dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return `step_ops.silu_mul` or `step_ops.gelu_tanh_mul` for ``[1, rows, dim]`` of one dtype, by its number."""
    call, kind, number = functions().pagedkv_gated, c_int32(activation), c_int32(DTYPES[dtype])
    checked = step_ops.GATES[activation]

    def run(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        shape = gate.shape
        if len(shape) != 3 or shape[0] != 1 or up.shape != shape or gate.dtype is not dtype or up.dtype is not dtype:
            return checked(gate, up)
        _, gate_stride, gate_channel = gate.stride()
        _, up_stride, up_channel = up.stride()
        if gate_channel != 1 or up_channel != 1 or not (gate.is_cpu and up.is_cpu):
            return checked(gate, up)
        out = torch.empty(shape, dtype=dtype)
        _, rows, dim = shape
        call(
            kind, gate.data_ptr(), gate_stride, up.data_ptr(), up_stride, out.data_ptr(), dim, rows, dim,
            number, torch.get_num_threads(),
        )  # fmt: skip
        return out

    return run


def rotary() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Return `step_ops.rotary_` for ``[1, heads, tokens, head_dim]``; tensors that look as before are not checked."""
    call = functions().pagedkv_rotary
    passed: dict[tuple[object, ...], tuple[int, ...]] = {}

    def run(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        looks = (
            q.shape, q.stride(), k.shape, k.stride(), cos.shape, cos.stride(), sin.shape, sin.stride(),
            q.dtype, k.dtype, cos.dtype, sin.dtype, q.device, k.device, cos.device, sin.device,
        )  # fmt: skip
        known = passed.get(looks)
        if known is None:
            step_ops.rotary_(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
            if len(passed) >= _MOST_LOOKS:
                passed.clear()
            passed[looks] = (q.shape[2], cos.shape[2], cos.stride(1), DTYPES[q.dtype])
            return
        tokens, rotary_dim, angle_stride, number = known
        threads = torch.get_num_threads()
        angles = (cos.data_ptr(), sin.data_ptr(), angle_stride, tokens, rotary_dim, number, threads)
        call(q.data_ptr(), q.stride(2), q.stride(1), q.shape[1], *angles)
        call(k.data_ptr(), k.stride(2), k.stride(1), k.shape[1], *angles)

    return run


_MOST_LOOKS = 256


def linear(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``x -> torch.cat([x @ weight.T + bias, …], -1)``, made for few rows, on the weights as they are.

    Sums are float32 in one order, rounded once: a row's result does not depend on the rows beside it.

    Args:
        weights: each ``[out_features, in_features]`` of one dtype and width, its rows' channels next to one another.
        biases: each ``[out_features]``, contiguous and in the weights' dtype, or None.

    Raises:
        LibraryUnavailableError: there is no compiled library.
        TypeError: a dtype is another than float32, bfloat16 or float16, or than the first weight's.
        ValueError: a weight or a bias has another shape or lies otherwise in memory.
    """
    call, first = functions().pagedkv_linear, weights[0]
    dim, dtype = first.shape[-1], first.dtype
    layers = (LinearLayer * len(weights))()
    for layer, weight, bias in zip(layers, weights, biases, strict=True):
        step_ops.require("weight", weight, first)
        if weight.dim() != 2 or weight.shape[1] != dim or dim == 0:
            raise ValueError(f"weight must be [out_features, {dim or 'at least 1'}], got {[*weight.shape]}")
        if bias is not None:
            step_ops.require("bias", bias, first)
            step_ops.require_shape("bias", bias, weight[:, 0])
        layer.weight, layer.weight_stride, layer.out_features = weight.data_ptr(), weight.stride(0), len(weight)
        layer.bias = None if bias is None else bias.data_ptr()
    features = sum(map(len, weights))
    held, number, width_of_x = (weights, biases), DTYPES[dtype], (dim,)
    count, size, width = c_int64(len(weights)), c_int64(dim), c_int64(features)

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not dtype or x.shape[-1:] != width_of_x or not x.is_cpu:
            step_ops.require("x", x, held[0][0])
            raise ValueError(f"x must be [..., {dim}], got {[*x.shape]}")
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty((*x.shape[:-1], features), dtype=dtype)
        failed = call(
            layers, count, x.data_ptr(), size, out.data_ptr(), width, x.numel() // dim, size,
            number, torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no room for a float32 copy of x, {[*x.shape]}")
        return out

    return run

"""Quantised K and V: int8 or fp8 (e4m3) values with one fp32 scale per slot and KV head.

Takes a token's K or V of one head and gives its values and scale. The scale is the absolute maximum over the head's
channels, so no calibration is needed and a token's bytes depend on that token alone.
"""

from __future__ import annotations

import torch

KV_QUANTS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
"""Names of the quantised KV dtypes."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether pages of ``dtype`` need scales."""
    return dtype in _LARGEST


def quantise(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``values`` in ``dtype`` and their fp32 scales, computed over the last dimension.

    ``scale = max|values| / 127`` (int8) or ``/ 448`` (fp8); ``value / scale`` is rounded to the nearest, ties to even.
    A head of zeros has scale 0. Non-finite input gives a non-finite scale, so that it stays visible when it is read.

    Args:
        values: floating ``[..., head_dim]``.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.

    Returns:
        Values ``[..., head_dim]`` and scales ``[...]``.
    """
    if dtype not in _LARGEST:
        raise ValueError(f"dtype must be one of {[str(known) for known in _LARGEST]}, got {dtype}")
    largest = _LARGEST[dtype]
    exact = values.to(torch.float32)
    scales = exact.abs().amax(-1) / largest
    divisor = torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    # The clamp catches a scale that lost bits because it is subnormal.
    scaled = (exact / divisor).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return ``values * scales`` in ``dtype``: values ``[..., head_dim]``, scales ``[...]``."""
    return values.to(dtype) * scales.to(dtype).unsqueeze(-1)

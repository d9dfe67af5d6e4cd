"""Matrix products that are faster than torch's: what a linear layer, or several with one input, computes.

Takes weights and gives callables; it knows no models. torch hands plain weights to its products, which rearranges them
inside every call; at decode's few rows that costs more than the arithmetic. Few rows go through our own product, which
takes weights as they are. For many rows oneDNN's packed form is made once, as a copy.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from pagedkv.native import bound_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Weights = Sequence[torch.Tensor]
    Biases = Sequence[torch.Tensor | None]
    Product = Callable[[torch.Tensor], Sequence[torch.Tensor]]

LEAST_WORK = 2**19
"""Multiply-adds below which a float32 product stays plain: the packed call takes 20 us before it begins."""

MOST_ROWS = 64
"""Rows up to which our own product is at least as fast as the packed one (figures in ``native/linear.cpp``)."""

# Fewer rows go over plain bfloat16 weights, which are half the bytes to read; from here on, arithmetic decides.
_FEWEST_WIDENED_ROWS = 4
_ROWS_HINT = 16  # what oneDNN lays the packed form out for; it serves every number of rows


@cache
def packing(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which weights of ``dtype`` are packed on this processor, or None where they are not.

    float32 everywhere that torch has oneDNN; a half type in itself where the processor multiplies it; else bfloat16
    is widened to float32, at twice the bytes. Tried once on a small product: the operators are torch's own inner ones.
    """
    ops = torch.ops.mkldnn
    try:
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return None
        if dtype == torch.bfloat16:
            packed = dtype if ops._is_mkldnn_bf16_supported() else torch.float32
        elif dtype == torch.float32 or (dtype == torch.float16 and ops._is_mkldnn_fp16_supported()):
            packed = dtype
        else:
            return None
        x, weight = torch.ones(3, 8, dtype=packed), torch.ones(4, 8, dtype=packed)
        out = ops._linear_pointwise(x, _reorder(weight), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return packed if torch.equal(out, torch.full((3, 4), 8.0, dtype=packed)) else None


def packed_bytes(weights: Sequence[torch.Tensor]) -> int:
    """Return what the packed copy of weights takes, 0 where they are not packed."""
    dtype = packing(weights[0].dtype)
    return 0 if dtype is None else sum(weight.numel() for weight in weights) * dtype.itemsize


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def plain_product(weights: Weights, biases: Biases) -> Product:
    """Return ``x -> [x @ weight.T + bias, …]``, on the weights as they are."""
    pairs = list(zip(weights, biases, strict=True))

    def run(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return [linear(x, weight, bias) for weight, bias in pairs]

    return run


def own_product(weights: Weights, biases: Biases) -> Product:
    """Return what `plain_product` does, as one product made for few rows, on the weights as they are.

    Raises:
        LibraryUnavailableError: there is no compiled library.
        TypeError: the weights' dtype is one that the library does not know.
        ValueError: weights or biases do not lie in memory as it takes them.
    """
    call, sizes = bound_ops.linear(weights, biases), [*map(len, weights)]

    def run(x: torch.Tensor) -> Sequence[torch.Tensor]:
        out = call(x)
        return (out,) if len(sizes) == 1 else out.split_with_sizes(sizes, -1)

    return run


def by_rows(few: Product, many: Product) -> Product:
    """Return a product that is ``few`` up to `MOST_ROWS` rows and ``many`` beyond."""

    def run(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return few(x) if x.numel() <= MOST_ROWS * x.shape[-1] else many(x)

    return run


def packed_product(weights: Weights, biases: Biases) -> Product:
    """Return what `plain_product` does, as one product over a packed copy; ``packing`` must know the dtype.

    Args:
        weights: each ``[out_features, in_features]``, on the CPU, of one dtype and as wide as one another.
        biases: each ``[out_features]``, or None for all.
    """
    dtype = packing(weights[0].dtype)
    assert dtype is not None
    with torch.inference_mode(mode=False), torch.no_grad():
        ours = _reorder(torch.cat([*weights]).to(dtype))
        given = [bias for bias in biases if bias is not None]
        bias = torch.cat(given).to(dtype) if given else None
    sizes = [len(weight) for weight in weights]
    call, plain = torch.ops.mkldnn._linear_pointwise.default, plain_product(weights, biases)
    own = weights[0].dtype
    if dtype != own:
        few = _FEWEST_WIDENED_ROWS * weights[0].shape[1]
    else:
        few = LEAST_WORK // sum(sizes) if dtype == torch.float32 else 0

    def run(x: torch.Tensor) -> Sequence[torch.Tensor]:
        if x.numel() < few:
            return plain(x)
        if dtype == own:
            out = call(x, ours, bias, "none", [], "")
        else:
            out = call(x.float(), ours, bias, "none", [], "").to(own)
        return (out,) if len(sizes) == 1 else out.split_with_sizes(sizes, -1)

    return run

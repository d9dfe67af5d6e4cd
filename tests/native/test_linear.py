"""Our own product for linear layers: as exact as its sums allow, alike for a row alone and among others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.native import bound_ops
from tests.native.test_step_ops import DTYPES, random_rows

ROWS = [1, 2, 3, 4, 5, 7, 13, 16, 70]
# Whole pairs of vectors, one vector more, and ends that are no vector; for every width of vectors.
DIMS = [1, 7, 16, 20, 40, 64, 576]


def layers(dtype: torch.dtype, dim: int, *sizes: int, bias: bool) -> tuple[list[torch.Tensor], list[Any]]:
    """Return weights whose rows lie further apart than they are long, and biases."""
    weights = [random_rows(size, dim, dtype, seed) for seed, size in enumerate(sizes)]
    biases = [random_rows(1, size, dtype, 50 + size)[0].contiguous() if bias else None for size in sizes]
    return weights, biases


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", ROWS)
def test_is_the_float64_product(rows: int, dim: int, dtype: torch.dtype) -> None:
    """Within the error of a float32 sum of ``dim`` products in any order, and one rounding to the dtype."""
    bias = rows % 2 == 0
    weights, biases = layers(dtype, dim, 1, 5, 24, 2, bias=bias)
    x = random_rows(rows, dim, dtype, 9)

    actual = bound_ops.linear(weights, biases)(x)

    weight = torch.cat(weights).double()
    added = torch.cat(biases).double() if bias else torch.zeros(len(weight), dtype=torch.float64)
    exact = x.double() @ weight.T + added
    magnitude = x.double().abs() @ weight.abs().T + added.abs()
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    limit = (dim + 2) * torch.finfo(torch.float32).eps / 2 * magnitude * (1 + rounding) + rounding * exact.abs()
    assert actual.shape == (rows, 32)
    assert actual.dtype == dtype
    assert bool(((actual.double() - exact).abs() <= limit + torch.finfo(dtype).smallest_normal).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [40, 576])
def test_a_row_does_not_see_the_others(dim: int, dtype: torch.dtype) -> None:
    """Bit-equal alone, in any batch, on one thread or more, and beside rows of NaN."""
    weights, biases = layers(dtype, dim, 131, 64, bias=True)
    run, x = bound_ops.linear(weights, biases), random_rows(70, dim, dtype).contiguous()
    threads = torch.get_num_threads()
    together = run(x)
    spoiled = x.clone()
    spoiled[1::2] = torch.nan
    try:
        torch.set_num_threads(1)
        alone = torch.cat([run(x[row : row + 1]) for row in range(len(x))])
        few = torch.cat([run(x[row : row + 9]) for row in range(0, len(x), 9)])
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(together, alone)
    assert torch.equal(together, few)
    assert torch.equal(run(spoiled)[::2], together[::2])
    assert bool(run(spoiled)[1::2].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_reaches_its_own_output_only(dtype: torch.dtype) -> None:
    """An infinite weight, or one between the rows of weights, shows nowhere else."""
    weights, biases = layers(dtype, 20, 7, bias=False)
    clean, x = bound_ops.linear(weights, biases)(random_rows(5, 20, dtype)), random_rows(5, 20, dtype)
    weights[0][3, 19] = torch.inf
    base = weights[0]._base
    assert base is not None
    base[:, 20:] = torch.nan

    spoiled = bound_ops.linear(weights, biases)(x)

    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(spoiled[:, others], clean[:, others])
    assert bool(spoiled[:, 3].isinf().all())


def test_shapes_of_any_rank_and_no_rows() -> None:
    """Leading dimensions stay as they are; no rows give no rows; other strides are copied."""
    weights, biases = layers(torch.float32, 16, 3, bias=False)
    run, x = bound_ops.linear(weights, biases), random_rows(6, 16, torch.float32)

    assert run(x[0]).shape == (3,)
    assert run(x.reshape(1, 2, 3, 16)).shape == (1, 2, 3, 3)
    assert run(x[:0]).shape == (0, 3)
    assert torch.equal(run(x.T.contiguous().T), run(x))


@pytest.mark.parametrize(
    ("weight", "bias", "error", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), None, TypeError, "weight must be float32, bfloat16 or float16"),
        (torch.zeros(3), None, ValueError, r"weight must be \[out_features, 3\], got \[3\]"),
        (torch.zeros(3, 0), None, ValueError, r"weight must be \[out_features, at least 1\], got \[3, 0\]"),
        (torch.zeros(4, 3).T, None, ValueError, "weight must have its channels next to one another"),
        (torch.zeros(3, 4), torch.zeros(4), ValueError, r"bias must be \[3\], got \[4\]"),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.float16), TypeError, "bias must be torch.float32"),
    ],
)
def test_bad_weights(weight: torch.Tensor, bias: torch.Tensor | None, error: type[Exception], message: str) -> None:
    """Weights of another dtype, shape or layout are refused before they are called."""
    with pytest.raises(error, match=message):
        bound_ops.linear([weight], [bias])


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(2, 5), ValueError, r"x must be \[..., 4\], got \[2, 5\]"),
        (torch.zeros(2, 4, dtype=torch.float16), TypeError, "x must be torch.float32, got torch.float16"),
        (torch.zeros(2, 4, device="meta"), ValueError, "x must be on the CPU"),
        (torch.tensor(1.0), ValueError, "x must have its channels"),
    ],
)
def test_bad_inputs(x: torch.Tensor, error: type[Exception], message: str) -> None:
    """Inputs of another width, dtype or device are refused by name."""
    with pytest.raises(error, match=message):
        bound_ops.linear([torch.zeros(3, 4)], [None])(x)

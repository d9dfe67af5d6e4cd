"""The operations between matrix products: as exact as their rounding allows, on any rows, and never on wrong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.native import step_ops

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS_AND_DIMS = [(1, 576), (3, 64), (5, 20), (2, 7), (40, 576), (0, 32)]


def random_rows(rows: int, dim: int, dtype: torch.dtype, seed: int = 0, factor: float = 1.0) -> torch.Tensor:
    """Return rows that lie further apart than they are long, so that a wrong stride shows."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, dim + 3, generator=generator) * factor).to(dtype)[:, :dim]


def assert_near(
    actual: torch.Tensor, exact: torch.Tensor, roundings: float | torch.Tensor, floor: float | torch.Tensor = 0.0
) -> None:
    """Assert that ``actual`` is within so many roundings of its dtype, plus ``floor``, from the float64 ``exact``."""
    info = torch.finfo(actual.dtype)
    limit = roundings * info.eps / 2 * exact.abs() + info.smallest_normal + floor

    assert actual.shape == exact.shape
    assert bool(((actual.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), ROWS_AND_DIMS)
def test_rms_norm(rows: int, dim: int, dtype: torch.dtype) -> None:
    """Two roundings of the dtype, and in fp32 those of the mean's sum, from the float64 formula."""
    x, weight = random_rows(rows, dim, dtype), random_rows(1, dim, dtype, 1)[0].contiguous()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    extra = 6 if dtype == torch.float32 else 0.1

    assert_near(step_ops.rms_norm(x, weight, 1e-5), exact, 2.1 + extra)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), ROWS_AND_DIMS)
def test_add_rms_norm(rows: int, dim: int, dtype: torch.dtype) -> None:
    """The sum is torch's bit for bit, and the norm is `rms_norm`'s of it."""
    x, residual = random_rows(rows, dim, dtype), random_rows(rows, dim, dtype, 2)
    weight = random_rows(1, dim, dtype, 1)[0].contiguous()
    before = x.clone(), residual.clone()
    normed, total = step_ops.add_rms_norm(x, residual, weight, 1e-5)

    assert torch.equal(total, x + residual)
    assert torch.equal(normed, step_ops.rms_norm(total, weight, 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return ``(-upper half, lower half)``, as the models' code does."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "head_dim", "rotary_dim"), [(1, 64, 64), (7, 80, 80), (300, 64, 16), (4, 12, 6)])
def test_rotary(tokens: int, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    """Bit-equal to the models' code, partial rotation and slices of one larger product included; nothing else moves."""
    product = random_rows(tokens, 6 * head_dim, dtype).contiguous()
    q = product[:, : 3 * head_dim].view(tokens, 3, head_dim)
    k = product[:, 3 * head_dim : 5 * head_dim].view(tokens, 2, head_dim)
    angles = torch.outer(torch.arange(tokens) + 100.0, torch.logspace(0, -4, rotary_dim // 2)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = product.clone()
    for heads in (
        expected[:, : 3 * head_dim].view(tokens, 3, -1),
        expected[:, 3 * head_dim : -head_dim].view(tokens, 2, -1),
    ):
        part = heads[..., :rotary_dim]
        heads[..., :rotary_dim] = part * cos[:, None] + rotate_half(part) * sin[:, None]
    step_ops.rotary_(q, k, cos, sin)

    assert torch.equal(product, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), ROWS_AND_DIMS)
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gates(name: str, rows: int, dim: int, dtype: torch.dtype) -> None:
    """Activation and product are each rounded once; fp32 also loses what the exponential's argument loses."""
    both = random_rows(rows, 2 * dim, dtype, factor=4.0)
    gate, up = both[:, :dim], both[:, dim:]
    wide = gate.double()
    if name == "silu":
        active, actual = wide * wide.sigmoid(), step_ops.silu_mul(gate, up)
    else:
        # x / 2 * (1 + tanh(t)) = x * sigmoid(2 t), without the cancellation that float64 has too.
        twice = 2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
        active, actual = wide * twice.sigmoid(), step_ops.gelu_tanh_mul(gate, up)
    # An error of the exponent e is one of the power by the same fraction, and the exponent of gelu grows like x cubed.
    exponent = wide.abs() if name == "silu" else 1.6 * wide.abs() + 0.072 * wide.abs() ** 3
    fp32 = torch.finfo(torch.float32).eps / 2
    power = (8 + 4 * exponent) * fp32 / (torch.finfo(dtype).eps / 2)

    # The power goes up to 2^126 only: what should be smaller still is that small a part of x.
    assert_near(actual, active * up.double(), 2.1 + power, (wide * up.double()).abs() * 2.0**-125)


def test_gates_at_the_ends() -> None:
    """Far from zero the gates are 0 and x, without overflow; NaN stays NaN."""
    gate = torch.tensor([[-1e30, -200.0, 200.0, 1e30, float("nan"), 0.0]])
    for gated in (step_ops.silu_mul, step_ops.gelu_tanh_mul):
        out = gated(gate, torch.ones_like(gate))[0]

        assert out[:2].abs().max() < 1e-6
        assert out[2] == 200
        assert out[4].isnan()
        assert out[5] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 64, 4099, 49152])
def test_argmax(dim: int, dtype: torch.dtype) -> None:
    """Torch's answer on every row: the first of equal elements, the first NaN before every number."""
    x = random_rows(6, dim, dtype)
    x[1] = -torch.inf
    x[2] = 3.0
    x[3, dim // 2 :] = torch.nan
    x[4, -1] = 100.0
    x[5, dim // 3 :] = x[5].max()

    assert torch.equal(step_ops.argmax(x), x.float().argmax(-1))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(threads: int) -> None:
    """Large inputs are cut over torch's threads; the result is that of one thread."""
    before = torch.get_num_threads()
    x, weight = random_rows(600, 576, torch.bfloat16), torch.ones(576, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    expected = step_ops.rms_norm(x, weight, 1e-6), step_ops.silu_mul(x, x), step_ops.argmax(x)
    torch.set_num_threads(threads)
    try:
        actual = step_ops.rms_norm(x, weight, 1e-6), step_ops.silu_mul(x, x), step_ops.argmax(x)
    finally:
        torch.set_num_threads(before)

    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


X = torch.zeros(4, 8)
HEADS = torch.zeros(4, 2, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: step_ops.rms_norm([1.0], X[0], 0.1), TypeError, "x must be a tensor, got list"),  # type: ignore[arg-type]
        (lambda: step_ops.rms_norm(X.double(), X[0], 0.1), TypeError, "x must be float32, .*got torch.float64"),
        (lambda: step_ops.rms_norm(X.to("meta"), X[0], 0.1), ValueError, "x must be on the CPU, got meta"),
        (lambda: step_ops.rms_norm(X.T, X[0, :4], 0.1), ValueError, "x must have its channels next to one another"),
        (lambda: step_ops.rms_norm(X, X[0, :7], 0.1), ValueError, r"weight must be \[8\], got \[7\]"),
        (lambda: step_ops.rms_norm(X, X[0].half(), 0.1), TypeError, "weight must be torch.float32, got torch.float16"),
        (lambda: step_ops.add_rms_norm(X, X[:3], X[0], 0.1), ValueError, r"residual must be \[4, 8\], got \[3, 8\]"),
        (lambda: step_ops.silu_mul(X, X[:, :7]), ValueError, r"up must be \[4, 8\], got \[4, 7\]"),
        (lambda: step_ops.silu_mul(torch.zeros(2, 3, 16)[..., :8], X), ValueError, "gate must have rows at even dist"),
        (lambda: step_ops.argmax(HEADS), ValueError, r"x must be \[rows, dim\] with dim at least 1, got \[4, 2, 8\]"),
        (lambda: step_ops.argmax(X[:, :0]), ValueError, "x must be .* dim at least 1"),
        (lambda: step_ops.rotary_(HEADS, HEADS[:3], X, X), ValueError, r"k must be \[4, heads, head_dim\]"),
        (lambda: step_ops.rotary_(HEADS, HEADS, X[:, :3], X[:, :3]), ValueError, "cos must have an even rotary_dim"),
        (lambda: step_ops.rotary_(HEADS[..., :4], HEADS, X, X), ValueError, "up to q's 4, got 8"),
        (lambda: step_ops.rotary_(HEADS, HEADS, X, X[:3]), ValueError, r"sin must be \[4, 8\]"),
        (lambda: step_ops.rotary_(HEADS, HEADS, X.half(), X), TypeError, "cos must be torch.float32"),
        (
            lambda: step_ops.rotary_(HEADS[:, :1].expand(4, 2, 8), HEADS, X, X),
            ValueError,
            "q must have memory of its own",
        ),
    ],
)
def test_refuses(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    """Each wrong argument, by name, before anything is written."""
    with pytest.raises(error, match=message):
        call()

    assert HEADS.count_nonzero() == 0

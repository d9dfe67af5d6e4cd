"""Every feature on every kind of row and shape, against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv.attention import LayerSpec
from tests.attention.cases import Shape, assert_within_limit, error_limit, make_case

MIXED = [(1, 33), (5, 5), (0, 7), (1, 0), (3, 40), (1, 1), (2, 100), (70, 90), (1, 130), (0, 0), (3, 0), (1, 32)]
SHORT = [(1, 21), (4, 4), (3, 18), (1, 0), (1, 9)]

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "window 1": {"window": 1},
    "sink tokens": {"window": 7, "num_sink_tokens": 5},
    "more sink tokens than tokens": {"window": 3, "num_sink_tokens": 500},
    "softcap": {"softcap": 0.7},
    "sink logits": {"sink_logits": True},
    "alibi": {"alibi_slopes": True},
    "everything": {
        "window": 20, "num_sink_tokens": 3, "softcap": 2.0, "sink_logits": True, "alibi_slopes": True,
    },
}  # fmt: skip

SHAPES = {
    "mixed fp32": Shape(MIXED),
    "mixed bf16": Shape(MIXED, dtype=torch.bfloat16),
    "fp16, odd head dims, page 1": Shape(SHORT, dims=(80, 80), page_size=1, dtype=torch.float16),
    "V narrower than K": Shape(SHORT, dims=(192, 128), page_size=8),
    "V wider than K": Shape(SHORT, dims=(32, 96), page_size=8, dtype=torch.bfloat16),
    "MQA": Shape(SHORT, heads=(7, 1), page_size=4),
    "MHA": Shape(SHORT, heads=(4, 4), dims=(112, 112), page_size=32),
    "group 17": Shape(SHORT, heads=(34, 2), dims=(96, 96), page_size=256),
    "tiny heads": Shape(SHORT, heads=(3, 1), dims=(8, 8), page_size=3),
    "int64 tables": Shape(SHORT, heads=(9, 3), table_dtype=torch.int64),
    "int8": Shape(MIXED, kv_dtype=torch.int8),
    "int8, bf16": Shape(SHORT, kv_dtype=torch.int8, dtype=torch.bfloat16, dims=(128, 128)),
    "fp8": Shape(SHORT, kv_dtype=torch.float8_e4m3fn, dtype=torch.float16, dims=(64, 32)),
}


def spec_for(feature: str, num_q_heads: int, scale: float = 0.125) -> LayerSpec:
    """Return the layer that has ``feature``, with per-head values drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(5)
    options: dict[str, Any] = {
        name: torch.rand(num_q_heads, generator=generator) if value is True else value
        for name, value in FEATURES[feature].items()
    }
    return LayerSpec(scale, **options)


def _check(shape: Shape, feature: str, seed: int = 0) -> None:
    """Compare every fast backend with the reference, which is computed once."""
    case = make_case(shape, seed)
    spec = spec_for(feature, shape.heads[0])
    results = [case.run(spec, backend) for backend in ("cpu", "torch")]

    assert {out.dtype for out in results} == {case.q.dtype}
    assert_within_limit(case, spec, *results)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_on_a_mixed_batch(feature: str) -> None:
    """Prefill, chunks, decode, empty and unseeing rows in one call: each feature is as exact as fp32 allows."""
    _check(SHAPES["mixed fp32"], feature)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_with_everything_and_with_nothing(shape: str) -> None:
    """Head counts, head dims, page sizes and dtypes: exact with no feature and with all at once."""
    _check(SHAPES[shape], "plain")
    _check(SHAPES[shape], "everything")


@pytest.mark.parametrize("shape", ["mixed bf16", "int8, bf16"])
def test_reference_backend_rounds_once(shape: str) -> None:
    """The reference as a backend computes in float64 and rounds to the output's dtype, nothing else."""
    case = make_case(SHAPES[shape])
    spec = spec_for("everything", case.shape.heads[0])

    assert torch.equal(case.run(spec, "reference"), case.reference(spec).to(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_full_matrix(shape: str, feature: str) -> None:
    """Every feature on every shape, with other data."""
    _check(SHAPES[shape], feature, seed=1)


@pytest.mark.parametrize("rows", [[(300, 300)], [(300, 500)], [(1, 1500)], [(270, 270), (1, 900)]])
@pytest.mark.parametrize("feature", ["plain", "sink tokens", "everything"])
def test_rows_longer_than_a_tile(rows: list[tuple[int, int]], feature: str) -> None:
    """Sequences of several query tiles, and decode lengths with coarser padding, lose nothing at the seams."""
    _check(Shape(rows, heads=(2, 1), dims=(16, 16)), feature)


_row = st.integers(0, 40).flatmap(lambda q: st.tuples(st.just(q), st.one_of(st.just(0), st.integers(q, q + 60))))


@given(
    rows=st.lists(_row, min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (5, 5)]),
    dims=st.sampled_from([(16, 16), (24, 16), (8, 40)]),
    page_size=st.integers(1, 20),
    feature=st.sampled_from(sorted(FEATURES)),
    kv_dtype=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_any_ragged_batch(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    feature: str,
    kv_dtype: torch.dtype | None,
    seed: int,
) -> None:
    """Whatever the rows, the pages and the layer, the answer is the reference's."""
    _check(Shape(rows, heads, dims, page_size, kv_dtype=kv_dtype), feature, seed=seed)


def test_the_limit_notices_one_key_too_many() -> None:
    """The error limit can fail: a window off by one is far outside it."""
    case = make_case(SHAPES["mixed bf16"])
    wrong = case.run(LayerSpec(0.125, window=10)).double()
    spec = LayerSpec(0.125, window=9)

    assert ((wrong - case.reference(spec)).abs() > 10 * error_limit(case, spec)).any()

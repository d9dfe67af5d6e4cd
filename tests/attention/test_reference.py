"""The specification itself, against formulas written down another way."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.attention import LayerSpec
from pagedkv.attention.reference import visible_positions
from tests.attention.cases import Shape, make_case


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 37), (9, 9), (5, 37)])
def test_reference_equals_sdpa_on_contiguous_kv(q_len: int, kv_len: int) -> None:
    """A sequence through shuffled pages gives what SDPA gives on its K and V laid out plainly, heads repeated."""
    case = make_case(Shape([(q_len, kv_len)], heads=(6, 2), page_size=4, dtype=torch.float64))
    k, v = (side.repeat_interleave(3, dim=1).transpose(0, 1) for side in case.stored[0])
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)

    expected = scaled_dot_product_attention(case.q.transpose(0, 1), k, v, attn_mask=mask, scale=0.3).transpose(0, 1)

    torch.testing.assert_close(case.reference(LayerSpec(0.3)), expected, rtol=1e-12, atol=1e-12)


def test_reference_features_follow_the_formula() -> None:
    """Softcap, ALiBi, window, sink tokens and sink logits together equal the formula, term by term."""
    spec = LayerSpec(
        0.5, window=3, num_sink_tokens=2, softcap=1.5,
        sink_logits=torch.tensor([0.3, -1.0]), alibi_slopes=torch.tensor([0.25, 0.5]),
    )  # fmt: skip
    case = make_case(Shape([(1, 9)], heads=(2, 1), dims=(8, 8), page_size=2, dtype=torch.float64))
    k, v = case.stored[0]
    expected = torch.zeros(2, 8, dtype=torch.float64)
    for head, (sink, slope) in enumerate([(0.3, 0.25), (-1.0, 0.5)]):
        denominator = math.exp(torch.tensor(sink).item())
        for t in (0, 1, 6, 7, 8):
            score = 1.5 * math.tanh(float(case.q[0, head] @ k[t, 0]) * 0.5 / 1.5) + slope * (t - 8)
            denominator += math.exp(score)
            expected[head] += math.exp(score) * v[t, 0]
        expected[head] /= denominator

    torch.testing.assert_close(case.reference(spec)[0], expected, rtol=1e-7, atol=1e-7)


def test_visible_positions_are_the_window_and_the_sink_tokens() -> None:
    """A window counts the token itself; sink tokens come on top and never repeat; a negative position sees nothing."""
    assert visible_positions(9, LayerSpec(1.0, window=4)).tolist() == [6, 7, 8, 9]
    assert visible_positions(9, LayerSpec(1.0, window=4, num_sink_tokens=2)).tolist() == [0, 1, 6, 7, 8, 9]
    assert visible_positions(2, LayerSpec(1.0, window=4, num_sink_tokens=8)).tolist() == [0, 1, 2]
    assert visible_positions(2, LayerSpec(1.0)).tolist() == [0, 1, 2]
    assert visible_positions(-1, LayerSpec(1.0)).tolist() == []


def test_reference_computes_in_the_dtype_asked() -> None:
    """The reference's own rounding can be measured: coarser arithmetic is further away, and says so in its dtype."""
    case = make_case(Shape([(1, 50), (4, 20)], dtype=torch.bfloat16))
    spec = LayerSpec(0.125)
    exact = case.reference(spec)
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        result = case.reference(spec, dtype)

        assert result.dtype == dtype
        errors[dtype] = float((result.double() - exact).abs().max())

    assert 0 < errors[torch.float32] < errors[torch.bfloat16]

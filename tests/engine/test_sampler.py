"""Tokens from logits: greedy semantics, filter order, edge values, and the distribution itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine import SamplingParams, sampler
from pagedkv.engine.philox import uniforms
from pagedkv.engine.sampler import SampleRow

if TYPE_CHECKING:
    from collections.abc import Sequence

GREEDY = SamplingParams()


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """Return a token for each row."""
    rows = [SampleRow(*row) for row in zip(params, seeds, positions, strict=True)]
    return sampler.sample(logits, rows)


def draws(logits: Sequence[float], params: SamplingParams, count: int) -> list[int]:
    """Return one token for each of ``count`` positions of one seed."""
    rows = torch.tensor([list(logits)]).expand(count, -1)
    return sample(rows, [params] * count, [11] * count, list(range(count)))


def exact(logits: Sequence[float], temperature: float, top_p: float) -> list[float]:
    """Return the distribution by enumeration, in plain Python."""
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    total = sum(weights)
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept: set[int] = set()
    before = 0.0
    for token in order:
        if not kept or before < top_p * total:
            kept.add(token)
        before += weights[token]
    mass = sum(weights[token] for token in kept)
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(logits))]


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**63)), min_size=1, max_size=8),
)
@settings(max_examples=60)
def test_uniforms_are_numpys_philox(rows: list[tuple[int, int]]) -> None:
    """The vectorised generator is NumPy's Philox at key = seed and counter = position, bit for bit."""
    seeds, positions = zip(*rows, strict=True)
    expected = [
        np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
        for seed, position in zip(seeds, positions, strict=True)
    ]

    assert uniforms(seeds, positions).tolist() == expected


def test_uniforms_fill_the_unit_interval() -> None:
    """Neighbouring positions and neighbouring seeds give independent-looking numbers: all ten bins are equally full."""
    by_position = np.histogram(uniforms([5] * 10_000, range(10_000)), bins=10, range=(0, 1))[0]
    by_seed = np.histogram(uniforms(range(10_000), [3] * 10_000), bins=10, range=(0, 1))[0]

    assert all(abs(count - 1000) < 150 for count in [*by_position, *by_seed])  # 5 standard deviations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_greedy_takes_the_lowest_id_of_a_tie(dtype: torch.dtype, top_p: float) -> None:
    """Temperature 0 is an argmax, alone and among sampled rows, 1,000 of 1,000 times (FreeToken#471, vllm#5404)."""
    greedy = SamplingParams(temperature=0.0, top_p=top_p)
    sampled = SamplingParams(temperature=1.0, top_p=top_p)
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0]], dtype=dtype).expand(1000, -1)
    mixed = [greedy if row % 2 == 0 else sampled for row in range(1000)]
    alone = sample(logits, [greedy] * 1000, [1] * 1000, list(range(1000)))
    beside = sample(logits, mixed, [1] * 1000, list(range(1000)))

    assert set(alone) == {1}
    assert set(beside[::2]) == {1}
    assert len(set(beside[1::2])) > 1


@pytest.mark.parametrize("width", [1, 7, 64, 1000, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_ties_on_wide_rows(width: int, dtype: torch.dtype) -> None:
    """Vectorised kernels split wide rows; the lowest id must win all the same."""
    first = width // 3
    logits = torch.full((3, width), -2.0, dtype=dtype)
    logits[:, first:] = 1.0

    assert sample(logits, [GREEDY] * 3, [0] * 3, [0] * 3) == [first] * 3


def test_temperature_comes_before_top_p() -> None:
    """Logits [4, 3, 1] at T = 0.5, top_p = 0.75 keep {0}; the other order would keep {0, 1} (sglang-jax#1563)."""
    assert set(draws([4.0, 3.0, 1.0], SamplingParams(temperature=0.5, top_p=0.75), 10_000)) == {0}
    assert set(draws([4.0, 3.0, 1.0], SamplingParams(temperature=1.0, top_p=0.75), 10_000)) == {0, 1}


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (1.6, 0.5), (0.2, 1.0), (1.0, 0.35), (3.0, 0.999)]
)
def test_the_distribution_is_the_enumerated_one(temperature: float, top_p: float) -> None:
    """10,000 draws match the exact distribution: what is filtered never comes, the rest within 5 deviations."""
    logits = [1.0, 2.0, -3.0, 1.0, 0.0, 2.5, -math.inf, 2.5]
    expected = exact(logits, temperature, top_p)
    tokens = draws(logits, SamplingParams(temperature=temperature, top_p=top_p), 10_000)
    for token, probability in enumerate(expected):
        deviation = math.sqrt(10_000 * probability * (1 - probability))

        assert abs(tokens.count(token) - 10_000 * probability) <= 5 * deviation


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_top_p_towards_zero_is_greedy(top_p: float) -> None:
    """The top token is always kept, and alone: the lowest id of a tie (sendnn-inference#542, vllm-metal#646)."""
    assert set(draws([0.0, 3.0, 3.0, 1.0], SamplingParams(temperature=1.0, top_p=top_p), 1000)) == {1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6, 1.0, 1e6, 1e300])
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_values_neither_crash_nor_draw_the_impossible(
    temperature: float, top_p: float, dtype: torch.dtype
) -> None:
    """Logits up to 1e4 with -inf among them, at any temperature: always a token with a finite logit (vllm#1623)."""
    logits = torch.tensor([[-1e4, 1e4, -math.inf, 9.9e3, 0.0], [-math.inf, -math.inf, -1e4, -math.inf, -math.inf]])
    params = [SamplingParams(temperature=temperature, top_p=top_p)] * 2
    for position in range(50):
        first, second = sample(logits.to(dtype), params, [3, 4], [position, position])

        assert first in {0, 1, 3, 4}
        assert second == 2
        assert temperature > 1 or first == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)])
def test_rows_that_are_no_distribution_are_refused(bad: float, params: SamplingParams) -> None:
    """NaN and +inf raise with the row's number instead of giving some token."""
    with pytest.raises(ValueError, match="logits of row 1"):
        sample(torch.tensor([[0.0, 1.0], [0.0, bad]]), [params] * 2, [0, 0], [0, 0])
    with pytest.raises(ValueError, match="logits of row 0"):
        sample(torch.full((1, 3), -math.inf), [params], [0], [0])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            st.sampled_from([0.2, 0.9, 1.0]),
            st.integers(0, 2**64 - 1),
            st.integers(0, 4000),
        ),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=60)
def test_a_row_does_not_depend_on_its_neighbours(rows: list[tuple[float, float, int, int]]) -> None:
    """A mixed batch gives each row the token that it gets alone: a draw depends on (seed, position) and the logits."""
    logits = torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(len(rows)))
    params = [SamplingParams(temperature=temperature, top_p=top_p) for temperature, top_p, _, _ in rows]
    seeds, positions = [row[2] for row in rows], [row[3] for row in rows]
    together = sample(logits, params, seeds, positions)
    alone = [
        sample(logits[row : row + 1], [params[row]], [seeds[row]], [positions[row]])[0] for row in range(len(rows))
    ]

    assert together == alone


def test_sampling_leaves_the_logits_alone() -> None:
    """The logits tensor, also one that requires grad, is not mutated."""
    logits = torch.randn(4, 9, requires_grad=True)
    before = logits.detach().clone()
    sample(logits, [SamplingParams(temperature=0.5, top_p=0.5), GREEDY] * 2, [1] * 4, [2] * 4)

    assert torch.equal(logits.detach(), before)


def test_the_draw_follows_the_order_of_ids() -> None:
    """The documented inverse CDF: the first id at which the summed probabilities exceed the position's uniform."""
    logits = [0.3, -1.0, 2.0, 0.7, 1.1]
    probabilities = exact(logits, 1.0, 1.0)
    for position, u in enumerate(uniforms([11] * 200, range(200)).tolist()):
        expected = next(t for t in range(5) if math.fsum(probabilities[: t + 1]) > u)

        assert draws(logits, SamplingParams(temperature=1.0), position + 1)[position] == expected

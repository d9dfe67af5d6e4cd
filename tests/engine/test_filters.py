"""The whole order of bias, penalties, temperature and filters, against an enumeration in plain Python."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine import SamplingParams
from pagedkv.engine.philox import uniforms
from pagedkv.engine.ranks import falling, largest, largest_ids
from pagedkv.engine.sampler import SampleRow, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 9
PROMPT, ANSWER = [1, 2, 2, 5], [2, 7, 7, 7]


def adjusted(logits: Sequence[float], params: SamplingParams, banned: Sequence[int]) -> list[float]:
    """Return the logits after bias, repetition, presence and frequency, and bans, in the documented order."""
    scores = list(logits)
    for token, bias in dict(params.logit_bias).items():
        scores[token] += bias
    for token in {*PROMPT, *ANSWER}:
        theta = params.repetition_penalty
        scores[token] = scores[token] / theta if scores[token] > 0 else scores[token] * theta
    for token in set(ANSWER):
        scores[token] -= params.presence_penalty + ANSWER.count(token) * params.frequency_penalty
    for token in banned:
        scores[token] = -math.inf
    return scores


def exact(scores: Sequence[float], params: SamplingParams) -> list[float]:
    """Return the distribution: temperature, top-k, top-p, min-p, each over what the one before has left."""
    top = max(scores)
    weights = [math.exp((score - top) / params.temperature) for score in scores]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[: params.top_k or None]
    total = math.fsum(weights[token] for token in order)
    kept: list[int] = []
    before = 0.0
    for token in order:
        if not kept or params.top_p == 1 or before < params.top_p * total:
            kept.append(token)
        before += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p]
    mass = math.fsum(weights[token] for token in kept)
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(weights))]


def row(params: SamplingParams, seed: int = 3, position: int = len(PROMPT + ANSWER), **more: Any) -> SampleRow:
    """Return a row whose text is `PROMPT` and `ANSWER`, and whatever else to its position."""
    text = (PROMPT + ANSWER + [0] * position)[:position] if position > 8 else PROMPT + ANSWER
    return SampleRow(params, seed, position, text, len(PROMPT), **more)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, -1, 1, 2, 4, VOCAB, 10**7]),
    top_p=st.sampled_from([0.0, 0.4, 0.8, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
)
LOGITS = st.lists(st.sampled_from([-3.0, -1.5, 0.0, 0.25, 1.0, 1.0, 2.0, 4.0]), min_size=VOCAB, max_size=VOCAB)
ROWS = st.lists(st.tuples(LOGITS, PARAMS, st.sets(st.integers(0, 3), max_size=2)), min_size=1, max_size=4)


@given(ROWS, st.integers(0, 2**64 - 1))
@settings(max_examples=40)
def test_each_draw_is_the_enumerated_distributions_at_its_uniform(rows: list[Any], seed: int) -> None:
    """Any mix of params in one batch: each row's token is its own distribution inverted at its own uniform number."""
    tokens = sample(torch.tensor([logits for logits, _, _ in rows]), [row(p, seed, banned=ban) for _, p, ban in rows])
    u = uniforms([seed], [8]).tolist()[0]
    for token, (logits, params, banned) in zip(tokens, rows, strict=True):
        chances = exact(adjusted(logits, params, sorted(banned)), params)
        below, above = math.fsum(chances[:token]), math.fsum(chances[: token + 1])

        assert chances[token] > 0
        assert below - 1e-9 <= u <= above + 1e-9


@given(ROWS)
@settings(max_examples=30)
def test_a_row_does_not_depend_on_its_neighbours(rows: list[Any]) -> None:
    """Greedy and sampled rows with any params: the token in the batch is the token alone."""
    greedy = SamplingParams(repetition_penalty=1.5, logit_bias={3: 1.0})
    mixed = [(logits, params if index % 2 else greedy, ban) for index, (logits, params, ban) in enumerate(rows)]
    logits = torch.tensor([logits for logits, _, _ in mixed])
    samples = [row(params, index, banned=ban) for index, (_, params, ban) in enumerate(mixed)]

    assert sample(logits, samples) == [sample(logits[i : i + 1], samples[i : i + 1])[0] for i in range(len(rows))]


@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 3, "top_p": 0.7},
        {"top_k": 4, "min_p": 0.2},
        {"repetition_penalty": 1.4, "temperature": 0.8},
        {"presence_penalty": 1.0, "frequency_penalty": 0.3, "logit_bias": {0: 1.5}},
    ],
)
def test_the_distribution_by_draws(given: dict[str, Any]) -> None:
    """10,000 draws match the enumeration: what is filtered never comes, the rest within 5 deviations."""
    logits = [1.0, 2.0, -3.0, 1.0, 0.0, 2.5, -math.inf, 2.5, 0.5]
    params = SamplingParams(**{"temperature": 1.0, **given})
    expected = exact(adjusted(logits, params, ()), params)
    rows = [row(params, seed) for seed in range(10_000)]
    tokens = sample(torch.tensor([logits]).expand(10_000, -1), rows)
    for token, chance in enumerate(expected):
        assert abs(tokens.count(token) - 10_000 * chance) <= 5 * math.sqrt(10_000 * chance * (1 - chance))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0, "top_k": 1}])
def test_one_token_left_is_greedy(dtype: torch.dtype, given: dict[str, Any]) -> None:
    """top_k = 1 is temperature 0 on ties too: the lowest id, alone and beside sampled rows (FreeToken#471)."""
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0]], dtype=dtype).expand(200, -1)
    one, free = SamplingParams(temperature=1.0, **given), SamplingParams(temperature=1.0)
    rows = [SampleRow(free if seed % 2 else one, seed, seed) for seed in range(200)]

    assert set(sample(logits, rows)[::2]) == {1}


def test_edge_values_in_one_batch() -> None:
    """Off, one, all and far too many in one batch, at extreme temperatures and logits (sendnn-inference#542)."""
    logits = torch.tensor([1e4, -1e4, -math.inf, 0.0, 9.9e3, -math.inf, 1e4])
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (1e-6, 1.0, 1e6)
        for k in (0, -1, 1, 7, 10**7)
        for p in (0, 1e-9, 1)
        for m in (0, 1)
    ]
    tokens = sample(logits.expand(len(params), -1), [SampleRow(p, seed, 0) for seed, p in enumerate(params)])

    assert not {2, 5} & set(tokens)
    for token, p in zip(tokens, params, strict=True):
        assert token in (
            {0} if p.top_k == 1 or p.top_p < 1 else {0, 6} if p.min_p == 1 or p.temperature < 10 else {0, 1, 3, 4, 6}
        )


def test_order_of_temperature_and_top_p_with_top_k() -> None:
    """Temperature comes before top-p, and top-p goes by what top-k has left (sglang-jax#1563)."""

    def drawn(logits: list[float], **given: Any) -> set[int]:
        params = SamplingParams(**given)
        return set(sample(torch.tensor([logits]).expand(2000, -1), [SampleRow(params, s, 0) for s in range(2000)]))

    assert drawn([4.0, 3.0, 1.0], temperature=0.5, top_p=0.75) == {0}
    # Over all three top-p = 0.6 needs {0, 1}; over the best two, 0 alone is 0.62.
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    assert drawn(logits, temperature=1.0, top_p=0.6) == {0, 1}
    assert drawn(logits, temperature=1.0, top_p=0.6, top_k=2) == {0}


def test_penalties_and_bans_are_greedys_too() -> None:
    """Temperature 0 goes by the adjusted logits; a ban moves the answer to the next best."""
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.5, 0.0, 0.0, 0.0, 2.9, 0.0]])

    assert sample(logits, [row(SamplingParams())]) == [2]
    assert sample(logits, [row(SamplingParams(repetition_penalty=1.3))]) == [3]  # 2 and 7 are in the text
    assert sample(logits, [row(SamplingParams(frequency_penalty=0.2))]) == [2]  # 3 - 0.2 against 2.9 - 0.6
    assert sample(logits, [row(SamplingParams(logit_bias={8: 100}))]) == [8]
    assert sample(logits, [row(SamplingParams(), banned={2, 7})]) == [3]


def test_logits_with_nan_are_refused_with_penalties_too() -> None:
    """No bias, penalty or ban hides a NaN."""
    logits = torch.tensor([[0.0, 1.0, math.nan]])
    for params in (SamplingParams(logit_bias={2: -100}), SamplingParams(temperature=1.0, repetition_penalty=2.0)):
        with pytest.raises(ValueError, match="logits of row 0 must have a finite maximum and no NaN"):
            sample(logits, [SampleRow(params, 0, 3, [2, 2, 2], 1, {2})])


@given(st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 6))
def test_the_largest_by_value_then_id(rows: list[list[int]], count: int) -> None:
    """The mask and the ids of the largest are those of a stable sort, ties and all."""
    values = torch.tensor(rows, dtype=torch.float64)
    expected = [sorted(range(6), key=lambda token: (-line[token], token))[:count] for line in rows]
    counts = torch.full((len(rows), 1), count)
    mask = largest(values, counts, falling(values).gather(-1, counts - 1))

    assert largest_ids(values, count).tolist() == expected
    assert [line.nonzero()[:, 0].tolist() for line in mask] == [sorted(ids) for ids in expected]

"""The one rule by which two greedy runs are called equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine.equality import TIE_GAP, TokenComparison, all_token_equal, compare_tokens, too_many_ties

if TYPE_CHECKING:
    from collections.abc import Sequence


def never(index: int) -> torch.Tensor:
    """Logits nobody should ask for."""
    raise AssertionError(f"asked for the logits of token {index}")


def logits(*pairs: tuple[int, float]) -> torch.Tensor:
    """Logits over ten tokens that are 0 but for the given ones."""
    row = torch.zeros(10)
    for token, value in pairs:
        row[token] = value
    return row


@given(st.lists(st.integers(0, 9)))
def test_identical_lists_are_equal(tokens: list[int]) -> None:
    """Identical lists are equal over their whole length, and the reference is not asked."""
    assert TokenComparison(len(tokens)) == compare_tokens(tokens, list(tokens), never)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_first_difference_is_found(reference: list[int], data: st.DataObject) -> None:
    """The reported index is the first at which the lists part, whatever follows it."""
    index = data.draw(st.integers(0, len(reference) - 1))
    rest = data.draw(
        st.lists(st.integers(0, 9), min_size=len(reference) - index - 1, max_size=len(reference) - index - 1)
    )
    tokens = [*reference[:index], (reference[index] + 1) % 10, *rest]
    asked = []

    def logits_at(position: int) -> torch.Tensor:
        asked.append(position)
        return logits((reference[position], 5.0))

    comparison = compare_tokens(tokens, reference, logits_at)
    assert (index, index + 1, False) == (comparison.first_difference, comparison.num_tokens, comparison.equal)
    assert [index] == asked


@pytest.mark.parametrize(
    ("tokens", "row", "tie"),
    [
        ([1, 3, 9], logits((2, 4.0), (3, 4.0 - TIE_GAP / 2)), True),
        ([1, 3, 9], logits((3, 4.0), (2, 4.0 - TIE_GAP / 2)), True),
        ([1, 3, 9], logits((2, 4.0), (3, 4.0 - TIE_GAP * 2)), False),
        ([1, 3, 9], logits((2, 4.0), (5, 4.0 - TIE_GAP / 2)), False),
    ],
    ids=["tie", "tie the other way round", "gap too wide", "another token is the second"],
)
def test_tie_needs_a_small_gap_and_the_pair(tokens: Sequence[int], row: torch.Tensor, tie: bool) -> None:
    """A difference is a tie only if the reference's top two are close and are exactly the two tokens."""
    comparison = compare_tokens(tokens, [1, 2, 4], lambda _: row)

    assert (tie, tie) == (comparison.tie, comparison.equal)
    assert comparison.gap is not None


@pytest.mark.parametrize(("tokens", "reference"), [([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([], [1])])
def test_a_list_that_ends_early_is_different(tokens: list[int], reference: list[int]) -> None:
    """A missing or a surplus token is a difference, and never a tie."""
    comparison = compare_tokens(tokens, reference, never)

    assert (False, False, min(len(tokens), len(reference))) == (
        comparison.equal,
        comparison.tie,
        comparison.first_difference,
    )


def test_many_ties_are_no_chance() -> None:
    """One tie is always allowed, then one in 2,000 compared tokens; more make the whole comparison fail."""
    tie, long = TokenComparison(10, 9, tie=True, gap=1e-5), TokenComparison(3990)

    assert all_token_equal([tie])
    assert not all_token_equal([tie, tie])
    assert not too_many_ties([tie, tie, long])
    assert too_many_ties([tie, tie, tie, long])
    assert not all_token_equal([TokenComparison(3, 2), long])

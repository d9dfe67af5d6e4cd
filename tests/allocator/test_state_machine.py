"""The allocator against a naive model and against what its pages hold, `check()` after every step."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.allocator.twin import VERBS, Random, Twin

if TYPE_CHECKING:
    from collections.abc import Sequence as Choices

T = TypeVar("T")


class Drawn:
    """Choices from Hypothesis, which shrinks them."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, both included."""
        return self._data.draw(st.integers(low, high))

    def choice(self, values: Choices[T]) -> T:
        """Return one of the values."""
        return self._data.draw(st.sampled_from(values))


class AllocatorMachine(RuleBasedStateMachine):
    """Random sequences of every verb; each must do what the model does, or raise and do nothing."""

    twin: Twin | None = None

    @initialize(data=st.data(), pages=st.integers(2, 24), prefix_cache=st.sampled_from([True, True, True, False]))
    def start(self, data: st.DataObject, pages: int, prefix_cache: bool) -> None:
        """Make a small pool, so that eviction and exhaustion are common, and put something in."""
        self.twin = Twin(pages, prefix_cache=prefix_cache)
        for _ in range(3):
            self.twin.open(Drawn(data))
            self.twin.compute(Drawn(data))

    # One rule, not one per verb: Hypothesis leaves rules out at random, and without `open` nothing happens.
    @rule(data=st.data(), verb=st.sampled_from(VERBS))
    def step(self, data: st.DataObject, verb: str) -> None:
        """Do one verb to both."""
        getattr(self.twin, verb)(Drawn(data))

    @invariant()
    def both_agree(self) -> None:
        """Books, numbers and memory are right after every step."""
        if self.twin is not None:
            self.twin.check()

    def teardown(self) -> None:
        """Nothing stays in use at the end."""
        if self.twin is not None:
            self.twin.finish()


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAllocatorMachine = AllocatorMachine.TestCase


def run_seed(seed: int, steps: int) -> Twin:
    """Drive a twin from a seed; the deeper runs that Hypothesis does not take."""
    draw = Random(random.Random(seed))
    twin = Twin(draw.integer(2, 24), prefix_cache=seed % 5 > 0)
    for _ in range(steps):
        getattr(twin, draw.choice(VERBS))(draw)
        twin.check()
    return twin


@pytest.mark.parametrize("seed", range(25))
def test_long_runs(seed: int) -> None:
    """The same holds over hundreds of steps from a fixed seed."""
    run_seed(seed, 200).finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_long_runs(seed: int) -> None:
    """The same again, for many seeds."""
    run_seed(seed, 1000).finish()

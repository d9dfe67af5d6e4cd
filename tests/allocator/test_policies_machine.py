"""Every policy keeps the protocol, whatever sequences do; the machine that says so notices policies that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

from pagedkv.allocator.policies import ARC, LFU, LRU, S3FIFO, SLRU, Priority
from pagedkv.allocator.testing import PolicyError, check_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.allocator import EvictionPolicy

STEPS = settings(max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
QUICK = settings(STEPS, phases=[Phase.generate], print_blob=False)


@pytest.mark.parametrize(
    "make_policy",
    [LRU, SLRU, LFU, lambda: LFU(ageing=False), ARC, S3FIFO, lambda: S3FIFO(small=0.5), Priority],
    ids=["lru", "slru", "lfu", "plain-lfu", "arc", "s3fifo", "s3fifo-half", "priority"],
)
def test_policy_keeps_the_protocol(make_policy: Callable[[], EvictionPolicy]) -> None:
    """Victims are candidates, different, enough and repeatable; the allocator's books hold after every step."""
    check_policy(make_policy, settings=STEPS)


class Forgetful(LRU):
    """Misses that pages were taken up again."""

    def held(self, pages: list[int]) -> None:
        """Do nothing."""


class Hoarder(LRU):
    """Misses that pages are gone."""

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Do nothing."""


class Stingy(LRU):
    """Names too few."""

    def victims(self, count: int) -> list[int]:
        """Return one page less."""
        return super().victims(count)[1:]


class Repetitive(LRU):
    """Names one page twice."""

    def victims(self, count: int) -> list[int]:
        """Return the first page as often as pages are needed."""
        return super().victims(min(count, 1)) * count


class Restless(LRU):
    """Changes its order when asked."""

    def victims(self, count: int) -> list[int]:
        """Return the oldest, and make them the youngest."""
        victims = super().victims(count)
        self.held(victims)
        self.released(victims)
        return victims


class Personal(LRU):
    """Each one has an order of its own, as by a random number."""

    instances = 0

    def __init__(self) -> None:
        super().__init__()
        Personal.instances += 1
        self.step = 1 if Personal.instances % 2 else -1

    def victims(self, count: int) -> list[int]:
        """Return the oldest or the youngest."""
        return super().victims(len(self._release_of))[:: self.step][:count]


@pytest.mark.parametrize(
    ("make_policy", "complaint"),
    [
        (Forgetful, "must return candidates"),
        (Hoarder, "must return candidates"),
        (Stingy, r"must return \d pages"),
        (Repetitive, "must return different pages"),
        (Restless, "must change nothing"),
        (Personal, "same calls must give the same victims"),
    ],
)
def test_machine_notices_a_wrong_policy(make_policy: Callable[[], EvictionPolicy], complaint: str) -> None:
    """Each way of breaking the protocol is found and named."""
    with pytest.raises(PolicyError, match=complaint):
        check_policy(make_policy, settings=QUICK)

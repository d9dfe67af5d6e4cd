"""Pattern fuzz: every slot says whose KV it holds, at every step and until it is used again."""

from __future__ import annotations

import pytest

from tests.allocator.tagged import Tagged


@pytest.mark.parametrize("seed", range(10))
def test_slots_hold_what_was_written(seed: int) -> None:
    """Whatever sequences do, with pins, resets and overlapping steps, each reads its own text and nothing else."""
    memory = Tagged(seed, num_pages=6 + 2 * seed, page_size=1 + seed % 4)
    for _ in range(300):
        memory.do(memory.random.choice(Tagged.VERBS * 2 + Tagged.HOLDS))
    memory.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_slots_hold_what_was_written_for_long(seed: int) -> None:
    """The same, longer, with swaps among them, under every policy."""
    policy = ("lru", "slru", "lfu", "arc", "s3fifo", "priority")[seed % 6]
    memory = Tagged(seed, num_pages=5 + seed % 31, page_size=1 + seed % 7, policy=policy)
    for _ in range(1500):
        memory.do(memory.random.choice(Tagged.VERBS * 2 + Tagged.HOLDS + Tagged.SWAPS))
    memory.finish()

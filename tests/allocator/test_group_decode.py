"""The decode step of several layer groups: the books that the general path writes, and room that is really there."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.allocator import BlockAllocator, FullAttention, OutOfPages, SlidingWindow
from pagedkv.allocator.group_decode import GroupDecodeBatch

MIX = (FullAttention(), SlidingWindow(5), SlidingWindow(5), SlidingWindow(9, 2))


def run(num_sequences: int, steps: int) -> list[Any]:
    """Decode a batch of different lengths; return every table after every step."""
    allocator = BlockAllocator(400, 4, groups=MIX)
    batch = [allocator.open([]) for _ in range(num_sequences)]
    for at, sequence in enumerate(batch):
        sequence.reserve(3 * at + 1)
        sequence.commit(range(3 * at + 1))
    seen = []
    for step in range(steps):
        allocator.reserve_batch(batch, 1)
        allocator.commit_batch(batch, [100 * at + step for at in range(num_sequences)])
        allocator.check()
        seen.append([sequence.block_table(group).tolist() for sequence in batch for group in range(len(MIX))])
    return seen


def test_the_fast_path_writes_the_same_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page for page what `reserve_rows` and `commit_row` do, over page ends and window ends of every row."""
    fast = run(5, 20)
    monkeypatch.setattr(GroupDecodeBatch, "of", classmethod(lambda *_: None))
    assert run(5, 20) == fast


def test_shared_pages_that_leave_a_window_are_no_room() -> None:
    """A page leaves for good when its last holder lets go: one fork alone gains nothing, both together do."""
    allocator = BlockAllocator(5, 2, groups=(SlidingWindow(4),), prefix_cache=False)
    one = allocator.open([])
    one.reserve(8)
    one.commit(range(8))
    two = one.fork()
    with pytest.raises(OutOfPages) as refused:
        allocator.reserve_batch([one], 1)
    assert (1, 0) == (refused.value.needed, refused.value.available)
    allocator.check()
    allocator.reserve_batch([one, two], 1)
    allocator.commit_batch([one, two], [1, 2])
    allocator.check()
    assert [False, False, True, True, True] == (one.block_table() > 0).tolist()


def test_a_window_that_is_held_stays_in_the_next_step() -> None:
    """`hold_window` between two decode steps stops the slide at once."""
    allocator = BlockAllocator(40, 2, groups=(SlidingWindow(4),))
    sequence = allocator.open([])
    for token in range(9):
        allocator.reserve_batch([sequence], 1)
        allocator.commit_batch([sequence], [token])
    before = int((sequence.block_table() > 0).sum())
    sequence.hold_window()
    for token in range(6):
        allocator.reserve_batch([sequence], 1)
        allocator.commit_batch([sequence], [token])
    assert before + 3 == int((sequence.block_table() > 0).sum())
    allocator.check()

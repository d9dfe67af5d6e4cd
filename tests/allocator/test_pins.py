"""Pins: a pinned page is referenced, whoever closes and whatever is needed."""

from __future__ import annotations

import pytest

from pagedkv.allocator import BlockAllocator, OutOfPages
from pagedkv.allocator.errors import AlreadyUnpinned
from tests.allocator.test_policies_live import SIZE, prompt_of, serve


@pytest.mark.parametrize("policy", ["lru", "slru", "lfu", "arc", "s3fifo", "priority"])
def test_pinned_pages_are_never_evicted(policy: str) -> None:
    """A pinned prefix survives any scan; unpinned it is idle again and can go."""
    allocator = BlockAllocator(16, SIZE, policy=policy)
    pinned = prompt_of(1, 4)
    serve(allocator, pinned)
    with allocator.pin(pinned) as pin:
        assert 4 * SIZE == pin.num_tokens
        assert (4, 11) == (allocator.stats().referenced, allocator.stats().free + allocator.stats().idle)
        for number in range(2, 9):
            serve(allocator, prompt_of(number, 6))
        assert 4 * SIZE == serve(allocator, pinned)
        allocator.check()
        with pytest.raises(OutOfPages) as refused:
            allocator.open(prompt_of(9, 15)).reserve(12 * SIZE)
        assert (12, 11) == (refused.value.needed, refused.value.available)
    assert 0 == allocator.stats().referenced
    allocator.check()
    with allocator.open(prompt_of(9, 14)) as sequence:
        sequence.reserve(15 * SIZE)
    assert 0 == allocator.open(pinned).num_tokens


def test_pins_count() -> None:
    """Two pins and a sequence hold a page three times; the last to go frees it; a second unpin is an error."""
    allocator = BlockAllocator(16, SIZE)
    prompt = prompt_of(1, 3)
    serve(allocator, prompt)
    first, second, sequence = allocator.pin(prompt), allocator.pin(prompt), allocator.open(prompt)
    allocator.check()
    first.unpin()
    with pytest.raises(AlreadyUnpinned):
        first.unpin()
    sequence.close()
    allocator.check()
    assert 3 == allocator.stats().referenced
    assert not allocator.reset_prefix_cache()
    second.unpin()
    assert (0, 15) == (allocator.stats().referenced, allocator.stats().free)
    allocator.check()


def test_a_pinned_page_is_not_written() -> None:
    """A sequence that cuts into a pinned page writes into a copy."""
    allocator = BlockAllocator(16, SIZE)
    prompt = prompt_of(1, 2)
    with allocator.open(prompt) as sequence:
        sequence.reserve(len(prompt))
        sequence.commit(prompt)
        pin = allocator.pin(prompt)
        sequence.truncate(SIZE + 1)
        sequence.reserve(1)
        assert [[int(pin.pages()[1]), int(sequence.block_table()[1])]] == allocator.take_copies().tolist()
        allocator.check()
    assert 2 * SIZE == serve(allocator, prompt)

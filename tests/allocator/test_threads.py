"""The thread guard."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from pagedkv.allocator import BlockAllocator, WrongThread
from tests.allocator.helpers import books, fill

if TYPE_CHECKING:
    from collections.abc import Callable


def in_thread(call: Callable[[], object]) -> list[object]:
    """Run a call in a thread of its own and return its result or its error."""
    results: list[object] = []

    def body() -> None:
        try:
            results.append(call())
        except WrongThread as error:
            results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return results


def test_a_second_thread_is_refused() -> None:
    """The thread that calls first owns the allocator; every verb refuses another one and changes nothing."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, [1, 2, 3])
    before = books(allocator)
    calls: list[Callable[[], object]] = [
        lambda: allocator.open([1]),
        lambda: allocator.room([1]),
        lambda: allocator.reserve_batch([sequence], 1),
        lambda: allocator.commit_batch([sequence], [[]]),
        allocator.take_copies,
        allocator.acknowledge_copies,
        allocator.take_scrubs,
        allocator.reset_prefix_cache,
        allocator.stats,
        allocator.check,
        allocator.hand_over,
        sequence.fork,
        sequence.close,
        lambda: sequence.reserve(1),
        lambda: sequence.commit([]),
        lambda: sequence.truncate(1),
        lambda: sequence.room(1),
    ]
    for call in calls:
        (result,) = in_thread(call)

        assert isinstance(result, WrongThread)

    assert before == books(allocator)


def test_hand_over() -> None:
    """After `hand_over` the next thread that calls is the owner, and the first is refused."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, [1, 2, 3])
    allocator.hand_over()

    assert [None] == in_thread(lambda: sequence.truncate(2))

    with pytest.raises(WrongThread, match=r"the owner must call hand_over\(\) first"):
        allocator.stats()

    assert 2 == sequence.num_tokens

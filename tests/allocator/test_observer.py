"""The observer hears every call that succeeded, in order, and none that raised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.allocator import AlreadyUnpinned, BlockAllocator, HostPool, Namespace, OutOfPages, PromptMismatch
from pagedkv.allocator.traces import EventLog, read_trace
from tests.allocator.helpers import fill, run_copies, store
from tests.allocator.tagged import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Notes:
    """Writes every event down as a tuple."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def note(*arguments: Any, **options: Any) -> None:
            self.events.append((name, *map(_plain, arguments), *map(_plain, options.values())))

        return note

    def take(self) -> list[tuple[Any, ...]]:
        """Return and forget the events."""
        events, self.events = self.events, []
        return events


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_plain(item) for item in value]
    return value


def watched(num_pages: int = 16, page_size: int = 2, **options: Any) -> tuple[BlockAllocator, Any]:
    """Return an allocator and what its observer hears from now on."""
    notes: Any = Notes()
    allocator = BlockAllocator(num_pages, page_size, observer=notes, **options)
    assert [("attached", num_pages, page_size)] == notes.take()
    return allocator, notes


def test_every_verb_is_heard() -> None:
    """Each verb tells its own event with the caller's own arguments, ids as they are stored."""
    allocator, notes = watched(clock=lambda: 7.5)
    space = Namespace(tenant="t")
    first = allocator.open([1, 2, 3], namespace=space, media=[(0, 1, "x")])
    first.reserve(3)
    first.commit([1, 2, 3])
    first.reserve(4)
    first.commit(count=2)
    second = first.fork()
    second.truncate(4)
    second.truncate(4)
    second.close()
    allocator.reset_prefix_cache()

    assert [
        ("opened", 1, [1, 2, 3], 0, space, [(0, 1, "x")], 7.5),
        ("reserved", [1], [3]),
        ("committed", [1], [[1, 2, 3]], [3]),
        ("reserved", [1], [4]),
        ("committed", [1], [None], [2]),
        ("forked", 1, 2, 7.5),
        ("truncated", 2, 4),
        ("closed", 2),
        ("was_reset",),
    ] == notes.take()


def test_what_is_held_is_heard() -> None:
    """Pins, steps and finished swaps tell their own events; plans, and what was refused or cancelled, tell nothing."""
    allocator, notes = watched(clock=lambda: 7.5)
    sequence, host = fill(allocator, [1, 2, 3, 4, 5]), HostPool(8)
    notes.take()
    pin = allocator.pin([1, 2, 3, 4])
    step = allocator.begin_step()
    step.end()
    pin.unpin()
    with pytest.raises(AlreadyUnpinned):
        pin.unpin()
    allocator.swap_out(sequence, host).cancel()
    allocator.swap_out(sequence, host).finish()
    allocator.swap_in(sequence).finish()

    assert [
        ("pinned", 1, 4, 7.5),
        ("step_began", 1, 7.5),
        ("step_ended", 1),
        ("unpinned", 1),
        ("swapped", 1, True),
        ("swapped", 1, False),
    ] == notes.take()


def test_the_fast_decode_path_is_heard_like_the_other() -> None:
    """A decode step tells the same events whether or not the batch is the last one."""
    allocator, notes = watched(64)
    pair = [fill(allocator, [1, 2, 3]), fill(allocator, [4, 5, 6])]
    notes.take()
    for step in range(5):
        allocator.reserve_batch(pair, 1)
        assert [("reserved", [1, 2], [1, 1])] == notes.take()
        allocator.commit_batch(pair, [step, 9])
        assert [("committed", [1, 2], [[step], [9]], [1, 1])] == notes.take()


def test_cached_tokens_are_told() -> None:
    """An opened sequence tells how much of its prompt was found."""
    allocator, notes = watched()
    store(allocator, [1, 2, 3, 4])
    notes.take()
    allocator.open([1, 2, 3, 4, 5])
    assert ("opened", 2, [1, 2, 3, 4, 5], 4, None, []) == notes.take()[0][:-1]


def test_evictions_are_told_before_the_call_that_needed_them() -> None:
    """Idle pages that go are named, in the order in which they go, just before the reserve."""
    allocator, notes = watched(5)
    store(allocator, [1, 2, 3, 4, 5, 6])
    notes.take()
    sequence = allocator.open([7] * 6)
    sequence.reserve(6)
    opened, *rest = notes.take()

    assert "opened" == opened[0]
    assert [("evicted", [3, 2]), ("reserved", [2], [6])] == rest


def test_a_call_that_raised_is_not_heard() -> None:
    """Nothing is told of refused calls, nor of an empty truncate."""
    allocator, notes = watched(4)
    sequence = allocator.open([1, 2, 3])
    notes.take()
    with pytest.raises(OutOfPages):
        sequence.reserve(100)
    with pytest.raises(TypeError):
        allocator.open(["x"])
    sequence.reserve(3)
    notes.take()
    with pytest.raises(PromptMismatch):
        sequence.commit([9])
    with pytest.raises(PromptMismatch):
        allocator.commit_batch([sequence], [[9]])
    run_copies(allocator)

    assert [] == notes.take()


def test_an_observer_must_have_every_method() -> None:
    """An object that lacks events is refused when the allocator is made, by name."""

    class Deaf:
        def attached(self, num_pages: int, page_size: int) -> None:
            """Hear this and nothing else."""

    with pytest.raises(TypeError, match=r"observer must have the methods of Observer, Deaf lacks .*'opened'"):
        BlockAllocator(4, 2, observer=Deaf())  # type: ignore[arg-type]


def test_a_live_log_is_read_back(tmp_path: Path) -> None:
    """An `EventLog` on a working allocator gives every sequence's text back, with pins, swaps and steps among them."""
    path = tmp_path / "log"
    with EventLog(path) as log:
        memory = Tagged(3, observer=log)
        texts = dict[int, list[int]]()
        for _ in range(200):
            memory.do(memory.random.choice(Tagged.VERBS + Tagged.HOLDS + Tagged.SWAPS))
            for sequence, text in memory.texts.items():
                texts[sequence.serial] = text.tokens + text.prompt[len(text.tokens) :]
    requests = read_trace(path).requests

    expected = [text for _, text in sorted(texts.items()) if text]
    assert expected == [[*request.prompt.array().tolist(), *request.output.array().tolist()] for request in requests]

"""Wrong calls: a named error that says what was wrong, and nothing changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pagedkv.allocator import (
    BlockAllocator,
    CopiesPending,
    ForeignSequence,
    FullAttention,
    NotReserved,
    OutOfPages,
    ReservationOpen,
    SequenceClosed,
)
from tests.allocator.helpers import books, fill, run_copies, store

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.allocator import Sequence


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_pages": 1}, ValueError, "num_pages must be 2 to"),
        ({"num_pages": 2**31}, ValueError, "num_pages must be 2 to"),
        ({"num_pages": -4}, ValueError, "num_pages must be 2 to 2147483647, was -4"),
        ({"num_pages": 8.0}, TypeError, "num_pages must be an integer, was 8.0"),
        ({"page_size": 0}, ValueError, "page_size must be 1 to"),
        ({"page_size": True}, TypeError, "page_size must be an integer, was True"),
        ({"groups": ()}, ValueError, r"groups must be .*, at least one, was \(\)"),
        ({"groups": (FullAttention(), 7)}, ValueError, "groups must be FullAttention.*, was"),
        ({"groups": 3}, ValueError, "groups must be .*, at least one, was 3"),
        ({"clock": 3}, TypeError, "clock must be a function that returns the time, was 3"),
        ({"policy": "fifo"}, ValueError, r"policy must be one of .*'arc', 'lfu', .* or an object, was 'fifo'"),
        ({"policy": object()}, TypeError, "policy must have the methods of EvictionPolicy, object lacks"),
    ],
)
def test_construction(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """A pool that cannot be is refused by the name of the argument."""
    with pytest.raises(error, match=message):
        BlockAllocator(**({"num_pages": 8, "page_size": 4} | arguments))


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, -2], ValueError, "tokens must be ids between 0 and"),
        ([2**32], ValueError, "tokens must be ids between 0 and"),
        (np.array([3, -1]), ValueError, "tokens must be ids between 0 and 4294967295, had -1 to 3"),
        ([1.5], TypeError, "tokens must be a sequence of integer token ids"),
        (np.array([1.5]), TypeError, "tokens must be integers, was float64"),
        (np.array([True]), TypeError, "tokens must be integers, was bool"),
        (np.zeros((1, 2), int), TypeError, "tokens must have one dimension, had 2"),
        ("text", TypeError, "tokens must be integer token ids, was str"),
        (b"text", TypeError, "tokens must be integer token ids, was bytes"),
        (7, TypeError, "tokens must be a sequence"),
        ({3, 1}, TypeError, "tokens must be a sequence of integer token ids, was {1, 3}"),
        ({3: 1}, TypeError, "tokens must be a sequence of integer token ids, was {3: 1}"),
        (iter([1]), TypeError, "tokens must be a sequence of integer token ids, was <list_iterator"),
        (None, TypeError, "tokens must be a sequence"),
    ],
)
def test_tokens(tokens: Any, error: type[Exception], message: str) -> None:
    """What is not a sequence of token ids is refused, at `open`, `room` and `commit`."""
    allocator = BlockAllocator(8, 4)
    sequence = allocator.open([])
    sequence.reserve(4)
    before = books(allocator)
    calls: list[Callable[[Any], object]] = [allocator.open, allocator.room]
    if tokens is not None:
        calls.append(sequence.commit)
    for call in calls:
        with pytest.raises(error, match=message):
            call(tokens)

    assert before == books(allocator)


@pytest.mark.parametrize(
    ("media", "error", "message"),
    [
        ([(0, 9, "d")], ValueError, r"media span \(0, 9\) must lie within the 8 tokens"),
        ([(2, 0, "d")], ValueError, "and not be empty"),
        ([(-1, 2, "d")], ValueError, "media start must be at least 0, was -1"),
        ([(0, True, "d")], TypeError, "media length must be an integer, was True"),
        ([(0, 2, 17)], TypeError, "media digest must be bytes, str or None, was int"),
        ([(0, 2)], TypeError, "media must hold"),
        (3, TypeError, r"media must be a list of \(start, length, digest\) tuples, was 3"),
        ("text", TypeError, r"media must be a list of \(start, length, digest\) tuples, was 'text'"),
    ],
)
def test_media(media: Any, error: type[Exception], message: str) -> None:
    """A span that makes no sense is refused."""
    allocator = BlockAllocator(8, 4)
    before = books(allocator)
    with pytest.raises(error, match=message):
        allocator.open(range(8), media=media)

    assert before == books(allocator)


def test_namespace_must_be_hashable() -> None:
    """A namespace that is no dictionary key is refused by name."""
    allocator = BlockAllocator(8, 4)
    with pytest.raises(TypeError, match="namespace must be hashable, was list"):
        allocator.open([1], namespace=[])  # type: ignore[arg-type]

    assert 0 == allocator.stats().sequences


BAD_COUNTS: list[tuple[Any, type[Exception], str]] = [
    (-1, ValueError, "must be at least 0, was -1"),
    (True, TypeError, "must be an integer, was True"),
    (1.0, TypeError, "must be an integer, was 1.0"),
    ("1", TypeError, "must be an integer, was '1'"),
    (None, TypeError, "must be an integer, was None"),
]


@pytest.mark.parametrize(("count", "error", "message"), BAD_COUNTS)
def test_counts(count: Any, error: type[Exception], message: str) -> None:
    """Negative counts and things that are no integers are refused wherever a count is taken."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, [1, 2, 3])
    before = books(allocator)
    calls: list[Callable[[], object]] = [
        lambda: sequence.reserve(count),
        lambda: sequence.room(count),
        lambda: sequence.truncate(count),
        lambda: allocator.room([1], growth=count),
        lambda: allocator.reserve_batch([sequence], count),
        lambda: allocator.reserve_batch([sequence], [count]),
        lambda: sequence.slots(count, 2),
    ]
    if count is not None:
        calls.append(lambda: sequence.commit(count=count))
    for call in calls:
        with pytest.raises(error, match=message):
            call()

    assert before == books(allocator)


def test_true_and_one_point_zero_are_no_counts_in_a_batch() -> None:
    """A batch that decodes again and again still looks at what it is given."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, [1, 2, 3])
    for _ in range(3):
        allocator.reserve_batch([sequence], [1])
        allocator.commit_batch([sequence], [5])
    for bad in ([True], [1.0], True):
        with pytest.raises(TypeError, match="must be an integer"):
            allocator.reserve_batch([sequence], bad)

    assert (6, 0) == (sequence.num_tokens, sequence.num_reserved)


def test_huge_counts() -> None:
    """A number beyond any pool is out of pages, not an overflow."""
    allocator = BlockAllocator(8, 4)
    sequence = allocator.open([1])
    before = books(allocator)
    for count in (2**31, 2**64, 10**30):
        with pytest.raises(OutOfPages):
            sequence.reserve(count)
        with pytest.raises(NotReserved):
            sequence.commit(count=count)
        with pytest.raises(ValueError, match="num_tokens must be at most 0"):
            sequence.truncate(count)

        assert not allocator.room([1], growth=count).fits

    assert before == books(allocator)


def test_closed() -> None:
    """Everything but `closed` and `repr` refuses a closed sequence, a second close too."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, [1, 2, 3])
    sequence.close()
    before = books(allocator)
    calls: list[Callable[[], object]] = [
        sequence.close,
        sequence.fork,
        sequence.block_table,
        sequence.__enter__,
        lambda: sequence.reserve(1),
        lambda: sequence.commit([1]),
        lambda: sequence.truncate(0),
        lambda: sequence.room(1),
        lambda: sequence.slots(0, 1),
        lambda: sequence.num_tokens,
        lambda: sequence.num_reserved,
        lambda: sequence.num_cached_tokens,
        lambda: sequence.row,
        lambda: allocator.reserve_batch([sequence], 1),
        lambda: allocator.commit_batch([sequence], [1]),
    ]
    for call in calls:
        with pytest.raises(SequenceClosed, match=r"<Sequence 1, closed> was used after close\(\)"):
            call()

    assert (True, before) == (sequence.closed, books(allocator))


def test_closed_sequence_in_a_batch_seen_before() -> None:
    """The kept decode batch does not serve a sequence that has been closed since, even if its row lives on."""
    allocator = BlockAllocator(8, 4)
    first, second = fill(allocator, [1]), fill(allocator, [2])
    allocator.reserve_batch([first, second], 1)
    allocator.commit_batch([first, second], [5, 6])
    first.close()
    fill(allocator, [3])
    with pytest.raises(SequenceClosed):
        allocator.reserve_batch([first, second], 1)

    assert 0 == second.num_reserved


def test_foreign() -> None:
    """A sequence of another allocator is refused."""
    ours, theirs = BlockAllocator(8, 4), BlockAllocator(8, 4)
    sequence = fill(theirs, [1, 2])
    for call in (lambda: ours.reserve_batch([sequence], 1), lambda: ours.close(sequence), lambda: ours.fork(sequence)):
        with pytest.raises(ForeignSequence, match="was opened by another allocator"):
            call()
    with pytest.raises(TypeError, match="sequences must be Sequence handles, had int"):
        ours.reserve_batch([3], 1)  # type: ignore[list-item]

    assert (2, False) == (sequence.num_tokens, sequence.closed)


def test_one_sequence_twice() -> None:
    """A batch names each sequence once."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, [1])
    with pytest.raises(ValueError, match="sequences must be different"):
        allocator.reserve_batch([sequence, sequence], 1)

    assert 0 == sequence.num_reserved


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("reserve", lambda sequence: sequence.reserve(1)),
        ("fork", lambda sequence: sequence.fork()),
        ("truncate", lambda sequence: sequence.truncate(1)),
        ("room", lambda sequence: sequence.room(1)),
    ],
)
def test_open_reservation(verb: str, call: Callable[[Sequence], object]) -> None:
    """What needs a sequence at rest refuses one with an open reservation."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, [1, 2])
    sequence.reserve(1)
    before = books(allocator)
    with pytest.raises(ReservationOpen, match=f"{verb} needs <Sequence 1, 2 tokens> without a reservation"):
        call(sequence)

    assert before == books(allocator)


def test_commit_more_than_reserved() -> None:
    """Only reserved tokens can be committed; one bad row leaves the whole batch as it was."""
    allocator = BlockAllocator(8, 4)
    first, second = allocator.open([1, 2]), allocator.open([3, 4])
    allocator.reserve_batch([first, second], [2, 1])
    before = books(allocator)
    with pytest.raises(NotReserved, match="2 tokens committed to <Sequence 2, 0 tokens>, 1 are reserved"):
        allocator.commit_batch([first, second], [[1, 2], [3, 4]])

    assert before == books(allocator)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], 5, "ab", [[1], [2], [3]], [1.5, 2], [None, 1], [-1, 2]])
@pytest.mark.parametrize("times", [0, 1])
def test_batch_tokens(tokens: Any, times: int) -> None:
    """Too few or too many entries, or what is no token, is refused on the fast path and on the general one."""
    allocator = BlockAllocator(8, 4)
    pair = [fill(allocator, [1]), fill(allocator, [2])]
    for _ in range(times):
        allocator.reserve_batch(pair, 1)
        allocator.commit_batch(pair, [5, 6])
    allocator.reserve_batch(pair, [1, 1])
    before = books(allocator)
    with pytest.raises((TypeError, ValueError), match="tokens must"):
        allocator.commit_batch(pair, tokens)

    assert before == books(allocator)


def test_batch_counts_length() -> None:
    """Counts must be as many as the sequences."""
    allocator = BlockAllocator(8, 4)
    with pytest.raises(ValueError, match=r"counts must have one entry per sequence \(1\), had 2"):
        allocator.reserve_batch([fill(allocator, [1])], [1, 1])


def test_commit_takes_ids_or_a_count() -> None:
    """Neither and both are refused."""
    allocator = BlockAllocator(8, 4)
    sequence = allocator.open([1])
    sequence.reserve(1)
    with pytest.raises(TypeError, match="either tokens or count="):
        sequence.commit()
    with pytest.raises(TypeError, match="either tokens or count="):
        sequence.commit([1], count=1)

    assert 1 == sequence.num_reserved


def test_commit_before_copies() -> None:
    """Committing into a page whose copy did not run is refused: its KV would be lost or another's overwritten."""
    allocator = BlockAllocator(16, 4)
    store(allocator, range(8))
    sequence = allocator.open([0, 1, 2, 9, 9])
    sequence.reserve(2)
    before = books(allocator)
    with pytest.raises(CopiesPending, match="page 3 of <Sequence 2, 3 tokens> is part of a copy"):
        sequence.commit([9, 9])
    allocator.take_copies()
    with pytest.raises(CopiesPending):
        allocator.commit_batch([sequence], [[9, 9]])

    assert before == books(allocator)

    run_copies(allocator)
    sequence.commit([9, 9])

    assert 5 == sequence.num_tokens


def test_slots_outside() -> None:
    """Positions that are neither stored nor reserved have no slot."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, [1, 2, 3])
    for start, stop in ((0, 4), (2, 1), (4, 4)):
        with pytest.raises(ValueError, match="slots must lie within the 3 tokens"):
            sequence.slots(start, stop)
    with pytest.raises(ValueError, match="group must be below 1, was 1"):
        sequence.block_table(1)

    assert [4] == sequence.slots(0, 1).tolist()

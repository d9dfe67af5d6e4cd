"""Open, reserve, commit, fork, truncate, close: what each does, one rule a test."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from pagedkv.allocator import BlockAllocator, NotReserved, OutOfPages, PromptMismatch, Room
from tests.allocator.helpers import extend, fill, hit, run_copies, store


def test_lowest_ids_first() -> None:
    """A fresh pool hands out page 1, 2, 3, ..., so that resident memory follows use; page 0 never."""
    allocator = BlockAllocator(6, 4)

    assert [1, 2, 3, 4, 5] == fill(allocator, range(20)).block_table().tolist()


def test_given_back_pages_are_used_again_first() -> None:
    """The pages given back last are handed out next, in the same order."""
    allocator = BlockAllocator(50, 4, prefix_cache=False)
    fill(allocator, range(8))
    fill(allocator, range(9)).close()

    assert [3, 4, 5] == fill(allocator, range(9)).block_table().tolist()


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], (1, 2, 3), array("q", [1, 2, 3]), np.array([1, 2, 3], np.int64), range(1, 4)]
)
def test_tokens_of_any_kind(tokens: list[int]) -> None:
    """Lists, arrays, ranges and numpy are the same tokens."""
    allocator = BlockAllocator(8, 2)
    store(allocator, [1, 2, 3])
    with fill(allocator, tokens) as sequence:
        assert 2 == sequence.num_cached_tokens


def test_lengths_while_reserved() -> None:
    """`num_tokens` counts committed tokens, `num_reserved` the open reservation, the table both."""
    allocator = BlockAllocator(8, 4)
    sequence = allocator.open(range(6))
    sequence.reserve(6)

    assert (0, 6, 2) == (sequence.num_tokens, sequence.num_reserved, len(sequence.block_table()))

    sequence.commit(range(4))

    assert (4, 0, 1) == (sequence.num_tokens, sequence.num_reserved, len(sequence.block_table()))


def test_commit_fewer_gives_the_rest_back() -> None:
    """Speculation: a commit of the first tokens frees the pages of the others."""
    allocator = BlockAllocator(8, 2)
    sequence = fill(allocator, [1, 2, 3])
    sequence.reserve(7)

    assert 5 == allocator.stats().in_use

    sequence.commit([4])

    assert (4, 2) == (sequence.num_tokens, allocator.stats().in_use)


def test_reserve_nothing() -> None:
    """Zero tokens are legal, take nothing and open nothing."""
    allocator = BlockAllocator(4, 4)
    sequence = allocator.open([1])
    sequence.reserve(0)
    sequence.reserve(0)
    sequence.commit([])
    sequence.commit(count=0)

    assert (0, 0) == (sequence.num_reserved, allocator.stats().in_use)


def test_empty_prompt() -> None:
    """A sequence may begin with nothing; its tokens then come as they are made."""
    allocator = BlockAllocator(4, 2)
    sequence = allocator.open([])
    extend(allocator, sequence, [5, 6, 7])

    assert (3, 2) == (sequence.num_tokens, hit(allocator, [5, 6, 9]))


def test_reserve_is_all_or_nothing() -> None:
    """A reserve that does not fit says both numbers and takes no page."""
    allocator = BlockAllocator(4, 2)
    sequence = allocator.open(range(9))

    with pytest.raises(OutOfPages, match="4 pages needed, 3 available") as raised:
        sequence.reserve(7)

    assert (4, 3, 0) == (raised.value.needed, raised.value.available, allocator.stats().in_use)
    assert Room(4, 3) == sequence.room(7)
    assert Room(3, 3).fits
    assert not Room(4, 3).fits


def test_batch_is_all_or_nothing() -> None:
    """One sequence that does not fit leaves the whole batch as it was."""
    allocator = BlockAllocator(4, 2)
    first, second = allocator.open([1, 2]), allocator.open([3, 4, 5, 6])

    with pytest.raises(OutOfPages, match="4 pages needed, 3 available"):
        allocator.reserve_batch([first, second], [4, 3])

    assert (0, 0, 0) == (first.num_reserved, second.num_reserved, allocator.stats().in_use)


def test_prompt_is_checked() -> None:
    """Tokens inside the prompt must be the prompt's; the error says where they differ."""
    allocator = BlockAllocator(8, 2)
    sequence = allocator.open([1, 2, 3, 4])
    sequence.reserve(6)

    with pytest.raises(PromptMismatch, match="at position 2 it has 3, 9 was given"):
        sequence.commit([1, 2, 9])

    sequence.commit([1, 2, 3, 4, 9])

    assert 5 == sequence.num_tokens


def test_truncate_forgets_the_prompt() -> None:
    """After a cut inside the prompt other tokens may follow."""
    allocator = BlockAllocator(8, 2)
    sequence = fill(allocator, [1, 2, 3, 4])
    sequence.truncate(1)
    extend(allocator, sequence, [7, 8])

    assert (3, 2) == (sequence.num_tokens, hit(allocator, [1, 7, 9]))


def test_truncate_inside_an_indexed_page_takes_it_out() -> None:
    """Where nobody else holds the page and nothing follows it, the next write takes it out of the index, uncopied."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, [1, 2, 3, 4])
    (page,) = sequence.block_table().tolist()
    sequence.truncate(3)

    assert 4 == hit(allocator, [1, 2, 3, 4, 5])

    extend(allocator, sequence, [9])

    assert ([page], 0) == (sequence.block_table().tolist(), allocator.stats().copies)
    assert (4, 3) == (hit(allocator, [1, 2, 3, 9, 5]), hit(allocator, [1, 2, 3, 4, 5]))


def test_truncate_inside_a_followed_page_copies_it() -> None:
    """Where an indexed page follows, the next write copies, and the old path stays findable."""
    allocator = BlockAllocator(8, 4)
    sequence = fill(allocator, range(8))
    first = int(sequence.block_table()[0])
    sequence.truncate(3)
    sequence.reserve(1)
    copies = run_copies(allocator)
    sequence.commit([9])

    assert [(first, int(sequence.block_table()[0]))] == copies
    assert (8, 4) == (hit(allocator, [*range(8), 5]), hit(allocator, [0, 1, 2, 9, 5]))


def test_fork_shares_and_copies_on_write() -> None:
    """A fork takes no page; the first to write the shared tail copies it, the last one writes in place."""
    allocator = BlockAllocator(8, 4)
    parent = fill(allocator, range(6))
    child = parent.fork()

    assert parent.block_table().tolist() == child.block_table().tolist()
    assert 2 == allocator.stats().in_use
    assert Room(1, 5) == child.room(1)

    allocator.reserve_batch([parent, child], 1)

    assert [(2, 3)] == run_copies(allocator)

    allocator.commit_batch([parent, child], [7, 8])

    assert ([1, 3], [1, 2]) == (parent.block_table().tolist(), child.block_table().tolist())


def test_fork_at_a_page_boundary_copies_nothing() -> None:
    """Full pages are never written again, so sharing them costs nothing."""
    allocator = BlockAllocator(8, 4)
    parent = fill(allocator, range(8))
    child = parent.fork()
    extend(allocator, parent, [9])
    extend(allocator, child, [10])

    assert (4, 0) == (allocator.stats().in_use, allocator.stats().copies)


def test_equal_pages_are_merged_at_commit() -> None:
    """Two sequences that compute the same page end with one page between them."""
    allocator = BlockAllocator(8, 4)
    first, second = allocator.open(range(5)), allocator.open(range(5))
    allocator.reserve_batch([first, second], 5)
    allocator.commit_batch([first, second], [list(range(5))] * 2)

    assert first.block_table()[0] == second.block_table()[0]
    assert (3, 1) == (allocator.stats().in_use, allocator.stats().merged_pages)


def test_merging_revives_idle_pages() -> None:
    """A sequence that was open before takes over the idle pages of one that came, computed the same and went."""
    allocator = BlockAllocator(8, 2)
    early = allocator.open([1, 2, 3, 4, 5])
    store(allocator, [1, 2, 3, 4, 5])

    assert 2 == allocator.stats().idle

    extend(allocator, early, [1, 2, 3, 4, 5])

    assert (0, 3, 4) == (allocator.stats().idle, allocator.stats().in_use, allocator.stats().free)


def test_unnamed_tokens_are_never_found() -> None:
    """KV that no token names keeps its page and every later one out of the index."""
    allocator = BlockAllocator(16, 2)
    sequence = fill(allocator, [1, 2])
    sequence.reserve(2)
    sequence.commit(count=2)
    extend(allocator, sequence, [5, 6])

    assert (6, 2) == (sequence.num_tokens, hit(allocator, [1, 2, 3, 4, 5, 6, 7]))

    sequence.truncate(2)
    extend(allocator, sequence, [3, 4])

    assert 4 == hit(allocator, [1, 2, 3, 4, 5, 6, 7])


def test_a_page_once_unnamed_is_not_indexed_after_a_cut() -> None:
    """The ids of a full page that was not indexed are not kept, so a cut into it leaves it out of the index."""
    allocator = BlockAllocator(16, 4)
    sequence = fill(allocator, [1])
    sequence.reserve(3)
    sequence.commit(count=3)
    allocator.reserve_batch([sequence], 1)
    allocator.commit_batch([sequence], [9])
    sequence.truncate(1)
    extend(allocator, sequence, [5, 6, 7])
    allocator.check()

    assert (0, 0) == (hit(allocator, [9, 5, 6, 7, 0]), hit(allocator, [1, 5, 6, 7, 0]))


def test_slots() -> None:
    """Slots are page id times page size plus offset, int64, reserved positions included."""
    allocator = BlockAllocator(8, 4)
    fill(allocator, [1])
    sequence = allocator.open(range(9))
    sequence.reserve(6)
    slots = sequence.slots(2, 6)

    assert ([10, 11, 12, 13], np.dtype(np.int64)) == (slots.tolist(), slots.dtype)
    assert [] == sequence.slots(6, 6).tolist()


def test_block_tables_end_in_the_null_page() -> None:
    """Past a sequence's own blocks stands page 0, also after a longer sequence used the row (vllm-tt-plugin#103)."""
    allocator = BlockAllocator(32, 2)
    row = (long := fill(allocator, range(20))).row
    long.close()
    short = fill(allocator, [7, 7, 7])

    assert row == short.row
    assert short.block_table().tolist() + [0] * 8 == allocator.block_tables()[row, :10].tolist()


def test_tables_grow() -> None:
    """Rows and widths beyond the first arrays keep what was there."""
    allocator = BlockAllocator(400, 2)
    sequences = [fill(allocator, [n, n, n]) for n in range(40)]
    extend(allocator, sequences[3], list(range(100)))
    allocator.check()

    assert allocator.block_tables().shape[0] >= 40
    assert [2] * 39 + [52] == sorted(len(sequence.block_table()) for sequence in sequences)
    assert np.dtype(np.int32) == allocator.block_tables().dtype


def test_context_manager_closes() -> None:
    """Leaving the block gives everything back, also after an error and also after an early close."""
    allocator = BlockAllocator(8, 2)
    with pytest.raises(NotReserved), allocator.open([1, 2, 3]) as sequence:
        sequence.commit([1])
    with allocator.open([1]) as other:
        other.reserve(1)
        other.close()

    assert (True, True, 0) == (sequence.closed, other.closed, allocator.stats().in_use)


def test_stats_count_shared_pages_once() -> None:
    """Stored tokens and held slots count a page once, however many tables name it."""
    allocator = BlockAllocator(16, 4)
    parent = fill(allocator, range(6))
    forks = [parent.fork() for _ in range(3)]
    stats = allocator.stats()

    assert (6, 8, 2, 4) == (stats.stored_tokens, stats.held_slots, stats.in_use, stats.sequences)
    assert (0.25, 2 / 15) == (stats.waste, stats.usage)

    for sequence in [parent, *forks]:
        sequence.close()

    assert (0, 0.0, 1) == (allocator.stats().stored_tokens, allocator.stats().waste, allocator.stats().idle)


def test_stats_count_the_fullest_holder() -> None:
    """A page that one fork has full and another has cut counts what the first has, indexed or not."""
    for prefix_cache in (True, False):
        allocator = BlockAllocator(16, 4, prefix_cache=prefix_cache)
        parent = fill(allocator, range(7))
        child = parent.fork()
        child.truncate(2)

        assert 7 == allocator.stats().stored_tokens


def test_same_calls_same_ids() -> None:
    """Two allocators that see the same calls hand out the same pages."""

    def run() -> list[int]:
        allocator = BlockAllocator(12, 2)
        ids: list[int] = []
        for n in range(30):
            with fill(allocator, [n % 5, 1, n % 3, 2, n % 7]) as sequence:
                child = sequence.fork()
                extend(allocator, child, [n, n])
                ids += sequence.block_table().tolist() + child.block_table().tolist()
                child.close()
        return ids

    assert run() == run()

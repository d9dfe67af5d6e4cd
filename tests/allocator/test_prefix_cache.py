"""What the prefix cache finds, and what it must not."""

from __future__ import annotations

import pytest

from pagedkv.allocator import BlockAllocator, Namespace, Room
from tests.allocator.helpers import books, extend, fill, hit, run_copies, store


def test_one_token_is_left() -> None:
    """A prompt that is stored whole leaves its last token to compute."""
    allocator = BlockAllocator(16, 4)
    store(allocator, range(8))

    assert (7, 8, 7) == (hit(allocator, range(8)), hit(allocator, range(9)), hit(allocator, range(8)))


def test_sub_page_hit_is_copied_on_write() -> None:
    """A partial match holds the indexed page as its tail; the first write copies it and leaves it findable."""
    allocator = BlockAllocator(16, 4)
    store(allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    sequence = allocator.open([1, 2, 3, 4, 5, 6, 9, 9])

    assert (6, 6, [1, 2]) == (sequence.num_tokens, sequence.num_cached_tokens, sequence.block_table().tolist())
    assert Room(1, 13) == sequence.room(2)

    sequence.reserve(2)

    assert [[2, 3]] == allocator.take_copies().tolist()

    allocator.acknowledge_copies()
    sequence.commit([9, 9])

    assert ([1, 3], 8) == (sequence.block_table().tolist(), hit(allocator, [1, 2, 3, 4, 5, 6, 7, 8, 0]))


def test_sub_page_hit_takes_the_longest_match() -> None:
    """Among many children the one that shares most tokens is found, whichever side of the query it sorts on."""
    allocator = BlockAllocator(64, 4)
    for last in (0, 1, 5, 9, 300):
        store(allocator, [7, last, last, last])
    store(allocator, [7, 5, 4, 4])

    assert 3 == hit(allocator, [7, 5, 4, 1, 1])
    assert 2 == hit(allocator, [7, 300, 1, 1, 1])
    assert 1 == hit(allocator, [7, 2, 2, 2, 2])
    assert 0 == hit(allocator, [6, 2, 2, 2, 2])


def test_sub_page_hit_without_room_for_its_copy_is_none() -> None:
    """With nothing left to copy into, a partial match counts as no hit."""
    allocator = BlockAllocator(4, 2)
    holder = fill(allocator, [1, 2, 3, 4])
    other = fill(allocator, [9])

    assert 2 == hit(allocator, [1, 2, 3, 9])
    assert (0, 3) == (allocator.stats().free, allocator.stats().in_use)

    other.close()

    assert 3 == hit(allocator, [1, 2, 3, 9])
    assert holder.num_tokens == 4


def test_sub_page_hit_never_makes_a_prompt_too_big() -> None:
    """Where no page is left for the copy, the borrowed page itself is taken out of the index and written."""
    allocator = BlockAllocator(5, 2)
    store(allocator, [1, 2, 3, 4])
    prompt = [1, 2, 3, 9, 9, 9, 9]

    assert Room(3, 3) == allocator.room(prompt)

    sequence = allocator.open(prompt)

    assert (3, Room(2, 2)) == (sequence.num_tokens, sequence.room(4))

    extend(allocator, sequence, [9, 9, 9, 9])
    allocator.check()

    assert ([1, 2], 0) == (sequence.block_table()[:2].tolist(), allocator.stats().copies)


def test_room_counts_hits_on_one_side() -> None:
    """Idle hits count neither as needed nor as available; asking changes nothing, not even recency."""
    allocator = BlockAllocator(9, 2)
    store(allocator, range(8))
    store(allocator, [5, 5, 5, 5])
    before = books(allocator)

    assert Room(3, 4) == allocator.room(range(10), growth=4)
    assert Room(5, 8) == allocator.room([3] * 10)
    assert Room(1, 8) == allocator.room([3], namespace="unknown")
    assert before == books(allocator)


def test_least_recently_released_goes_first_tail_first() -> None:
    """Eviction takes the oldest prefix, and of it the last page."""
    allocator = BlockAllocator(6, 2)
    store(allocator, [1, 1, 1, 1])
    store(allocator, [2, 2, 2, 2])
    fill(allocator, [9, 9, 9])

    assert (2, 4, 1) == (hit(allocator, [1, 1, 1, 1, 0]), hit(allocator, [2, 2, 2, 2, 0]), allocator.stats().evictions)


def test_a_hit_makes_recent() -> None:
    """A prefix that was opened again outlives one that was not."""
    allocator = BlockAllocator(6, 2)
    store(allocator, [1, 1, 1, 1])
    store(allocator, [2, 2, 2, 2])
    hit(allocator, [1, 1, 1, 1, 0])
    fill(allocator, [9, 9, 9, 9])

    assert (4, 2) == (hit(allocator, [1, 1, 1, 1, 0]), hit(allocator, [2, 2, 2, 2, 0]))


def test_producer_need_not_end() -> None:
    """Pages can be found once committed, while their producer runs; never before."""
    allocator = BlockAllocator(16, 2)
    producer = allocator.open(range(6))
    producer.reserve(6)

    assert 0 == hit(allocator, range(6))

    producer.commit(range(4))

    assert 4 == hit(allocator, range(6))


def test_rejected_drafts_are_not_found() -> None:
    """Tokens reserved but not committed never reach the index."""
    allocator = BlockAllocator(16, 2)
    sequence = fill(allocator, [1, 2])
    sequence.reserve(4)
    sequence.commit([3])

    assert 3 - 1 == hit(allocator, [1, 2, 3, 4, 5, 6])


def test_long_runs_split_where_prompts_part() -> None:
    """Prompts that part at any page each find their whole own path."""
    allocator = BlockAllocator(256, 2)
    base = list(range(20))
    prompts = [[*base[:at], 99, 98, 97, 96] for at in (0, 2, 4, 10, 18, 20)] + [base]
    for prompt in prompts:
        store(allocator, prompt)
        allocator.check()

    assert [len(prompt) for prompt in prompts] == [hit(allocator, [*prompt, 1]) for prompt in prompts]


def test_prefix_cache_off() -> None:
    """Without a prefix cache nothing is found and nothing is idle."""
    allocator = BlockAllocator(16, 2, prefix_cache=False)
    store(allocator, range(8))
    fork = fill(allocator, range(8)).fork()
    fork.truncate(3)
    extend(allocator, fork, [3, 4])
    allocator.check()

    assert (0, 0, False) == (hit(allocator, range(8)), allocator.stats().idle, allocator.prefix_cache)


NAMESPACES = [
    None,
    "7",
    7,
    True,
    1,
    1.0,
    ("7",),
    Namespace(),
    Namespace(tenant="7"),
    Namespace(adapter="7"),
    Namespace(tenant="7", adapter="7"),
    Namespace(adapter=("7", 1)),
    Namespace(adapter=("7", True)),
    ("7", None),
]


def test_namespaces_share_nothing() -> None:
    """No namespace finds another's pages, however alike their keys are in Python."""
    allocator = BlockAllocator(64, 2)
    for namespace in NAMESPACES:
        assert 0 == hit(allocator, range(4), namespace=namespace)
        store(allocator, range(4), namespace=namespace)
        assert 3 == hit(allocator, range(4), namespace=namespace)


def test_namespaces_leave_nothing_behind() -> None:
    """A namespace is forgotten with its last page and sequence."""
    allocator = BlockAllocator(4, 2)
    for tenant in range(100):
        store(allocator, [1, 2, 3], namespace=Namespace(tenant=tenant))

    assert len(allocator.ledger.index.roots) <= 3


def test_scrubs_name_pages_that_change_namespace() -> None:
    """A page is reported when it goes from one namespace to another, not at its first use nor within one."""
    allocator = BlockAllocator(4, 2, prefix_cache=False)
    keeper_a, keeper_b = allocator.open([], namespace="a"), allocator.open([], namespace="b")
    extend(allocator, keeper_a, [1, 1])

    assert [] == allocator.take_scrubs().tolist()

    keeper_a.truncate(0)
    extend(allocator, keeper_a, [1, 1])

    assert [] == allocator.take_scrubs().tolist()

    keeper_a.truncate(0)
    keeper_b.reserve(4)

    assert ([1], []) == (allocator.take_scrubs().tolist(), allocator.take_scrubs().tolist())


def test_a_namespace_that_comes_again_scrubs_nothing_of_its_own() -> None:
    """Pages that one namespace alone has used are not reported, even where it was forgotten in between."""
    allocator = BlockAllocator(4, 2, prefix_cache=False)
    for _ in range(3):
        store(allocator, [1, 2, 3], namespace="a")

    assert [] == allocator.take_scrubs().tolist()

    store(allocator, [1, 2, 3], namespace="b")

    assert [1, 2] == sorted(allocator.take_scrubs().tolist())


MEDIA_PROMPT = [1, 2, 3, 4, 9, 9, 9, 9, 9, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "media",
    [
        [(4, 5, "other")],
        [(4, 5, b"digest")],
        [(3, 6, "digest")],
        [(4, 4, "digest")],
        [],
        [(4, 5, "digest"), (9, 1, "x")],
    ],
)
def test_media_join_the_key(media: list[tuple[int, int, str]]) -> None:
    """Pages that a media span overlaps, and all after them, are found only with the same media at the same place."""
    allocator = BlockAllocator(32, 2)
    store(allocator, MEDIA_PROMPT, media=[(4, 5, "digest")])

    assert 12 == hit(allocator, MEDIA_PROMPT, media=[(4, 5, "digest")])
    assert hit(allocator, MEDIA_PROMPT, media=media) in ((8,) if len(media) == 2 else (2, 4))


def test_media_survive_splits_and_cuts() -> None:
    """Prompts with the same picture share its pages and part after it; a cut before the picture forgets it."""
    allocator = BlockAllocator(64, 2)
    picture = [(2, 4, b"cat")]
    store(allocator, [1, 2, 9, 9, 9, 9, 3, 4, 5, 6], media=picture)
    store(allocator, [1, 2, 9, 9, 9, 9, 7, 7], media=picture)
    allocator.check()

    assert 6 == hit(allocator, [1, 2, 9, 9, 9, 9, 8, 8], media=picture)

    sequence = fill(allocator, [1, 2, 9, 9, 9, 9, 3, 4, 5, 6], media=picture)
    sequence.truncate(2)
    extend(allocator, sequence, [9, 9, 9, 9])
    allocator.check()

    assert (6, 6) == (hit(allocator, [1, 2, 9, 9, 9, 9, 1]), hit(allocator, [1, 2, 9, 9, 9, 9, 1], media=picture))


def test_reset_with_nothing_open() -> None:
    """A reset frees all idle pages and says so."""
    allocator = BlockAllocator(16, 2)
    store(allocator, range(8))
    report = allocator.reset_prefix_cache()

    assert (4, 0, True) == (report.dropped, report.still_held, bool(report))
    assert (0, 0) == (hit(allocator, range(8)), allocator.stats().idle)


def test_reset_with_a_copy_pending() -> None:
    """The copy still runs, its source is freed afterwards."""
    allocator = BlockAllocator(16, 4)
    store(allocator, range(8))
    sequence = allocator.open([0, 1, 2, 9, 9])
    sequence.reserve(2)
    allocator.reset_prefix_cache()
    allocator.check()

    assert [(1, int(sequence.block_table()[0]))] == run_copies(allocator)

    sequence.commit([9, 9])
    allocator.check()

    assert (2, 0) == (allocator.stats().in_use, hit(allocator, range(8)))


def test_prompt_cut_to_nothing_is_clean_again() -> None:
    """A sequence from before a reset that was cut to nothing computes new KV, which may be found."""
    allocator = BlockAllocator(16, 2)
    sequence = fill(allocator, [1, 2, 3, 4])
    allocator.reset_prefix_cache()
    sequence.truncate(0)
    extend(allocator, sequence, [1, 2, 3, 4])
    allocator.check()

    assert 4 == hit(allocator, [1, 2, 3, 4, 5])

"""Each policy evicts what its paper says: hand traces with exact victims, and random ones against plain lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pagedkv.allocator.eviction import make_policy
from pagedkv.allocator.policies import ARC, LFU, LRU, S3FIFO, SLRU, Priority
from pagedkv.allocator.policies.ordered import OrderedPages
from tests.allocator.paper_caches import PaperARC, PaperLFU, PaperS3FIFO, PaperSLRU, PolicyCache, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 5
traces = st.lists(st.integers(0, 9), min_size=20, max_size=80)
few = settings(max_examples=150, deadline=None)


class Cache(Protocol):
    """Anything with ``access``."""

    def access(self, key: int) -> int | None:
        """Use a key and return the key evicted for it."""


def evictions(cache: Cache, trace: list[int]) -> list[int | None]:
    """Run a trace and return what was evicted at each access."""
    return [cache.access(key) for key in trace]


def filled(trace: list[int]) -> list[int]:
    """Return the trace after five accesses that fill the cache without a hit."""
    return [100, 101, 102, 103, 104, *trace]


@few
@given(traces)
def test_slru_is_the_papers(trace: list[int]) -> None:
    """With a full cache, bounding the protected segment at evictions is bounding it at each promotion."""
    expected = evictions(PaperSLRU(CAPACITY, protected=3), filled(trace))

    assert expected == evictions(PolicyCache(SLRU(protected=0.6), CAPACITY), filled(trace))


@few
@given(traces, st.booleans())
def test_lfu_is_the_papers(trace: list[int], ageing: bool) -> None:
    """With and without ageing, the lowest value goes, the least recent first."""
    expected = evictions(PaperLFU(CAPACITY, ageing), trace)

    assert expected == evictions(PolicyCache(LFU(ageing=ageing), CAPACITY), trace)


@few
@given(traces)
def test_arc_is_the_papers(trace: list[int]) -> None:
    """Lists, ghosts and target move as in the paper's algorithm."""
    expected = evictions(PaperARC(CAPACITY), filled(trace))

    assert expected == evictions(PolicyCache(ARC(), CAPACITY), filled(trace))


@few
@given(traces, st.sampled_from([0.1, 0.4, 0.8]))
def test_s3fifo_is_the_papers(trace: list[int], small: float) -> None:
    """Small, main and ghost queue move as in the paper's algorithm, for any split."""
    expected = evictions(PaperS3FIFO(CAPACITY, small, ghosts=0.9), filled(trace))

    assert expected == evictions(PolicyCache(S3FIFO(small, ghosts=0.9), CAPACITY), filled(trace))


def test_lru_by_hand() -> None:
    """The least recently released goes first."""
    cache = PolicyCache(LRU(), 3)

    assert [None, None, None, None, 2, 3] == evictions(cache, [1, 2, 3, 1, 4, 5])
    assert [1, 4, 5] == cache.victims(3)


def test_slru_by_hand() -> None:
    """Hit pages outlive newer ones that were not; when too many are protected, the oldest returns to probation."""
    cache = PolicyCache(SLRU(protected=0.5), 4)

    evictions(cache, [1, 2, 3, 4, 1, 2])
    assert [3, 4, 1, 2] == cache.victims(4)
    evictions(cache, [3])  # protected: 1, 2, 3, one too many
    assert 4 == cache.access(5)
    assert [1, 5, 2, 3] == cache.victims(4)
    assert 1 == cache.access(6)


def test_lfu_by_hand() -> None:
    """Fewest uses first, the least recent of these first; ageing lets newcomers overtake what was popular once."""
    plain, ageing = PolicyCache(LFU(ageing=False), 3), PolicyCache(LFU(), 3)
    for cache in (plain, ageing):
        evictions(cache, [1, 1, 1, 2, 2, 3])
        assert [3, 2, 1] == cache.victims(3)

    assert [3, 4, 5, 6, 7] == evictions(plain, [4, 5, 6, 7, 8])
    assert [3, 2, 4, 1, 5] == evictions(ageing, [4, 5, 6, 7, 8])


def test_arc_by_hand() -> None:
    """Pages seen once go first until a ghost says that there were too few of them."""
    cache = PolicyCache(ARC(), 4)

    assert [None, None, None, None, None, None] == evictions(cache, [1, 2, 1, 2, 3, 4])
    assert 3 == cache.access(5)  # T1: 4 5, T2: 1 2, B1: 3
    assert 4 == cache.access(3)  # room came from T1; the ghost of 3 raises the target to 1, and 3 goes to T2
    assert [1, 2, 3, 5] == cache.victims(4)  # T1 has 5 alone, its target: now T2 pays


def test_arc_takes_back_what_the_other_ghosts_taught() -> None:
    """A ghost of pages seen again lowers the target that a ghost of pages seen once had raised."""
    cache = PolicyCache(ARC(), 4)
    evictions(cache, [1, 2, 1, 2, 3, 4, 5, 3])

    assert 1 == cache.access(6)  # T1: 5 6, T2: 2 3, B1: 4, B2: 1
    assert 5 == cache.access(1)  # T1 was above its target of 1; the ghost of 1 lowers it to 0
    assert [6, 2, 3, 1] == cache.victims(4)


def test_s3fifo_by_hand() -> None:
    """One-time pages leave by the small queue, pages hit twice move to main, ghosts enter main at once."""
    cache = PolicyCache(S3FIFO(small=0.25), 4)

    evictions(cache, [1, 2, 3, 4, 1, 1, 2])
    assert [2, 3, 4, 1] == cache.victims(4)  # 1 was hit twice and is passed over; one hit is not enough
    assert [2, 3, 4] == evictions(cache, [5, 6, 7])
    assert 5 == cache.access(3)  # a ghost
    assert [6, 7, 1, 3] == cache.victims(4)


def test_s3fifo_gives_main_pages_a_round_per_hit() -> None:
    """The oldest of the main queue is put back once for each hit, at most three times, then it goes."""
    cache = PolicyCache(S3FIFO(small=0.3), 3)
    evictions(cache, [1, 1, 1, 2, 2, 2, 3, 4])  # 3 goes; 1 and 2 are in main, their hits forgotten

    assert [4, 1, 2] == cache.victims(3)
    evictions(cache, [1, 1])
    assert [4, 2, 1] == cache.victims(3)


def test_priority_by_hand() -> None:
    """Lowest priority first, then the least recently released; a mark moves a page at once, a new one replaces it."""
    policy = Priority(default=50)
    cache = PolicyCache(policy, 5)
    policy.prioritise([digest_of(3)], 0)
    policy.prioritise([digest_of(1)], 100)
    evictions(cache, [1, 2, 3, 4, 5])

    assert [3, 2, 4, 5, 1] == cache.victims(5)
    policy.prioritise([digest_of(2), digest_of(4)], 60)
    assert [3, 5, 2, 4, 1] == cache.victims(5)
    policy.prioritise([digest_of(1)], 50)
    assert [3, 1, 5, 2, 4] == cache.victims(5)


def test_priority_ends_with_its_time() -> None:
    """A mark holds for ``ttl`` of the clock; then the page stands where it would have stood without one."""
    now = 0.0
    policy = Priority(clock=lambda: now)
    cache = PolicyCache(policy, 4)
    policy.prioritise([digest_of(1)], 90, ttl=10)
    policy.prioritise([digest_of(2)], 80, ttl=20)
    policy.prioritise([digest_of(4)], 0, ttl=20)
    evictions(cache, [1, 2, 3, 4])

    assert [4, 3, 2, 1] == cache.victims(4)
    now = 9.5
    assert [4, 3, 2, 1] == cache.victims(4)
    now = 10.0
    assert [4, 1, 3, 2] == cache.victims(4)
    policy.prioritise([digest_of(2)], 80, ttl=5)  # until 15 now, not 20
    now = 15.0
    assert [4, 1, 2, 3] == cache.victims(4)
    now = 20.0
    assert [1, 2, 3, 4] == cache.victims(4)


def test_priority_counts_calls_without_a_clock() -> None:
    """By default time is the number of calls to the policy, so the same calls expire the same marks everywhere."""
    policy = Priority()
    cache = PolicyCache(policy, 3)
    policy.prioritise([digest_of(1)], 90, ttl=6)
    evictions(cache, [1, 2])  # stored and released: two calls each

    assert [2, 1] == cache.victims(2)
    cache.access(3)
    assert [1, 2, 3] == cache.victims(3)


def test_priority_outlives_eviction() -> None:
    """A mark is on content: stored again, on another page, it has its priority again."""
    policy = Priority()
    cache = PolicyCache(policy, 2)
    policy.prioritise([digest_of(1)], 90)
    policy.prioritise([digest_of(2), digest_of(3)], 95)

    assert [None, None, 1] == evictions(cache, [1, 2, 3])
    assert [2, None] == evictions(cache, [1, 3])
    assert 1 == cache.access(4)


def test_priority_keeps_a_bounded_number_of_marks() -> None:
    """Beyond ``max_marks`` the oldest marks are dropped, and with them their effect; expiries do not pile up."""
    policy = Priority(max_marks=2)
    cache = PolicyCache(policy, 3)
    evictions(cache, [1, 2, 3])
    policy.prioritise([digest_of(1), digest_of(2), digest_of(3)], 90)
    assert [1, 2, 3] == cache.victims(3)
    policy.prioritise([digest_of(1)], 90)
    assert [2, 1, 3] == cache.victims(3)

    for _ in range(1000):
        policy.prioritise([digest_of(1)], 90, ttl=10**6)
    assert len(policy._expiries) < 100


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SLRU(protected=1.5), ValueError, "protected must be from 0 to 1, was 1.5"),
        (lambda: S3FIFO(small=-0.1), ValueError, "small must be from 0 to 1, was -0.1"),
        (lambda: S3FIFO(ghosts=2), ValueError, "ghosts must be from 0 to 1, was 2"),
        (lambda: Priority(default=101), ValueError, "default must be 0 to 100, was 101"),
        (lambda: Priority(max_marks=0), ValueError, "max_marks must be at least 1, was 0"),
        (lambda: Priority().prioritise([b"x" * 16], -1), ValueError, "priority must be 0 to 100, was -1"),
        (lambda: Priority().prioritise([b"x" * 16], 50, ttl=0), ValueError, "ttl must be above 0 or None, was 0"),
        (lambda: Priority().prioritise([b"x" * 16], 50, ttl=float("nan")), ValueError, "ttl must be above 0"),
        (lambda: Priority().prioritise([b"short"], 50), TypeError, "identities must be digests of 16 bytes"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    """An argument that is not what it must be is named, with what it was."""
    with pytest.raises(error, match=message):
        call()


def test_refused_marks_change_nothing() -> None:
    """One bad digest among good ones: none is marked."""
    policy = Priority()
    cache = PolicyCache(policy, 2)
    evictions(cache, [1, 2])
    with pytest.raises(TypeError):
        policy.prioritise([digest_of(1), b"bad"], 90)

    assert [1, 2] == cache.victims(2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("lru", LRU), ("slru", SLRU), ("lfu", LFU), ("arc", ARC), ("s3fifo", S3FIFO), ("priority", Priority)],
)
def test_policies_have_names(name: str, kind: type) -> None:
    """Every policy can be had by name, a new one each time."""
    assert type(make_policy(name)) is kind
    assert make_policy(name) is not make_policy(name)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(-3, 3)), max_size=30))
def test_ordered_pages_are_a_sorted_list(changes: list[tuple[int, int]]) -> None:
    """However many runs there are, pages come in the order of rank and ticket, and discarding leaves the rest."""
    ordered, naive = OrderedPages(), dict[int, tuple[float, int]]()
    for page in range(1, 1500):
        rank = (page * 7919) % 13
        ordered.add(page, rank, page)
        naive[page] = (rank, page)
    for ticket, (page, rank) in enumerate(changes, start=2000):
        if rank < 0:
            ordered.discard(page)
            naive.pop(page, None)
        else:
            ordered.add(page, rank, ticket)
            naive[page] = (rank, ticket)

    assert sorted(naive, key=lambda page: naive[page]) == list(ordered)
    assert len(naive) == len(ordered)
    for page in list(naive):
        ordered.discard(page)
    assert [] == list(ordered)

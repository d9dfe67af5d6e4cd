"""Policies on a real allocator: what they are told, what they keep through a scan, and whom priority protects."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pagedkv.allocator import LRU, BlockAllocator, Namespace
from pagedkv.allocator.content_hash import content_hashes, namespace_digest
from pagedkv.allocator.policies import Priority

if TYPE_CHECKING:
    from collections.abc import Hashable

SIZE = 4


def serve(allocator: BlockAllocator, tokens: list[int], namespace: Hashable = None) -> int:
    """Run one request to its end; return how many of its tokens were stored already."""
    with allocator.open(tokens, namespace=namespace) as sequence:
        found = sequence.num_tokens
        sequence.reserve(len(tokens) - found)
        allocator.take_copies()
        allocator.acknowledge_copies()
        sequence.commit(tokens[found:])
        allocator.check()
    return found


def prompt_of(number: int, pages: int) -> list[int]:
    """Return a prompt that begins like no other: ``pages`` full pages and one token."""
    return [number * 1000 + at for at in range(pages * SIZE)] + [7]


@pytest.mark.parametrize("policy", ["lru", "slru", "lfu", "arc", "s3fifo"])
def test_scan(policy: str) -> None:
    """A prefix that was used often survives a scan three times the pool, except under LRU."""
    allocator = BlockAllocator(32, SIZE, policy=policy)
    hot = prompt_of(1, 6)
    for turn in range(8):
        serve(allocator, [*hot, turn])
    for number in range(2, 20):
        serve(allocator, prompt_of(number, 5))

    assert (0 if policy == "lru" else 6 * SIZE) == serve(allocator, [*hot, 99]) // SIZE * SIZE
    assert allocator.stats().evictions > 0


@pytest.mark.parametrize("policy", ["slru", "lfu", "arc", "s3fifo"])
def test_a_new_favourite_takes_over(policy: str) -> None:
    """Old fame does not last: when the hot prefix changes for good, the new one is kept through scans."""
    allocator = BlockAllocator(32, SIZE, policy=policy)
    for favourite in (1, 2):
        hot = prompt_of(favourite, 12)
        for round_ in range(8):
            serve(allocator, [*hot, round_])
            for number in range(2):
                serve(allocator, prompt_of(100 * favourite + 10 * round_ + number, 3))
        for number in range(8):
            serve(allocator, prompt_of(100 * favourite + 80 + number, 3))

        assert 12 * SIZE <= serve(allocator, [*hot, 99])


def test_arc_learns_that_recency_pays() -> None:
    """Under a loop a little larger than what is left beside old favourites, ghosts win the loop its room."""
    allocator = BlockAllocator(26, SIZE, policy="arc")
    for turn in range(3):
        serve(allocator, [*prompt_of(1, 12), turn])
    found = [[serve(allocator, prompt_of(number, 3)) for number in range(2, 8)] for _ in range(6)]

    assert [0] * 6 == found[0]
    assert all(hits >= 3 * SIZE for hits in found[-1])


class Spy(LRU):
    """LRU that writes down what it is told of contents."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: dict[int, bytes] = {}
        self.ever: list[bytes] = []

    def stored(self, pages: list[int], identities: list[bytes]) -> None:
        """Remember who holds what; a page that is stored was not known before."""
        assert not set(pages) & set(self.holds)
        self.holds.update(zip(pages, identities, strict=True))
        self.ever += identities

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Forget who held what; only candidates are evicted."""
        assert not evicted or set(pages) <= set(self._release_of)
        super().removed(pages, evicted)
        for page in pages:
            del self.holds[page]


few_tokens = st.integers(0, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(few_tokens, min_size=1, max_size=14), st.sampled_from([None, "a"])), max_size=12))
def test_policies_are_told_the_content_hashes(requests: list[tuple[list[int], str | None]]) -> None:
    """What a policy hears at each commit are the digests that anybody can make of the same tokens."""
    spy = Spy()
    allocator = BlockAllocator(9, 2, policy=spy)
    for tokens, namespace in requests:
        with allocator.open(tokens, namespace=namespace) as sequence:
            for token in tokens[sequence.num_tokens :]:
                sequence.reserve(1)
                allocator.take_copies()
                allocator.acknowledge_copies()
                sequence.commit([token])
            expected = content_hashes(tokens, 2, namespace=namespace)
            pages = sequence.block_table()[: len(expected)].tolist()

            assert expected == [spy.holds[page] for page in pages]
        assert allocator.stats().idle == len(spy.holds) == len(spy._release_of)
    allocator.reset_prefix_cache()
    assert {} == spy.holds


def test_media_are_part_of_the_content() -> None:
    """The same tokens with another picture are another content, from the first page it touches on."""
    spy = Spy()
    allocator = BlockAllocator(20, 2, policy=spy)
    tokens, media = [1, 2, 3, 3, 4, 5, 6, 7], [(3, 1, b"cat")]
    with allocator.open(tokens, media=media) as sequence:
        sequence.reserve(8)
        sequence.commit(tokens)
        pages = sequence.block_table().tolist()

        assert [spy.holds[page] for page in pages] == content_hashes(tokens, 2, media=media)

    plain = content_hashes(tokens, 2)
    dog = content_hashes(tokens, 2, media=[(3, 1, b"dog")])
    cat = content_hashes(tokens, 2, media=media)
    assert plain[0] == dog[0] == cat[0]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(plain[1:], dog[1:], cat[1:], strict=True))
    assert content_hashes(tokens, 2, media=[(3, 1, None)]) == plain[:1]


def test_policies_without_stored_make_no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """LRU pays nothing for what it does not use."""

    def refuse(*_: object, **__: object) -> bytes:
        raise AssertionError("a digest was made")

    monkeypatch.setattr("pagedkv.allocator.content_hash.blake2b", refuse)
    allocator = BlockAllocator(9, SIZE, policy="lru")

    assert 0 == serve(allocator, prompt_of(1, 2), namespace=object())
    with pytest.raises(AssertionError, match="a digest was made"):
        serve(BlockAllocator(9, SIZE, policy="arc"), prompt_of(1, 2))


def test_namespaces_without_a_stable_hash_are_refused() -> None:
    """Where the policy needs digests, a namespace that has none is refused at the door; nothing has changed."""
    allocator = BlockAllocator(9, SIZE, policy="arc")
    serve(allocator, prompt_of(1, 2), namespace="a")
    before = allocator.stats()
    with pytest.raises(TypeError, match=r"namespace must be made of .* had frozenset"):
        allocator.open(prompt_of(1, 2), namespace=("a", frozenset({1})))

    assert before == allocator.stats()
    allocator.check()


def test_priority_protects_a_marked_prefix() -> None:
    """A system prompt marked before it was ever stored survives a scan for its time to live, and no longer."""
    now = 0.0
    policy = Priority(clock=lambda: now)
    allocator = BlockAllocator(32, SIZE, policy=policy)
    system = prompt_of(1, 6)
    tenant = Namespace(tenant="7")
    policy.prioritise(content_hashes(system, SIZE, namespace=tenant), 90, ttl=100)
    serve(allocator, system, namespace=tenant)
    for number in range(2, 20):
        serve(allocator, prompt_of(number, 5))
    assert 6 * SIZE <= serve(allocator, [*system, 8], namespace=tenant)

    now = 100.0
    for number in range(20, 40):
        serve(allocator, prompt_of(number, 5))
    assert 0 == serve(allocator, [*system, 9], namespace=tenant)


def test_low_priority_goes_first() -> None:
    """A document marked as not worth keeping makes room before older pages do; what precedes it stays."""
    policy = Priority()
    allocator = BlockAllocator(16, SIZE, policy=policy)
    older, document = prompt_of(1, 4), prompt_of(2, 8)
    serve(allocator, older)
    policy.prioritise(content_hashes(document, SIZE)[2:], 0)
    serve(allocator, document)
    serve(allocator, prompt_of(3, 6))

    assert 4 * SIZE <= serve(allocator, [*older, 1])
    assert 2 * SIZE <= allocator.open(document).num_tokens < 8 * SIZE


def test_content_hashes_are_stable() -> None:
    """The digests are a format that others store: these were made once and must never change."""
    namespace = Namespace(tenant="7", adapter=("lora-3", 2))
    digests = content_hashes([1, 2, 3, 4, 5], 2, namespace=namespace, media=[(2, 1, "picture")])

    assert GOLDEN == [digest.hex() for digest in digests]
    program = (
        "from pagedkv.allocator import Namespace; from pagedkv.allocator.content_hash import content_hashes;"
        "n = Namespace(tenant='7', adapter=('lora-3', 2));"
        "print([d.hex() for d in content_hashes([1, 2, 3, 4, 5], 2, namespace=n, media=[(2, 1, 'picture')])])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert str(GOLDEN) == result.stdout.strip()


@settings(max_examples=100, deadline=None)
@given(st.lists(few_tokens, max_size=9), st.lists(few_tokens, max_size=9), st.integers(1, 4))
def test_digests_are_equal_as_far_as_prompts_are(left: list[int], right: list[int], page_size: int) -> None:
    """Two prompts have the same digests exactly for the full pages of their common beginning."""
    a, b = content_hashes(left, page_size), content_hashes(right, page_size)
    common = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))

    assert len(left) // page_size == len(a)
    assert common // page_size == sum(x == y for x, y in zip(a, b, strict=False))
    assert len(set(a + b)) == len(a) + len(b) - common // page_size


def test_different_namespaces_have_different_digests() -> None:
    """As in the index: the type counts, a tuple is not its contents, nothing imitates anything else."""
    values: list[Hashable] = [
        *(None, False, True, 0, 1, -1, 2**70, 0.0, 1.0, 0.5, "", "1", "None", "a", "b", b"", b"1", b"a"),
        *((), ((),), (1,), (1, 1), ((1,), 1), ("ab",), ("a", "b"), (None,)),
        *(Namespace(), Namespace(tenant="a"), Namespace(adapter="a"), Namespace(tenant=("a", 1)), ("a", None)),
        Namespace(tenant="a", adapter="b"),
    ]

    assert len(values) == len({namespace_digest(value) for value in values})
    assert namespace_digest(0.0) == namespace_digest(-0.0)


@pytest.mark.parametrize(
    ("namespace", "error", "message"),
    [
        (frozenset(), TypeError, "namespace must be made of .* had frozenset"),
        ((1, object()), TypeError, "had object"),
        (Namespace(tenant=range(3)), TypeError, "had range"),
        (float("nan"), ValueError, "namespace must not hold a NaN"),
    ],
)
def test_namespaces_that_mean_nothing_elsewhere(namespace: Hashable, error: type[Exception], message: str) -> None:
    """What cannot be the same in another process has no digest."""
    with pytest.raises(error, match=message):
        namespace_digest(namespace)


def test_content_hashes_refuse_a_page_of_no_tokens() -> None:
    """A page has at least one slot."""
    with pytest.raises(ValueError, match="page_size must be at least 1, was 0"):
        content_hashes([1, 2], 0)


GOLDEN = ["ce3d0f593d85e76d8eec88a34e325345", "b3705ae3cc70ef8ce18783920cfb1186"]


@pytest.mark.parametrize("pages", [2, 12])
def test_a_policy_that_gives_too_few_is_named(pages: int) -> None:
    """One victim where more are needed would hand out a page twice; the call raises with nothing changed."""

    class Stingy(LRU):
        def victims(self, count: int) -> list[int]:
            return super().victims(count)[:1]

    allocator = BlockAllocator(17, 2, policy=Stingy())
    with allocator.open(range(32)) as sequence:
        sequence.reserve(32)
        sequence.commit(list(range(32)))
    before = allocator.stats()
    with allocator.open(range(100, 100 + 2 * pages)) as sequence:
        with pytest.raises(ValueError, match=rf"Stingy.victims\({pages}\) must return {pages} of its candidates"):
            sequence.reserve(2 * pages)
        assert sequence.num_reserved == 0
    assert allocator.stats().idle == before.idle

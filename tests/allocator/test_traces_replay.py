"""The replay: a closed loop over the real allocator, and Belady's rule as one more policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.allocator import LRU
from pagedkv.allocator.traces import Belady, Ids, NextUses, ReplayResult, Request, replay
from pagedkv.allocator.traces.belady import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIQUE = 10**6


def request(*prompt: int, output: int = 1, name: int = 0, namespace: int | None = None) -> Request:
    """Return a request whose output tokens are like no other ``name``'s."""
    new = [UNIQUE + 1000 * name + i for i in range(output)]
    return Request(0.0, Ids(prompt), Ids(new), namespace)


def letters(words: str, size: int = 4, output: int = 1) -> list[Request]:
    """Return a request per word; a letter stands for a page of its own tokens, and one token more ends each prompt."""
    return [
        request(*(size * ord(c) + i for c in word for i in range(size)), 9, output=output, name=number)
        for number, word in enumerate(words.split())
    ]


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12)


@given(texts=prompts, page_size=st.integers(1, 3), now=st.integers(0, 12))
def test_next_uses_are_those_of_a_search(texts: list[list[int]], page_size: int, now: int) -> None:
    """Per page: the first request after ``now`` whose prompt has the same beginning up to the page's end."""
    uses = NextUses([request(*text) for text in texts], page_size)
    for index, text in enumerate(texts):
        ends = range(page_size, len(text) + 1, page_size)
        later = range(max(now, index) + 1, len(texts))
        expected = [next((j for j in later if texts[j][:end] == text[:end]), NEVER) for end in ends]
        assert expected == uses.after(index, max(now, index))


@given(texts=prompts, page_size=st.integers(1, 3))
def test_seen_tokens_are_whole_pages_of_earlier_prompts(texts: list[list[int]], page_size: int) -> None:
    """An unlimited cache would have the whole pages that an earlier prompt began with, but never the last token."""
    uses = NextUses([request(*text) for text in texts], page_size)
    expected = []
    for index, text in enumerate(texts):
        ends = range(page_size, len(text) + 1, page_size)
        seen = [end for end in ends if any(other[:end] == text[:end] for other in texts[:index])]
        expected.append(min(max(seen, default=0), len(text) - 1))

    assert expected == uses.seen_tokens


def test_outputs_count_where_they_are_known() -> None:
    """A prompt that goes on from an earlier request's output has been stored before, if outputs are the file's own."""
    first = Request(0.0, Ids([1, 2]), Ids([3, 4]))
    second = Request(0.0, Ids([1, 2, 3, 4, 5]), Ids([6]))

    assert [0, 2] == NextUses([first, second], 2).seen_tokens
    assert [0, 4] == NextUses([first, second], 2, outputs_known=True).seen_tokens
    assert [1, 1] == NextUses([first, second], 2, outputs_known=True).after(0, 0)


def test_namespaces_and_media_are_part_of_what_is_alike() -> None:
    """The same tokens in another namespace, with other media or with media without a digest are other pages."""
    tokens = Ids(range(8))
    plain = Request(0.0, tokens, Ids([]))
    others = [
        Request(0.0, tokens, Ids([]), 1),
        Request(0.0, tokens, Ids([]), 2),
        Request(0.0, tokens, Ids([]), None, ((4, 2, "a"),)),
        Request(0.0, tokens, Ids([]), None, ((4, 2, "b"),)),
        Request(0.0, tokens, Ids([]), None, ((4, 2, None),)),
        Request(0.0, tokens, Ids([]), None, ((4, 2, None),)),
    ]

    assert [0, 0, 0, 4, 4, 4, 4] == NextUses([plain, *others], 4).seen_tokens
    assert 7 == NextUses([others[2], others[2]], 4).seen_tokens[1]


def test_belady_gives_up_what_is_used_last() -> None:
    """Victims are candidates by descending next use, equal ones by release; held and removed ones are none."""
    policy = Belady()
    policy.expect([1, 2, 3, 4], [7, 9, 7, 2])
    policy.released([4, 3, 2, 1])
    policy.released([5])

    assert [5, 2, 3, 1, 4] == policy.victims(5)
    policy.held([2])
    policy.removed([5])
    assert [3, 1] == policy.victims(2)
    policy.released([5])
    assert [5, 3] == policy.victims(2)


def test_belady_keeps_what_lru_gives_up() -> None:
    """A loop over one page more than fits: LRU never hits, Belady keeps most of it (Belady, 1966)."""
    requests = letters("A B C D A B C D A B C D A B C D")
    lru, belady = (replay(requests, num_pages=4, page_size=4, policy=p, running=1) for p in ("lru", "belady"))

    assert 0 == lru.hit_tokens
    assert lru.hit_tokens < belady.hit_tokens
    assert lru.regret(belady) == pytest.approx(belady.hit_rate)
    assert lru.recomputed_tokens - belady.recomputed_tokens == belady.hit_tokens


def best_hits(pages: Sequence[str], room: int) -> int:
    """Return the most hits of any way to keep ``room`` pages, the one just used among them, by trying them all."""
    states: dict[frozenset[str], int] = {frozenset(): 0}
    for page in pages:
        following: dict[frozenset[str], int] = {}
        for kept, hits in states.items():
            held = kept | {page}
            choices = [held] if len(held) <= room else [held - {other} for other in kept]
            for choice in choices:
                following[choice] = max(following.get(choice, 0), hits + (page in kept))
        states = following
    return max(states.values())


@settings(max_examples=60)
@given(word=st.text("ABCDE", min_size=1, max_size=14), room=st.integers(1, 4))
def test_belady_is_the_best_there_is_for_single_pages(word: str, room: int) -> None:
    """Where every prompt is one page, farthest next use gives exactly the most hits that any policy can have."""
    # One page beside: the running request's last prompt token.
    result = replay(letters(" ".join(word), output=0), num_pages=room + 1, page_size=4, policy="belady", running=1)

    assert 4 * best_hits(word, room) == result.hit_tokens


def test_all_is_counted_in_a_pool_without_pressure() -> None:
    """A case counted by hand: two requests alike, one at a time."""
    requests = [request(1, 2, 3, 4, 5, output=3, name=1), request(1, 2, 3, 4, 6, output=3, name=2)]
    told: list[int] = []
    result = replay(requests, num_pages=10, page_size=4, running=1, progress=told.append)

    assert ReplayResult(
        policy="lru", num_pages=10, page_size=4, requests=2, refused=0, prompt_tokens=10, hit_tokens=4,
        recomputed_tokens=0, preemptions=0, evictions=0, rounds=6, occupancy=0.2, peak=0.2, waste=result.waste,
    ) == result  # fmt: skip
    assert pytest.approx(0.25) == result.waste
    assert [1, 1] == told


def test_a_full_pool_preempts_the_youngest_and_serves_all() -> None:
    """Two requests that fit together at first and not at their end: one gives way, comes back once and ends."""
    requests = [request(*range(4), output=8, name=1), request(*range(10, 14), output=8, name=2)]
    result = replay(requests, num_pages=4, page_size=4, running=2)

    assert (2, 0, 1) == (result.requests, result.refused, result.preemptions)
    assert 1.0 == result.peak
    assert result.recomputed_tokens > 0


def test_what_is_longer_than_the_pool_is_refused() -> None:
    """A request that the empty pool could not hold is refused and counted; the others are served."""
    requests = [request(*range(30)), request(1, 2), request(*range(12), output=5)]
    told: list[int] = []
    result = replay(requests, num_pages=4, page_size=4, progress=told.append)

    assert (1, 2) == (result.requests, result.refused)
    assert 3 == sum(told)


def test_a_request_without_output_is_served() -> None:
    """A prompt alone is stored and given back in its round."""
    result = replay([request(1, 2, 3, output=0)], num_pages=4, page_size=4)

    assert (1, 1, 3) == (result.requests, result.rounds, result.prompt_tokens)


def test_namespaces_share_nothing_in_a_replay() -> None:
    """The same prompt in two namespaces is stored twice."""
    tokens = range(9)
    result = replay([request(*tokens, namespace=1), request(*tokens, namespace=2)], num_pages=20, page_size=4)

    assert 0 == result.hit_tokens


def test_the_policy_object_itself_runs() -> None:
    """An object of one's own is taken as it is, named by its class, and gives what its name gives."""
    requests = letters("AB AC AD B AB AC")
    mine = replay(requests, num_pages=5, page_size=4, policy=LRU(), running=1)

    assert replay(requests, num_pages=5, page_size=4, policy="lru", running=1) == mine


@settings(max_examples=60)
@given(
    words=st.lists(st.text("ABC", min_size=1, max_size=4), min_size=1, max_size=8),
    output=st.integers(0, 9),
    num_pages=st.integers(1, 12),
    running=st.integers(1, 4),
    policy=st.sampled_from(["lru", "belady"]),
)
def test_every_request_ends_or_is_refused(
    words: list[str], output: int, num_pages: int, running: int, policy: str
) -> None:
    """No load hangs: every request is served or refused, and the counts stay within their bounds."""
    requests = letters(" ".join(words), output=output)
    result = replay(requests, num_pages=num_pages, page_size=4, policy=policy, running=running)
    too_long = sum(-(-r.num_tokens // 4) > num_pages for r in requests)

    assert (len(requests) - too_long, too_long) == (result.requests, result.refused)
    assert 0 <= result.hit_tokens <= result.prompt_tokens
    assert 0 <= result.occupancy <= result.peak <= 1
    assert 0 <= result.waste < 1


@pytest.mark.parametrize(
    ("wrong", "words"), [({"running": 0}, "running"), ({"num_pages": 0}, "num_pages"), ({"policy": "best"}, "policy")]
)
def test_bad_arguments_are_named(wrong: dict[str, object], words: str) -> None:
    """Numbers below one and policies nobody has are refused."""
    arguments: dict[str, object] = {"num_pages": 4, **wrong}

    with pytest.raises(ValueError, match=words):
        replay([request(1)], **arguments)  # type: ignore[arg-type]

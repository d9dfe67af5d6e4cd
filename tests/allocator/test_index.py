"""The index's parts: ordered children, and eviction that a policy cannot spoil."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.allocator import LRU, BlockAllocator
from pagedkv.allocator.children import Children
from pagedkv.allocator.index_node import Node
from tests.allocator.helpers import extend, fill, hit, store


def test_many_children_stay_in_order() -> None:
    """Thousands of keys, added and removed in any order, keep their neighbours right."""
    rng = random.Random(3)
    children, keys = Children(), set[bytes]()
    node = Node(None, b"", 0, b"", [])
    for _ in range(6000):
        key = b"\0" + rng.randbytes(2)
        if key in keys and rng.random() < 0.9:
            del children[key]
            keys.remove(key)
        else:
            children[key] = node
            keys.add(key)

    order = sorted(keys)

    assert order == list(children.in_order())
    assert (len(keys), True) == (len(children), len(children._runs) > 3)

    for _ in range(500):
        probe = b"\0" + rng.randbytes(2)
        before = [key for key in order if key < probe][-1:]
        after = [key for key in order if key >= probe][:1]

        assert before + after == children.neighbours(probe)

    for key in rng.sample(order, len(order)):
        del children[key]

    assert ([], []) == (list(children.in_order()), children.neighbours(b"\0x"))


@given(st.lists(st.binary(min_size=3, max_size=3), max_size=12), st.binary(min_size=3, max_size=3))
@settings(max_examples=200, deadline=None)
def test_a_neighbour_shares_most(keys: list[bytes], probe: bytes) -> None:
    """No key shares a longer prefix with a probe than one of its two neighbours does."""

    def shared(key: bytes) -> int:
        return next((at for at in range(3) if key[at] != probe[at]), 3)

    children = Children()
    for key in keys:
        children[key] = Node(None, key, 0, b"", [])

    assert max(map(shared, keys), default=-1) == max(map(shared, children.neighbours(probe)), default=-1)


class Newest(LRU):
    """Gives up what was released last, parents before children: the worst order there is."""

    def victims(self, count: int) -> list[int]:
        """Return the newest candidates."""
        return super().victims(len(self._release_of))[::-1][:count]


class Shuffled(LRU):
    """Gives up any candidate."""

    def victims(self, count: int) -> list[int]:
        """Return candidates in an order of no meaning."""
        return random.Random(count).sample(super().victims(len(self._release_of)), count)


@pytest.mark.parametrize("policy", [Newest, Shuffled])
def test_children_go_before_parents_whatever_the_policy(policy: type[LRU]) -> None:
    """A policy that names a parent first loses the parent's last descendants in its place; the books stay right."""
    rng = random.Random(4)
    allocator = BlockAllocator(24, 2, policy=policy())
    held = fill(allocator, [0, 0, 0, 0, 1, 1])
    for _ in range(300):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 16))]
        store(allocator, prompt)
        allocator.check()

    assert (6, True) == (hit(allocator, [0, 0, 0, 0, 1, 1, 1]), allocator.stats().evictions > 100)

    extend(allocator, held, [1, 2, 3])
    allocator.check()


def test_a_policy_hears_of_hits() -> None:
    """A policy is told which pages a new sequence found, first block first."""

    class Listening(LRU):
        heard: list[list[int]]

        def hit(self, pages: list[int]) -> None:
            self.heard.append(pages)

    policy = Listening()
    policy.heard = []
    allocator = BlockAllocator(24, 2, policy=policy)
    store(allocator, range(6))
    hit(allocator, range(4))
    hit(allocator, range(7))

    assert [[1, 2], [1, 2, 3]] == policy.heard

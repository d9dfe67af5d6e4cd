"""Belady's rule: the idle page that will be used again last goes first.

Takes the whole order of requests in advance, which no live policy has, and so gives the reference that others are
measured against. It is strong, not a proof of the optimum: a page pays for itself only together with the pages before
it, and requests that wait change when a page is used. Source: Belady, IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import Request

NEVER = 2**62
"""The next use of a page that no later request begins with."""

_Words = npt.NDArray[np.uint64]


def _mixed(words: _Words) -> _Words:
    """Return 64-bit words scrambled one to one (the finaliser of SplitMix64, Steele et al., OOPSLA 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class NextUses:
    """For every full page of every request, the next request whose prompt begins with the same pages.

    Pages are compared by 64-bit sums over all tokens up to their end; a collision would blur the reference and
    nothing else, since the allocator itself compares tokens.

    Attributes:
        seen_tokens: per request the prompt tokens that a cache without limit would have had: whole pages that an
            earlier request began with too, and never all of the prompt.
    """

    def __init__(self, requests: Sequence[Request], page_size: int, *, outputs_known: bool = False) -> None:
        """Look through all requests; outputs count as stored pages where their tokens are known."""
        chains = [_chain(request, index, page_size, outputs_known) for index, request in enumerate(requests)]
        prompt_pages = [len(request.prompt) // page_size for request in requests]
        lengths = np.array([len(chain) for chain in chains], np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._request = np.repeat(np.arange(len(requests)), lengths)
        block = np.arange(self._starts[-1]) - self._starts[self._request]
        in_prompt = block < np.array(prompt_pages, np.int64)[self._request]
        values = np.concatenate(chains) if chains else np.empty(0, np.uint64)
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        same = np.concatenate([ordered[1:] == ordered[:-1], [False]])[: len(order)]
        self._next = _next_of(order, ordered, in_prompt[order])
        seen = np.zeros(len(order), np.bool_)
        seen[order[1:][same[:-1]]] = True
        seen_pages = np.bincount(self._request[seen & in_prompt], minlength=len(requests))
        self.seen_tokens: list[int] = [
            min(int(pages) * page_size, max(len(request.prompt) - 1, 0))
            for pages, request in zip(seen_pages, requests, strict=True)
        ]

    def after(self, request: int, now: int) -> list[int]:
        """Return per full page of ``request`` the first request after request ``now`` that begins with it, or NEVER."""
        at = self._next[self._starts[request] : self._starts[request + 1]]
        while True:
            past = np.flatnonzero((at >= 0) & (self._request[at] <= now))
            if not past.size:
                break
            at = at.copy()
            at[past] = self._next[at[past]]
        return np.where(at >= 0, self._request[at], NEVER).tolist() if at.size else []


def _next_of(order: npt.NDArray[np.int64], values: _Words, used: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return for each place the next place of equal value that is ``used``, or -1; arguments are sorted by value."""
    total = len(order)
    found = np.full(total, -1, np.int64)
    if not total:
        return found
    candidates = np.where(used, np.arange(total), total)
    following = np.minimum.accumulate(candidates[::-1])[::-1]
    following = np.append(following[1:], total)
    real = np.flatnonzero(following < total)
    real = real[values[following[real]] == values[real]]
    found[order[real]] = order[following[real]]
    return found


def _chain(request: Request, index: int, page_size: int, outputs_known: bool) -> _Words:
    """Return one word per full page that stands for all tokens up to its end."""
    tokens = request.prompt.array()
    if outputs_known:
        tokens = np.concatenate([tokens, request.output.array()])
    count = len(tokens) // page_size
    pages = tokens[: count * page_size].reshape(count, page_size).astype(np.uint64)
    places = _mixed(np.arange(page_size, dtype=np.uint64))
    words = _mixed((_mixed(pages) * (places | np.uint64(1))).sum(axis=1, dtype=np.uint64))
    for start, length, digest in request.media:
        # Content without a digest is like nobody else's, from there on.
        name = f"{start} {length} {digest}" if digest is not None else f"request {index}"
        end = count if digest is None else -(-(start + length) // page_size)
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
        words[start // page_size : end] ^= np.uint64(key)
    if request.namespace is not None and count:
        words[0] ^= _mixed(np.array([request.namespace + 1], np.uint64))[0]
    weights = _mixed(np.arange(count, dtype=np.uint64)) | np.uint64(1)
    return _mixed(np.cumsum(words * weights, dtype=np.uint64))


class Belady:
    """The reference as an eviction policy: `expect` tells it what is to come, everything else is the protocol.

    It has no method `stored`: what a page holds is known from `expect`, so no digest need be made.
    """

    def __init__(self) -> None:
        """Start with no candidates and no expectations."""
        self._next: dict[int, int] = {}
        self._idle: dict[int, dict[int, None]] = {}
        self._uses: list[int] = []
        self._use_of: dict[int, int] = {}

    def expect(self, pages: Sequence[int], uses: Sequence[int]) -> None:
        """Say when each page will be used next, for when it is released; pages never spoken of: never."""
        self._next.update(zip(pages, uses, strict=True))

    def hit(self, pages: list[int]) -> None:
        """Nothing: what matters is the next use, not the last."""

    def held(self, pages: list[int]) -> None:
        """Forget candidates."""
        for page in pages:
            self._drop(page)

    def released(self, pages: list[int]) -> None:
        """Add candidates under their next use; within one use, the order of release."""
        for page in pages:
            use = self._next.get(page, NEVER)
            self._use_of[page] = use
            group = self._idle.get(use)
            if group is None:
                group = self._idle[use] = {}
                insort(self._uses, use)
            group[page] = None

    def removed(self, pages: list[int], evicted: bool = True) -> None:
        """Forget pages and what was expected of them, whatever took them out of the index."""
        for page in pages:
            self._drop(page)
            self._next.pop(page, None)

    def victims(self, count: int) -> list[int]:
        """Return the candidates that are used again last; of equal ones, the first released."""
        chosen: list[int] = []
        for use in reversed(self._uses):
            for page in self._idle[use]:
                if len(chosen) == count:
                    return chosen
                chosen.append(page)
        return chosen

    def _drop(self, page: int) -> None:
        use = self._use_of.pop(page, None)
        if use is None:
            return
        group = self._idle[use]
        del group[page]
        if not group:
            del self._idle[use]
            del self._uses[bisect_left(self._uses, use)]

"""The allocator and the naive model side by side: each verb done to both, and compared.

A verb draws what it needs from a `Draw`, so that Hypothesis and a seeded generator can both drive it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import pytest

from pagedkv.allocator import BlockAllocator, OutOfPages
from tests.allocator.model import Memory, Model, Seq, assert_agree

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Hashable
    from collections.abc import Sequence as Choices

    from pagedkv.allocator import Sequence

PAGE = 3
MAX_SEQUENCES = 8

T = TypeVar("T")


class Draw(Protocol):
    """Where choices come from."""

    def integer(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, both included."""

    def choice(self, values: Choices[T]) -> T:
        """Return one of the values."""


class Random:
    """Choices from a seeded generator."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def integer(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, both included."""
        return self._generator.randint(low, high)

    def choice(self, values: Choices[T]) -> T:
        """Return one of the values."""
        return self._generator.choice(values)


class Twin:
    """A real allocator, its model, and the memory that its pages stand for."""

    def __init__(self, pages: int, *, prefix_cache: bool) -> None:
        self.allocator = BlockAllocator(pages, PAGE, prefix_cache=prefix_cache)
        self.model = Model(pages - 1, PAGE, prefix_cache=prefix_cache)
        self.memory = Memory(pages, PAGE)
        self.real: list[Sequence] = []
        self.epoch = 0

    def where(self, fits: Callable[[Seq], bool] = lambda _: True) -> list[int]:
        """Return the sequences with a property."""
        return [at for at, seq in enumerate(self.model.seqs) if fits(seq)]

    def resting(self) -> list[int]:
        """Return the sequences without a reservation."""
        return self.where(lambda seq: not seq.reserved)

    def reserved(self) -> list[int]:
        """Return the sequences with one."""
        return self.where(lambda seq: seq.reserved > 0)

    # Verbs.

    def open(self, draw: Draw) -> None:
        """Open anything, or something that begins as an earlier sequence does."""
        tokens = self._tokens(draw, draw.integer(0, 4 * PAGE + 1))
        namespace: Hashable = draw.choice([None, None, "a"])
        if len(self.real) >= MAX_SEQUENCES:
            return
        if self.real and draw.integer(0, 1):
            seq = draw.choice(self.model.seqs)
            tokens = (seq.tokens + seq.prompt[len(seq.tokens) :])[: draw.integer(0, len(seq.tokens) + PAGE)] + tokens
            namespace = seq.namespace
        self._open(tokens, namespace)

    def room(self, draw: Draw) -> None:
        """Ask what opening and reserving would take."""
        tokens, growth = self._tokens(draw, draw.integer(0, 4 * PAGE)), draw.integer(0, 2 * PAGE)

        assert self.model.room(None, tokens, growth) == self.allocator.room(tokens, growth=growth)

    def reserve(self, draw: Draw) -> None:
        """Make room for some sequences, or for none of them."""
        chosen = [at for at in self.resting() if draw.integer(0, 1)]
        self._reserve(chosen, [draw.integer(0, 2 * PAGE + 1) for _ in chosen])

    def compute(self, draw: Draw) -> None:
        """Take a sequence some tokens further: the rest of its prompt, or generated ones."""
        if resting := self.resting():
            seq = self.model.seqs[at := draw.choice(resting)]
            self._reserve([at], [max(len(seq.prompt) - len(seq.tokens), draw.integer(1, 2 * PAGE))])
            if seq.reserved:
                self._commit([at], [self._next_tokens(draw, seq, seq.reserved)])

    def decode(self, draw: Draw) -> None:
        """Take everybody at rest one token further, some times over."""
        chosen = self.resting()
        for _ in range(draw.integer(1, 2 * PAGE)):
            self._reserve(chosen, [1] * len(chosen))
            if not all(self.model.seqs[at].reserved for at in chosen):
                return
            self._commit(chosen, [self._next_tokens(draw, self.model.seqs[at], 1) for at in chosen])

    def commit(self, draw: Draw) -> None:
        """Write one sequence's reservation and keep some of it."""
        if reserved := self.reserved():
            seq = self.model.seqs[at := draw.choice(reserved)]
            tokens = self._next_tokens(draw, seq, draw.integer(0, seq.reserved))
            if draw.integer(0, 3):
                self._commit([at], [tokens])
            else:
                self._commit_unnamed(at, tokens)

    def commit_all(self, draw: Draw) -> None:
        """Write and commit every open reservation in one call."""
        chosen = self.reserved()
        self._commit(chosen, [self._next_tokens(draw, seq, seq.reserved) for seq in self.model.seqs if seq.reserved])

    def abandon(self, draw: Draw) -> None:
        """Take a reservation back without having written anything."""
        if reserved := self.reserved():
            at = draw.choice(reserved)
            self.real[at].commit([])
            self.model.commit(self.model.seqs[at], [], [], named=True)

    def copy(self, draw: Draw) -> None:
        """Run the copies, or only ask for them."""
        copies = self.allocator.take_copies()

        assert self.model.take_copies() == sorted(map(tuple, copies.tolist()))

        if draw.integer(0, 1):
            self.memory.run_copies(copies)
            self.allocator.acknowledge_copies()
            self.model.acknowledge()

    def fork(self, draw: Draw) -> None:
        """Share every page."""
        if (resting := self.resting()) and len(self.real) < MAX_SEQUENCES:
            seq = self.model.seqs[at := draw.choice(resting)]
            for page in seq.table:
                self.model.hold(page)
            child = Seq(seq.namespace, list(seq.prompt), list(seq.tokens), list(seq.kv), list(seq.table))
            child.opaque, child.borrowed = seq.opaque, seq.borrowed
            self.model.seqs.append(child)
            self.real.append(self.real[at].fork())

    def truncate(self, draw: Draw) -> None:
        """Forget a tail."""
        if resting := self.resting():
            seq = self.model.seqs[at := draw.choice(resting)]
            length = draw.integer(max(0, len(seq.tokens) - draw.integer(0, 3 * PAGE)), len(seq.tokens))
            self.real[at].truncate(length)
            self.model.truncate(seq, length)

    def close(self, draw: Draw) -> None:
        """Give everything back."""
        if self.real:
            at = draw.integer(0, len(self.real) - 1)
            self.real.pop(at).close()
            self.model.drop_blocks(self.model.seqs.pop(at), 0)

    def reset(self, draw: Draw) -> None:
        """Change the weights, now and then."""
        if draw.integer(0, 7) == 0:
            self.epoch += 1
            report = self.allocator.reset_prefix_cache()

            assert self.model.reset() == (report.dropped, report.still_held)
            assert bool(report) == (report.still_held == 0)

    # Judgement.

    def check(self) -> None:
        """Every invariant holds, every number is the model's, and each sequence reads back its own KV.

        Free pages are poisoned first, so that one that is still in use shows.
        """
        self.allocator.check()
        assert_agree(self.allocator, self.model)
        self.memory.poison(self.allocator.ledger.pool.free_pages.tolist())
        for seq, real in zip(self.model.seqs, self.real, strict=True):
            pages = [page.page_id for page in seq.table]

            assert (seq.reserved, pages) == (real.num_reserved, real.block_table().tolist())

            # A page whose copy is pending holds nothing yet; its source does.
            sources = [self.model.copies[page].page_id if page in self.model.copies else page for page in pages]
            slots = [sources[position // PAGE] * PAGE + position % PAGE for position in range(len(seq.tokens))]

            assert seq.kv == [self.memory.read(slot) for slot in slots]

    def finish(self) -> None:
        """Nothing stays in use once everything is closed."""
        for real in self.real:
            real.close()
        self.allocator.check()

        assert 0 == self.allocator.stats().in_use

    # Both at once.

    @staticmethod
    def _tokens(draw: Draw, count: int) -> list[int]:
        return [draw.integer(0, 1) for _ in range(count)]

    def _next_tokens(self, draw: Draw, seq: Seq, count: int) -> list[int]:
        """Draw the next tokens: the prompt's while inside it."""
        prompt = seq.prompt[len(seq.tokens) : len(seq.tokens) + count]
        return prompt + self._tokens(draw, count - len(prompt))

    def _open(self, tokens: list[int], namespace: Hashable) -> None:
        """Find whole pages, then the best partial one where its copy has room."""
        model = self.model
        hits = model.whole_hits(namespace, tokens)
        tail, pages = model.tail_hits(namespace, tokens, len(hits))
        real = self.allocator.open(tokens, namespace=namespace)
        table = real.block_table().tolist()
        for page in hits:
            model.hold(page)
        borrowed = [page for page in pages if page.page_id in table]
        stored = len(hits) * PAGE
        if borrowed:
            stored += tail
            model.hold(borrowed[0])
            hits.append(borrowed[0])

            assert model.available >= 1
        else:
            # No page shares a token, or copying the one that was found would have no room.
            assert not pages or any(model.available - (not page.refs) < 1 for page in pages)

        assert (stored, stored) == (real.num_tokens, real.num_cached_tokens)
        assert [page.page_id for page in hits] == table

        kv = self.memory.chain(namespace, tokens[:stored], self.epoch)
        model.seqs.append(Seq(namespace, list(tokens), tokens[:stored], kv, hits, borrowed=bool(borrowed)))
        self.real.append(real)

    def _reserve(self, chosen: list[int], counts: list[int]) -> None:
        real = [self.real[at] for at in chosen]
        wanted = [(self.model.seqs[at], count) for at, count in zip(chosen, counts, strict=True)]
        needed, available = self.model.tails(wanted)[0], self.model.available
        if len(chosen) == 1:
            assert (needed, available) == real[0].room(counts[0])
        if needed > available:
            with pytest.raises(OutOfPages) as raised:
                self.allocator.reserve_batch(real, counts)

            assert (needed, available) == (raised.value.needed, raised.value.available)
            return
        self.allocator.reserve_batch(real, counts)
        self.model.reserve(wanted, [seq.block_table().tolist() for seq in real])

    def _write(self, at: int, tokens: list[int], *, named: bool) -> list[int]:
        """Write every reserved slot, the kept ones with their KV and the others with rubbish."""
        seq, real = self.model.seqs[at], self.real[at]
        start = len(seq.tokens)
        before = seq.kv[-1] if seq.kv else self.memory.origin(seq.namespace)
        kv: list[int] = []
        for token in tokens:
            before = self.memory.name(before, token, self.epoch) if named else self.memory.nameless()
            kv.append(before)
        rubbish = [self.memory.nameless() for _ in range(seq.reserved - len(kv))]
        for slot, value in zip(real.slots(start, start + seq.reserved).tolist(), kv + rubbish, strict=True):
            self.memory.write(slot, value)
        return kv

    def _run_copies(self) -> None:
        copies = self.allocator.take_copies()

        assert self.model.take_copies() == sorted(map(tuple, copies.tolist()))

        self.memory.run_copies(copies)
        self.allocator.acknowledge_copies()
        self.model.acknowledge()

    def _commit(self, chosen: list[int], tokens: list[list[int]]) -> None:
        self._run_copies()
        kv = [self._write(at, entry, named=True) for at, entry in zip(chosen, tokens, strict=True)]
        ones = all(len(entry) == 1 for entry in tokens)
        real = [self.real[at] for at in chosen]
        if len(chosen) == 1 and not ones:
            real[0].commit(tokens[0])
        else:
            self.allocator.commit_batch(real, [entry[0] for entry in tokens] if ones else tokens)
        for at, entry, values in zip(chosen, tokens, kv, strict=True):
            self.model.commit(self.model.seqs[at], entry, values, named=True)

    def _commit_unnamed(self, at: int, tokens: list[int]) -> None:
        self._run_copies()
        kv = self._write(at, tokens, named=False)
        self.real[at].commit(count=len(tokens))
        self.model.commit(self.model.seqs[at], tokens, kv, named=False)


VERBS = (
    "open",
    "open",
    "room",
    "reserve",
    "compute",
    "compute",
    "decode",
    "commit",
    "commit_all",
    "abandon",
    "copy",
    "fork",
    "truncate",
    "close",
    "reset",
)

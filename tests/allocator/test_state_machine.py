"""The allocator against a naive model and against what its pages hold, `check()` after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.allocator import BlockAllocator, OutOfPages
from tests.allocator.model import Memory, Model, Seq, assert_agree

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from pagedkv.allocator import Sequence

PAGE = 3
TOKENS = st.lists(st.integers(0, 1), max_size=4 * PAGE + 1)
SPACES = st.sampled_from([None, "a"])


class AllocatorMachine(RuleBasedStateMachine):
    """Random sequences of every verb; each must do what the model does, or raise and do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.real: list[Sequence] = []
        self.epoch = 0
        self.written: dict[Seq, list[int]] = {}

    @initialize(pages=st.integers(2, 16), prefix_cache=st.sampled_from([True, True, True, False]))
    def start(self, pages: int, prefix_cache: bool) -> None:
        """Make a small pool, so that eviction and exhaustion are common."""
        self.allocator = BlockAllocator(pages, PAGE, prefix_cache=prefix_cache)
        self.model = Model(pages - 1, PAGE, prefix_cache=prefix_cache)
        self.memory = Memory(pages, PAGE)

    def pick(self, data: st.DataObject, where: Callable[[Seq], bool] = lambda _: True) -> int | None:
        """Draw a sequence with a property."""
        fitting = [at for at, seq in enumerate(self.model.seqs) if where(seq)]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @rule(data=st.data(), tokens=TOKENS)
    def open_alike(self, data: st.DataObject, tokens: list[int]) -> None:
        """Open something that begins as an earlier sequence does."""
        at = self.pick(data)
        if at is not None:
            seq = self.model.seqs[at]
            length = data.draw(st.integers(0, len(seq.tokens)))
            self.open_prompt(seq.tokens[:length] + tokens, seq.namespace)

    @rule(tokens=TOKENS, namespace=SPACES)
    def open(self, tokens: list[int], namespace: str | None) -> None:
        """Open anything."""
        self.open_prompt(tokens, namespace)

    def open_prompt(self, tokens: list[int], namespace: Hashable) -> None:
        """Find whole pages, then the best partial one where its copy has room."""
        model = self.model
        hits = model.whole_hits(namespace, tokens)
        tail, pages = model.tail_hits(namespace, tokens, len(hits))
        real = self.allocator.open(tokens, namespace=namespace)
        table = real.block_table().tolist()
        for page in hits:
            model.hold(page)
        borrowed = [page for page in pages if page.page_id in table]
        if borrowed:
            model.hold(borrowed[0])
            hits.append(borrowed[0])
            assert model.available >= 1
        else:
            # No page shares a token, or copying the one that was found would have no room.
            assert not pages or any(model.available - (not page.refs) < 1 for page in pages)
            tail = 0
        stored = len(hits) * PAGE if not tail else (len(hits) - 1) * PAGE + tail
        assert (stored, stored) == (real.num_tokens, real.num_cached_tokens)
        assert [page.page_id for page in hits] == table
        kv = self.memory.chain(namespace, tokens[:stored], self.epoch)
        self.model.seqs.append(Seq(namespace, list(tokens), tokens[:stored], kv, hits, borrowed=tail > 0))
        self.real.append(real)

    @rule(tokens=TOKENS, growth=st.integers(0, 7), namespace=SPACES)
    def room(self, tokens: list[int], growth: int, namespace: str | None) -> None:
        """Answer what opening and reserving would take."""
        assert self.model.room(namespace, tokens, growth) == self.allocator.room(
            tokens, growth=growth, namespace=namespace
        )

    @rule(data=st.data(), counts=st.lists(st.integers(0, 2 * PAGE + 1), min_size=1, max_size=3))
    def reserve(self, data: st.DataObject, counts: list[int]) -> None:
        """Make room for all or for none."""
        resting = [at for at, seq in enumerate(self.model.seqs) if not seq.reserved]
        if not resting:
            return
        chosen = data.draw(st.lists(st.sampled_from(resting), min_size=1, max_size=len(counts), unique=True))
        self.do_reserve(chosen, counts[: len(chosen)])

    @rule()
    def decode(self) -> None:
        """Reserve one token for everybody at rest."""
        resting = [at for at, seq in enumerate(self.model.seqs) if not seq.reserved]
        self.do_reserve(resting, [1] * len(resting))

    def do_reserve(self, chosen: list[int], counts: list[int]) -> None:
        """Reserve in both."""
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

    def write(self, at: int, tokens: list[int], *, named: bool) -> list[int]:
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

    def run_copies(self) -> None:
        """Do what a cache does before it writes."""
        copies = self.allocator.take_copies()
        assert self.model.take_copies() == sorted(map(tuple, copies.tolist()))
        self.memory.run_copies(copies)
        self.allocator.acknowledge_copies()
        self.model.acknowledge()

    def draw_tokens(self, data: st.DataObject, seq: Seq, count: int) -> list[int]:
        """Draw the next tokens: the prompt's while inside it."""
        prompt = seq.prompt[len(seq.tokens) : len(seq.tokens) + count]
        return prompt + data.draw(
            st.lists(st.integers(0, 1), min_size=count - len(prompt), max_size=count - len(prompt))
        )

    @rule(data=st.data(), named=st.sampled_from([True, True, True, False]))
    def commit(self, data: st.DataObject, named: bool) -> None:
        """Write one sequence's reservation and keep some of it."""
        at = self.pick(data, lambda seq: seq.reserved > 0)
        if at is None:
            return
        self.run_copies()
        seq = self.model.seqs[at]
        count = data.draw(st.integers(0, seq.reserved))
        tokens = self.draw_tokens(data, seq, count)
        kv = self.write(at, tokens, named=named)
        if named:
            self.real[at].commit(tokens)
        else:
            self.real[at].commit(count=count)
        self.model.commit(seq, tokens, kv, named=named)

    @rule(data=st.data())
    def commit_all(self, data: st.DataObject) -> None:
        """Write and commit every open reservation in one call."""
        chosen = [at for at, seq in enumerate(self.model.seqs) if seq.reserved]
        self.run_copies()
        tokens = [self.draw_tokens(data, self.model.seqs[at], self.model.seqs[at].reserved) for at in chosen]
        kv = [self.write(at, entry, named=True) for at, entry in zip(chosen, tokens, strict=True)]
        flat = [entry[0] for entry in tokens] if all(len(entry) == 1 for entry in tokens) else tokens
        self.allocator.commit_batch([self.real[at] for at in chosen], flat)
        for at, entry, values in zip(chosen, tokens, kv, strict=True):
            self.model.commit(self.model.seqs[at], entry, values, named=True)

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """Take a reservation back without having written anything."""
        at = self.pick(data, lambda seq: seq.reserved > 0)
        if at is not None:
            self.real[at].commit([])
            self.model.commit(self.model.seqs[at], [], [], named=True)

    @rule()
    def take_copies(self) -> None:
        """Run the copies at any time."""
        self.run_copies()

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Share every page."""
        at = self.pick(data, lambda seq: not seq.reserved)
        if at is None or len(self.real) > 8:
            return
        seq = self.model.seqs[at]
        for page in seq.table:
            self.model.hold(page)
        child = Seq(seq.namespace, list(seq.prompt), list(seq.tokens), list(seq.kv), list(seq.table))
        child.opaque, child.borrowed = seq.opaque, seq.borrowed
        self.model.seqs.append(child)
        self.real.append(self.real[at].fork())

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Forget a tail."""
        at = self.pick(data, lambda seq: not seq.reserved)
        if at is not None:
            length = data.draw(st.integers(0, len(self.model.seqs[at].tokens)))
            self.real[at].truncate(length)
            self.model.truncate(self.model.seqs[at], length)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Give everything back."""
        at = self.pick(data)
        if at is not None:
            self.real.pop(at).close()
            seq = self.model.seqs.pop(at)
            self.model.drop_blocks(seq, 0)

    @precondition(lambda self: len(self.real) < 4)
    @rule()
    def reset(self) -> None:
        """Change the weights."""
        self.epoch += 1
        report = self.allocator.reset_prefix_cache()
        assert self.model.reset() == (report.dropped, report.still_held)
        assert bool(report) == (report.still_held == 0)

    @invariant()
    def books_balance(self) -> None:
        """Every invariant holds and every number is the model's."""
        if hasattr(self, "allocator"):
            self.allocator.check()
            assert_agree(self.allocator, self.model)

    @invariant()
    def pages_hold_what_they_should(self) -> None:
        """Each sequence reads back its own KV, though every free page is poisoned."""
        if not hasattr(self, "allocator"):
            return
        self.memory.poison(self.allocator.ledger.pool.free_pages.tolist())
        unread = set(self.model.copies)
        for seq, real in zip(self.model.seqs, self.real, strict=True):
            assert seq.reserved == real.num_reserved
            assert [page.page_id for page in seq.table] == real.block_table().tolist()
            slots = real.slots(0, len(seq.tokens)).tolist()
            here = [self.model.copies[s // PAGE].page_id * PAGE + s % PAGE if s // PAGE in unread else s for s in slots]
            assert seq.kv == [self.memory.read(slot) for slot in here]

    def teardown(self) -> None:
        """Nothing stays in use once everything is closed."""
        for real in self.real:
            real.close()
        if hasattr(self, "allocator"):
            self.allocator.check()
            assert self.allocator.stats().in_use == 0


AllocatorMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAllocatorMachine = AllocatorMachine.TestCase

"""Layer groups against a naive model and against what their pages hold, `check()` after every step.

The model keeps each sequence's tokens and, by the rules of the design, which blocks each group must and may hold; what
can be found it counts by brute force over everything that the index names. Each slot holds the tokens up to it and the
group, so that a page lost, overwritten or served to the wrong group shows when it is read back.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedkv.allocator import BeyondWindow, BlockAllocator, FullAttention, HostPool, OutOfPages, SlidingWindow

if TYPE_CHECKING:
    from pagedkv.allocator import Sequence
    from pagedkv.allocator.index_node import Node

PAGE = 3
TOKENS = st.lists(st.integers(0, 1), max_size=4 * PAGE + 1)
FULL = FullAttention()
MIXES = [
    (FULL, SlidingWindow(5)),
    (SlidingWindow(4), FULL),
    (SlidingWindow(6),),
    (SlidingWindow(2, 1), SlidingWindow(8)),
    (FULL, FULL, SlidingWindow(4, 2)),
    (SlidingWindow(1),),
]


@dataclass(eq=False)
class Seq:
    """What a sequence should be; ``first`` is per group the first block, sinks apart, that is held."""

    real: Sequence
    prompt: list[int]
    tokens: list[int]
    first: list[int]
    reserved: int = 0
    keeping: bool = False


class GroupsMachine(RuleBasedStateMachine):
    """Random sequences of every verb, on a small pool with few tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.seqs: list[Seq] = []
        self.away: list[Seq] = []
        self.host = HostPool(24)
        self.host_memory: dict[int, object] = {}

    @initialize(pages=st.integers(6, 32), mix=st.sampled_from(MIXES), policy=st.sampled_from(["lru", "slru", "arc"]))
    def start(self, pages: int, mix: tuple[Any, ...], policy: str) -> None:
        """Make the pool; memory is poison."""
        self.mix = mix
        self.allocator = BlockAllocator(pages, PAGE, groups=mix, policy=policy)
        self.memory: dict[int, object] = {}
        # Something to begin with, longer than every window: else most examples stay too short for one to slide.
        self.seqs.append(Seq(self.allocator.open([]), [], [], [0] * len(mix)))
        for count in (4, 5, 1, 1, 1, 3):
            self.do_reserve(self.seqs, [count])
            self.do_commit(self.seqs[0], self.seqs[0].reserved, 0b10110)
            self.pages_hold_what_they_should()

    # The rules, naively.

    def visible(self, group: int, length: int) -> set[int]:
        """Return the blocks that the token after ``length`` tokens sees."""
        kind = self.mix[group]
        if isinstance(kind, FullAttention):
            return {position // PAGE for position in range(length)}
        # A window of 1 is kept as one of 2.
        reach = max(kind.window - 1, 1)
        return {p // PAGE for p in range(length) if p >= length - reach or p < kind.num_sink_tokens}

    def held(self, seq: Seq, group: int) -> set[int]:
        """Return the blocks that a table must have."""
        kind, end = self.mix[group], -(-(len(seq.tokens) + seq.reserved) // PAGE)
        sinks = -(-kind.num_sink_tokens // PAGE) if isinstance(kind, SlidingWindow) else 0
        return {block for block in range(end) if block < sinks or block >= seq.first[group]}

    def slide(self, group: int, seq: Seq) -> int:
        """Return the first block that is held once ``seq`` has reserved again."""
        kind = self.mix[group]
        if seq.keeping or isinstance(kind, FullAttention):
            return seq.first[group]
        reach: int = max(kind.window - 1, 1)
        return max(seq.first[group], max(len(seq.tokens) - reach, 0) // PAGE)

    def named(self) -> list[dict[tuple[int, ...], int]]:
        """Return for each group every prefix that the index names a page for."""
        index = self.allocator.ledger.index
        lead = getattr(index, "lead", 0)
        others = getattr(index, "others", [])
        found: list[dict[tuple[int, ...], int]] = [{} for _ in self.mix]
        todo: list[tuple[Node, tuple[int, ...]]] = [(root, ()) for root in index.roots.values()]
        while todo:
            node, prefix = todo.pop()
            tokens = array("I", bytes(node.tokens)).tolist()
            for at in range(len(node.pages)):
                prefix += tuple(tokens[at * PAGE : (at + 1) * PAGE])
                if lead is not None:
                    found[lead][prefix] = node.pages[at]
                for group, sheet in zip(others, node.sheets, strict=True):
                    if node.start + at in sheet:
                        found[group][prefix] = sheet[node.start + at]
            if node.children is not None:
                todo += [(child, prefix) for child in node.children.nodes.values()]
        return found

    def longest_whole_hit(self, tokens: list[int]) -> int:
        """Return the longest hit of whole pages, by trying each length."""
        named = self.named()
        return max(
            length
            for length in range(0, max(len(tokens), 1), PAGE)
            if all(
                tuple(tokens[: (block + 1) * PAGE]) in named[group]
                for group in range(len(self.mix))
                for block in self.visible(group, length)
            )
        )

    def referenced(self) -> Counter[int]:
        """Count the table entries of each page."""
        return Counter(
            page
            for seq in self.seqs
            for group in range(len(self.mix))
            for page in seq.real.block_table(group).tolist()
            if page
        )

    # The verbs.

    def pick(self, data: st.DataObject, *, resting: bool = True) -> Seq | None:
        """Draw a sequence."""
        fitting = [seq for seq in self.seqs if not (resting and seq.reserved)]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @rule(data=st.data(), tokens=TOKENS)
    def open_prompt(self, data: st.DataObject, tokens: list[int]) -> None:
        """Open a prompt, often one that begins as an open sequence does; the longest hit wins."""
        if len(self.seqs) > 7:
            return
        like = self.pick(data, resting=False)
        if like is not None:
            tokens = like.tokens[: data.draw(st.integers(0, len(like.tokens)))] + tokens
        best = self.longest_whole_hit(tokens)
        real = self.allocator.open(tokens)
        found = real.num_tokens
        assert best <= found <= max(len(tokens) - 1, 0)
        if found % PAGE == 0:
            assert best == found
        blocks = [self.visible(group, found) for group in range(len(self.mix))]
        assert blocks == [set(real.block_table(group).nonzero()[0].tolist()) for group in range(len(self.mix))]
        first = [
            0 if isinstance(kind, FullAttention) else max(found - max(kind.window - 1, 1), 0) // PAGE
            for kind in self.mix
        ]
        self.seqs.append(Seq(real, list(tokens), tokens[:found], first))

    @rule(data=st.data(), counts=st.lists(st.integers(0, 2 * PAGE), min_size=1, max_size=3))
    def reserve(self, data: st.DataObject, counts: list[int]) -> None:
        """Make room for all or none; pages that leave a window are room."""
        resting = [seq for seq in self.seqs if not seq.reserved]
        if not resting:
            return
        chosen = data.draw(st.lists(st.sampled_from(resting), min_size=1, max_size=len(counts), unique=True))
        self.do_reserve(chosen, counts[: len(chosen)])

    @rule()
    def decode(self) -> None:
        """Reserve one token for everybody at rest."""
        resting = [seq for seq in self.seqs if not seq.reserved]
        self.do_reserve(resting, [1] * len(resting))

    @rule(steps=st.integers(1, 2 * PAGE), bits=st.integers(0, 2**12 - 1))
    def decode_steps(self, steps: int, bits: int) -> None:
        """Run a batch for several steps, each committed at once, as an engine does."""
        chosen = [seq for seq in self.seqs if not seq.reserved]
        for step in range(steps if chosen else 0):
            self.do_reserve(chosen, [1] * len(chosen))
            if not all(seq.reserved for seq in chosen):
                return
            fed = []
            for at, seq in enumerate(chosen):
                start = len(seq.tokens)
                inside = seq.prompt[start : start + 1]
                seq.tokens, seq.reserved = seq.tokens + (inside or [bits >> (step + at) % 12 & 1]), 0
                fed.append(seq.tokens[-1])
                for group in range(len(self.mix)):
                    (slot,) = seq.real.slots(start, start + 1, group).tolist()
                    self.memory[slot] = self.kv(seq, group, start)
            self.allocator.commit_batch([seq.real for seq in chosen], fed)
            self.pages_hold_what_they_should()

    def do_reserve(self, chosen: list[Seq], counts: list[int]) -> None:
        """Reserve, and compare what it took with a count of pages."""
        stats = self.allocator.stats()
        leaving: Counter[int] = Counter()
        for seq, count in zip(chosen, counts, strict=True):
            for group in range(len(self.mix)) if count else ():
                gone = self.held(seq, group) - self.held(self.after_slide(seq), group)
                leaving.update(seq.real.block_table(group)[sorted(gone)].tolist())
        returning = self.returning(leaving)
        blocks = sum(
            -(-(len(seq.tokens) + n) // PAGE) - -(-len(seq.tokens) // PAGE)
            for seq, n in zip(chosen, counts, strict=True)
        )
        least = blocks * len(self.mix)
        most = least + len(self.mix) * sum(
            n > 0 and len(s.tokens) % PAGE > 0 for s, n in zip(chosen, counts, strict=True)
        )
        tables = [seq.real.block_table(g).tolist() for seq in self.seqs for g in range(len(self.mix))]
        try:
            self.allocator.reserve_batch([seq.real for seq in chosen], counts)
        except OutOfPages as error:
            assert least <= error.needed <= most
            assert stats.free + stats.idle + returning == error.available < error.needed
            assert tables == [seq.real.block_table(g).tolist() for seq in self.seqs for g in range(len(self.mix))]
            assert stats == self.allocator.stats()
            return
        for seq, count in zip(chosen, counts, strict=True):
            if count:
                seq.first, seq.reserved = self.after_slide(seq).first, count
        grown = self.allocator.stats().referenced - stats.referenced
        assert least - returning <= grown <= most - returning
        self.run_copies()

    def returning(self, leaving: Counter[int]) -> int:
        """Count the pages that nobody holds any more once tables have let go of them so many times."""
        before = self.referenced()
        return sum(before[page] == times for page, times in leaving.items())

    def after_slide(self, seq: Seq) -> Seq:
        """Return the sequence as its next reserve leaves it, before it grows."""
        first = [self.slide(group, seq) for group in range(len(self.mix))]
        return Seq(seq.real, seq.prompt, seq.tokens, first, seq.reserved, seq.keeping)

    def run_copies(self) -> None:
        """Copy all at once."""
        copies = self.allocator.take_copies().tolist()
        read = {to * PAGE + at: self.memory.get(of * PAGE + at) for of, to in copies for at in range(PAGE)}
        self.memory.update(read)
        self.allocator.acknowledge_copies()

    def kv(self, seq: Seq, group: int, position: int) -> object:
        """Return what a slot must hold."""
        return group, tuple(seq.tokens[: position + 1])

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Write a reservation and keep some of it."""
        open_ones = [seq for seq in self.seqs if seq.reserved]
        if open_ones:
            seq = data.draw(st.sampled_from(open_ones))
            self.do_commit(seq, data.draw(st.integers(0, seq.reserved)), data.draw(st.integers(0, 2**16 - 1)))

    @rule(data=st.data(), steps=st.lists(st.integers(1, 2 * PAGE), min_size=1, max_size=5), bits=st.integers(0, 3))
    def grow(self, data: st.DataObject, steps: list[int], bits: int) -> None:
        """Take several steps with one sequence."""
        seq = self.pick(data)
        for count in steps if seq is not None else ():
            assert seq is not None
            self.do_reserve([seq], [count])
            self.do_commit(seq, seq.reserved, bits)

    @rule(data=st.data(), tokens=TOKENS, steps=st.lists(st.integers(1, 2 * PAGE), min_size=1, max_size=4))
    def serve(self, data: st.DataObject, tokens: list[int], steps: list[int]) -> None:
        """Open, compute and close, so that the cache has something to find and to evict."""
        before = len(self.seqs)
        self.open_prompt(data, tokens)
        if len(self.seqs) > before:
            seq = self.seqs[-1]
            for count in steps:
                self.do_reserve([seq], [count])
                self.do_commit(seq, seq.reserved, 0)
            self.seqs.remove(seq)
            seq.real.close()

    def do_commit(self, seq: Seq, count: int, bits: int) -> None:
        """Write every reserved slot, the kept ones with their KV; tokens beyond the prompt are ``bits``."""
        start = len(seq.tokens)
        inside = seq.prompt[start : start + count]
        extra = [bits >> at % 16 & 1 for at in range(count - len(inside))]
        end = start + seq.reserved
        seq.tokens, seq.reserved = seq.tokens + inside + extra, 0
        for group in range(len(self.mix)):
            for position, slot in enumerate(seq.real.slots(start, end, group).tolist(), start):
                self.memory[slot] = self.kv(seq, group, position) if position < start + count else "rubbish"
        seq.real.commit(inside + extra)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Share every page."""
        seq = self.pick(data)
        if seq is not None and len(self.seqs) < 8:
            twin = Seq(seq.real.fork(), list(seq.prompt), list(seq.tokens), list(seq.first), keeping=seq.keeping)
            self.seqs.append(twin)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Cut back as far as the windows still reach, and no further."""
        seq = self.pick(data)
        if seq is None:
            return
        length = data.draw(st.integers(0, len(seq.tokens)))
        if any(self.visible(group, length) - self.held(seq, group) for group in range(len(self.mix))):
            with pytest.raises(BeyondWindow):
                seq.real.truncate(length)
            return
        seq.real.truncate(length)
        seq.keeping = False
        if length == len(seq.tokens):
            return
        del seq.tokens[length:], seq.prompt[length:]
        seq.first = [min(first, -(-length // PAGE)) for first in seq.first]

    @rule(data=st.data())
    def hold_window(self, data: st.DataObject) -> None:
        """Keep pages until the next truncate."""
        seq = self.pick(data, resting=False)
        if seq is not None:
            seq.real.hold_window()
            seq.keeping = True

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Give everything back."""
        seq = self.pick(data, resting=False)
        if seq is not None:
            self.seqs.remove(seq)
            seq.real.close()

    # Swap.

    @rule(data=st.data(), cancel=st.booleans())
    def swap_out(self, data: st.DataObject, cancel: bool) -> None:
        """Move what the next token sees, and what is held on purpose, into the host pool."""
        seq = self.pick(data)
        if seq is None:
            return
        leaves = self.after_slide(seq)
        blocks = [self.held(leaves, group) for group in range(len(self.mix))]
        if sum(map(len, blocks)) > self.host.num_free:
            with pytest.raises(OutOfPages):
                self.allocator.swap_out(seq.real, self.host)
            return
        pages = [seq.real.block_table(group)[sorted(mine)].tolist() for group, mine in enumerate(blocks)]
        plan = self.allocator.swap_out(seq.real, self.host)
        assert [page for mine in pages for page in mine] == plan.copies[:, 0].tolist()
        if cancel:
            plan.cancel()
            return
        for device, host in plan.copies.tolist():
            for at in range(PAGE):
                self.host_memory[host * PAGE + at] = self.memory.get(device * PAGE + at)
        plan.finish()
        seq.first = leaves.first
        self.seqs.remove(seq)
        self.away.append(seq)

    @rule(data=st.data(), cancel=st.booleans())
    def swap_in(self, data: st.DataObject, cancel: bool) -> None:
        """Bring one back, sharing what can be found; where there is no room it stays as it is."""
        if not self.away or len(self.seqs) > 7:
            return
        seq = data.draw(st.sampled_from(self.away))
        stats = self.allocator.stats()
        try:
            plan = self.allocator.swap_in(seq.real)
        except OutOfPages as error:
            assert error.needed > error.available <= stats.free + stats.idle
            assert stats == self.allocator.stats()
            return
        for device, host in plan.copies.tolist():
            for at in range(PAGE):
                self.memory[device * PAGE + at] = self.host_memory[host * PAGE + at]
        self.allocator.check()
        if cancel:
            plan.cancel()
            return
        plan.finish()
        self.away.remove(seq)
        self.seqs.append(seq)

    # Asking for room.

    @rule(data=st.data(), count=st.integers(1, 12), chunk=st.integers(1, 2 * PAGE))
    def room_in_chunks(self, data: st.DataObject, count: int, chunk: int) -> None:
        """A sequence that is told it has room for some tokens, chunk by chunk, gets them all."""
        seq = self.pick(data)
        if seq is None:
            return
        before = self.allocator.stats()
        room = seq.real.room(count, chunk=chunk)
        assert before == self.allocator.stats()
        assert room.available <= before.free + before.idle + sum(self.referenced().values())
        if not room.fits or self.in_flight():
            return
        while count:
            self.do_reserve([seq], [min(count, chunk)])
            assert seq.reserved, "room was promised"
            count -= seq.reserved
            self.do_commit(seq, seq.reserved, 0b1001)

    def in_flight(self) -> bool:
        """Whether a step in flight keeps what leaves a window."""
        return False

    # What must hold.

    @invariant()
    def pages_hold_what_they_should(self) -> None:
        """Tables have the blocks they must, with the KV of their group and tokens; so has every page in the index."""
        if not hasattr(self, "allocator"):
            return
        self.allocator.check()
        for page in self.allocator.ledger.pool.free_pages.tolist():
            self.memory.update(dict.fromkeys(range(page * PAGE, (page + 1) * PAGE), "poison"))
        for seq in self.seqs:
            assert (len(seq.tokens), seq.reserved) == (seq.real.num_tokens, seq.real.num_reserved)
            for group in range(len(self.mix)):
                blocks = self.held(seq, group)
                assert blocks == set(seq.real.block_table(group).nonzero()[0].tolist())
                slots = seq.real.slots(0, len(seq.tokens), group).tolist()
                for position, slot in enumerate(slots):
                    if position // PAGE in blocks:
                        assert self.kv(seq, group, position) == self.memory[slot]
        for group, pages in enumerate(self.named()):
            for prefix, page in pages.items():
                ends = range(len(prefix) - PAGE, len(prefix))
                assert [(group, prefix[: end + 1]) for end in ends] == [
                    self.memory[page * PAGE + e % PAGE] for e in ends
                ]

    def teardown(self) -> None:
        """Nothing stays in use once everything is closed."""
        for seq in [*self.seqs, *self.away]:
            seq.real.close()
        assert not self.host.num_used
        if hasattr(self, "allocator"):
            self.allocator.check()
            assert self.allocator.stats().in_use == 0


GroupsMachine.TestCase.settings = settings(
    max_examples=35, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestGroupsMachine = GroupsMachine.TestCase

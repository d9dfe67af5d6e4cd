"""The cache as a state machine: whatever is done to it, attention is that of each sequence's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pagedkv.allocator import OutOfPages
from pagedkv.cache import PagedKVCache
from tests.cache.naive import poison_unheld, poisoned, run_step, tiny_spec

if TYPE_CHECKING:
    from pagedkv.allocator import Sequence

# Few distinct tokens, so that prompts often share a beginning.
tokens = st.integers(0, 2)
prompts = st.lists(tokens, min_size=1, max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """Drives `PagedKVCache` against lists of tokens; K and V are a function of the tokens before them."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.cache = poisoned(PagedKVCache(tiny_spec(window=5), num_pages=13, page_size=4, check=True))
        self.histories: dict[Sequence, list[int]] = {}
        self.prompts: dict[Sequence, list[int]] = {}

    @rule(target=sequences, prompt=prompts)
    def open(self, prompt: list[int]) -> Sequence:
        """A sequence starts with what the prefix cache has of its prompt, never all of it."""
        sequence = self.cache.open(prompt)
        assert 0 <= sequence.num_tokens < len(prompt)
        self.histories[sequence] = prompt[: sequence.num_tokens]
        self.prompts[sequence] = prompt
        return sequence

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: Sequence) -> Sequence:
        """A fork has its parent's tokens."""
        child = parent.fork()
        self.histories[child] = list(self.histories[parent])
        self.prompts[child] = self.prompts[parent]
        return child

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: Sequence, share: float) -> None:
        """What is left after a cut is what stood before it."""
        length = int(share * len(self.histories[sequence]))
        sequence.truncate(length)
        self.histories[sequence] = self.histories[sequence][:length]

    @rule(sequence=consumes(sequences))
    def close(self, sequence: Sequence) -> None:
        """A closed sequence disturbs nobody."""
        sequence.close()
        del self.histories[sequence], self.prompts[sequence]

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A step over any sequences gives each one attention over its own tokens, whatever happens to it next."""
        chosen = data.draw(
            st.lists(st.sampled_from(list(self.histories)), unique=True) if self.histories else st.just([])
        )
        if not chosen:
            return
        rows: dict[object, list[int]] = {}
        for sequence in chosen:
            rest = self.prompts[sequence][len(self.histories[sequence]) :]
            new = data.draw(st.lists(tokens, min_size=1, max_size=6))
            rows[sequence] = (rest[: len(new)] + new[len(rest) :])[: len(new)]
        before = {sequence: sequence.num_tokens for sequence in chosen}
        try:
            batch = run_step(self.cache, rows, self.histories)
        except OutOfPages as error:
            assert error.needed > error.available
            assert {sequence: sequence.num_tokens for sequence in chosen} == before
            return
        end = data.draw(st.sampled_from(["all", "some", "abandon"]))
        if end == "abandon":
            self.cache.abandon_step(batch)  # type: ignore[arg-type]
            assert {sequence: sequence.num_tokens for sequence in chosen} == before
            return
        keep = (
            {sequence: data.draw(st.integers(0, len(rows[sequence]))) for sequence in chosen} if end == "some" else {}
        )
        self.cache.end_step(batch, keep=keep)  # type: ignore[arg-type]
        for sequence in chosen:
            self.histories[sequence] += rows[sequence][: keep.get(sequence, len(rows[sequence]))]

    @invariant()
    def sound(self) -> None:
        """Books balance, lengths agree, and a page nobody holds may be anything: it is poisoned."""
        self.cache.allocator.check()
        held: set[int] = set()
        for sequence, history in self.histories.items():
            assert sequence.num_tokens == len(history)
            held |= set(sequence.block_table().tolist())
        if not self.cache.allocator.stats().idle:
            poison_unheld(self.cache, held)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)

"""The cache as a state machine: whatever is done to it, attention is that of each sequence's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from pagedkv.allocator import BeyondWindow, OutOfPages
from pagedkv.cache import PagedKVCache
from pagedkv.spec import KVSpec, LayerKV
from tests.cache.naive import poison_free, poisoned, run_step

if TYPE_CHECKING:
    from pagedkv.allocator import Sequence

# Few distinct tokens, so that prompts often share a beginning.
tokens = st.integers(0, 2)
prompts = st.lists(tokens, min_size=1, max_size=14)


FULL, WINDOW = LayerKV(2, 8, 6), LayerKV(2, 8, 6, window=5)
# Kinds of models: their layers, and the page size and usable pages of their cache.
KINDS: dict[str, tuple[tuple[LayerKV, ...], int, int]] = {
    "full": ((FULL, FULL), 4, 12),
    "full and window": ((FULL, WINDOW), 4, 20),
    "windows only": ((WINDOW, WINDOW), 4, 8),
    "two windows": ((WINDOW, LayerKV(2, 8, 6, window=9)), 2, 20),
    "sinks": ((LayerKV(2, 8, 6, window=4, num_sink_tokens=3), FULL), 2, 26),
    "widths and sharing": ((LayerKV(4, 4, 4), WINDOW, LayerKV(1, 8, 16, window=5), LayerKV(0, 8, 8)), 4, 24),
}


class CacheMachine(RuleBasedStateMachine):
    """Drives `PagedKVCache` against lists of tokens; K and V are a function of the tokens before them."""

    sequences = Bundle("sequences")
    kind = "full"

    def __init__(self) -> None:
        super().__init__()
        layers, page_size, usable = KINDS[self.kind]
        spec = KVSpec(layers, max_len=64, vocab_size=16)
        self.cache = poisoned(PagedKVCache(spec, num_pages=usable + 1, page_size=page_size, check=True))
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
        """What is left after a cut is what stood before it; what a window has given back cannot be returned to."""
        length = int(share * len(self.histories[sequence]))
        try:
            sequence.truncate(length)
        except BeyondWindow:
            assert any(layer.window for layer in self.cache.spec.layers)
            return
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
            batch = run_step(self.cache, rows, self.histories, counted=data.draw(st.booleans()))
        except OutOfPages as error:
            assert error.needed > error.available
            assert {sequence: sequence.num_tokens for sequence in chosen} == before
            return
        end = data.draw(st.sampled_from(["all", "some", "abandon"]))
        if end == "abandon":
            self.cache.abandon_step(batch)
            assert {sequence: sequence.num_tokens for sequence in chosen} == before
            return
        keep = (
            {sequence: data.draw(st.integers(0, len(rows[sequence]))) for sequence in chosen} if end == "some" else {}
        )
        self.cache.end_step(batch, keep=keep)
        for sequence in chosen:
            self.histories[sequence] += rows[sequence][: keep.get(sequence, len(rows[sequence]))]

    @invariant()
    def sound(self) -> None:
        """Books balance, lengths agree, and a page nobody holds may be anything: it is poisoned."""
        self.cache.allocator.check()
        for sequence, history in self.histories.items():
            assert sequence.num_tokens == len(history)
        poison_free(self.cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("examples", [12, pytest.param(150, marks=pytest.mark.slow)])
def test_cache_machine(kind: str, examples: int) -> None:
    """Every kind of model, long sequences of operations."""
    machine = type("CacheMachineOfAKind", (CacheMachine,), {"kind": kind})
    chosen = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=chosen)

"""Layer groups once more, with steps in flight, pins and resets among the verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tests.allocator.test_groups_machine import PAGE, TOKENS, GroupsMachine

if TYPE_CHECKING:
    from collections import Counter

    from pagedkv.allocator import Pin, StepInFlight


class HeldGroupsMachine(GroupsMachine):
    """The verbs of `GroupsMachine`, and those that hold pages besides sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[StepInFlight, list[int]]] = []
        self.pins: list[tuple[Pin, list[int]]] = []

    def returning(self, leaving: Counter[int]) -> int:
        """Count what tables alone hold; a step in flight lets nothing go."""
        if self.steps:
            return 0
        pinned = {page for pin, _ in self.pins for page in pin.pages().tolist()}
        return super().returning(type(leaving)({page: n for page, n in leaving.items() if page not in pinned}))

    def in_flight(self) -> bool:
        """Whether a step in flight keeps what leaves a window."""
        return bool(self.steps)

    @rule()
    def begin_step(self) -> None:
        """Send a step that may use whatever is held now."""
        if len(self.steps) < 2:
            self.steps.append((self.allocator.begin_step(), sorted(self.referenced())))

    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        """End one, not always the oldest."""
        if self.steps:
            step, _ = self.steps.pop(data.draw(st.integers(0, len(self.steps) - 1)))
            step.end()

    @rule(data=st.data(), tokens=TOKENS)
    def pin(self, data: st.DataObject, tokens: list[int]) -> None:
        """Hold the longest whole-page hit: of every group what the next token sees."""
        like = self.pick(data, resting=False)
        if like is not None:
            tokens = like.tokens[: data.draw(st.integers(0, len(like.tokens)))] + tokens
        if len(self.pins) < 3:
            best, named = self.longest_whole_hit([*tokens, 0]), self.named()
            pin = self.allocator.pin(tokens)
            assert best == pin.num_tokens
            assert sorted(pin.pages().tolist()) == sorted(
                named[group][tuple(tokens[: (block + 1) * PAGE])]
                for group in range(len(self.mix))
                for block in self.visible(group, best)
            )
            self.pins.append((pin, tokens[:best]))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """Let go of one."""
        if self.pins:
            pin, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
            pin.unpin()

    @rule()
    def reset(self) -> None:
        """Forget the index; pinned pages stay held and cannot be found."""
        self.allocator.reset_prefix_cache()
        self.pins = [(pin, []) for pin, _ in self.pins]

    @invariant()
    def steps_and_pins_hold(self) -> None:
        """What was held when a step in flight began is neither free nor idle; what is pinned is found."""
        for _, pages in self.steps:
            assert [] == [page for page in pages if not self.allocator.ledger.pool.refs[page]]
        for _, tokens in self.pins:
            assert len(tokens) == self.longest_whole_hit([*tokens, 0])

    def teardown(self) -> None:
        """Nothing stays in use once everything has let go."""
        for step, _ in self.steps:
            step.end()
        for pin, _ in self.pins:
            pin.unpin()
        super().teardown()


HeldGroupsMachine.TestCase.settings = settings(
    max_examples=35, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHeldGroupsMachine = HeldGroupsMachine.TestCase

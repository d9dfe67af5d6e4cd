"""Checks for an eviction policy of your own: a state machine that drives it on a real allocator.

Takes a function that makes the policy, gives an error where the policy breaks the protocol, and refuses to judge how
good its choices are. Needs Hypothesis; nothing else in the package imports this module.

    def test_my_policy():
        check_policy(MyPolicy)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from .block_allocator import BlockAllocator
from .errors import OutOfPages

if TYPE_CHECKING:
    from collections.abc import Callable

    from .eviction import EvictionPolicy
    from .pins import Pin
    from .sequence import Sequence
    from .steps import StepInFlight

_TOKENS = st.integers(0, 2)


class PolicyError(AssertionError):
    """A policy did what the protocol forbids; the message says what."""


class WatchedPolicy:
    """Passes every call on to a policy and to its twin, and compares the answers with what the protocol allows.

    The twin is a second policy from the same function: given the same calls, both must name the same victims, or
    ranks and replays would drift apart.
    """

    def __init__(self, policy: EvictionPolicy, twin: EvictionPolicy) -> None:
        """Start with no pages."""
        self.policy = policy
        self.twin = twin
        self.candidates: set[int] = set()
        self.known: set[int] = set()

    def hit(self, pages: list[int]) -> None:
        """Pass it on."""
        self._tell("hit", pages)

    def held(self, pages: list[int]) -> None:
        """Pass it on; these are candidates no more."""
        self.candidates.difference_update(pages)
        self._tell("held", pages)

    def released(self, pages: list[int]) -> None:
        """Pass it on; these are candidates now."""
        self.candidates.update(pages)
        self.known.update(pages)
        self._tell("released", pages)

    def removed(self, pages: list[int], evicted: bool) -> None:
        """Pass it on; these are gone."""
        self.candidates.difference_update(pages)
        self.known.difference_update(pages)
        for policy in (self.policy, self.twin):
            policy.removed(list(pages), evicted)

    def victims(self, count: int) -> list[int]:
        """Pass it on, and check the answer."""
        victims = self.policy.victims(count)
        if not isinstance(victims, list):
            raise PolicyError(f"victims must return a list, returned {type(victims).__name__}")
        if len(victims) != count:
            raise PolicyError(f"victims({count}) must return {count} pages, returned {victims}")
        if len(set(victims)) != count:
            raise PolicyError(f"victims({count}) must return different pages, returned {victims}")
        strangers = set(victims) - self.candidates
        if strangers:
            raise PolicyError(f"victims({count}) must return candidates, returned {victims}; {strangers} are not")
        again = self.policy.victims(count)
        if again != victims:
            raise PolicyError(f"victims({count}) must change nothing, returned {victims}, asked again {again}")
        other = self.twin.victims(count)
        if other != victims:
            raise PolicyError(f"the same calls must give the same victims, gave {victims} and {other}")
        return victims

    def _tell(self, name: str, pages: list[int]) -> None:
        # A copy each: a policy that keeps or sorts the list it was given must not disturb others.
        for policy in (self.policy, self.twin):
            getattr(policy, name)(list(pages))


class WatchedContentPolicy(WatchedPolicy):
    """The same for a policy that has the method `stored`."""

    def stored(self, pages: list[int], identities: list[bytes]) -> None:
        """Pass it on."""
        self.known.update(pages)
        for policy in (self.policy, self.twin):
            policy.stored(list(pages), list(identities))  # type: ignore[attr-defined]


def watched(make_policy: Callable[[], EvictionPolicy]) -> WatchedPolicy:
    """Return two new policies of ``make_policy`` behind the checks."""
    policy = make_policy()
    kind = WatchedContentPolicy if hasattr(policy, "stored") else WatchedPolicy
    return kind(policy, make_policy())


class PolicyMachine(RuleBasedStateMachine):
    """Runs sequences on an allocator with the policies of ``make_policy``; `policy_machine` makes its subclasses."""

    make_policy: ClassVar[staticmethod[[], EvictionPolicy]]
    num_pages: ClassVar[int]
    page_size: ClassVar[int]
    sequences: Bundle[Sequence] = Bundle("sequences")
    pins: Bundle[Pin] = Bundle("pins")
    steps: Bundle[StepInFlight] = Bundle("steps")

    def __init__(self) -> None:
        super().__init__()
        self.policy = watched(self.make_policy)
        self.allocator = BlockAllocator(self.num_pages, self.page_size, policy=self.policy)

    @rule(target=sequences, prompt=st.lists(_TOKENS, max_size=9), namespace=st.sampled_from([None, "other"]))
    def open(self, prompt: list[int], namespace: str | None) -> Sequence:
        """Open a sequence; some in another namespace."""
        return self.allocator.open(prompt, namespace=namespace)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: Sequence) -> Any:
        """Share all pages of a sequence."""
        return sequence.fork() if len(self._open()) < 8 else multiple()

    @rule(sequence=sequences, more=st.lists(_TOKENS, min_size=1, max_size=7), kept=st.integers(0, 7))
    def grow(self, sequence: Sequence, more: list[int], kept: int) -> None:
        """Store what the prompt still lacks, then more; commit part of it."""
        rest = sequence.prompt.tokens[sequence.num_tokens :].tolist()
        new = (rest + more)[: max(len(rest), len(more))]
        try:
            sequence.reserve(len(new))
        except OutOfPages:
            return
        self.allocator.take_copies()
        self.allocator.acknowledge_copies()
        sequence.commit(new[: max(kept, 1)])

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: Sequence, share: float) -> None:
        """Cut a sequence."""
        sequence.truncate(int(share * sequence.num_tokens))

    @rule(sequence=consumes(sequences))
    def close(self, sequence: Sequence) -> None:
        """Let a sequence go."""
        sequence.close()

    @rule(prompt=st.lists(_TOKENS, min_size=1, max_size=9))
    def serve(self, prompt: list[int]) -> None:
        """Run a whole request: most of what a cache sees."""
        with self.allocator.open(prompt) as sequence:
            self.grow(sequence, prompt[-1:], len(prompt))

    @rule(target=pins, prompt=st.lists(_TOKENS, min_size=1, max_size=9))
    def pin(self, prompt: list[int]) -> Any:
        """Hold what is stored of a prompt with no sequence: pages that are candidates no more."""
        return self.allocator.pin(prompt) if len(self.allocator.ledger.pins) < 4 else multiple()

    @rule(pin=consumes(pins))
    def unpin(self, pin: Pin) -> None:
        """Let pinned pages go; those that nobody else holds are candidates again."""
        pin.unpin()

    @rule(target=steps)
    def begin_step(self) -> Any:
        """Have a device begin a step: what is given back from now on waits for its end."""
        return self.allocator.begin_step() if len(self.allocator.ledger.pool.deferred.steps) < 3 else multiple()

    @rule(step=consumes(steps))
    def end_step(self, step: StepInFlight) -> None:
        """End a step, in any order; what has waited for it alone is given back, or becomes a candidate."""
        step.end()

    @rule()
    def reset(self) -> None:
        """Make everything stored unfindable."""
        self.allocator.reset_prefix_cache()

    @invariant()
    def sound(self) -> None:
        """Audit the books, and have the policy name any number of its candidates."""
        self.allocator.check()
        if len(self.policy.candidates) != self.allocator.stats().idle:
            raise PolicyError("the candidates that the policy was told of are not the idle pages")
        for count in range(len(self.policy.candidates) + 1):
            self.policy.victims(count)

    def _open(self) -> list[int]:
        return self.allocator.ledger.rows.live()


def policy_machine(
    make_policy: Callable[[], EvictionPolicy], *, num_pages: int = 9, page_size: int = 2
) -> type[PolicyMachine]:
    """Return a Hypothesis state machine that runs sequences on an allocator with the policy.

    Pins and steps in flight take pages from the policy and give them back like sequences do.
    After every step the allocator's `check` holds, and the policy's candidates are exactly the idle pages. Prompts are
    drawn from few tokens, so that beginnings are shared, and the pool is small, so that it is always short of pages.
    """
    bound = {"make_policy": staticmethod(make_policy), "num_pages": num_pages, "page_size": page_size}
    return type("CheckedPolicyMachine", (PolicyMachine,), bound)


def check_policy(
    make_policy: Callable[[], EvictionPolicy],
    *,
    num_pages: int = 9,
    page_size: int = 2,
    settings: hypothesis_settings | None = None,
) -> None:
    """Drive the policies of ``make_policy`` through random operations.

    Raises:
        PolicyError: a policy broke the protocol; Hypothesis prints the shortest sequence of operations it found.
        InvariantViolation: the allocator's books are wrong.
    """
    settings = settings or hypothesis_settings(max_examples=40, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(policy_machine(make_policy, num_pages=num_pages, page_size=page_size), settings=settings)

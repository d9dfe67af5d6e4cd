"""Holding: what keeps pages besides open sequences: pins, steps in flight, and swaps under way.

The part of the allocator's door that hands out these handles; what they do to the books stands in `pins`, `steps` and
`swapping`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .debug import caller
from .door import Door
from .errors import ForeignSequence, PlanOpen
from .host_pool import HostPool
from .leaks import Leak, leaks
from .pins import Pin, pin_prefix, unpin_prefix
from .prompt import read_prompt
from .sequence import Sequence
from .steps import StepInFlight
from .swapping import Swap, SwapPlan, leave_device, leave_host, make_findable, start_in, start_out

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from .ledger import Ledger


class Holding(Door):
    """The verbs of an allocator that hold pages apart from sequences."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] | None, *, debug: bool) -> None:
        """Hold nothing; with ``debug`` every handle remembers where it was made."""
        super().__init__(ledger, clock)
        self._debug = debug
        self._pins_made = 0

    def _where(self) -> str | None:
        return caller() if self._debug else None

    # Pins.

    def pin(
        self,
        tokens: Any,
        *,
        namespace: Hashable = None,
        media: Iterable[tuple[int, int, bytes | str | None]] = (),
    ) -> Pin:
        """Hold the full pages that are stored of ``tokens`` now, with no sequence, until `Pin.unpin`.

        They cannot be evicted meanwhile, and whoever writes into one writes into a copy. `reset_prefix_cache` makes
        them unfindable like any other page; they stay held. Of a window group only the pages are held that the token
        after the last full page sees.
        """
        self._enter()
        prompt = read_prompt(tokens, namespace, media, self.ledger.page_size)
        self._batch = None
        pages, num_tokens = pin_prefix(self.ledger, prompt)
        self._pins_made += 1
        pin = Pin(self, pages, serial=self._pins_made, num_tokens=num_tokens, origin=self._now(), where=self._where())
        self.ledger.pins[id(pin)] = pin
        if self._observer is not None:
            self._observer.pinned(pin.serial, num_tokens, pin.origin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """See `Pin.unpin`."""
        self._enter()
        if not isinstance(pin, Pin):
            raise TypeError(f"pin must be a Pin, was {type(pin).__name__}")
        pages = pin.pages()
        if self.ledger.pins.get(id(pin)) is not pin:
            raise ValueError("pin must be one that this allocator made, was another allocator's")
        del self.ledger.pins[id(pin)]
        pin._forget()
        unpin_prefix(self.ledger, pages)
        if self._observer is not None:
            self._observer.unpinned(pin.serial)

    # Steps in flight.

    def begin_step(self) -> StepInFlight:
        """Say that a device begins a step; pages given back from now on are not handed out before it ends.

        Steps may overlap: a page waits for those that were in flight when it was given back, not for later ones. Such
        pages count as referenced (`Stats.deferred` says how many there are), so they are not available either.
        ``with allocator.begin_step():`` ends the step by itself.
        """
        self._enter()
        step = self.ledger.pool.deferred.begin(self, self._now(), self._where())
        if self._observer is not None:
            self._observer.step_began(step.serial, step.origin)
        return step

    def end_step(self, step: StepInFlight) -> None:
        """See `StepInFlight.end`."""
        self._enter()
        if not isinstance(step, StepInFlight):
            raise TypeError(f"step must be a StepInFlight, was {type(step).__name__}")
        self.ledger.pool.end_step(step)
        if self._observer is not None:
            self._observer.step_ended(step.serial)

    # Swap.

    def swap_out(self, sequence: Sequence, host_pool: HostPool) -> SwapPlan:
        """Plan to move a sequence's pages into ``host_pool``; run the plan's copies, then finish or cancel it.

        Until then both ends stay held; from now on until it is back the sequence refuses every verb but `close`.
        Shared and findable pages are copied like any other, and stay with whoever else has them. Of a window group
        only what the next token sees is moved, unless `Sequence.hold_window` keeps the rest.

        Raises:
            ReservationOpen: a reservation was not committed.
            CopiesPending: a page of the sequence is still to be copied into.
            OutOfPages: the host pool has too few pages; the numbers are its own.
        """
        self._enter()
        (row,) = self._rows_of((sequence,), at_rest="swap_out")
        if not isinstance(host_pool, HostPool):
            raise TypeError(f"host_pool must be a HostPool, was {type(host_pool).__name__}")
        swap, copies = start_out(self.ledger, row, host_pool)
        self._batch = None
        swap.plan = SwapPlan(self, sequence, copies, to_host=True)
        return swap.plan

    def swap_in(self, sequence: Sequence) -> SwapPlan:
        """Plan to bring a swapped sequence back; run the plan's copies, then finish or cancel it.

        Pages that the prefix index has are shared and not copied: ``plan.copies`` has the others.

        Raises:
            ValueError: the sequence is not swapped.
            PlanOpen: its last plan has neither been finished nor cancelled.
            OutOfPages: the device has too few pages.
        """
        self._enter()
        swap = self._swap_of(sequence)
        if swap is None:
            raise ValueError(f"sequence must be swapped, was {sequence!r}")
        copies = start_in(self.ledger, swap)
        self._batch = None
        swap.plan = SwapPlan(self, sequence, copies, to_host=False)
        return swap.plan

    def finish_swap(self, plan: SwapPlan) -> None:
        """See `SwapPlan.finish`."""
        swap = self._settle(plan)
        if plan.to_host:
            leave_device(self.ledger, swap)
        else:
            make_findable(self.ledger, swap)
            leave_host(self.ledger, swap)
        if self._observer is not None:
            self._observer.swapped(plan.sequence.serial, to_host=plan.to_host)

    def cancel_swap(self, plan: SwapPlan) -> None:
        """See `SwapPlan.cancel`."""
        swap = self._settle(plan)
        if plan.to_host:
            leave_host(self.ledger, swap)
        else:
            leave_device(self.ledger, swap)

    def _settle(self, plan: SwapPlan) -> Swap:
        self._enter()
        if not isinstance(plan, SwapPlan):
            raise TypeError(f"plan must be a SwapPlan, was {type(plan).__name__}")
        if plan.sequence._allocator is not self:
            raise ForeignSequence(f"{plan!r} was made by another allocator")
        plan.settle()
        self._batch = None
        swap = plan.sequence._swap
        assert swap is not None
        swap.plan = None
        return swap

    def _swap_of(self, sequence: Sequence) -> Swap | None:
        """Return the record of a swapped sequence whose plan is settled; None for any other handle."""
        swap = sequence._swap if isinstance(sequence, Sequence) else None
        if swap is None:
            self._rows_of((sequence,))
            return None
        if sequence._allocator is not self:
            raise ForeignSequence(f"{sequence!r} was opened by another allocator")
        if swap.plan is not None:
            raise PlanOpen(f"{sequence!r} has an open plan: finish or cancel {swap.plan!r} first")
        return swap

    # Leaks.

    def leaks(self) -> tuple[Leak, ...]:
        """Return everything that keeps pages now, oldest first: at a time when nothing should, each is a leak."""
        self._enter()
        return leaks(self.ledger, self._now())

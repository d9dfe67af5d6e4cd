"""`check` names what is broken: each invariant is broken by hand once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagedkv.allocator import BlockAllocator, HostPool, InvariantViolation
from tests.allocator.helpers import extend, fill, run_copies, store

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.allocator.ledger import Ledger
    from pagedkv.allocator.swapping import Swap


def lively() -> BlockAllocator:
    """Return an allocator with free, idle, shared and reserved pages, a split run and a pending copy."""
    allocator = BlockAllocator(32, 2)
    store(allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    store(allocator, [1, 2, 3, 4, 9, 9], namespace="other")
    first = fill(allocator, [1, 2, 3, 4, 9, 9, 9])
    second = first.fork()
    extend(allocator, second, [5])
    run_copies(allocator)
    allocator.swap_out(fill(allocator, [6, 6, 7, 7]), HostPool(4)).finish()
    allocator.pin([1, 2, 3, 4])
    allocator.begin_step()
    fill(allocator, [8, 8]).close()
    third = second.fork()
    third.truncate(5)
    third.reserve(4)
    allocator.check()
    return allocator


def away(ledger: Ledger) -> Swap:
    """Return the record of the one swapped sequence."""
    (swap,) = ledger.swaps.values()
    return swap


def set_(target: str) -> Callable[[Ledger], None]:
    """Return a breakage that runs one statement on ``ledger``."""
    return lambda ledger: exec(target, {"ledger": ledger, "away": away})


BREAKAGES = [
    ("ledger.rows.opaque_from[0] = -1", "a length is negative"),
    ("ledger.rows.ends[0] = 99", "the table is too short"),
    ("ledger.tables[0, 1] = 0", "a block has no page of the pool"),
    ("ledger.tables[0, 1] = 99", "a block has no page of the pool"),
    ("ledger.tables[0, 1] = ledger.tables[0, 0]", "one table names a page twice"),
    ("ledger.tables[0, 6] = 3", "a table names a page past its last block"),
    ("ledger.pool.refs[ledger.tables[0, 0]] -= 1", "references counted, tables and pins hold"),
    ("ledger.pool.refs[ledger.pool.free_pages[0]] += 1", "1 references counted, tables and pins hold 0"),
    ("ledger.pool.pins[5] = 0", "a page has no pin in the pin list"),
    ("ledger.pool._stack[0] = ledger.pool._stack[1]", "a page must be in exactly one state: free"),
    ("ledger.pool.num_free -= 1", "a page must be in exactly one state: free 0 times"),
    ("ledger.pool._stack[0] = 0", "the null page is in use"),
    ("ledger.pool.num_idle += 1", "idle pages counted"),
    (
        "ledger.pool.policy._release_of[1] = 0; ledger.pool.policy._log.appendleft((0, [1]))",
        "eviction policy's candid",
    ),
    ("ledger.pool.policy.held(ledger.pool.policy.victims(1))", "the eviction policy's candidates"),
    ("ledger.rows.cursor[0].tokens.pop()", "tokens do not fit its pages"),
    ("ledger.rows.cursor[0].media[77] = b''", "media outside its run"),
    ("ledger.rows.cursor[0].key = b'?'", "child is not linked to it"),
    ("ledger.rows.cursor[0].tokens[0] ^= 1", "child is not linked to it"),
    ("ledger.index.node_of[ledger.tables[0, 0]] = None", "does not know the index node"),
    ("ledger.rows.cursor[0].parent.children._runs[0].reverse()", "children are not in order"),
    ("ledger.rows.root[0].children._runs[0].append(b'x')", "children are not in order"),
    ("ledger.index.indexed[ledger.tables[0, 0]] = False", "a page must be in exactly one state|marked otherwise"),
    ("ledger.rows.root[0].users += 1", "users are not its open sequences"),
    ("ledger.index.enter('ghost').users = 0", "neither users nor children"),
    ("ledger.rows.cursor[0] = ledger.rows.root[0]", "pages are not its path in the index"),
    ("ledger.rows.root[0] = None", "namespace is not in the index"),
    ("ledger.rows.tail_locked[1] = False; ledger.rows.num_tokens[0] = 5", "may be written is indexed or shared"),
    ("ledger.copies.source_of[3] = next(iter(ledger.copies.source_of))", "source and destination"),
    ("ledger.copies.source_of[29] = 2", "nobody holds the destination"),
    (
        "ledger.pool.pins[ledger.tables[0, 0]] += 1; ledger.pool.refs[ledger.tables[0, 0]] += 1",
        "the pins are not those",
    ),
    ("ledger.pins.clear()", "the pins are not those of pending copies, pins and steps in flight"),
    ("ledger.pool.deferred.pages.clear()", "the pins are not those of pending copies, pins and steps in flight"),
    (
        "ledger.pool.deferred.pages[next(iter(ledger.pool.deferred.pages))] = 0",
        "waits for a step that is not in flight",
    ),
    ("ledger.pool.deferred.steps.clear()", "waits for a step that is not in flight"),
    ("away(ledger).sequence._row = 0", "a swapped sequence is not where its handle says"),
    ("away(ledger).sequence._swap = None", "a swapped sequence is not where its handle says"),
    ("away(ledger).plan = 1", "a swapped sequence is not where its handle says"),
    ("away(ledger).row = 3", "a swapped sequence is not where its handle says"),
    ("away(ledger).num_tokens += 2", "length does not fit its host pages"),
    ("away(ledger).opaque_from = 1", "length does not fit its host pages"),
    ("away(ledger).host_pages[0] = away(ledger).host_pages[1]", "owner is not the sequence swapped into it"),
    ("away(ledger).host_pool.owners[2] = ledger.rows.sequences[0]", "a host page must be either free or held, once"),
    ("away(ledger).host_pool._free.append(2)", "a host page must be either free or held, once"),
    ("away(ledger).host_pool._free.pop()", "a host page must be either free or held, once"),
    (
        "away(ledger).host_pool.owners[away(ledger).host_pool._free.pop()] = ledger.rows.sequences[0]",
        "held by a sequence that is not swapped",
    ),
    ("ledger.copies.source_of.clear()", "the pins are not those of pending copies"),
    ("ledger.rows.num_tokens[7] = 3", "a row that nobody uses is not empty"),
    ("ledger.tables[7, 2] = 3", "a row that nobody uses is not empty"),
]


@pytest.mark.parametrize(("breakage", "message"), BREAKAGES)
def test_each_invariant_is_proved(breakage: str, message: str) -> None:
    """A broken book is found, whichever it is."""
    allocator = lively()
    set_(breakage)(allocator.ledger)
    with pytest.raises(InvariantViolation, match=message):
        allocator.check()


def test_held_page_with_an_idle_parent() -> None:
    """Whoever holds a page must hold its parents, within a run and across runs."""
    for at in (0, 1):
        allocator = BlockAllocator(32, 2)
        store(allocator, [1, 2, 3, 4, 5, 6])
        store(allocator, [1, 2, 3, 4, 9, 9])
        sequence = allocator.open([1, 2, 3, 4, 5, 6, 7])
        ledger = allocator.ledger
        page = int(sequence.block_table()[at])
        ledger.pool.refs[page] = 0
        from pagedkv.allocator import audit

        with pytest.raises(InvariantViolation, match="a page is held, its parent is not"):
            audit._index(ledger)


def test_the_owner_is_named() -> None:
    """The error has the page, the sequence that holds it, and when it was opened."""
    allocator = BlockAllocator(8, 4, clock=lambda: 12.5)
    sequence = fill(allocator, [1, 2, 3])
    page = int(sequence.block_table()[0])
    allocator.ledger.pool.refs[page] = 4
    with pytest.raises(InvariantViolation) as raised:
        allocator.check()

    assert (page, sequence, 12.5) == (raised.value.page, raised.value.owner, raised.value.origin)
    assert (
        "4 references counted, tables and pins hold 1 (page 1) (owner <Sequence 1, 3 tokens>, opened at 12.5)"
        == str(raised.value)
    )

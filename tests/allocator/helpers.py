"""Short verbs for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence as Tokens

    from pagedkv.allocator import BlockAllocator, Sequence


def run_copies(allocator: BlockAllocator) -> list[tuple[int, int]]:
    """Take and acknowledge the pending copies, as a cache does before it writes."""
    copies = [(source, destination) for source, destination in allocator.take_copies().tolist()]
    allocator.acknowledge_copies()
    return copies


def fill(allocator: BlockAllocator, tokens: Tokens[int], **where: Any) -> Sequence:
    """Open a sequence and compute all of its prompt."""
    sequence = allocator.open(tokens, **where)
    extend(allocator, sequence, list(tokens)[sequence.num_tokens :])
    return sequence


def extend(allocator: BlockAllocator, sequence: Sequence, tokens: list[int]) -> None:
    """Reserve, run copies, commit."""
    sequence.reserve(len(tokens))
    run_copies(allocator)
    sequence.commit(tokens)


def store(allocator: BlockAllocator, tokens: Tokens[int], **where: Any) -> None:
    """Compute a prompt and close it, so that only the prefix cache has it."""
    fill(allocator, tokens, **where).close()


def hit(allocator: BlockAllocator, tokens: Tokens[int], **where: Any) -> int:
    """Return how many tokens of a prompt are found."""
    with allocator.open(tokens, **where) as sequence:
        return sequence.num_tokens


def books(allocator: BlockAllocator) -> tuple[object, ...]:
    """Return everything that a call that raises must leave as it was."""
    ledger = allocator.ledger
    rows = ledger.rows
    return (
        ledger.pool.refs.tolist(),
        ledger.pool.free_pages.tolist(),
        ledger.pool.policy.victims(ledger.pool.num_idle),
        dict(ledger.pool.pins),
        ledger.index.indexed.tolist(),
        [table[row, : rows.held(row)].tolist() for table in rows.tables for row in rows.live()],
        [values[rows.live()].tolist() for values in (rows.num_tokens, rows.ends, rows.opaque_from, rows.prompt_len)],
        dict(ledger.copies.source_of),
        sorted(map(str, ledger.index.roots)),
        allocator.stats(),
    )

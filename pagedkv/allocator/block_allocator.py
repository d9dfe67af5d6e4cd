"""The block allocator: pages for sequences, found, shared, written and given back.

Takes token ids and counts, gives page ids and slots, and refuses to know tensors, requests and model configs. It is
the door: it checks what callers pass and which thread they are, and every call either does all it says or raises
with nothing changed. It reads no clock and draws no random number, so the same calls give the same page ids
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .audit import audit
from .committing import check_commit, commit_row
from .debug import require_level, watch
from .decode import all_one, one_each
from .eviction import EvictionPolicy, make_policy
from .group_decode import decode_batch
from .groups import FullAttention, LayerGroup
from .holding import Holding
from .ledger import Ledger, Room
from .lifecycle import ResetReport, check_truncate, close_row, fork_row, open_row, reset, room_for, truncate_row
from .observer import require_observer
from .prompt import read_prompt
from .reserving import reserve_rows, room_to_grow
from .sequence import CLOSED, Sequence
from .stats import Stats, collect
from .swapping import close_swapped
from .tokens import chunk_of, count_of, counts_of, token_array, token_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from .observer import Observer
    from .prefix_index import PageArray
    from .prompt import Prompt

MAX_PAGES = 2**31 - 1
"""The most pages of a pool, the null page included: page ids are int32."""


class BlockAllocator(Holding):
    """Hands out the pages of one pool and keeps a block table per sequence.

    The first thread that calls it owns it; `hand_over` gives it to the next one that calls.

    Args:
        num_pages: pages of the pool, page 0, the null page, included; so at least 2.
        page_size: token slots in a page.
        groups: the layer groups, `FullAttention` and `SlidingWindow`, that share the pool; each sequence has a block
            table for every one.
        prefix_cache: whether full pages can be found by other sequences with the same beginning.
        policy: which idle page is evicted first, by name (docs/eviction.md), or an `EvictionPolicy` of your own.
        clock: gives the time that sequences are marked with; by default the number of calls so far.
        observer: hears what has succeeded (`Observer`); None costs nothing.
        debug: how often `check` runs after operations: "off", "sampled" (every thousandth) or "every"; unless off,
            sequences and other handles also remember the caller's file and line, for `leaks`.

    Attributes:
        ledger: the books; reading them is for audits and tests, changing them is not for anybody.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        groups: Iterable[LayerGroup] = (FullAttention(),),
        prefix_cache: bool = True,
        policy: str | EvictionPolicy = "lru",
        clock: Callable[[], float] | None = None,
        observer: Observer | None = None,
        debug: str = "off",
    ) -> None:
        """Make a pool in which every page is free."""
        num_pages = count_of(num_pages, "num_pages", 2, MAX_PAGES)  # page 0 is never handed out
        page_size = count_of(page_size, "page_size", 1, MAX_PAGES)
        self.groups = tuple(groups) if isinstance(groups, Iterable) else ()
        if not self.groups or not all(isinstance(group, LayerGroup) for group in self.groups):
            raise ValueError(f"groups must be FullAttention() and SlidingWindow(...), at least one, was {groups!r}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = bool(prefix_cache)
        ledger = Ledger(num_pages, page_size, self.groups, prefix_cache=self.prefix_cache, policy=make_policy(policy))
        super().__init__(ledger, clock, debug=require_level(debug))
        self._serial = 0
        self._observer = observer
        if observer is not None:
            require_observer(observer).attached(num_pages, page_size)
            ledger.pool.on_evicted = observer.evicted
        watch(self, ledger, debug)

    # Sequences.

    def open(
        self,
        tokens: Any,
        *,
        namespace: Hashable = None,
        media: Iterable[tuple[int, int, bytes | str | None]] = (),
    ) -> Sequence:
        """Open a sequence that will hold ``tokens``; what is stored of them already is its `num_tokens`.

        At least one token is left to compute. Takes no new page; the pages found are held until `close`.

        Args:
            tokens: ids from 0 to 2**32 - 1; may be empty.
            namespace: who may share: a `Namespace` or any hashable.
            media: ``(start, length, digest)`` spans; see `Media`.

        Raises:
            TypeError, ValueError: an argument is not what it must be.
        """
        self._enter()
        prompt = read_prompt(tokens, namespace, media, self.page_size)
        self.ledger.require_named(namespace)
        sequence = self._handle(prompt, namespace)
        sequence._row = open_row(self.ledger, prompt, sequence)
        sequence._cached = sequence.num_tokens
        if self._observer is not None:
            self._observer.opened(
                sequence.serial,
                prompt.tokens,
                sequence._cached,
                namespace=namespace,
                media=prompt.spans,
                at=sequence.origin,
            )
        return sequence

    def room(
        self,
        tokens: Any,
        *,
        growth: int = 0,
        chunk: int | None = None,
        namespace: Hashable = None,
        media: Iterable[tuple[int, int, bytes | str | None]] = (),
    ) -> Room:
        """Say how many pages ``tokens`` and ``growth`` tokens more would take, hits counted, and how many there are.

        Changes nothing, not even recency. ``chunk`` is the most tokens that one reserve will ask for, by default all
        at once: a window group's pages go back between reserves, so it never holds more than the window and a chunk.
        """
        self._enter()
        prompt = read_prompt(tokens, namespace, media, self.page_size)
        return room_for(self.ledger, prompt, count_of(growth, "growth"), chunk_of(chunk))

    def room_to_grow(self, sequence: Sequence, num_tokens: int, chunk: int | None = None) -> Room:
        """See `Sequence.room`."""
        self._enter()
        count = count_of(num_tokens, "num_tokens")
        (row,) = self._rows_of((sequence,), at_rest="room")
        return room_to_grow(self.ledger, row, count, chunk_of(chunk))

    def fork(self, sequence: Sequence) -> Sequence:
        """See `Sequence.fork`."""
        self._enter()
        (row,) = self._rows_of((sequence,), at_rest="fork")
        child = self._handle(sequence.prompt, sequence.namespace)
        child._row = fork_row(self.ledger, row, child)
        child._cached = sequence.num_cached_tokens
        if self._observer is not None:
            self._observer.forked(sequence.serial, child.serial, child.origin)
        return child

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """See `Sequence.truncate`."""
        self._enter()
        num_tokens = count_of(num_tokens, "num_tokens")
        (row,) = self._rows_of((sequence,), at_rest="truncate")
        if num_tokens > sequence.num_tokens:
            raise ValueError(
                f"num_tokens must be at most {sequence.num_tokens}, what {sequence!r} has, was {num_tokens}"
            )
        check_truncate(self.ledger, row, num_tokens)
        self.ledger.rows.window_held[row] = False
        if num_tokens < sequence.num_tokens:
            self._batch = None
            truncate_row(self.ledger, row, num_tokens)
            sequence.prompt = sequence.prompt.cut(num_tokens, self.page_size)
            if self._observer is not None:
                self._observer.truncated(sequence.serial, num_tokens)

    def hold_window(self, sequence: Sequence) -> None:
        """See `Sequence.hold_window`."""
        self._enter()
        (row,) = self._rows_of((sequence,))
        self._batch = None
        self.ledger.rows.window_held[row] = True

    def close(self, sequence: Sequence) -> None:
        """See `Sequence.close`."""
        self._enter()
        swap = self._swap_of(sequence)
        if swap is not None:
            close_swapped(self.ledger, swap)
        else:
            self._batch = None
            close_row(self.ledger, sequence.row)
            sequence._row = CLOSED
        if self._observer is not None:
            self._observer.closed(sequence.serial)

    # Steps.

    def reserve_batch(self, sequences: Iterable[Sequence], counts: Any) -> None:
        """Make room for the next tokens of every sequence, or of none.

        Args:
            sequences: different open sequences without a reservation.
            counts: one number for all, or one per sequence; 0 is legal and opens nothing.

        Raises:
            OutOfPages: they need more pages together than there are.
            ReservationOpen: one has a reservation that was not committed.
        """
        self._enter()
        batch, sequences = self._batch, list(sequences)
        if batch is None or batch.is_reserved or batch.sequences != sequences:
            rows, batch = self._rows_of(sequences, at_rest="reserve"), None
        else:
            rows = batch.rows
        is_step = all_one(counts, len(rows))
        if is_step and batch is None:
            batch = decode_batch(self.ledger, sequences, rows)
        if is_step and batch is not None:
            batch.reserve()
            self._batch, numbers = batch, batch.ones
        else:
            numbers = counts_of(counts, len(rows), "counts")
            reserve_rows(self.ledger, rows, numbers)
            self._batch = None
        if self._observer is not None:
            self._observer.reserved([sequence.serial for sequence in sequences], numbers)

    def commit_batch(self, sequences: Iterable[Sequence], tokens: Any) -> None:
        """Say that the next tokens of every sequence have been written; the rest of each reservation is given back.

        Args:
            sequences: different open sequences.
            tokens: one id per sequence, or the ids of each; no ids means that nothing was written.

        Raises:
            NotReserved, PromptMismatch, CopiesPending: as in `Sequence.commit`; nothing of the batch is committed.
        """
        self._enter()
        batch, sequences = self._batch, list(sequences)
        if batch is not None and batch.is_reserved and batch.sequences == sequences and not self.ledger.copies:
            ids = one_each(tokens, len(sequences))
            if ids is not None:
                batch.commit(ids)
                if self._observer is not None:
                    self._observer.committed([s.serial for s in sequences], list(ids.reshape(-1, 1)), batch.ones)
                return
        rows = self._rows_of(sequences)
        entries = token_rows(tokens, len(rows))
        for row, entry in zip(rows, entries, strict=True):
            check_commit(self.ledger, row, len(entry), entry)
        self._batch = None
        for row, entry in zip(rows, entries, strict=True):
            commit_row(self.ledger, row, len(entry), entry)
        if self._observer is not None:
            self._observer.committed([s.serial for s in sequences], entries, [len(entry) for entry in entries])

    def commit(self, sequence: Sequence, tokens: Any, count: int | None) -> None:
        """See `Sequence.commit`."""
        self._enter()
        (row,) = self._rows_of((sequence,))
        ids = None if count is not None else token_array(tokens)
        number = count_of(count, "count") if ids is None else len(ids)
        check_commit(self.ledger, row, number, ids)
        self._batch = None
        commit_row(self.ledger, row, number, ids)
        if self._observer is not None:
            self._observer.committed([sequence.serial], [ids], [number])

    # What the cache must do to its tensors.

    def take_copies(self) -> PageArray:
        """Return the page copies to run before the next write, int32 ``[n, 2]`` (source, destination).

        The list may be run all at once. It has everything that was not acknowledged, so asking twice is harmless.
        """
        self._enter()
        return self.ledger.copies.take()

    def acknowledge_copies(self) -> None:
        """Say that the copies last taken have run (or are queued before any later write): their sources may go."""
        self._enter()
        self.ledger.copies.acknowledge()

    def take_scrubs(self) -> PageArray:
        """Return the pages that changed namespace since they were last taken, int32 ``[n]``.

        A cache that clears pages must do so before the next write, and before the copies.
        """
        self._enter()
        return self.ledger.scrubs.take()

    # Looking in.

    def block_tables(self, group: int = 0) -> PageArray:
        """Return a layer group's block tables, int32 ``[rows, width]``: a live view, read-only by agreement.

        Past a sequence's own blocks stands the null page. The array is replaced when it grows (`open`, `fork`,
        `reserve`), so ask again after those.
        """
        if not 0 <= count_of(group, "group") < len(self.groups):
            raise ValueError(f"group must be below {len(self.groups)}, was {group}")
        return self.ledger.rows.tables[group]

    def reset_prefix_cache(self) -> ResetReport:
        """Make everything stored so far unfindable, for ever, as when the weights change.

        Idle pages are freed. Open sequences go on, but no later sequence finds what they hold, nor what they add.

        Returns:
            What was done; true where nothing of the old KV is held any more.
        """
        self._enter()
        self._batch = None
        report = reset(self.ledger)
        if self._observer is not None:
            self._observer.was_reset()
        return report

    def stats(self) -> Stats:
        """Return the numbers of this moment."""
        self._look()
        return collect(self.ledger)

    def check(self) -> None:
        """Prove every invariant of the books.

        Raises:
            InvariantViolation: one does not hold; names the page, its owner and its origin.
        """
        self._look()
        audit(self.ledger)

    def _handle(self, prompt: Prompt, namespace: Hashable) -> Sequence:
        self._batch = None
        self._serial += 1
        return Sequence(self, prompt, namespace, serial=self._serial, origin=self._now(), where=self._where())

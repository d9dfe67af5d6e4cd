"""The handle on one sequence.

Takes verbs, hands them to its allocator, and keeps nothing but its row, its prompt and where it came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from .committing import require_prompt
from .errors import SequenceClosed, SequenceSwapped
from .tokens import count_of, token_array

if TYPE_CHECKING:
    from collections.abc import Hashable

    from .block_allocator import BlockAllocator
    from .ledger import Room
    from .prefix_index import PageArray
    from .prompt import Prompt
    from .swapping import Swap


CLOSED, SWAPPED = -1, -2  # in the place of a row


class Sequence:
    """Tokens whose KV is stored in pages, made by `BlockAllocator.open` or `fork`; a context manager.

    After `close` every use but `closed` and `repr` raises `SequenceClosed`. While it lies in a host pool, or is on its
    way, its lengths are known, `close` works, and everything else raises `SequenceSwapped`.

    Attributes:
        serial: its number among the allocator's sequences, from 1, as they were opened and forked.
        origin: the allocator's clock when it was opened.
        where: the caller's file and line, where the allocator's ``debug`` is on.
        prompt: what it was opened with, less what `truncate` cut off.
    """

    __slots__ = ("_allocator", "_cached", "_namespace", "_row", "_swap", "origin", "prompt", "serial", "where")

    def __init__(
        self,
        allocator: BlockAllocator,
        prompt: Prompt,
        namespace: Hashable,
        *,
        serial: int,
        origin: float,
        where: str | None,
    ) -> None:
        """Make a handle without a row; the allocator gives it one at once."""
        self._allocator = allocator
        self._namespace = namespace
        self._row = CLOSED
        self._swap: Swap | None = None
        self._cached = 0
        self.prompt = prompt
        self.serial = serial
        self.origin = origin
        self.where = where

    def __repr__(self) -> str:
        if self._swap is not None:
            return f"<Sequence {self.serial}, {self._swap.num_tokens} tokens, swapped>"
        if self._row < 0:
            return f"<Sequence {self.serial}, closed>"
        return f"<Sequence {self.serial}, {self._allocator.ledger.rows.num_tokens[self._row]} tokens>"

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *error: object) -> None:
        if self._row != CLOSED:
            self.close()

    def _live_row(self) -> int:
        if self._row < 0:
            self._require_open()
            raise SequenceSwapped(
                f"{self!r} lies in a host pool, or is on its way; swap_in() and finish the plan first"
            )
        return self._row

    def _require_open(self) -> None:
        if self._row == CLOSED:
            raise SequenceClosed(f"{self!r} was used after close()")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._row == CLOSED

    @property
    def swapped(self) -> bool:
        """Whether it lies in a host pool, or is on its way there or back."""
        return self._row == SWAPPED

    @property
    def namespace(self) -> Hashable:
        """The namespace it was opened in."""
        return self._namespace

    @property
    def row(self) -> int:
        """Its row in `BlockAllocator.block_tables`."""
        return self._live_row()

    @property
    def num_tokens(self) -> int:
        """Tokens whose K and V are stored."""
        if self._swap is not None:
            return self._swap.num_tokens
        return int(self._allocator.ledger.rows.num_tokens[self._live_row()])

    @property
    def num_reserved(self) -> int:
        """Tokens of the open reservation; 0 where none is open."""
        return 0 if self._swap is not None else self._allocator.ledger.rows.reserved(self._live_row())

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were stored already when it was opened (a fork: when its parent was)."""
        self._require_open()
        return self._cached

    def reserve(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` more tokens; 0 is legal and opens nothing.

        Raises:
            OutOfPages: not enough pages are free or idle.
            ReservationOpen: an earlier reservation was not committed.
        """
        self._allocator.reserve_batch((self,), count_of(num_tokens, "num_tokens"))

    def commit(self, tokens: Any = None, *, count: int | None = None) -> None:
        """Say that the next tokens' KV has been written; what is left of the reservation is given back.

        Args:
            tokens: their ids. Full pages become findable.
            count: instead of ids, how many. That page and all later ones are never indexed.

        Raises:
            NotReserved: more tokens than are reserved.
            PromptMismatch: a token differs from the prompt.
            CopiesPending: a page was written whose copy has not been acknowledged.
        """
        if (tokens is None) == (count is None):
            raise TypeError("commit takes either tokens or count=")
        self._allocator.commit(self, tokens, count)

    def require_next(self, tokens: Any) -> None:
        """Raise `PromptMismatch` where ``tokens`` cannot come next: inside the prompt they must equal it.

        For callers who want to know before they compute; `commit` asks the same.
        """
        ledger, row = self._allocator.ledger, self._live_row()
        if ledger.rows.num_tokens.item(row) < len(self.prompt.tokens):
            require_prompt(ledger, row, token_array(tokens))

    def fork(self) -> Sequence:
        """Return a new sequence with the same tokens, sharing every page; a shared tail is copied on the first write.

        Raises:
            ReservationOpen: a reservation was not committed.
        """
        return self._allocator.fork(self)

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens from ``num_tokens`` on, also what the prompt says of them.

        Truncating to the present length changes nothing: what is left of the prompt still comes next.

        Raises:
            ReservationOpen: a reservation was not committed.
            ValueError: it has fewer tokens.
            BeyondWindow: a window group has given back pages that it would need again; the last step and what came
                before it within the window can always be taken back.
        """
        self._allocator.truncate(self, num_tokens)

    def hold_window(self) -> None:
        """Keep pages that leave a window, until the next `truncate`: every length from here on can be returned to."""
        self._allocator.hold_window(self)

    def close(self) -> None:
        """Give every page back, also those of an open reservation and of a host pool.

        Raises:
            PlanOpen: a swap plan has neither been finished nor cancelled.
        """
        self._allocator.close(self)

    def room(self, num_tokens: int, *, chunk: int | None = None) -> Room:
        """Say what `reserve` of ``num_tokens`` would take, copies included, and what there is; changes nothing.

        Pages that have left a window go back in that reserve, so they count as available, unless a step is in flight.
        ``chunk`` says that the tokens will come in several reserves, of so many at most: then a window's pages make
        room for each other, and what is needed is the most at any time.
        """
        return self._allocator.room_to_grow(self, num_tokens, chunk)

    def block_table(self, group: int = 0) -> PageArray:
        """Return a copy of the page id of each block, int32 ``[blocks]``, reserved ones included.

        Blocks that left the group's window have the null page.
        """
        rows = self._allocator.ledger.rows
        row = self._live_row()
        table: PageArray = self._allocator.block_tables(group)[row, : rows.held(row)].copy()
        return table

    def slots(self, start: int, stop: int, group: int = 0) -> npt.NDArray[np.int64]:
        """Return the slots of positions ``start`` to ``stop``, int64 ``[stop - start]``, reserved ones included.

        Raises:
            ValueError: a position is neither stored nor reserved.
        """
        start, stop = count_of(start, "start"), count_of(stop, "stop")
        row, rows = self._live_row(), self._allocator.ledger.rows
        end = int(rows.ends[row])
        if not start <= stop <= end:
            raise ValueError(f"slots must lie within the {end} tokens stored and reserved, was {start} to {stop}")
        positions = np.arange(start, stop)
        size = rows.page_size
        pages = self._allocator.block_tables(group)[row, positions // size].astype(np.int64)
        slots: npt.NDArray[np.int64] = pages * size + positions % size
        return slots

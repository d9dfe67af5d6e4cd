"""The rows of a batch: a paged sequence each, and the columns that translate between them and `generate`.

Takes row numbers, gives rows reordered, repeated, cut or forked, and refuses to touch pages itself: a row that is
taken twice is forked (its pages are shared until one of them writes), a row that nobody took is closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.transformers.columns import Columns

if TYPE_CHECKING:
    from pagedkv.allocator import Sequence as PagedSequence
    from pagedkv.cache import PagedKVCache


class Rows:
    """The sequences of one batch.

    Attributes:
        sequences: one per row, each with the row's real tokens.
        columns: which columns are real.
    """

    def __init__(self, sequences: list[PagedSequence], columns: Columns) -> None:
        self.sequences = sequences
        self.columns = columns

    @classmethod
    def opened(cls, store: PagedKVCache, num_rows: int) -> Rows:
        """Return ``num_rows`` empty rows."""
        return cls([store.open([]) for _ in range(num_rows)], Columns(num_rows))

    def fit(self, num_rows: int, *, matched: bool) -> None:
        """Make these the rows of a batch of ``num_rows``: equally many, or, just ``matched``, a multiple.

        Beams and parallel samples repeat the prompts that were matched.

        Raises:
            ValueError: the batch has other rows.
        """
        repeats, rest = divmod(num_rows, self.columns.num_rows)
        if matched and not rest:
            self.select([row for row in range(self.columns.num_rows) for _ in range(repeats)])
        elif num_rows != self.columns.num_rows:
            raise ValueError(
                f"the batch must have {self.columns.num_rows} rows, as the cache has, had {num_rows}; "
                "reset() begins anew"
            )

    @classmethod
    def matched(cls, store: PagedKVCache, input_ids: torch.Tensor, real: torch.Tensor) -> Rows | None:
        """Return rows that hold what is stored of ``input_ids`` ``[rows, columns]``, equally many columns in each.

        ``real`` says which columns are tokens. None where no column can be taken over.
        """
        sequences = []
        try:
            for ids, kept in zip(input_ids, real, strict=True):
                sequences.append(store.open(ids[kept].tolist()))
            found = torch.tensor([sequence.num_tokens for sequence in sequences])
            columns = int((real.cumsum(1) <= found[:, None]).all(0).sum())
            columns = min(columns, input_ids.shape[1] - 1)
            rows = cls(sequences, Columns(len(sequences)))
            rows.columns.append(real[:, :columns], columns)
            for sequence, length in zip(sequences, rows.columns.lengths(), strict=True):
                sequence.truncate(length)
        except BaseException:
            close_all(sequences)
            raise
        if columns:
            return rows
        rows.close()
        return None

    def select(self, indices: list[int]) -> None:
        """Make row ``i`` what row ``indices[i]`` was, without moving any K or V.

        Raises:
            ValueError: an index names no row; nothing has changed.
        """
        for index in indices:
            if not 0 <= index < len(self.sequences):
                raise ValueError(f"indices must be rows from 0 to {len(self.sequences) - 1}, had {index}")
        taken: set[int] = set()
        sequences = []
        for index in indices:
            sequences.append(self.sequences[index].fork() if index in taken else self.sequences[index])
            taken.add(index)
        for index, sequence in enumerate(self.sequences):
            if index not in taken:
                sequence.close()
        self.sequences = sequences
        self.columns.select(indices)

    def crop(self, count: int) -> None:
        """Take the last ``count`` columns away; all rows or none.

        Raises:
            BeyondWindow: a sliding window has given back what would be seen again.
        """
        columns = self.columns.copy()
        gone = columns.crop(count)
        lengths = [sequence.num_tokens - n for sequence, n in zip(self.sequences, gone, strict=True)]
        forks: list[PagedSequence] = []
        try:
            # On forks first: a row that cannot be cut must leave the others as they are.
            for sequence, length in zip(self.sequences, lengths, strict=True):
                forks.append(sequence.fork())
                forks[-1].truncate(length)
        except BaseException:
            close_all(forks)
            raise
        close_all(self.sequences)
        self.sequences, self.columns = forks, columns

    def fork(self) -> Rows:
        """Return rows of their own that share every page with these."""
        return Rows([sequence.fork() for sequence in self.sequences], self.columns.copy())

    def close(self) -> None:
        """Give every page back."""
        close_all(self.sequences)
        self.sequences = []


def close_all(sequences: list[PagedSequence]) -> None:
    """Close those that are still open."""
    for sequence in sequences:
        if not sequence.closed:
            sequence.close()


def row_numbers(indices: torch.Tensor | list[int]) -> list[int]:
    """Return a beam index, any row index, or one bool per row, as whole numbers."""
    if isinstance(indices, torch.Tensor):
        indices = (indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist()
    return list(indices)

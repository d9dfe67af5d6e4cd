"""The columns of a padded batch: which of them are real tokens, row by row.

Takes the masks that a caller gives with each forward, gives the translation between columns (what `generate` counts)
and positions (what is stored: real tokens only, one slot each), and refuses a mask that changes what is stored
already. It knows no pages.
"""

from __future__ import annotations

import torch


class Columns:
    """Which columns of a batch of ``num_rows`` rows are real; all lives on the CPU.

    Where nothing was ever padded, nothing but the count is kept.

    Attributes:
        num_rows: rows of the batch.
        count: columns so far, padding included.
        last_hole: the last column that is padding after a real token of its row; -1 where there is none. Column
            distances across it are not position distances.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.count = 0
        self.last_hole = -1
        self._real: torch.Tensor | None = None  # bool [num_rows, capacity]; None: every column of every row is real

    @property
    def padded(self) -> bool:
        """Whether any column of any row is padding."""
        return self._real is not None

    @property
    def real(self) -> torch.Tensor:
        """Bool ``[num_rows, count]``: which columns are real tokens."""
        if self._real is None:
            return torch.ones(self.num_rows, self.count, dtype=torch.bool)
        return self._real[:, : self.count]

    def lengths(self) -> list[int]:
        """Return each row's real tokens."""
        if self._real is None:
            return [self.count] * self.num_rows
        lengths: list[int] = self.real.sum(1).tolist()
        return lengths

    def read(self, mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
        """Return which of the next ``count`` columns are real, bool ``[num_rows, count]``; None if all are.

        Args:
            mask: ``[num_rows, columns]``, true for real tokens, over all columns from the first; what it lacks at the
                end counts as padding, as in transformers. None means that every column is real.
            count: columns about to be added.

        Raises:
            ValueError: the mask has other rows, or disagrees with what is stored: such a token cannot be hidden, nor
                padding be shown, since padding was given no slot.
        """
        if mask is None:
            if self.padded:
                raise ValueError(
                    "attention_mask must hide the padding that was not stored; None would show it. Pass the mask of "
                    f"all {self.count + count} columns"
                )
            return None
        mask = mask.detach().to(device="cpu", dtype=torch.bool)
        total = self.count + count
        if mask.shape[0] != self.num_rows:
            raise ValueError(f"attention_mask must have {self.num_rows} rows, as the cache has, had {mask.shape[0]}")
        mask = mask[:, :total]
        if mask.shape[1] < total:
            mask = torch.nn.functional.pad(mask, (0, total - mask.shape[1]))
        if self._real is None and bool(mask.all()):
            return None
        self._require_same(mask[:, : self.count])
        new = mask[:, self.count :]
        return None if bool(new.all()) else new

    def _require_same(self, mask: torch.Tensor) -> None:
        changed = (mask != self.real).nonzero()
        if len(changed):
            row, column = changed[0].tolist()
            was = "a stored token" if bool(self.real[row, column]) else "padding, which has no slot"
            raise ValueError(
                f"attention_mask must leave the columns before this forward as they were: row {row}, column {column} "
                f"is {was}, the mask now says {int(mask[row, column])}"
            )

    def append(self, real: torch.Tensor | None, count: int) -> None:
        """Add ``count`` columns, of which ``real`` ``[num_rows, count]`` are tokens; None: all."""
        if real is not None and bool(real.all()):
            real = None
        if real is None and self._real is None:
            self.count += count
            return
        before = self.real
        self._ensure(self.count + count)
        assert self._real is not None
        self._real[:, : self.count] = before
        self._real[:, self.count : self.count + count] = True if real is None else real
        self.count += count
        if real is not None:
            self.last_hole = last_hole(self.real)

    def _ensure(self, capacity: int) -> None:
        """Make room for ``capacity`` columns, by doubling."""
        if self._real is None or self._real.shape[1] < capacity:
            self._real = torch.zeros(self.num_rows, max(2 * capacity, 64), dtype=torch.bool)

    def crop(self, count: int) -> list[int]:
        """Take the last ``count`` columns away; return how many real tokens of each row they were."""
        count = min(count, self.count)
        if self._real is None:
            self.count -= count
            return [count] * self.num_rows
        gone: list[int] = self._real[:, self.count - count : self.count].sum(1).tolist()
        self.count -= count
        self._forget_padding()
        return gone

    def select(self, indices: list[int]) -> None:
        """Make row ``i`` what row ``indices[i]`` was."""
        if self._real is not None:
            self._real = self._real[indices].clone()
        self.num_rows = len(indices)
        if self._real is not None:
            self._forget_padding()

    def _forget_padding(self) -> None:
        """Go back to counting alone where no padding is left."""
        if bool(self.real.all()):
            self._real, self.last_hole = None, -1
        else:
            self.last_hole = last_hole(self.real)

    def copy(self) -> Columns:
        """Return columns that go their own way from here."""
        twin = Columns(self.num_rows)
        twin.count, twin.last_hole = self.count, self.last_hole
        twin._real = None if self._real is None else self._real.clone()
        return twin


def last_hole(real: torch.Tensor) -> int:
    """Return the last column of ``real`` ``[rows, columns]`` that is padding after a token of its row, or -1."""
    holes = (real.cumsum(1) > 0).logical_and_(~real).any(0).nonzero()
    return int(holes[-1]) if len(holes) else -1

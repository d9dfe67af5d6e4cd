"""Requests as a trace has them: a prompt, an output, and what decides whether two prompts may share.

Takes what a reader found in a file, gives token ids when they are asked for, and refuses to know file formats. Ids are
made late: the prompts of a public trace are 10^8 tokens, the runs that stand for them a few megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from ..tokens import TokenArray

OUTPUT_IDS = 2**31
"""Ids below are made for prompts, ids from here on for outputs, where a file names neither."""


class TraceError(ValueError):
    """A line of a trace is not what it must be.

    Attributes:
        path: the file.
        line: the line's number, from 1.
    """

    def __init__(self, path: Path | str, line: int, what: str) -> None:
        """Say where and what."""
        super().__init__(f"{path}:{line}: {what}")
        self.path = path
        self.line = line

    def __reduce__(self) -> tuple[type[ValueError], tuple[str]]:
        return ValueError, (str(self),)


class Ids:
    """Token ids that a file names."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Sequence[int] | npt.NDArray[np.uint32]) -> None:
        """Keep the ids, 0 to 2**32 - 1 each."""
        self._ids = np.array(ids, np.uint32)

    def __len__(self) -> int:
        return len(self._ids)

    def array(self) -> TokenArray:
        """Return the ids, uint32 ``[n]``."""
        return self._ids


class Runs:
    """Token ids that a reader makes: runs of ``run`` consecutive ids, the last one cut so that all are ``length``."""

    __slots__ = ("_firsts", "_length", "_run")

    def __init__(self, firsts: Sequence[int], run: int, length: int) -> None:
        """Keep the first id of each run; ``length`` must end in the last run."""
        if not (len(firsts) - 1) * run < length <= len(firsts) * run and (length or firsts):
            raise ValueError(f"length must end in the last of {len(firsts)} runs of {run}, was {length}")
        self._firsts = np.array(firsts, np.int64)
        self._run = run
        self._length = length

    def __len__(self) -> int:
        return self._length

    def array(self) -> TokenArray:
        """Return the ids, uint32 ``[n]``."""
        width = min(self._run, self._length) if len(self._firsts) == 1 else self._run
        ids = self._firsts[:, None] + np.arange(width)
        return ids.reshape(-1)[: self._length].astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        arrival: seconds since the trace began, or the clock of the allocator that was recorded. The replay does not
            read it: requests keep the order of the file.
        prompt: what must be stored before the first output token.
        output: the tokens that follow, one per step.
        namespace: requests of different namespaces share nothing.
        media: ``(start, length, digest)`` spans of the prompt.
    """

    arrival: float
    prompt: Ids | Runs
    output: Ids | Runs
    namespace: int | None = None
    media: tuple[tuple[int, int, str | None], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens stored at its end."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file, in the order of arrival.

    Attributes:
        path: where they come from.
        kind: "azure", "mooncake" or "pagedkv".
        requests: all, or as many as were asked for.
        hits_known: whether the file says which prompts begin alike; where not, every request is distinct.
        outputs_known: whether outputs are the file's own ids; where not, they are ids that occur nowhere else.
        recorded_hit_tokens: prompt tokens that were found stored when the log was written; None for other kinds.
    """

    path: str
    kind: str
    requests: list[Request] = field(repr=False)
    hits_known: bool
    outputs_known: bool
    recorded_hit_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)


class NewIds:
    """Gives out token ids that were not given out before, below ``end``."""

    def __init__(self, first: int, end: int) -> None:
        """Start at ``first``."""
        self._next = first
        self._end = end

    def take(self, count: int) -> Runs:
        """Return ``count`` new ids.

        Raises:
            ValueError: there are not so many left.
        """
        if self._next + count > self._end:
            raise ValueError(f"the trace has more than {self._end:,} tokens; read it with a limit")
        first, self._next = self._next, self._next + count
        return Runs([first] if count else [], max(count, 1), count)

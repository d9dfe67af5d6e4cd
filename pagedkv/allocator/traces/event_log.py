"""The event log: an observer that writes down what a replay needs, as JSON lines.

Takes an allocator's events, gives a file that `read_trace` reads, and leaves out what can be worked out again: pages,
tables and reservations, and the prompt's tokens when they are committed. Namespaces and media digests are written as
numbers; token ids are written as they are, so a log is as private as the prompts in it.

docs/traces.md is the format's specification.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..namespace import namespace_key

if TYPE_CHECKING:
    import os
    from collections.abc import Hashable, Sequence

    from ..namespace import Media
    from ..tokens import TokenArray

FORMAT = "pagedkv_events"
VERSION = 1


class EventLog:
    """Writes a log; an `Observer`, and a context manager that closes the file.

    A log takes one allocator: attaching a second one raises ValueError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Make the file, or empty it."""
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        self._attached = False
        self._stored: dict[int, int] = {}
        self._prompt: dict[int, int] = {}
        self._spaces: dict[Hashable, int] = {}
        self._digests: dict[object, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._file.close()

    def _write(self, **record: Any) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def attached(self, num_pages: int, page_size: int) -> None:
        """Write the header."""
        if self._attached:
            raise ValueError("an EventLog takes one allocator, this one has its own already")
        self._attached = True
        self._write(**{FORMAT: VERSION}, num_pages=num_pages, page_size=page_size)

    def opened(
        self,
        sequence: int,
        tokens: TokenArray,
        cached: int,
        *,
        namespace: Hashable,
        media: tuple[Media, ...],
        at: float,
    ) -> None:
        """Write the prompt and how much of it was found."""
        self._stored[sequence], self._prompt[sequence] = cached, len(tokens)
        more: dict[str, Any] = {}
        if namespace is not None:
            more["namespace"] = self._spaces.setdefault(namespace_key(namespace), len(self._spaces) + 1)
        if media:
            more["media"] = [[span.start, span.length, self._digest(span.digest)] for span in media]
        self._write(event="open", seq=sequence, at=at, cached=cached, tokens=tokens.tolist(), **more)

    def _digest(self, digest: bytes | str | None) -> int | None:
        if digest is None:
            return None
        return self._digests.setdefault((type(digest), digest), len(self._digests) + 1)

    def reserved(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Write nothing: what was committed says enough."""

    def committed(self, sequences: Sequence[int], tokens: Sequence[TokenArray | None], counts: Sequence[int]) -> None:
        """Write per sequence how many prompt tokens were stored, then the ids that followed, or their number."""
        rows: list[list[Any]] = []
        for sequence, ids, count in zip(sequences, tokens, counts, strict=True):
            inside = min(max(self._prompt[sequence] - self._stored[sequence], 0), count)
            self._stored[sequence] += count
            if count:
                rows.append([sequence, inside, count - inside if ids is None else ids[inside:].tolist()])
        if rows:
            self._write(event="commit", rows=rows)

    def forked(self, parent: int, child: int, at: float) -> None:
        """Write both numbers."""
        self._stored[child], self._prompt[child] = self._stored[parent], self._prompt[parent]
        self._write(event="fork", seq=child, parent=parent, at=at)

    def truncated(self, sequence: int, num_tokens: int) -> None:
        """Write the length that is left."""
        self._stored[sequence] = num_tokens
        self._prompt[sequence] = min(self._prompt[sequence], num_tokens)
        self._write(event="truncate", seq=sequence, to=num_tokens)

    def closed(self, sequence: int) -> None:
        """Write the end of a sequence."""
        del self._stored[sequence], self._prompt[sequence]
        self._write(event="close", seq=sequence)

    def evicted(self, pages: Sequence[int]) -> None:
        """Write how many pages went."""
        self._write(event="evict", count=len(pages))

    def was_reset(self) -> None:
        """Write that the cache was reset."""
        self._write(event="reset")

    def pinned(self, pin: int, num_tokens: int, at: float) -> None:
        """Write the pin's number and the tokens it holds."""
        self._write(event="pin", pin=pin, at=at, tokens=num_tokens)

    def unpinned(self, pin: int) -> None:
        """Write the pin's number."""
        self._write(event="unpin", pin=pin)

    def step_began(self, step: int, at: float) -> None:
        """Write the step's number."""
        self._write(event="step", step=step, at=at)

    def step_ended(self, step: int) -> None:
        """Write the step's number."""
        self._write(event="step_end", step=step)

    def swapped(self, sequence: int, *, to_host: bool) -> None:
        """Write where the sequence lies now."""
        self._write(event="swap", seq=sequence, to="host" if to_host else "device")

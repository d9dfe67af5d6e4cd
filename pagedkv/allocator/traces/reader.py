"""Reading a trace: which format a file has is said by its first line.

Takes a path, gives a `Trace`. Files are data: nothing in them is ever executed, and a line that is not what it must
be is an error with file and line, never skipped.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from .azure import HEADER, read_azure
from .event_log import FORMAT
from .lines import json_object, lines_of
from .log_reader import read_log
from .mooncake import read_mooncake
from .request import TraceError

if TYPE_CHECKING:
    import os

    from .request import Trace


def read_trace(path: str | os.PathLike[str], *, limit: int | None = None) -> Trace:
    """Read an Azure LLM inference CSV, a Mooncake JSONL or a log of `EventLog`.

    Args:
        path: the file.
        limit: read the first ``limit`` requests and look at no line behind them. A log is read to its end, since
            later lines belong to earlier requests; then the first ``limit`` are kept.

    Raises:
        TraceError: a line is malformed or cut off, or the file has no request.
        ValueError: ``limit`` is below 1.
        OSError: the file cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, was {limit}")
    path = Path(path)
    lines = lines_of(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(path, 1, "the file is empty")
    lines = chain([first], lines)
    text = first[1]
    if not text.startswith("{"):
        if HEADER[0] not in text:
            raise TraceError(path, 1, f"neither JSON nor the header {','.join(HEADER)}: {text[:60]!r}")
        trace = read_azure(path, lines, limit)
    elif FORMAT in _first_object(path, text):
        trace = read_log(path, lines, limit)
    else:
        trace = read_mooncake(path, lines, limit)
    if not trace.requests:
        raise TraceError(path, first[0], "the file has no request")
    return trace


def _first_object(path: Path, text: str) -> dict[str, object]:
    try:
        return json_object(text)
    except ValueError as error:
        raise TraceError(path, 1, str(error)) from error

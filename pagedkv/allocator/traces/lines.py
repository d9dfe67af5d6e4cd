"""Lines of a trace file, and numbers in them, checked.

Takes bytes from outside, gives text and plain ints, and turns everything else into a `TraceError` with file and line.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from .request import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONGEST = 2**31 - 1
"""No request has more tokens than this."""


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(number, text)`` of every line, without its line end; a byte-order mark is dropped.

    Raises:
        TraceError: a line is not UTF-8, or is empty.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            try:
                text = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TraceError(path, number, f"not UTF-8 text: {error}") from error
            text = text.rstrip("\r\n")
            if not text.strip():
                raise TraceError(path, number, "empty line")
            yield number, text


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: it is not one, or is cut off.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("must be a JSON object, was nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"must be a JSON object; cut off or malformed ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, was {type(value).__name__}")
    return value


def field_of(record: dict[str, Any], name: str) -> Any:
    """Return a field that must be there."""
    if name not in record:
        raise ValueError(f"field {name!r} is missing")
    return record[name]


def count_in(value: Any, name: str, *, least: int = 0, most: int = LONGEST) -> int:
    """Return ``value`` as an int from ``least`` to ``most``; text must be decimal digits alone.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, was {_short(value)}")
    return value


def counts_in(values: Any, name: str, *, most: int = LONGEST) -> list[int]:
    """Return ``values`` as a list of ints from 0 to ``most``.

    Raises:
        ValueError: it is not one.
    """
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list of whole numbers, was {_short(values)}")
    for value in values:
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{name} must hold whole numbers from 0 to {most}, had {_short(value)}")
    return values


def number_in(value: Any, name: str) -> float:
    """Return ``value`` as a finite float.

    Raises:
        ValueError: it is not one.
    """
    if type(value) not in {int, float} or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} must be a number, was {_short(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} must be a number, was too large") from error


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) else hex(value) if value.bit_length() > 128 else str(value)
    return text if len(text) <= 60 else text[:57] + "..."

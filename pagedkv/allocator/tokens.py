"""Numbers from outside: token ids and counts, checked at the door.

Takes what callers have (lists, arrays, numpy), gives uint32 arrays and plain ints, and refuses everything else with
an error that names the argument.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.uint32]

_UINT32 = np.dtype(np.uint32)  # an object at hand halves the time of a short conversion

MAX_TOKEN = 2**32 - 1


def token_array(tokens: Any, name: str = "tokens") -> TokenArray:
    """Return ``tokens`` as a new uint32 array of one dimension.

    Raises:
        TypeError: not a sequence of integers.
        ValueError: an id is negative or above 2**32 - 1.
    """
    if isinstance(tokens, np.ndarray):
        return _from_numpy(tokens, name)
    if type(tokens) is not list:
        _require_sequence(tokens, name)
    try:
        # Twice as fast as np.array for a list, and it refuses floats and negative ids on its way.
        return np.frombuffer(array("I", tokens), _UINT32)
    except OverflowError as error:
        raise ValueError(f"{name} must be ids between 0 and {MAX_TOKEN}: {error}") from error
    except TypeError as error:
        raise TypeError(f"{name} must be a sequence of integer token ids: {error}") from error


def _require_sequence(tokens: Any, name: str) -> None:
    if isinstance(tokens, str | bytes | bytearray):
        raise TypeError(f"{name} must be integer token ids, was {type(tokens).__name__}")
    if not hasattr(tokens, "__getitem__") or isinstance(tokens, Mapping):  # a set has no order, a generator one use
        raise TypeError(f"{name} must be a sequence of integer token ids, was {tokens!r}")


def _from_numpy(tokens: npt.NDArray[Any], name: str) -> TokenArray:
    if tokens.ndim != 1:
        raise TypeError(f"{name} must have one dimension, had {tokens.ndim}")
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, was {tokens.dtype}")
    if tokens.dtype == np.uint32:
        return tokens.astype(np.uint32)  # a copy; every id is in range
    if tokens.size and (tokens.min() < 0 or tokens.max() > MAX_TOKEN):
        raise ValueError(f"{name} must be ids between 0 and {MAX_TOKEN}, had {tokens.min()} to {tokens.max()}")
    return tokens.astype(np.uint32)


def count_of(value: Any, name: str, least: int = 0, most: int | None = None) -> int:
    """Return ``value`` as an int from ``least`` to ``most`` (both included; None: no upper bound).

    The one check that every door of the package makes of a whole number. Python's and numpy's integers are such; True,
    1.0 and "1" are none.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, was {value!r}")
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, was {value!r}") from error
    if count < least or (most is not None and count > most):
        span = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} must be {span}, was {count}")
    return count


def counts_of(values: Any, length: int, name: str) -> list[int]:
    """Return one count for each of ``length`` sequences, from one number for all or a sequence of numbers."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return [count_of(values, name)] * length
    if len(values) != length:
        raise ValueError(f"{name} must have one entry per sequence ({length}), had {len(values)}")
    return [count_of(value, name) for value in values]


def token_rows(tokens: Any, length: int) -> list[TokenArray]:
    """Return the tokens of each of ``length`` sequences, from one id each or a sequence of ids each."""
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes):
        raise TypeError(f"tokens must have one entry per sequence, was {type(tokens).__name__}")
    entries = list(tokens)
    if len(entries) != length:
        raise ValueError(f"tokens must have one entry per sequence ({length}), had {len(entries)}")
    return [token_array([entry] if _is_id(entry) else entry) for entry in entries]


def _is_id(entry: Any) -> bool:
    return hasattr(entry, "__index__") and not isinstance(entry, np.ndarray)


def same_prefix(left: bytes | bytearray, right: bytes | bytearray) -> int:
    """Return how many leading tokens two byte strings of uint32 ids have in common."""
    size = min(len(left), len(right)) // 4
    differ = np.frombuffer(left, np.uint32, size) != np.frombuffer(right, np.uint32, size)
    return int(differ.argmax()) if differ.any() else size


def chunk_of(chunk: int | None) -> int | None:
    """Return ``chunk``, the most tokens of one reserve; raise where it is neither None nor at least 1."""
    return None if chunk is None else count_of(chunk, "chunk", 1)

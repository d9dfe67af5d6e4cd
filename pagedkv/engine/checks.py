"""What the engine's doors have in common: numbers in range, prompts that are token ids.

Takes what a caller gave, gives it back as plain ints and floats, and refuses with the argument's name, what it must
be and what it was. It knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from pagedkv.allocator.tokens import count_of


def require_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int from ``low`` to ``high`` (both included; None: no upper bound)."""
    return count_of(value, name, low, high)


def require_hashable(name: str, value: object) -> None:
    """Refuse what cannot be the key of a dict."""
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"{name} must be hashable, was {value!r:.60} ({error})") from error


def require_bool(name: str, value: object) -> bool:
    """Return ``value``, True or False and nothing that merely counts as such."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, was {value!r:.60}")
    return value


def require_number(name: str, value: object, low: float, high: float = math.inf) -> float:
    """Return ``value`` as a finite float from ``low`` to ``high`` (both included)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, was {value!r}")
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high:
        span = f"finite and at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        raise ValueError(f"{name} must be {span}, was {number!r}")
    return number


def require_token_ids(name: str, tokens: Any, vocab_size: int | None) -> list[int]:
    """Return ``tokens`` (a sequence of ints, or a 1-D integer array or tensor) as a new list of ids in range.

    An id is 0 to ``vocab_size - 1``; without a ``vocab_size`` only negative ones are refused. An empty list passes.
    """
    if isinstance(tokens, torch.Tensor | np.ndarray):
        ids = _from_array(name, tokens)
    elif isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes):
        ids = list(tokens)
        if not all(type(token) is int for token in ids):
            ids = [require_int(f"{name}[{index}]", token, 0) for index, token in enumerate(ids)]
    else:
        raise TypeError(f"{name} must be a list of token ids, was {type(tokens).__name__}")
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        high = None if vocab_size is None else vocab_size - 1
        for index, token in enumerate(ids):
            require_int(f"{name}[{index}]", token, 0, high)
    return ids


def _from_array(name: str, tokens: Any) -> list[int]:
    array = tokens.detach().cpu() if isinstance(tokens, torch.Tensor) else tokens
    integer = array.dtype.kind in "iu" if isinstance(array, np.ndarray) else _is_integer(array.dtype)
    if array.ndim != 1 or not integer:
        raise TypeError(f"{name} must be 1-D and of an integer dtype, was {tuple(array.shape)} of {array.dtype}")
    return [int(token) for token in array.tolist()]


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)

"""Debug levels: the audit in production, after operations.

Takes an allocator and a level, wraps its verbs, and costs nothing where the level is "off": then nothing is wrapped.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .audit import audit
from .errors import InvariantViolation, WrongThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger import Ledger

EVERY = {"off": 0, "sampled": 1000, "every": 1}
"""By level, after how many operations the books are audited; an audit costs a pass over all pages."""

VERBS = (
    "open",
    "fork",
    "truncate",
    "hold_window",
    "close",
    "reserve_batch",
    "commit_batch",
    "commit",
    "take_copies",
    "acknowledge_copies",
    "take_scrubs",
    "reset_prefix_cache",
    "pin",
    "unpin",
    "begin_step",
    "end_step",
    "swap_out",
    "swap_in",
    "finish_swap",
    "cancel_swap",
)

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def require_level(debug: str) -> bool:
    """Return whether the level is another than "off".

    Raises:
        ValueError: there is no such level.
    """
    if debug not in EVERY:
        raise ValueError(f"debug must be one of {list(EVERY)}, was {debug!r}")
    return debug != "off"


def watch(allocator: object, ledger: Ledger, debug: str) -> None:
    """Have the verbs of ``allocator`` audit its ledger, also when they raise: a call that raised has changed nothing.

    The audit raises `InvariantViolation` with a note that names the verb.
    """
    if EVERY[debug]:
        calls = _Calls(ledger, EVERY[debug])
        for name in VERBS:
            setattr(allocator, name, _audited(getattr(allocator, name), name, calls))


class _Calls:
    """Counts operations and audits after every ``every``-th."""

    def __init__(self, ledger: Ledger, every: int) -> None:
        self._ledger = ledger
        self._every = every
        self._count = 0

    def one_more(self, name: str) -> None:
        self._count += 1
        if self._count % self._every == 0:
            try:
                audit(self._ledger)
            except InvariantViolation as error:
                error.add_note(f"found after {name}, operation {self._count}; audited after every {self._every}")
                raise


def _audited(verb: Callable[..., Any], name: str, calls: _Calls) -> Callable[..., Any]:
    @wraps(verb)
    def audited(*arguments: Any, **options: Any) -> Any:
        try:
            result = verb(*arguments, **options)
        except WrongThread:
            raise  # the owner may be in the middle of a change
        except Exception:
            calls.one_more(name)
            raise
        calls.one_more(name)
        return result

    return audited


def caller() -> str:
    """Return the file and line of the innermost frame outside this package, as ``file:line``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

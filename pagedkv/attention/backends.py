"""Which backends there are, what one must offer, and which one serves a call.

Takes a name or None and gives the backend's module, imported only then. A backend is one module with the functions
of `Backend`; to add one, add its file and its line in ``_MODULES``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from .calls import AttendCall, WriteCall

_MODULES = {
    "cpu": ".cpu",
    "triton": ".triton",
    "torch": ".gather",
    "reference": ".reference",
}
"""Module of each backend, in the order in which ``backend=None`` tries them."""

_CHOSEN_ON = {"cpu": "cpu", "triton": "cuda"}
"""Backends that ``backend=None`` tries on one type of device only and loads nowhere else (HIP calls itself cuda)."""


class Backend(Protocol):
    """A way to run the operator. Arguments arrive checked for shape, dtype and device agreement.

    Each ``cannot_…`` says why this backend cannot serve these arguments ("q must be …, got …"), or None if it can; it
    reads shapes, dtypes, strides and devices only, and not the number of tokens: its answer stands for calls that
    differ in nothing else. The others run, without gradients.
    """

    def cannot_attend(self, call: AttendCall) -> str | None:
        """Say why `attend` cannot serve the call."""

    def attend(self, call: AttendCall, out: torch.Tensor) -> None:
        """Write every row of ``out``, which is ``call.out`` or what stands for it."""

    def cannot_write(self, call: WriteCall) -> str | None:
        """Say why `write` cannot serve the call."""

    def write(self, call: WriteCall) -> None:
        """Store K and V, and their scales if the pages are quantised."""

    def cannot_copy(self, pages: Sequence[torch.Tensor], copies: torch.Tensor) -> str | None:
        """Say why `copy` cannot serve these arguments."""

    def copy(self, pages: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
        """Copy pages within each tensor, all sources read before any destination is written."""


def backend_names() -> tuple[str, ...]:
    """Names that ``backend=`` takes, in the order of preference."""
    return tuple(_MODULES)


@cache
def load(name: str) -> Backend:
    """Return the backend called ``name``, imported on first use."""
    if name not in _MODULES:
        raise ValueError(f"backend must be None or one of {list(_MODULES)}, got {name!r}")
    return cast("Backend", import_module(_MODULES[name], __package__))


def choose(name: str | None, device: str, cannot: Callable[[Backend], str | None]) -> Backend:
    """Return the backend called ``name``, or with None the first that can serve the call.

    ``device`` is the type of the device the call's tensors are on; ``cannot`` asks a backend about the call at hand. A
    named backend is never replaced by another.

    Raises:
        ValueError: the named backend, or every backend, cannot serve the call; says why.
    """
    reasons = []
    for candidate in _candidates(device) if name is None else (name,):
        backend = load(candidate)
        reason = cannot(backend)
        if reason is None:
            return backend
        reasons.append(f"backend {candidate!r} cannot serve this call: {reason}")
    raise ValueError("; ".join(reasons))


def _candidates(device: str) -> list[str]:
    return [name for name in _MODULES if _CHOSEN_ON.get(name, device) == device]

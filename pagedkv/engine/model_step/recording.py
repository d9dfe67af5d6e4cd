"""What a forward pass does, as a list of calls: torch's operators, our own products, and the cache's two verbs.

Takes a forward pass that runs inside `Recorder`, gives its calls with tensors replaced by where they came from. A pass
that looks at a tensor's content, or draws random numbers, cannot be told as such a list and is refused.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.backend import StepBatch
    from pagedkv.transformers.ragged_cache import LayerStore

P = ParamSpec("P")
R = TypeVar("R")

# Operators whose outcome follows from content or chance: by their tags; by name those made of such that have none.
_REFUSED_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_REFUSED = {
    torch.ops.aten.where.default,
    torch.ops.aten.nonzero_numpy.default,
    torch.ops.aten.argwhere.default,
    torch.ops.aten.one_hot.default,
    torch.ops.aten.repeat_interleave.self_Tensor,
    torch.ops.aten.tensor_split.tensor_indices_or_sections,
}
# Methods that read content past the operators.
_PEEKS = {"tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}

_active: ContextVar[Recorder | None] = ContextVar("pagedkv_active_recorder", default=None)


class CannotRecordError(Exception):
    """A forward pass does something that a list of calls cannot say; the message names it."""


class Value(NamedTuple):
    """A tensor that an earlier call made, or an input, by its number."""

    number: int


class Constant(NamedTuple):
    """A tensor that was there before, by its number."""

    number: int


@dataclass(frozen=True)
class Call:
    """One call; ``outputs`` are the numbers of the tensors it returned, ``single`` if that was one alone."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    single: bool


@dataclass
class Recording:
    """A forward pass on one step.

    Attributes:
        calls: what it did, in order.
        constants: tensors that it used and had not made.
        result: the number of what it returned.
    """

    calls: list[Call] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    result: int = -1


def write(layer: int, k: torch.Tensor, v: torch.Tensor, *, store: LayerStore, batch: StepBatch) -> tuple[()]:
    """Store a layer's K and V in the step's cache; return no tensors."""
    store.write(layer, k, v, batch)
    return ()


def attend(layer: int, q: torch.Tensor, *, store: LayerStore, batch: StepBatch) -> torch.Tensor:
    """Attend to what the step's cache has stored."""
    return store.attend(layer, q, batch)


STORE_CALLS = (write, attend)
"""Targets whose keywords, the ``store`` and ``batch`` of a step, are not recorded: each step has its own."""


def opaque(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` as one call to a recorder: what happens inside is its own affair.

    It takes tensors and plain values, returns a tensor or some, and keeps nothing of a call for the next.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        recorder = _active.get()
        return function(*args, **kwargs) if recorder is None else recorder.call(function, *args, **kwargs)

    return run


def _is_harmless(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this call of an operator with a refused tag needs neither content nor chance."""
    if func is torch.ops.aten.index.Tensor:
        return all(index is None or index.dtype in {torch.int64, torch.int32} for index in args[1])
    return func is torch.ops.aten.dropout.default and args[2] is False


class _NoPeeking(TorchFunctionMode):
    """Refuses what reads a tensor's content without an operator, for the active recorder."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch's."""
        recorder, name = _active.get(), getattr(func, "__name__", "")
        if name in _PEEKS and recorder is not None and not recorder.inside:
            recorder.refuse(f"{name} looks at a tensor's content")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Records what runs in its context; its first values are ``inputs``.

    Attributes:
        recording: what was noted so far.
        inside: whether what runs is part of a call that will be noted as one.
    """

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.inside = False
        self._refused: CannotRecordError | None = None
        # The tensors are kept: an address that is free may be another tensor's a moment later.
        self._values: dict[int, tuple[int, torch.Tensor]] = {}
        self._count = 0
        self._constants: dict[int, tuple[int, torch.Tensor]] = {}
        self._no_peeking = _NoPeeking()
        for tensor in inputs:
            self._number(tensor)

    def __enter__(self) -> Self:
        self._token = _active.set(self)
        self._no_peeking.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._no_peeking.__exit__(*exception)  # type: ignore[no-untyped-call]
        _active.reset(self._token)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of torch's, and note it."""
        if self.inside:
            return func(*args, **(kwargs or {}))
        tags = _REFUSED_TAGS.intersection(func.tags)
        if func in _REFUSED or (tags and not _is_harmless(func, args)):
            self.refuse(f"{func} is {', '.join(tag.name for tag in tags) or 'dynamic_output_shape'}")
        return self.call(func, *args, **(kwargs or {}))

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``target`` as one call, and note it."""
        if self.inside:
            return target(*args, **kwargs)
        told = (self._told(args), {} if target in STORE_CALLS else self._told(kwargs))
        self.inside = True
        try:
            output = target(*args, **kwargs)
        finally:
            self.inside = False
        self._note(target, *told, output)
        return output

    def refuse(self, reason: str) -> NoReturn:
        """Give the recording up, also where the forward pass catches what is raised here."""
        self._refused = CannotRecordError(reason)
        raise self._refused

    def finish(self, result: torch.Tensor) -> Recording:
        """Say what the forward pass returned."""
        told = self._told(result)
        if self._refused is not None:
            raise self._refused
        if not isinstance(told, Value):
            self.refuse("its result is none of its own tensors")
        self.recording.result = told.number
        return self.recording

    def _note(self, target: Any, args: Any, kwargs: Any, output: Any) -> None:
        single = isinstance(output, torch.Tensor)
        outputs = (output,) if single else output
        if not isinstance(outputs, tuple | list) or not all(isinstance(one, torch.Tensor) for one in outputs):
            self.refuse(f"{target} returned {type(output).__name__}, not tensors")
        numbers = tuple(map(self._number, outputs))
        self.recording.calls.append(Call(target, args, kwargs, numbers, single))

    def _number(self, tensor: torch.Tensor) -> int:
        # A number of its own also where a call returns what it was given: on other sizes it might be a copy.
        number = self._count
        self._count += 1
        self._values[id(tensor)] = (number, tensor)
        return number

    def _told(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self._values.get(id(value))
            if known is not None:
                return Value(known[0])
            constant = self._constants.get(id(value))
            if constant is None:
                constant = self._constants[id(value)] = (len(self._constants), value)
                self.recording.constants.append(value)
            return Constant(constant[0])
        if isinstance(value, tuple | list):
            return tuple(map(self._told, value)) if isinstance(value, tuple) else [self._told(one) for one in value]
        if isinstance(value, dict):
            return {key: self._told(one) for key, one in value.items()}
        return value

"""Replacements that stand during a forward pass only: put in, taken out, whatever happens in between.

Takes replacements of modules' forwards and of functions in modules' globals; gives a context manager. A model's
structure, parameters and state_dict are never touched: a replacement is one entry in a module's ``__dict__``.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


@dataclass(frozen=True)
class Weights:
    """Tensors that a replacement has copies of, and how they were then: changed weights end it.

    Attributes:
        holders: the modules that own them, with the names of the parameters.
        seen: address and version of each, in the same order.
    """

    holders: tuple[tuple[torch.nn.Module, str], ...]
    seen: tuple[tuple[int, int] | None, ...]

    @classmethod
    def of(cls, *modules: torch.nn.Module) -> Weights:
        """Note all parameters of ``modules``."""
        holders = tuple((module, name) for module in modules for name in module._parameters)
        return cls(holders, tuple(_state(module._parameters[name]) for module, name in holders))

    def unchanged(self) -> bool:
        """Whether they are the same tensors with the same contents."""
        return all(
            _state(module._parameters.get(name)) == seen
            for (module, name), seen in zip(self.holders, self.seen, strict=True)
        )


def _state(parameter: torch.Tensor | None) -> tuple[int, int] | None:
    if parameter is None:
        return None
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


@dataclass
class Patches:
    """Replacements of one model.

    Attributes:
        forwards: modules and their other forwards. Each takes what the module's own takes.
        functions: ``(globals of a module, name, function)``.
        weights: what the replacements have copies of.
        extra_bytes: what those copies take.
        forget: called after every forward pass: whatever was held of its inputs is dropped.
    """

    forwards: dict[torch.nn.Module, Callable[..., Any]] = field(default_factory=dict)
    functions: list[tuple[dict[str, Any], str, Callable[..., Any]]] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    extra_bytes: int = 0
    forget: list[Callable[[], None]] = field(default_factory=list)

    def current(self) -> bool:
        """Whether the model's weights are those that the copies were made of."""
        return all(one.unchanged() for one in self.weights)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let all replacements stand, and everything be as it was afterwards.

        A module that has got another forward meanwhile keeps that one.
        """
        own = [(module.__dict__, forward) for module, forward in self.forwards.items()]
        own = [(attributes, forward) for attributes, forward in own if "forward" not in attributes]
        before = [names[name] for names, name, _ in self.functions]
        try:
            for attributes, forward in own:
                attributes["forward"] = forward
            for names, name, function in self.functions:
                names[name] = function
            yield
        finally:
            for attributes, _ in own:
                attributes.pop("forward", None)
            for (names, name, _), function in zip(self.functions, before, strict=True):
                names[name] = function
            for forget in self.forget:
                forget()


def plain_forward(module: torch.nn.Module) -> bool:
    """Whether the module's forward is its class's, and nobody listens to it: it may be replaced."""
    return (
        "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module.training
    )

"""Replacements that stand during a forward pass only: put in, taken out, whatever happens in between.

Takes replacements of modules' forwards and of functions in modules' globals; gives a context manager. A model's
structure, parameters and state_dict are never touched: a replacement is one entry in a module's ``__dict__``.
"""

from __future__ import annotations

import operator
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.nn.modules import module as nn_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class Weights:
    """Parameters and buffers of some modules, and how they were: changed weights end what was made of them."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        """Note all parameters and buffers of ``modules``, also which there are none of."""
        self._held = [(held, dict(held)) for one in modules for held in (one._parameters, one._buffers)]
        tensors = [tensor for _, noted in self._held for tensor in noted.values() if tensor is not None]
        self._seen = [(tensor, _address(tensor), _version(tensor)) for tensor in tensors]

    def unchanged(self) -> bool:
        """Whether they are the same tensors, in the same memory, and nothing has been written into them."""
        for held, noted in self._held:
            if held.keys() != noted.keys() or any(held[name] is not tensor for name, tensor in noted.items()):
                return False
        return all(_address(tensor) == at and _version(tensor) == version for tensor, at, version in self._seen)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # a sparse tensor, one without memory yet
        return 0


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_ALONE = threading.RLock()


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

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let all replacements stand, and everything be as it was afterwards.

        A module that has got another forward meanwhile keeps that one. One thread at a time: two engines may share a
        model, and all models of a family its functions.
        """
        with _ALONE:
            yield from self._applied()

    def _applied(self) -> Iterator[None]:
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


class Structure:
    """A model's modules as they were: a pass that leaves them out must not happen once something of them has changed.

    Of every module are looked at its children, its class and that one's forward, every attribute by identity, and who
    listens to it. What stands inside an attribute, numbers in a config say, is not.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        self._children = [(one._modules, dict(one._modules)) for one in modules]
        self._classes = [(one, type(one)) for one in modules]
        self._forwards = {kind: getattr(kind, "forward", None) for _, kind in self._classes}
        self._attributes = [(vars(one), tuple(vars(one).values())) for one in modules]
        self._hooks = [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._hooks += [nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks]
        self._plain = not any("forward" in attributes or one.training for one in modules for attributes in (vars(one),))

    def unchanged(self) -> bool:
        """Whether nobody would miss a pass that leaves the modules out."""
        return (
            self._plain
            and not any(self._hooks)
            and all(
                len(attributes) == len(noted) and all(map(operator.is_, attributes.values(), noted))
                for attributes, noted in self._attributes
            )
            and all(children == noted for children, noted in self._children)
            and all(type(one) is kind for one, kind in self._classes)
            and all(getattr(kind, "forward", None) is forward for kind, forward in self._forwards.items())
        )


def plain_forward(module: torch.nn.Module) -> bool:
    """Whether the module's forward is its class's, and nobody listens to it: it may be replaced."""
    return (
        "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module.training
    )

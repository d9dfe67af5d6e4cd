"""Replacements that stand during a forward pass only: put in, taken out, whatever happens in between.

Takes replacements of modules' forwards and of functions in modules' globals; gives a context manager. A model's
structure, parameters and state_dict are never touched: a replacement is one entry in a module's ``__dict__``.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from pagedkv.engine.model_step.watching import Weights

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

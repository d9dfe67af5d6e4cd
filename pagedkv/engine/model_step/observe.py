"""Watch one forward pass: which modules run, in which order, on which inputs.

Takes a model and a few tokens, gives the calls of its modules; what the model is called, and what its parts are called,
is not looked at. Two linears that get the same input object one after the other are siblings, whatever their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Observed:
    """What one forward pass did.

    Attributes:
        logits: of all tokens.
        calls: every call ``(module, its first input)`` of a module that got one tensor, in the order of entering.
        times_called: by module.
    """

    logits: torch.Tensor
    calls: list[tuple[torch.nn.Module, torch.Tensor]]
    times_called: dict[torch.nn.Module, int]

    @property
    def called_once(self) -> list[torch.nn.Module]:
        """The modules that were called once, in order."""
        return [module for module, times in self.times_called.items() if times == 1]

    def siblings(self) -> list[list[torch.nn.Linear]]:
        """Return the linears that ran once, those in a row with one input object together."""
        groups: list[list[torch.nn.Linear]] = []
        last: torch.Tensor | None = None
        for module, x in self.calls:
            if type(module) is not torch.nn.Linear:
                continue
            if self.times_called[module] != 1:
                last = None
                continue
            if x is last and _alike(groups[-1][0], module):
                groups[-1].append(module)
            else:
                groups.append([module])
            last = x
        return groups


def _alike(one: torch.nn.Linear, other: torch.nn.Linear) -> bool:
    return one.weight.dtype == other.weight.dtype and (one.bias is None) == (other.bias is None)


def observe(model: Any, tokens: torch.Tensor) -> Observed:
    """Run ``model`` on ``tokens`` ``[1, n]`` by its own means, and note what its modules did."""
    calls: list[tuple[torch.nn.Module, torch.Tensor]] = []
    times: dict[torch.nn.Module, int] = {}

    def note(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        times[module] = times.get(module, 0) + 1
        if args and isinstance(args[0], torch.Tensor):
            calls.append((module, args[0]))

    handles: list[RemovableHandle] = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        logits = plain_logits(model, tokens)
    finally:
        for handle in handles:
            handle.remove()
    return Observed(logits, calls, times)


@torch.inference_mode()
def plain_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's logits ``[n, vocab]`` of ``tokens`` ``[1, n]``, without a cache."""
    output = model(input_ids=tokens, use_cache=False)
    logits: torch.Tensor = output.logits[0] if hasattr(output, "logits") else output[0][0]
    return logits

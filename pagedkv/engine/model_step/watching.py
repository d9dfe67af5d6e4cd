"""A model as it was: its weights and its modules, noted once and compared before every step.

Takes a model's modules and says whether what was made of them still holds. It knows nothing of what that is.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from torch.nn.modules import module as nn_module

if TYPE_CHECKING:
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
        self._plain = not any("forward" in vars(one) or one.training for one in modules)

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

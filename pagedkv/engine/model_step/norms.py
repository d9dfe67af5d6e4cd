"""Root-mean-square norms as one C call each.

Takes modules with one vector of weights, tries the formula with each number they hold as epsilon, on the weights and on
one plus the weights, and keeps what equals them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.engine.model_step.patches import Patches, plain_forward
from pagedkv.engine.model_step.recording import opaque
from pagedkv.engine.model_step.watching import Weights
from pagedkv.native import bound_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagedkv.engine.model_step.acceptance import Acceptance

    Norm = Callable[[torch.Tensor], torch.Tensor]


# The small one is about the square root of the usual epsilons, so that a wrong one shows.
_SCALES = (1.0, 1e-3)


def _candidates(module: torch.nn.Module, weight: torch.Tensor) -> Iterator[tuple[Norm, int]]:
    """Yield what the module may compute, with the bytes that it copies."""
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 <= value < 1}
    for eps in sorted(numbers):
        yield bound_ops.rms_norm(weight, eps), 0
        yield bound_ops.rms_norm((1 + weight.float()).to(weight.dtype), eps), weight.nbytes


def patch_norms(patches: Patches, modules: list[torch.nn.Module], accept: Acceptance) -> None:
    """Add what replaces those of ``modules`` that are such norms, however often a step calls them."""
    for module in modules:
        parameters = list(module._parameters.values())
        weight = parameters[0] if len(parameters) == 1 else None
        if weight is None or weight.dim() != 1 or list(module.children()) or not plain_forward(module):
            continue
        if weight.dtype != accept.dtype or weight.device.type != "cpu" or not weight.is_contiguous():
            continue
        own = type(module).forward.__get__(module)
        with torch.inference_mode():
            inputs = accept.rows(len(weight), (1, 5), _SCALES)
            for run, size in _candidates(module, weight.detach()):
                if all(accept.agrees(run, own, x) for x in inputs):
                    patches.forwards[module] = _guarded(opaque(run), own, weight.dtype)
                    patches.weights.append(Weights(module))
                    patches.extra_bytes += size
                    break


def _guarded(run: Norm, own: Norm, dtype: torch.dtype) -> Norm:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return run(x) if x.dtype == dtype and torch.is_inference_mode_enabled() else own(x)

    return forward

"""Rotary embeddings of queries and keys as one C call each, in place.

Takes the functions ``(q, k, cos, sin, …)`` that stand in the modules where a model's classes are defined, tries each on
random queries and keys, and keeps the C function where it equals them. Such a function is a global name, which other
models of the family use too: so the replacement looks at every call's own tensors, and leaves to the original whatever
was not tried.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.engine.model_step.recording import opaque
from pagedkv.native import bound_ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.engine.model_step.acceptance import Acceptance
    from pagedkv.engine.model_step.patches import Patches

    Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_PARAMETERS = ["q", "k", "cos", "sin"]
_HALF_DIM = 8  # of the channels of the trial


def _rotates(original: Rotary) -> Rotary:
    in_place = bound_ops.rotary()

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if args or kwargs or not torch.is_inference_mode_enabled() or not _tried(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)
        in_place(q, k, cos, sin)
        return q, k

    return rotate


def _tried(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether these look like what was tried: one ragged row, all channels rotated, memory of their own."""
    return (
        q.dim() == k.dim() == 4
        and cos.dim() == 3
        and q.shape[0] == k.shape[0] == cos.shape[0] == 1
        and q.shape[2:] == k.shape[2:] == cos.shape[1:]
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.is_cpu
        and cos.is_contiguous()
        and sin.shape == cos.shape
        and sin.is_contiguous()
        and q.stride(3) == k.stride(3) == 1
        and q.stride(2) >= q.stride(1) >= q.shape[3]
        and k.stride(2) >= k.stride(1) >= k.shape[3]
    )


def patch_rotary(patches: Patches, model: torch.nn.Module, accept: Acceptance) -> None:
    """Add what replaces the rotary functions of the model's own modules."""
    homes = {type(module).__module__ for module in model.modules()}
    for home in sorted(homes):
        if home.startswith("torch.") or home not in sys.modules:
            continue
        names = vars(sys.modules[home])
        for name, function in list(names.items()):
            if inspect.isfunction(function) and list(inspect.signature(function).parameters)[:4] == _PARAMETERS:
                ours = opaque(_rotates(function))
                with torch.inference_mode():
                    if all(_agrees(ours, function, accept, tokens) for tokens in (1, 5)):
                        patches.functions.append((names, name, ours))


def _agrees(ours: Rotary, original: Rotary, accept: Acceptance, tokens: int) -> bool:
    dim = 2 * _HALF_DIM
    q, k = accept.random(1, tokens, 3, dim).transpose(1, 2), accept.random(1, tokens, 2, dim).transpose(1, 2)
    half = accept.random(1, tokens, _HALF_DIM)
    cos, sin = (torch.cat((one, one), dim=-1) for one in (half.cos(), half.sin()))
    return accept.agrees(ours, original, q, k, cos, sin)

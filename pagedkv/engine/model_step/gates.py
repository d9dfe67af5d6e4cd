"""Gated feed-forward blocks: ``down(activation(gate(x)) * up(x))`` as two products and one C call between them.

Takes a module with two or three linears below it, tries what it may be computing, and keeps what equals it. Which of
its linears is the gate, whether gate and up are one linear, and which activation stands between, is found by trying.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.engine.model_step.linears import eligible, faster, parameters
from pagedkv.engine.model_step.patches import Patches, plain_forward
from pagedkv.engine.model_step.products import plain_product
from pagedkv.engine.model_step.recording import opaque
from pagedkv.engine.model_step.watching import Weights
from pagedkv.native import bound_ops, step_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagedkv.engine.model_step.acceptance import Acceptance
    from pagedkv.engine.model_step.products import Product

    Forward = Callable[[torch.Tensor], torch.Tensor]
    Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    Linears = list[torch.nn.Linear]


def _block(inner: Product, outer: Product, gate: Gate, *, gate_first: bool) -> Forward:
    def run(x: torch.Tensor) -> torch.Tensor:
        parts = inner(x)
        one, other = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
        return outer(gate(one, other) if gate_first else gate(other, one))[0]

    return run


def _linears_of(module: torch.nn.Module, dtype: torch.dtype) -> tuple[Linears, Linears] | None:
    """Return the linears that widen, and the one that narrows again, if the module is made of nothing else."""
    children = list(module.children())
    linears = [one for one in children if isinstance(one, torch.nn.Linear)]
    rest = [one for one in children if not isinstance(one, torch.nn.Linear)]
    if len(linears) not in {2, 3} or any(one._parameters or list(one.children()) for one in rest):
        return None
    if not all(eligible(one, dtype) for one in linears) or module._parameters or not all(map(plain_forward, rest)):
        return None
    for down in linears:
        inner = [one for one in linears if one is not down]
        shapes = {(one.in_features, one.out_features, one.bias is None) for one in inner}
        if len(shapes) == 1:
            dim, width, _ = shapes.pop()
            if down.out_features == dim and down.in_features * 2 == width * len(inner):
                return inner, [down]
    return None


def _candidates(inner: Product, outer: Product, dtype: torch.dtype) -> Iterator[Forward]:
    for activation in range(len(step_ops.GATES)):
        gate = bound_ops.gated(activation, dtype)
        for gate_first in (True, False):
            yield _block(inner, outer, gate, gate_first=gate_first)


def patch_gates(patches: Patches, modules: list[torch.nn.Module], accept: Acceptance, *, pack: bool) -> None:
    """Add what replaces those of ``modules`` that are gated blocks, with packed copies if ``pack``."""
    for module in modules:
        found = _linears_of(module, accept.dtype) if plain_forward(module) else None
        if found is None:
            continue
        widening, narrowing = found
        own = type(module).forward.__get__(module)
        # What block it is, the weights as they are say: packing follows only once it is known to be one.
        block = _recognise(widening, narrowing, own, accept)
        if block is None:
            continue
        products = []
        for linears in (widening, narrowing):
            run, copied = faster(linears, accept, pack=pack) or (plain_product(*parameters(linears)), 0)
            patches.extra_bytes += copied
            products.append(run)
        patches.forwards[module] = _guarded(
            opaque(list(_candidates(products[0], products[1], accept.dtype))[block]), own
        )
        patches.weights.append(Weights(*widening, *narrowing))


def _recognise(widening: Linears, narrowing: Linears, own: Forward, accept: Acceptance) -> int | None:
    """Return the place of the candidate that equals the block, with the weights as they are."""
    inner, outer = plain_product(*parameters(widening)), plain_product(*parameters(narrowing))
    inputs = accept.rows(widening[0].in_features, (3,))
    with torch.inference_mode():
        for place, run in enumerate(_candidates(inner, outer, accept.dtype)):
            if all(accept.agrees(run, own, x) for x in inputs):
                return place
    return None


def _guarded(run: Forward, own: Forward) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return run(x) if torch.is_inference_mode_enabled() else own(x)

    return forward

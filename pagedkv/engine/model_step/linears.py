"""Linear layers by faster products, and siblings, which share an input, as one product.

Takes linears that ran in a row on one input object and gives forwards for them: the first computes all, the others hand
out their part when they are called with that same object, and compute their own otherwise.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from pagedkv.engine.model_step.patches import Patches, plain_forward
from pagedkv.engine.model_step.products import (
    by_rows,
    own_product,
    packed_bytes,
    packed_product,
    packing,
    plain_product,
)
from pagedkv.engine.model_step.recording import opaque
from pagedkv.engine.model_step.watching import Weights
from pagedkv.native.library import LibraryUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedkv.engine.model_step.acceptance import Acceptance
    from pagedkv.engine.model_step.products import Product

    Forward = Callable[[torch.Tensor], torch.Tensor]


_FEW_ROWS, _MANY_ROWS = (1, 5), (17,)


class Siblings:
    """Linears of one input as one product.

    The input is held from the first one's call until the last has taken its part, or the forward pass is over: it must
    not change meanwhile, which the check of the whole model at load would show.
    """

    def __init__(self, linears: Sequence[torch.nn.Linear], run: Product) -> None:
        self._linears = list(linears)
        self._run = run
        self._input: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()

    def forget(self) -> None:
        """Let the held input and its products go."""
        self._input = None
        self._parts = ()

    def forwards(self) -> dict[torch.nn.Module, Forward]:
        """Return each linear's forward."""
        followers: dict[torch.nn.Module, Forward] = {
            own: self._follow(index) for index, own in enumerate(self._linears) if index
        }
        return {self._linears[0]: self._lead, **followers}

    def _lead(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_inference_mode_enabled():
            return plain(self._linears[0], x)
        self._parts = self._run(x)
        self._input = x
        return self._parts[0]

    def _follow(self, index: int) -> Forward:
        own, last = self._linears[index], index == len(self._linears) - 1

        def forward(x: torch.Tensor) -> torch.Tensor:
            if self._input is not x or not torch.is_inference_mode_enabled():
                return plain(own, x)
            part = self._parts[index]
            if last:
                self.forget()
            return part

        return forward


def plain(own: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return what a linear's own forward does."""
    return linear(x, own.weight, own.bias)


def _alone(own: torch.nn.Linear, run: Product) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return run(x)[0] if torch.is_inference_mode_enabled() else plain(own, x)

    return forward


def faster(linears: Sequence[torch.nn.Linear], accept: Acceptance, *, pack: bool) -> tuple[Product, int] | None:
    """Return the products of ``linears`` with one input as one, and the bytes it copied, if it equals theirs.

    Our own product for few rows, the packed one for many with ``pack``; each is left out where it is not accepted. The
    own one takes many rows too where they would go to torch's in a half type without products in hardware.
    """
    weights, biases = parameters(linears)
    theirs, width = plain_product(weights, biases), linears[0].in_features
    few = many = None
    # Rounded to a half type, sums in another order are equal on most inputs, not on all.
    if not accept.exact:
        with suppress(LibraryUnavailableError, TypeError, ValueError):
            few = own_product(weights, biases)
        if few is not None and not _equal(few, theirs, accept, _FEW_ROWS, width):
            few = None
    if pack:
        many = packed_product(weights, biases)
        if not _equal(many, theirs, accept, _MANY_ROWS if few else (*_FEW_ROWS, *_MANY_ROWS), width):
            many = None
    copied = packed_bytes(weights) if many else 0
    if few is None:
        return None if many is None else (many, copied)
    if many is None and accept.dtype != torch.float32 and packing(accept.dtype) != accept.dtype:
        return few, copied
    return by_rows(few, many or theirs), copied


def _equal(ours: Product, theirs: Product, accept: Acceptance, rows: Sequence[int], width: int) -> bool:
    with torch.inference_mode():
        inputs = accept.rows(width, rows)
        return all(accept.agrees(lambda x: tuple(ours(x)), lambda x: tuple(theirs(x)), x) for x in inputs)


def parameters(linears: Sequence[torch.nn.Linear]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the weights and biases of ``linears``."""
    return [one.weight.detach() for one in linears], [
        None if one.bias is None else one.bias.detach() for one in linears
    ]


def eligible(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module is a plain linear layer in memory that products can be made of."""
    return (
        type(module) is torch.nn.Linear
        and plain_forward(module)
        and module.weight.dtype == dtype
        and type(module.weight) in {torch.Tensor, torch.nn.Parameter}
        and module.weight.device.type == "cpu"
    )


def patch_linears(patches: Patches, groups: Sequence[list[torch.nn.Linear]], accept: Acceptance, *, pack: bool) -> None:
    """Add what replaces the linears of ``groups``: siblings as one product, or else each alone."""
    for group in groups:
        for linears in (group, *([one] for one in group)) if len(group) > 1 else (group,):
            if any(one in patches.forwards or not eligible(one, accept.dtype) for one in linears):
                continue
            found = faster(linears, accept, pack=pack)
            if found is None:
                continue
            run, copied = opaque(found[0]), found[1]
            if len(linears) == 1:
                patches.forwards[linears[0]] = _alone(linears[0], run)
            else:
                siblings = Siblings(linears, run)
                patches.forwards.update(siblings.forwards())
                patches.forget.append(siblings.forget)
            patches.weights.append(Weights(*linears))
            patches.extra_bytes += copied

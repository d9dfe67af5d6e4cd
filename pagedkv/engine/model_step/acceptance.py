"""When a replacement equals what it replaces: both are run on the same random input, and compared.

Takes two callables and gives a verdict; it knows no modules. Where either raises, the replacement is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Sums in another order move float32 by some roundings of the largest element; a half type is rounded once or twice.
_ROUNDINGS = {torch.float32: 32.0}
_ROUNDINGS_OF_HALVES = 2.0


class Acceptance:
    """Decides over replacements of one dtype.

    Args:
        dtype: of the model.
        exact: whether only bit-equal replacements are accepted.
    """

    def __init__(self, dtype: torch.dtype, *, exact: bool) -> None:
        self.dtype = dtype
        self.exact = exact
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return normal numbers in the dtype; torch's own generator stays as it is."""
        return (torch.randn(shape, generator=self._generator) * scale).to(self.dtype)

    def rows(self, dim: int, counts: Iterable[int], scales: Iterable[float] = (1.0,)) -> list[torch.Tensor]:
        """Return inputs ``[1, rows, dim]``, one of each count and scale."""
        return [self.random(1, count, dim, scale=scale) for scale in scales for count in counts]

    def agrees(self, ours: Callable[..., object], theirs: Callable[..., object], *inputs: torch.Tensor) -> bool:
        """Whether both give the same tensors; each gets copies of the inputs of its own, which it may overwrite."""
        try:
            expected = _tensors(theirs(*(_copy(one) for one in inputs)))
            actual = _tensors(ours(*(_copy(one) for one in inputs)))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        return len(actual) == len(expected) and all(map(self._same, actual, expected))

    def _same(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return False
        if self.exact:
            return torch.equal(actual, expected)
        wide = expected.double()
        if not expected.numel() or not bool(wide.isfinite().all()):
            return torch.equal(actual, expected)
        roundings = _ROUNDINGS.get(expected.dtype, _ROUNDINGS_OF_HALVES)
        allowed = roundings * torch.finfo(expected.dtype).eps * float(wide.abs().max())
        return float((actual.double() - wide).abs().max()) <= allowed


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of the original, where those say where each element is."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def _tensors(output: object) -> tuple[torch.Tensor, ...]:
    found = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(one, torch.Tensor) for one in found):
        raise TypeError(f"expected tensors, got {[type(one).__name__ for one in found]}")
    return found

"""What stays the same for one attention layer: scale, window, softcap, sink logits, ALiBi slopes.

Takes plain numbers and per-head tensors, refuses values that no layer can mean, and knows nothing of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """A layer's attention arithmetic: ``softcap(scale * q.k)``, plus ALiBi, then the mask, then softmax.

    Build one per layer and keep it: backends remember what they derived from it by identity.

    Attributes:
        scale: factor on ``q.k``, finite.
        window: a token sees itself and the ``window - 1`` tokens before it; None sees everything before it.
        num_sink_tokens: the first positions of a sequence, visible outside the window too (StreamingLLM,
            arXiv:2309.17453). Without a window it changes nothing.
        softcap: ``softcap * tanh(score / softcap)`` after the scale and before the mask (Gemma 2,
            arXiv:2408.00118); None for no cap.
        sink_logits: floating ``[num_q_heads]``: a learned logit that joins each head's softmax denominator and
            carries no value (gpt-oss, arXiv:2508.10925).
        alibi_slopes: floating ``[num_q_heads]``: ``slope * (key position - query position)`` is added to the
            score (arXiv:2108.12409).
    """

    scale: float
    window: int | None = None
    num_sink_tokens: int = 0
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _require_number("scale", self.scale)
        if self.window is not None:
            _require_integer("window", self.window, at_least=1)
        _require_integer("num_sink_tokens", self.num_sink_tokens, at_least=0)
        if self.softcap is not None:
            _require_number("softcap", self.softcap)
            if self.softcap <= 0:
                raise ValueError(f"softcap must be greater than 0 or None, got {self.softcap}")
        _require_per_head("sink_logits", self.sink_logits)
        _require_per_head("alibi_slopes", self.alibi_slopes)


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def _require_integer(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")


def _require_per_head(name: str, value: torch.Tensor | None) -> None:
    if value is None:
        return
    if not hasattr(value, "is_floating_point"):
        raise TypeError(f"{name} must be a tensor [num_q_heads] or None, got {type(value).__name__}")
    if not value.is_floating_point() or value.dim() != 1:
        raise ValueError(f"{name} must be floating [num_q_heads], got {value.dtype} {list(value.shape)}")

"""What to keep of K and V when memory is short: an estimate of the bytes, and a choice by it.

Takes a config, a batch and a length; gives bytes and a strategy's name; refuses to build anything. ``full`` keeps all K
and V. ``sliding`` keeps a recent window and sink tokens (`pagedkv.sliding`). ``recompute`` keeps some layers' input
states and computes their K and V again when they are needed (`pagedkv.recompute`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from pagedkv.attention.quantise import KV_QUANTS
from pagedkv.sizing import parse_memory, require_count, require_float_dtype
from pagedkv.spec import KVSpec

if TYPE_CHECKING:
    import torch

Strategy = Literal["full", "sliding", "recompute"]
STRATEGIES: Final = ("full", "sliding", "recompute", "auto")
FULL_BELOW: Final = 0.5
SLIDING_BELOW: Final = 0.8
_SCALE_BYTES = 4  # a float32 per slot and KV head, for K and for V, where they are quantised


def estimate_kv_bytes(config: Any, batch_size: int, seq_len: int, dtype: torch.dtype | str) -> int:
    """Return the bytes of K and V of ``batch_size`` texts of ``seq_len`` tokens, exactly.

    Over all layers: batch x KV heads x tokens kept x (K width + V width) x bytes per number. A layer with a sliding
    window keeps no more tokens than its window; one that shares another's K and V keeps none. What pages round up to
    is not counted: at most ``page_size - 1`` slots a text and layer group.

    Args:
        config: a transformers config.
        batch_size: texts at a time.
        seq_len: tokens of each, prompt and answer together.
        dtype: of K and V as stored; ``"int8"`` and ``"fp8_e4m3"`` count their scales, a float32 per token and KV head
            each for K and V.

    Raises:
        UnsupportedModel: if the config's past is not K and V per token.
        TypeError, ValueError: for counts below 1 or an unknown dtype.
    """
    spec = KVSpec.from_config(config)
    require_count("batch_size", batch_size)
    require_count("seq_len", seq_len)
    if isinstance(dtype, str) and dtype not in KV_QUANTS:
        raise ValueError(f"dtype must be a torch.dtype or one of {sorted(KV_QUANTS)}, was {dtype!r}")
    scale = _SCALE_BYTES if isinstance(dtype, str) else 0
    item = KV_QUANTS[dtype].itemsize if isinstance(dtype, str) else require_float_dtype(dtype).itemsize
    total = 0
    for layer in spec.layers:
        kept = seq_len if layer.window is None else min(seq_len, layer.window + layer.num_sink_tokens)
        total += kept * layer.num_kv_heads * ((layer.k_dim + layer.v_dim) * item + 2 * scale)
    return batch_size * total


def strategy_for(kv_bytes: int, memory: int | str) -> Strategy:
    """Return what fits: ``full`` under 50 % of ``memory``, ``sliding`` under 80 %, else ``recompute``.

    The rest is headroom, which is never given away: weights' activations and a longer request than declared.
    """
    share = kv_bytes / parse_memory(memory)
    if share < FULL_BELOW:
        return "full"
    return "sliding" if share < SLIDING_BELOW else "recompute"


def choose_strategy(
    config: Any, batch_size: int, seq_len: int, dtype: torch.dtype | str, memory: int | str
) -> Strategy:
    """Return `strategy_for` the bytes of `estimate_kv_bytes` within ``memory``: bytes, or text such as "32GiB"."""
    return strategy_for(estimate_kv_bytes(config, batch_size, seq_len, dtype), memory)

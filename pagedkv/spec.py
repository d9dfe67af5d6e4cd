"""What a model's config says about its KV: which layers store how many heads of which width, for how long.

Takes a transformers config, gives numbers, and refuses to guess: a model whose past is anything else than K and V
per token (recurrent states, latents, chunks, a second text) is an `UnsupportedModel` with the reason. It reads
configs only; no model is built or needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch

_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "dummy")
_WINDOWS = ("sliding_attention", "chunked_attention")
_REFUSED_KINDS = {
    "linear_attention": "a recurrent state (linear attention or state space) instead of K and V",
    "conv": "a convolution state instead of K and V",
    "hybrid": "a recurrent state beside K and V",
    "hybrid_sliding": "a recurrent state beside K and V",
    "indexed_attention": "sparse attention chosen by an indexer with a cache of its own",
    "deepseek_sparse_attention": "sparse attention chosen by an indexer with a cache of its own",
    "compressed_sparse_attention": "compressed K and V",
    "heavily_compressed_attention": "compressed K and V",
}
_SWITCHING_ROPES = ("dynamic", "longrope")
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


class UnsupportedModel(ValueError):  # noqa: N818  (named for the situation)
    """The model's past cannot be kept as K and V per token, or its attention cannot be routed; the text says why."""


@dataclass(frozen=True)
class LayerKV:
    """What one layer stores per token.

    Attributes:
        num_kv_heads: KV heads; 0 for a layer that stores nothing of its own (it shares an earlier layer's K and V).
        k_dim: width of a K head, which is a query head's too.
        v_dim: width of a V head.
        window: the tokens that a query sees, itself included; None for all.
        num_sink_tokens: first positions of a text that stay visible outside the window.
        chunked: whether the window does not slide: a query sees what is in its own chunk of ``window`` tokens.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    num_sink_tokens: int = 0
    chunked: bool = False

    def __post_init__(self) -> None:
        """Refuse counts that describe no layer."""
        for name in ("num_kv_heads", "k_dim", "v_dim"):
            if getattr(self, name) < (0 if name == "num_kv_heads" else 1):
                raise ValueError(f"{name} must be positive, was {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be None or at least 1, was {self.window}")
        if self.num_sink_tokens < 0:
            raise ValueError(f"num_sink_tokens must be at least 0, was {self.num_sink_tokens}")


@dataclass(frozen=True)
class KVSpec:
    """What a whole model stores per token.

    Attributes:
        layers: one `LayerKV` per cached layer, in the model's own numbering.
        max_len: the longest text that the model was made for, in tokens.
        vocab_size: token ids are 0 to ``vocab_size - 1``.
    """

    layers: tuple[LayerKV, ...]
    max_len: int
    vocab_size: int

    @property
    def num_layers(self) -> int:
        """Layers of the model, those that store nothing included."""
        return len(self.layers)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's K and V over all layers, stored as ``dtype``."""
        return sum(layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in self.layers) * dtype.itemsize

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Read a transformers config of any decoder-only model; composite ones by their text part.

        Missing ``num_key_value_heads`` means one per query head; ``head_dim`` of its own goes before
        ``hidden_size / num_attention_heads``; configs that differ from layer to layer are read layer by layer.

        Raises:
            UnsupportedModel: if the model keeps anything else than K and V per token; the message says what.
            TypeError: if ``config`` is no transformers config.
        """
        layers = kv_layers(config)
        text = config.get_text_config(decoder=True)
        return cls(layers=layers, max_len=_max_len(text), vocab_size=text.vocab_size)


def kv_layers(config: Any) -> tuple[LayerKV, ...]:
    """Return what each layer stores by its config, as in `KVSpec.from_config`, of texts of any length."""
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config must be a transformers config, was {type(config).__name__}")
    text = config.get_text_config(decoder=True)
    _require_decoder_only(config, text)
    kinds, windows = _layer_kinds(text)
    configs = _layer_configs(text, len(kinds))
    return tuple(_layer_kv(*layer) for layer in zip(kinds, windows, configs, strict=True))


def _refuse(config: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"config of a {config.model_type!r} model must describe K and V per token, but {reason}")


def _require_decoder_only(config: Any, text: Any) -> None:
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise _refuse(config, "it is an encoder-decoder (is_encoder_decoder)")
    if getattr(text, "add_cross_attention", False) or getattr(text, "cross_attention_layers", None):
        raise _refuse(config, "it has cross attention to a second input")


def _layer_kinds(text: Any) -> tuple[list[str], list[int | None]]:
    """Return each layer's kind and window, by the rules that transformers' own caches go by."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    try:
        kinds, options = get_layer_types_and_kwargs(text)
    except (AttributeError, KeyError) as error:
        raise _refuse(text, f"its layers cannot be told: {error}") from error
    if isinstance(options, dict):  # before 5.20: one set for all layers, and none for shared ones at the end
        kinds = [*kinds, *["dummy"] * (text.num_hidden_layers - len(kinds))]
        options = [options] * len(kinds)
    for index, kind in enumerate(kinds):
        if kind not in _LAYER_KINDS:
            raise _refuse(text, f"layer {index} has {_REFUSED_KINDS.get(kind, f'an unknown kind, {kind!r}')}")
    pairs = zip(kinds, options, strict=True)
    return list(kinds), [option["sliding_window"] if kind in _WINDOWS else None for kind, option in pairs]


def _layer_configs(text: Any, num_layers: int) -> list[Any]:
    configs = getattr(text, "per_layer_config", None)
    return [text] * num_layers if configs is None else list(configs)[:num_layers]


def _layer_kv(kind: str, window: int | None, config: Any) -> LayerKV:
    stores = kind != "dummy"
    if getattr(config, "kv_lora_rank", None) is not None:  # one latent and one rotated part for all heads
        return LayerKV(int(stores), config.kv_lora_rank, config.qk_rope_head_dim, window)
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_heads:
        raise _refuse(config, "it names no attention heads (num_attention_heads)")
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    k_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    v_dim = getattr(config, "v_head_dim", None) or k_dim
    return LayerKV(num_kv_heads if stores else 0, k_dim, v_dim, window, chunked=kind == "chunked_attention")


def _max_len(text: Any) -> int:
    """Return the context length, for rotary embeddings that switch at a length: the one before the switch.

    Dynamic and "longrope" scaling go by the longest text of a batch, so that beyond it a neighbour would change
    an answer.
    """
    for name in _CONTEXT_NAMES:
        length = getattr(text, name, None)
        if length is not None and length > 0:
            rope = getattr(text, "rope_parameters", None) or {}
            scalings = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
            switching = [one for one in scalings if one.get("rope_type") in _SWITCHING_ROPES]
            return min([int(length), *[int(one.get("original_max_position_embeddings", length)) for one in switching]])
    raise _refuse(text, f"it names no context length (any of {', '.join(_CONTEXT_NAMES)})")

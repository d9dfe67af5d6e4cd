"""What is known of a model's layers: what each stores, how far it sees, and whether pages alone can serve it.

Takes what a stock run showed, gives the `KVSpec` that pages are made by, and refuses what no pages can hold. Nothing
in it names a model: all of it is seen, not listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pagedkv.attention import LayerSpec
from pagedkv.spec import KVSpec, LayerKV, UnsupportedModel

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_FALLBACK_CONTEXT = 8192

PLAIN_MASK = "a plain causal mask over a layer whose cache forgets"
"""Why such a layer cannot be paged: beyond the window its answer depends on how a text was cut into forwards."""


@dataclass(frozen=True)
class StoredLayer:
    """What a layer handed to the stock cache.

    Attributes:
        k_shape: (heads, width) of K.
        v_shape: (heads, width) of V.
        dtype: of both.
        device: of both.
        window: tokens that the stock cache keeps visible, the newest included; None for all.
        chunked: whether that is a chunk of the text instead of a window that slides.
    """

    k_shape: tuple[int, int]
    v_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    chunked: bool = False

    @property
    def folded(self) -> bool:
        """Whether K and V differ in heads, so that each is stored as one wide head."""
        return self.k_shape[0] != self.v_shape[0]

    def require(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise ValueError unless K and V of layer ``index`` are as they were when the model was tried out."""
        for name, states, shape in (("K", k, self.k_shape), ("V", v, self.v_shape)):
            if states.device != self.device:
                raise ValueError(
                    f"{name} of layer {index} must be on {self.device}, where its pages are, was on {states.device}; "
                    "make a new PagedCache after moving a model"
                )
            if states.dtype != self.dtype or (states.shape[1], states.shape[3]) != shape:
                raise ValueError(
                    f"{name} of layer {index} must be [rows, {shape[0]}, tokens, {shape[1]}] in {self.dtype}, "
                    f"was {[*states.shape]} in {states.dtype}"
                )

    def layer_kv(self) -> LayerKV:
        """Return what is stored per token."""
        if self.folded:
            return LayerKV(1, self.k_shape[0] * self.k_shape[1], self.v_shape[0] * self.v_shape[1], self.window)
        return LayerKV(self.k_shape[0], self.k_shape[1], self.v_shape[1], self.window)


@dataclass
class Learned:
    """What a model showed when it was tried out.

    Attributes:
        name: the model's class.
        layers: what each layer that stores K and V stores, by number.
        kinds: the stock cache's layer objects, one per layer; ours are made after them.
        gathered: the layers that need K and V gathered for the model's own attention, and why.
        untouched: whether the attention implementation is never set: everything is gathered.
        stores_padding: whether padding takes slots as tokens do, since the model's answers depend on what stands there.
        by_generate: whether it was tried out by `generate`, since bare forwards of a padded batch fail.
    """

    name: str
    layers: dict[int, StoredLayer]
    kinds: list[Any]
    gathered: dict[int, str] = field(default_factory=dict)
    untouched: bool = False
    stores_padding: bool = False
    by_generate: bool = False
    _specs: dict[tuple[int, float, float | None], LayerSpec] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers that the cache has, those that store nothing included."""
        return max([len(self.kinds), *(index + 1 for index in self.layers)])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of K and V."""
        return next(iter(self.layers.values())).dtype

    @property
    def device(self) -> torch.device:
        """The device of the first layer's K and V."""
        return next(iter(self.layers.values())).device

    def layer_spec(
        self, layer: int, scale: float, softcap: float | None, sink_logits: torch.Tensor | None
    ) -> LayerSpec:
        """Return how ``layer`` attends, the same object as long as it says the same."""
        key = (layer, scale, softcap)
        spec = self._specs.get(key)
        if spec is None or not _same_logits(spec.sink_logits, sink_logits):
            sinks = None if sink_logits is None else sink_logits.detach()
            window = self.layers[layer].window
            spec = self._specs[key] = LayerSpec(scale=scale, window=window, softcap=softcap, sink_logits=sinks)
        return spec

    def paged(self, layer: int) -> bool:
        """Whether ``layer`` attends through pages."""
        return not self.untouched and layer not in self.gathered

    def spec(self, config: Any) -> KVSpec:
        """Return what is stored per token.

        Raises:
            UnsupportedModel: if the layers' dtypes differ.
        """
        dtypes = {layer.dtype for layer in self.layers.values()}
        if len(dtypes) > 1:
            raise UnsupportedModel(f"{self.name} must store K and V in one dtype, stores {sorted(map(str, dtypes))}")
        text = config.get_text_config(decoder=True)
        nothing = LayerKV(0, 1, 1)
        layers = [self.layers[i].layer_kv() if i in self.layers else nothing for i in range(self.num_layers)]
        return KVSpec(tuple(layers), max_len=context_length(text), vocab_size=text.vocab_size)


def context_length(text: Any) -> int:
    """Return the longest text that a decoder's config says it was made for; 8,192 where it says nothing."""
    for name in _CONTEXT_NAMES:
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return _FALLBACK_CONTEXT


def _same_logits(known: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    if known is None or now is None:
        return known is now
    return known.data_ptr() == now.data_ptr() or torch.equal(known, now)

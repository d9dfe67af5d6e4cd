"""What a model really stores: one token through it on transformers' own cache, and the shapes that are there then.

Takes a model, gives its `KVSpec`, and refuses what its config refuses and forwards that cannot run many texts at once.
A config says which layers slide and how long texts may be; heads and widths it says under many names, and
some models store other layers than it lists.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from pagedkv.spec import KVSpec, LayerKV, UnsupportedModel, kv_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NOTHING = LayerKV(0, 1, 1)


@torch.inference_mode()
def observe_kv_spec(model: PreTrainedModel) -> KVSpec:
    """Return what ``model`` stores per token, by running one token through it.

    Raises:
        UnsupportedModel: if its config says that it keeps anything else than K and V per token; if its forward has no
            place for a step of many texts; if it fails on one token, or stores K and V with different numbers of heads.
    """
    name = type(model).__name__
    kv_layers(model.config)  # first, since what a layer keeps is the better reason
    _require_place_for_steps(model)
    said = KVSpec.from_config(model.config)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    try:
        token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=token, use_cache=True, **{cache_keyword(model): cache})
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{name} fails on transformers' own cache: {type(error).__name__}: {error}") from error
    layers = [_layer_kv(name, index, layer, said) for index, layer in enumerate(cache.layers)]
    if not any(layer.num_kv_heads for layer in layers):
        raise UnsupportedModel(f"{name} stores no K and V in a cache that it is given")
    layers += [_NOTHING] * (said.num_layers - len(layers))
    return replace(said, layers=tuple(layers))


def cache_keyword(model: PreTrainedModel) -> str:
    """Return the name by which the model's forward takes a cache: it differs between versions of transformers."""
    parameters = inspect.signature(model.forward).parameters
    for keyword in ("cache", "past_key_values"):
        if keyword in parameters:
            return keyword
    raise UnsupportedModel(f"{type(model).__name__}.forward must take a cache, takes {', '.join(parameters)}")


def _require_place_for_steps(model: PreTrainedModel) -> None:
    """Raise unless the model's forward takes what a step of many texts says: positions, and the rows to keep."""
    parameters = inspect.signature(model.forward).parameters
    for wanted, why in (("position_ids", "each token's position"), ("logits_to_keep", "each text's last row")):
        if wanted not in parameters:
            raise UnsupportedModel(
                f"{type(model).__name__}.forward must take {wanted!r}, by which a step of many texts says {why}"
            )


def _layer_kv(name: str, index: int, layer: Any, said: KVSpec) -> LayerKV:
    """Return what a layer of the stock cache holds, and how far it says that the layer sees."""
    k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
    if k is None or v is None or not k.numel():
        return _NOTHING
    if k.dim() != 4 or v.dim() != 4 or k.shape[1] != v.shape[1]:
        raise UnsupportedModel(
            f"{name} must store K and V as [rows, heads, tokens, width], layer {index} stores "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    window = layer.sliding_window if layer.is_sliding else None
    chunked = index < said.num_layers and said.layers[index].chunked
    return LayerKV(k.shape[1], k.shape[3], v.shape[3], window, chunked=chunked)

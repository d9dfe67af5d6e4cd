"""A model's own run: a few tokens through it with transformers' cache, and what its layers stored meanwhile.

Takes a model, gives logits and a `Learned` about its layers, and refuses models that have no K and V to page. It is
what our own run of the same tokens is compared with.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.learned import Learned, StoredLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

# A batch of two, the second row padded on the left: two columns at once, then one that has a past.
_ROWS = ((1, 1, 1), (0, 1, 1))
_STEPS = ((0, 2), (2, 3))


class Recorder(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """The cache that `generate` would make, which also remembers what was stored in it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.shapes: dict[int, tuple[torch.Size, torch.Size, torch.dtype, torch.device]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V of a layer as the stock cache does."""
        self.shapes[layer_idx] = (key_states.shape, value_states.shape, key_states.dtype, key_states.device)
        stored: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return stored


def cache_keyword(model: PreTrainedModel) -> str:
    """Return the name by which the model's forward takes a cache: it differs between versions of transformers."""
    parameters = inspect.signature(model.forward).parameters
    for keyword in ("cache", "past_key_values"):
        if keyword in parameters:
            return keyword
    raise UnsupportedModel(f"{type(model).__name__}.forward must take a cache, takes {', '.join(parameters)}")


def try_out(model: PreTrainedModel, cache: Cache, *, by_generate: bool = False) -> list[torch.Tensor]:
    """Run five tokens in two rows through ``model`` on ``cache``; return float32 logits ``[2, vocab]`` per step.

    ``by_generate`` leaves the steps to the model's own `generate`: for models that make other inputs of a text.
    """
    text = model.config.get_text_config(decoder=True)
    ids = torch.tensor([[1 + 37 * (3 * row + i + 1) % (text.vocab_size - 1) for i in range(3)] for row in range(2)])
    mask = torch.tensor(_ROWS)
    if by_generate:
        return _generate(model, cache, ids.to(model.device), mask.to(model.device))
    device, keyword = model.device, cache_keyword(model)
    takes = inspect.signature(model.forward).parameters
    logits = []
    for start, stop in _STEPS:
        inputs: dict[str, Any] = {"input_ids": ids[:, start:stop].to(device), "use_cache": True, keyword: cache}
        if "attention_mask" in takes:
            inputs["attention_mask"] = mask[:, :stop].to(device)
        if "position_ids" in takes:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start:stop].to(device)
        with torch.no_grad():
            output = model(**inputs)
        one = output.logits if hasattr(output, "logits") else output[0]
        logits.append(one[:, -1].float().cpu())
    return logits


def _generate(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    output: Any = model.generate(
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=len(_STEPS),
        use_cache=True,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [one.float().cpu() for one in output.logits]


def stock_run(model: PreTrainedModel) -> tuple[list[torch.Tensor], Learned]:
    """Return the logits of `try_out` on the stock cache, and what the layers stored.

    Raises:
        UnsupportedModel: if the model has nothing to page: it fails, ignores the cache, or keeps no K and V.
    """
    name, text = type(model).__name__, model.config.get_text_config(decoder=True)
    if not model._supports_default_dynamic_cache():
        raise UnsupportedModel(f"{name} takes no cache from its caller (transformers says so)")
    by_generate = False
    try:
        recorder = Recorder(text)
        logits = try_out(model, recorder)
    except (torch.OutOfMemoryError, UnsupportedModel):
        raise
    except Exception as error:
        by_generate = True
        try:
            recorder = Recorder(text)
            logits = try_out(model, recorder, by_generate=True)
        except Exception:
            reason = f"{type(error).__name__}: {error}"
            raise UnsupportedModel(f"{name} fails on transformers' own cache: {reason}") from error
    if not recorder.shapes:
        raise UnsupportedModel(f"{name} stores no K and V in a cache that it is given: there is nothing to page")
    return logits, Learned(name, _stored_layers(name, text, recorder), recorder.layers, by_generate=by_generate)


def _stored_layers(name: str, text: Any, recorder: Recorder) -> dict[int, StoredLayer]:
    types, _ = get_layer_types_and_kwargs(text)
    layers = {}
    for index, (k, v, dtype, device) in sorted(recorder.shapes.items()):
        if len(k) != 4 or len(v) != 4:
            raise UnsupportedModel(f"{name} must store K and V as [rows, heads, tokens, width], stores {k} and {v}")
        kind = recorder.layers[index]
        if not isinstance(kind, CacheLayerMixin):
            raise UnsupportedModel(f"{name} stores K and V in layer {index}, a {type(kind).__name__}")
        window = kind.sliding_window if getattr(kind, "is_sliding", False) else None
        chunked = index < len(types) and types[index] == "chunked_attention"
        layers[index] = StoredLayer((k[1], k[3]), (v[1], v[3]), dtype, device, window, chunked)
    return layers

"""How a `PagedCache` comes about: the model is tried out, then its pages are made.

Takes a model and a size, gives a `Binding`, and refuses models whose answers on pages are not those of the stock
cache. The trial is a batch of two, one row padded, three columns in two forwards: what it showed is remembered for as
long as the model lives.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from pagedkv.cache import PagedKVCache
from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.binding import Binding
from pagedkv.transformers.learned import PLAIN_MASK
from pagedkv.transformers.stock import stock_run, try_out

if TYPE_CHECKING:
    from pagedkv.transformers.learned import Learned

_TRIAL_PAGE_SIZE, _TRIAL_PAGES = 4, 64

_known: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, Learned]] = weakref.WeakKeyDictionary()


def build_binding(model: PreTrainedModel, **options: Any) -> Binding:
    """Return ``model`` bound to fresh pages; ``options`` are those of `PagedKVCache.from_config`."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, was {type(model).__name__}")
    if model.training:
        raise ValueError("model must be in eval mode (model.eval()), was in training mode")
    learned = learn(model)
    return Binding(model, learned, make_store(model, learned, **options), learning=False)


def make_store(model: PreTrainedModel, learned: Learned, **options: Any) -> PagedKVCache:
    """Return pages for what ``learned`` names, each layer's on the device where its K and V were.

    ``options`` are those of `PagedKVCache.from_config`.
    """
    spec, devices = learned.spec(model.config), {layer: stored.device for layer, stored in learned.layers.items()}
    placed = {layer: devices.get(layer, learned.device) for layer in range(spec.num_layers)}
    device_map = placed if len(set(devices.values())) > 1 else None
    return PagedKVCache.from_spec(spec, dtype=learned.dtype, device=learned.device, device_map=device_map, **options)


def learn(model: PreTrainedModel) -> Learned:
    """Return what a trial shows of ``model``'s layers, from memory if nothing about the model has changed.

    Raises:
        UnsupportedModel: if it cannot be paged, or answers otherwise than on the stock cache.
    """
    text = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or text.is_encoder_decoder:
        raise UnsupportedModel(f"{type(model).__name__} is an encoder-decoder: it attends to a second text as well")
    state = (model.dtype, str(model.device), text._attn_implementation)
    known = _known.get(model)
    if known is not None and known[0] == state:
        return known[1]
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        learned = _try(model)
    _known[model] = (state, learned)
    return learned


def _try(model: PreTrainedModel) -> Learned:
    expected, learned = stock_run(model)
    trouble = _trial(model, learned, expected)
    plain = sorted(layer for layer, reason in learned.gathered.items() if reason == PLAIN_MASK)
    if plain:
        # A short text does not show it: beyond the window its answer would depend on how it was cut into forwards.
        raise UnsupportedModel(f"{learned.name} attends without the window that its own cache keeps to, layers {plain}")
    if trouble is None:
        learned.untouched = learned.gathered.keys() == learned.layers.keys()
        return learned
    # What is left changes nothing about the model and gathers for every layer; in the end with K and V of padding too,
    # for models that read padding or take no mask.
    learned.untouched = True
    for stores_padding in (False, True):
        learned.stores_padding = stores_padding
        trouble = _trial(model, learned, expected)
        if trouble is None:
            return learned
    raise UnsupportedModel(f"{learned.name} answers otherwise on a paged cache than on the stock one: {trouble}")


def _trial(model: PreTrainedModel, learned: Learned, expected: list[torch.Tensor]) -> str | None:
    """Run the tokens of the stock run on pages; return what is wrong with the answer, or None."""
    from pagedkv.transformers.paged_cache import PagedCache

    store = make_store(
        model,
        learned,
        num_pages=_TRIAL_PAGES,
        page_size=_TRIAL_PAGE_SIZE,
        max_batch=2,
        max_len=_TRIAL_PAGES,
        attention_backend="reference",
        check=True,
    )
    with PagedCache.on(Binding(model, learned, store, learning=not learned.untouched)) as cache:
        try:
            logits = try_out(model, cache, by_generate=learned.by_generate)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return _difference(logits, expected, model.dtype)


def _difference(logits: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> str | None:
    """Compare within half the digits of ``dtype``, relative to the spread of the logits."""
    for step, (ours, theirs) in enumerate(zip(logits, expected, strict=True)):
        spread = float(theirs.max() - theirs.min())
        error, allowed = float((ours - theirs).abs().max()), torch.finfo(dtype).eps ** 0.5 * spread
        if not error <= allowed:
            return f"logits of forward {step + 1} differ by {error:.3g}, allowed are {allowed:.3g}"
    return None

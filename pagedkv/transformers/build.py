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
from pagedkv.page_tensors import PageLayout
from pagedkv.sizing import default_num_pages, pages_within
from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.binding import Binding
from pagedkv.transformers.stock import stock_run, try_out

if TYPE_CHECKING:
    from pagedkv.transformers.learned import Learned

_TRIAL_PAGE_SIZE, _TRIAL_PAGES = 4, 64
_MAX_BATCH = 256
_MOST_CONTEXTS = 4

_known: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, Learned]] = weakref.WeakKeyDictionary()


def build_binding(
    model: PreTrainedModel,
    *,
    memory: int | str | None,
    num_pages: int | None,
    page_size: int,
    options: dict[str, Any],
) -> Binding:
    """Return ``model`` bound to fresh pages; see `PagedCache` for the arguments and errors."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, was {type(model).__name__}")
    if model.training:
        raise ValueError("model must be in eval mode (model.eval()), was in training mode")
    if memory is not None and num_pages is not None:
        raise ValueError(f"memory and num_pages exclude each other, were {memory!r} and {num_pages!r}")
    learned = learn(model)
    spec = learned.spec(model.config)
    if num_pages is None:
        layout = PageLayout.of(
            spec, page_size=page_size, max_len=spec.max_len, dtype=learned.dtype, device=learned.device
        )
        (page_bytes,) = layout.page_bytes().values()
        if memory is None:
            num_pages = default_num_pages(layout.pages_per_text(spec.max_len), page_bytes, learned.device)
        else:
            num_pages = pages_within(memory, page_size, page_bytes)
    store = PagedKVCache(
        spec,
        num_pages=num_pages,
        page_size=page_size,
        max_batch=_MAX_BATCH,
        max_len=max(1, min((num_pages - 1) * page_size, _MOST_CONTEXTS * spec.max_len)),
        dtype=learned.dtype,
        device=learned.device,
        **options,
    )
    return Binding(model, learned, store, learning=False)


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
    if trouble is None:
        learned.untouched = learned.gathered.keys() == learned.layers.keys()
        return learned
    # The last resort changes nothing about the model and gathers for every layer.
    learned.untouched = True
    trouble = _trial(model, learned, expected)
    if trouble is not None:
        raise UnsupportedModel(f"{learned.name} answers otherwise on a paged cache than on the stock one: {trouble}")
    return learned


def _trial(model: PreTrainedModel, learned: Learned, expected: list[torch.Tensor]) -> str | None:
    """Run the tokens of the stock run on pages; return what is wrong with the answer, or None."""
    from pagedkv.transformers.paged_cache import PagedCache

    store = PagedKVCache(
        learned.spec(model.config),
        num_pages=_TRIAL_PAGES,
        page_size=_TRIAL_PAGE_SIZE,
        max_batch=2,
        dtype=learned.dtype,
        device=learned.device,
        attention_backend="reference",
        check=True,
    )
    with PagedCache.on(Binding(model, learned, store, learning=not learned.untouched)) as cache:
        try:
            logits = try_out(model, cache)
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

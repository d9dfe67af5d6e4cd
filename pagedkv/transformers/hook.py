"""The attention function and mask function through which a model's own forward reaches a `RaggedCache`.

Takes what a layer hands over, attends through the store or over the histories that the layer was given, and refuses
whatever it would have to ignore: an unknown bias, a mask of the model's own, attention that is not causal.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from pagedkv.spec import UnsupportedModel
from pagedkv.transformers import histories
from pagedkv.transformers.ragged_cache import RaggedCache, tag_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# transformers looks for parts of its own implementations' names in this one: it must contain none of them.
IMPLEMENTATION = "pagedkv"
_ATTRIBUTE = "_attn_implementation_internal"
_ABSENT = object()
_HARMLESS_TENSORS = {"position_ids", "cache_position", "s_aux"}

_active: ContextVar[RaggedCache | None] = ContextVar("pagedkv_active_cache", default=None)


def attention(  # noqa: PLR0917  (the interface is transformers')
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for the cache whose tag K and V carry, or for the layer that has just stored; transformers' interface.

    Args:
        module: the layer's attention module, named in errors.
        query: ``[1, num_q_heads, total_q, k_dim]``.
        key: what `RaggedCache.update` returned, or what the model made of it.
        value: likewise.
        attention_mask: must be None: the ragged step has no mask.
        scaling: of the scores; by default ``k_dim ** -0.5``.
        dropout: must be 0.
        kwargs: what the model passes besides; only what is understood is let through.

    Returns:
        ``[1, total_q, num_q_heads, v_dim]`` and no weights.

    Raises:
        UnsupportedModel: if the call says something that the cache could not honour.
    """
    name = type(module).__name__
    cache = _active.get()
    if cache is None:
        raise RuntimeError(f"the attention implementation {IMPLEMENTATION!r} works inside ModelRunner.forward only")
    layer = _layer_of(name, cache, key, value)
    _require_understood(name, cache, query, {"attention_mask": attention_mask, "dropout": dropout, **kwargs})
    window, bound_window = kwargs.get("sliding_window"), cache.spec.layers[layer].window
    if window is not None and window != bound_window:
        raise UnsupportedModel(f"{name} asks for a window of {window}, the config of layer {layer} says {bound_window}")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    spec = cache.agree(layer, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
    cache.attended.add(layer)
    q = query[0].transpose(0, 1)
    if layer not in cache.routes.gathered:
        return cache.store.attend(layer, q, cache.batch).unsqueeze(0), None
    laid_out = cache.histories(layer, key.device)
    if key.shape[2] != laid_out.total_kv or value.shape[2] != laid_out.total_kv:
        raise UnsupportedModel(
            f"{name} attends to {key.shape[2]} keys and {value.shape[2]} values, was given {laid_out.total_kv}"
        )
    out = histories.attend(q, key[0].transpose(0, 1), value[0].transpose(0, 1), laid_out, spec)
    return out.unsqueeze(0), None


def _layer_of(name: str, cache: RaggedCache, key: torch.Tensor, value: torch.Tensor) -> int:
    """Return the layer that K and V were stored in: by their tags, or the one that stored last where they have none.

    A layer that makes something else of K and V shows it in its first forward, without a history, in which all K and V
    are the new ones: from then on it is given its histories.
    """
    tag, v_tag = tag_of(key), tag_of(value)
    if tag is not None and v_tag is not None:
        if (tag.role, v_tag.role) != ("key", "value") or v_tag[:2] != tag[:2] or tag.cache is not cache:
            raise UnsupportedModel(f"{name} attends to K and V that do not belong together, or to an earlier step's")
        return tag.layer
    layer = cache.written[-1] if cache.written else None
    if layer is not None and cache.learning and layer not in cache.routes.specs:
        cache.routes.gathered.add(layer)
    if layer not in cache.routes.gathered:
        raise UnsupportedModel(f"{name} attends to K and V that are not what it stored in the cache")
    return layer


def _require_understood(name: str, cache: RaggedCache, query: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Refuse a call that says more than scale, window, softcap and sink logits."""
    if kwargs["attention_mask"] is not None:
        raise UnsupportedModel(f"{name} attends under a mask of its own, {type(kwargs['attention_mask']).__name__}")
    if kwargs["dropout"]:
        raise UnsupportedModel(f"{name} attends with dropout {kwargs['dropout']}")
    if kwargs.get("is_causal") is False:
        raise UnsupportedModel(f"{name} asks for attention that is not causal")
    if query.shape[0] != 1 or query.shape[2] != cache.total_q:
        raise UnsupportedModel(f"{name} asks with queries {tuple(query.shape)} in a step of {cache.total_q} tokens")
    for key, value in kwargs.items():
        harmless = key in _HARMLESS_TENSORS or value is cache.rows
        if isinstance(value, torch.Tensor) and not harmless:
            raise UnsupportedModel(f"{name} attends with a tensor {key!r} of its own, of shape {tuple(value.shape)}")


def mask(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: Any = None,
    **kwargs: Any,
) -> None:
    """Return no mask: causality and windows are the operator's; transformers' mask interface.

    Raises:
        UnsupportedModel: if the model asks for another pattern than causality within a window.
    """
    cache = _active.get()
    if cache is None:
        raise RuntimeError(f"the attention implementation {IMPLEMENTATION!r} works inside ModelRunner.forward only")
    padded = attention_mask is not None and not bool(attention_mask.all())
    if padded or use_vmap or not allow_is_causal_skip:
        name = getattr(config, "model_type", None)
        raise UnsupportedModel(f"a {name!r} model asks for an attention pattern of its own, not causal within a window")
    cache.mask_windows.add(local_size)


@contextmanager
def implementation(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Let ``configs`` say that attention is done by ``name``; afterwards, whatever happens, what they said before."""
    before = [vars(config).get(_ATTRIBUTE, _ABSENT) for config in configs]
    try:
        for config in configs:
            vars(config)[_ATTRIBUTE] = name
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            if value is _ABSENT:
                vars(config).pop(_ATTRIBUTE, None)
            else:
                vars(config)[_ATTRIBUTE] = value


@contextmanager
def active(cache: RaggedCache) -> Iterator[None]:
    """Make ``cache`` the one that this thread's forward runs on."""
    token = _active.set(cache)
    try:
        yield
    finally:
        _active.reset(token)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, mask)

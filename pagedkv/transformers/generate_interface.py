"""The attention and mask functions behind `PagedCache`, as transformers calls them for each layer.

Takes what a layer hands over and decides who answers: the pages, where all that the layer says is understood, or the
model's own implementation on gathered K and V. It refuses to ignore anything: an unknown bias, a foreign mask, a
window other than the stored one all go to the model's own implementation.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.cache_forward import CacheForward, Tag, mask_key, tag_of
from pagedkv.transformers.learned import PLAIN_MASK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# transformers looks for parts of its own implementations' names in this one: it must contain none of them.
IMPLEMENTATION = "pagedkv_generate"
# Tensors that change nothing in attention, or that pages understand.
_UNDERSTOOD_TENSORS = {"position_ids", "cache_position", "s_aux"}

_active: ContextVar[CacheForward | None] = ContextVar("pagedkv_generate_forward", default=None)


@contextmanager
def active(forward: CacheForward) -> Iterator[None]:
    """Make ``forward`` the one that this thread's masks are made for."""
    token = _active.set(forward)
    try:
        yield
    finally:
        _active.reset(token)


def attention(  # noqa: PLR0917  (the interface is transformers')
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend through pages or through the model's own implementation; transformers' attention interface.

    Args:
        module: the layer's attention module.
        query: ``[rows, num_q_heads, n, k_dim]``, the last ``n`` columns of the forward.
        key: what the layer attends to; tagged where it is what `PagedCache.update` returned.
        value: likewise.
        attention_mask: None, one of our masks or a view of it, or one of the model's own making.
        scaling: of the scores; by default ``k_dim ** -0.5``.
        dropout: handed on.
        kwargs: what the model passes besides.

    Returns:
        ``[rows, n, num_q_heads, v_dim]``, and weights where the model's own implementation gives them.
    """
    forward = _active.get()
    if forward is None:
        raise RuntimeError(
            f"the attention implementation {IMPLEMENTATION!r} works inside a forward on a PagedCache only"
        )
    tag = _common_tag(forward, key, value)
    if tag is not None:
        said = {"attention_mask": attention_mask, "scaling": scaling, "dropout": dropout, **kwargs}
        reason = _why_not_pages(forward, tag.layer, module, query, said)
        if reason is None:
            forward.attended.add(tag.layer)
            scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            spec = forward.learned.layer_spec(tag.layer, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
            return forward.attend(tag.layer, query, spec), None
        if forward.learning:
            forward.learned.gathered.setdefault(tag.layer, reason)
        elif not tag.gathered:
            key, value = forward.gather(tag.layer)
            attention_mask = _mask_for(forward, tag.layer, module, query, attention_mask)
    if scaling is not None:
        kwargs["scaling"] = scaling
    own = _own_implementation(forward, module)
    result: tuple[torch.Tensor, torch.Tensor | None] = own(
        module, query, key, value, attention_mask, dropout=dropout, **kwargs
    )
    return result


def _common_tag(forward: CacheForward, key: torch.Tensor, value: torch.Tensor) -> Tag | None:
    """Return the tag that K and V share, or None where they are not what one layer stored in this forward."""
    tag, v_tag = tag_of(key), tag_of(value)
    if tag is None or v_tag is None or (tag.role, v_tag.role) != ("key", "value") or tag.layer != v_tag.layer:
        return None
    if tag.forward is not forward or v_tag.forward is not forward:
        raise UnsupportedModel(f"{forward.learned.name} attends to K and V of an earlier forward")
    return tag


def _why_not_pages(
    forward: CacheForward, layer: int, module: torch.nn.Module, query: torch.Tensor, said: dict[str, Any]
) -> str | None:
    """Return what keeps pages from answering this call, or None."""
    if not forward.learned.paged(layer):
        return forward.learned.gathered.get(layer, "everything is gathered")
    stored = forward.learned.layers[layer]
    if stored.folded or stored.chunked or query.shape[-1] != stored.k_shape[1] or query.shape[1] % stored.k_shape[0]:
        return f"queries {tuple(query.shape)} over K {stored.k_shape} and V {stored.v_shape}"
    if forward.ends_in_padding or not forward.is_within_window(stored.window):
        return "padding at the end, or between tokens inside a window"
    is_causal = said.get("is_causal") is not False and getattr(module, "is_causal", True) is not False
    if said["dropout"] or not is_causal:
        return "dropout, or attention that is not causal"
    if said.get("sliding_window") not in {None, stored.window}:
        return f"a window of {said['sliding_window']} instead of {stored.window}"
    return _why_not_tensors(said, query.shape[1]) or _why_not_mask(forward, stored.window, said["attention_mask"])


def _why_not_tensors(said: dict[str, Any], num_heads: int) -> str | None:
    """Return which tensor among what a layer says is not understood, or None."""
    for name, value in said.items():
        if isinstance(value, torch.Tensor) and name not in _UNDERSTOOD_TENSORS and name != "attention_mask":
            return f"a tensor {name!r}"
    sinks = said.get("s_aux")
    if sinks is not None and tuple(sinks.shape) != (num_heads,):
        return f"sink logits {tuple(sinks.shape)}"
    return None


def _why_not_mask(forward: CacheForward, window: int | None, mask: Any) -> str | None:
    """Return why ``mask`` says more than causality, padding and the layer's window, or None."""
    if mask is None:
        return "no mask, though one was made for it" if forward.learning else None
    known = forward.masks.get(mask_key(mask))
    if known is None:
        return "a mask of the model's own"
    if known[1] is None and window is not None:
        return PLAIN_MASK
    if known[1] != window:
        return f"a mask for a window of {known[1]} instead of {window}"
    return None


def _mask_for(forward: CacheForward, layer: int, module: torch.nn.Module, query: torch.Tensor, mask: Any) -> Any:
    """Return a mask over all gathered columns for the model's own implementation.

    Raises:
        UnsupportedModel: if the model's own mask is not as wide as the columns.
    """
    if mask is None:
        seen = forward.own_mask(layer, query.shape[2], query.device)
        if _own_name(forward, module) == "eager":
            return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(
                ~seen, torch.finfo(query.dtype).min
            )
        return seen
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[-1] != forward.columns_end:
        raise UnsupportedModel(
            f"{forward.learned.name} attends to {forward.columns_end} columns under a mask of {tuple(mask.shape)}"
        )
    return mask


def _own_name(forward: CacheForward, module: torch.nn.Module) -> str:
    """Return the attention implementation that the module's config named before this forward."""
    before = forward.implementation_before
    return before.get(id(getattr(module, "config", None))) or next(iter(before.values()), None) or "eager"


def _own_implementation(forward: CacheForward, module: torch.nn.Module) -> Callable[..., Any]:
    """Return the attention function that the model would have called without us."""
    name = _own_name(forward, module)
    default = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] | None = default if name == "eager" else ALL_ATTENTION_FUNCTIONS.get(name, default)
    if found is None:
        raise UnsupportedModel(f"{type(module).__name__} has no attention function for the implementation {name!r}")
    return found


def mask(
    batch_size: int,
    q_length: int,
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """Return the mask that the model's own implementation would get, or None where pages need none.

    A mask that says nothing but causality, padding and a window is remembered, so that layers on pages know that
    they may skip it; any other is foreign to them. transformers' mask interface.
    """
    forward = _active.get()
    if forward is None:
        raise RuntimeError(
            f"the attention implementation {IMPLEMENTATION!r} works inside a forward on a PagedCache only"
        )
    forward.begin(batch_size, q_length)
    plain = allow_is_causal_skip and not use_vmap
    if plain and not forward.needs_masks:
        return None
    own = forward.implementation_before.get(id(config)) or next(iter(forward.implementation_before.values()), None)
    made = ALL_MASK_ATTENTION_FUNCTIONS[own or "eager"](
        batch_size,
        q_length,
        *args,
        attention_mask=attention_mask,
        # While learning a mask must be there to be recognised.
        allow_is_causal_skip=allow_is_causal_skip and not forward.learning,
        use_vmap=use_vmap,
        local_size=local_size,
        config=config,
        **kwargs,
    )
    if plain and made is not None:
        forward.remember(made, local_size)
    return made


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, mask)

"""The attention function, mask function and cache object through which a model's own forward reaches a KV cache.

Takes what a layer hands over, writes K and V and attends through a cache backend, and refuses whatever it would
have to ignore: an unknown bias, a mask of the model's own, K or V changed after they were stored.

How the attention function knows its layer: `RaggedCache.update` returns fresh views of K and V that carry a tag.
The tag survives as long as the model passes these very objects on, also to later layers that share them, and it
is missing exactly where the stored K and V are not what the model attends to.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from pagedkv.attention import LayerSpec
from pagedkv.spec import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagedkv.backend import StepBatch
    from pagedkv.spec import KVSpec

# transformers looks for parts of its own implementations' names in this one: it must contain none of them.
IMPLEMENTATION = "pagedkv"
_ATTRIBUTE = "_attn_implementation_internal"
_TAG = "_pagedkv_tag"
_ABSENT = object()
_HARMLESS_TENSORS = {"position_ids", "cache_position", "s_aux"}

_active: ContextVar[RaggedCache | None] = ContextVar("pagedkv_active_cache", default=None)


class LayerStore(Protocol):
    """The part of a `CacheBackend` that layers see."""

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """Say how a layer attends."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store a layer's K and V ``[total_q, num_kv_heads, dim]``."""

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Attend from q ``[total_q, num_q_heads, k_dim]`` to everything stored."""


class _Tag(NamedTuple):
    """What a K or V that came out of `RaggedCache.update` carries."""

    cache: RaggedCache
    layer: int
    role: str


class RaggedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """One step's cache as a model sees it: it has no past, and storing returns what was given.

    To the model all sequences of the step are one text without history; their histories are the backend's.

    Attributes:
        specs: how each layer attends, by number. With ``learning`` it is filled by what the layers say when they
            first attend; otherwise what they say must agree with it.
        written: the layers that have stored their K and V in this step.
        attended: the layers whose K and V were attended to in this step.
        mask_windows: the window of each kind of mask that the model asked for; None for plain causality.
    """

    def __init__(
        self,
        spec: KVSpec,
        store: LayerStore,
        batch: StepBatch,
        specs: dict[int, LayerSpec],
        *,
        learning: bool = False,
    ) -> None:
        super().__init__(layers=[])
        self.spec = spec
        self.store = store
        self.batch = batch
        self.specs = specs
        self.learning = learning
        self.total_q = sum(batch.q_lens)
        self.written: set[int] = set()
        self.attended: set[int] = set()
        self.mask_windows: set[int | None] = set()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions come with the step."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0, as `get_seq_length`."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the step's own tokens: no mask is built from it."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: no bound that the model should care for."""
        return -1

    @property
    def is_compileable(self) -> bool:
        """False: the library would build masks ahead and compile."""
        return False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K ``[1, num_kv_heads, total_q, k_dim]`` and V of a layer; return tagged views of them."""
        self._require_expected(key_states, value_states, layer_idx)
        # [1, H, T, D] -> [T, H, D] without a copy
        self.store.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), self.batch)
        self.written.add(layer_idx)
        return self._tagged(key_states, layer_idx, "key"), self._tagged(value_states, layer_idx, "value")

    def _tagged(self, states: torch.Tensor, layer: int, role: str) -> torch.Tensor:
        view = states.view_as(states)
        setattr(view, _TAG, _Tag(self, layer, role))
        return view

    def _require_expected(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        if layer >= self.spec.num_layers:
            raise UnsupportedModel(f"layer {layer} stores K and V, but the config names {self.spec.num_layers} layers")
        if layer in self.written:
            raise UnsupportedModel(f"layer {layer} stores K and V twice in one forward")
        kv = self.spec.layers[layer]
        k_shape = (1, kv.num_kv_heads, self.total_q, kv.k_dim)
        v_shape = (1, kv.num_kv_heads, self.total_q, kv.v_dim)
        if k.shape != k_shape or v.shape != v_shape:
            raise UnsupportedModel(
                f"layer {layer} must store K {k_shape} and V {v_shape} by its config, "
                f"stores {tuple(k.shape)} and {tuple(v.shape)}"
            )

    def agree(self, layer: int, scale: float, softcap: float | None, sink_logits: torch.Tensor | None) -> None:
        """Check what a layer says of itself against what is bound, or learn it.

        Raises:
            UnsupportedModel: if it says something else than before.
        """
        bound = self.specs.get(layer)
        if bound is None:
            if not self.learning:
                raise UnsupportedModel(f"layer {layer} attends, but did not when the model was tried out")
            sinks = None if sink_logits is None else sink_logits.detach()
            bound = LayerSpec(scale=scale, window=self.spec.layers[layer].window, softcap=softcap, sink_logits=sinks)
            self.specs[layer] = bound
            self.store.bind_layer(layer, bound)
        elif scale != bound.scale or softcap != bound.softcap or not _same_logits(sink_logits, bound.sink_logits):
            raise UnsupportedModel(
                f"layer {layer} must attend as bound (scale {bound.scale}, softcap {bound.softcap}, its sink logits), "
                f"now says scale {scale}, softcap {softcap}"
            )


def _same_logits(now: torch.Tensor | None, bound: torch.Tensor | None) -> bool:
    if now is None or bound is None:
        return now is bound
    return now.data_ptr() == bound.data_ptr() or torch.equal(now, bound)


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
    """Attend through the cache whose tag K and V carry; transformers' attention interface.

    Args:
        module: the layer's attention module, named in errors.
        query: ``[1, num_q_heads, total_q, k_dim]``.
        key: what `RaggedCache.update` returned.
        value: what `RaggedCache.update` returned.
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
    cache, layer = _owner(name, key, value)
    _require_understood(name, cache, query, {"attention_mask": attention_mask, "dropout": dropout, **kwargs})
    window, bound_window = kwargs.get("sliding_window"), cache.spec.layers[layer].window
    if window is not None and window != bound_window:
        raise UnsupportedModel(f"{name} asks for a window of {window}, the config of layer {layer} says {bound_window}")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    cache.agree(layer, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
    cache.attended.add(layer)
    out = cache.store.attend(layer, query[0].transpose(0, 1), cache.batch)
    return out.unsqueeze(0), None


def _owner(name: str, key: torch.Tensor, value: torch.Tensor) -> tuple[RaggedCache, int]:
    """Return the cache and the layer that K and V were stored in, by their tags."""
    tag: _Tag | None = getattr(key, _TAG, None)
    v_tag: _Tag | None = getattr(value, _TAG, None)
    if tag is None or v_tag is None:
        raise UnsupportedModel(f"{name} attends to K and V that are not what it stored in the cache")
    if (tag.role, v_tag.role) != ("key", "value") or v_tag[:2] != tag[:2] or tag.cache is not _active.get():
        raise UnsupportedModel(f"{name} attends to K and V that do not belong together, or to an earlier step's")
    return tag.cache, tag.layer


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
        if isinstance(value, torch.Tensor) and key not in _HARMLESS_TENSORS:
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

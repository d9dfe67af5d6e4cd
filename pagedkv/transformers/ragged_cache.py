"""RaggedCache: the cache object that a model's forward sees while it runs one step of many sequences.

Takes K and V of each layer, hands them to a store, and gives back what the layer is to attend to: the very tensors,
tagged, where the store's attention will answer; all histories, one after the other, where the model changes K and V
after storing them. It refuses whatever differs from what the model showed when it was tried out.

How the attention function knows its layer: what `RaggedCache.update` returns carries a tag. The tag survives as long
as the model passes these very objects on, also to later layers that share them, and it is missing exactly where what
was stored is not what the model attends to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from transformers.cache_utils import Cache

from pagedkv.attention import LayerSpec
from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.histories import Histories, lay_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pagedkv.backend import StepBatch
    from pagedkv.spec import KVSpec

_TAG = "_pagedkv_tag"


class LayerStore(Protocol):
    """The part of a `CacheBackend` that layers see."""

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """Say how a layer attends."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store a layer's K and V ``[total_q, num_kv_heads, dim]``."""

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Attend from q ``[total_q, num_q_heads, k_dim]`` to everything stored."""

    def gather(self, layer: int, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's stored K and V, sequence after sequence, ``[total_kv, num_kv_heads, dim]``."""

    def held_positions(self, layer: int, batch: StepBatch) -> Sequence[NDArray[np.int64]]:
        """Return per sequence the positions that `gather` returns."""


class Tag(NamedTuple):
    """What a K or V that came out of `RaggedCache.update` carries."""

    cache: RaggedCache
    layer: int
    role: str


def tag_of(states: torch.Tensor) -> Tag | None:
    """Return the tag of a K or V, or None where it was not returned by `RaggedCache.update`."""
    tag: Tag | None = getattr(states, _TAG, None)
    return tag


@dataclass
class LayerRoutes:
    """How each layer attends, as the model showed it when it was tried out.

    Attributes:
        specs: what each layer that attends says of itself.
        gathered: the layers that are given all histories, since what they attend to is not what they store, or since
            the store's attention does not know their pattern.
    """

    specs: dict[int, LayerSpec] = field(default_factory=dict)
    gathered: set[int] = field(default_factory=set)


class RaggedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """One step's cache as a model sees it: it has no past; positions come with the step.

    To the model all sequences of the step are one text without history; their histories are the store's.

    Attributes:
        rows: the tokens of the step whose logits are wanted.
        routes: how each layer attends. With ``learning`` it is filled by what the layers say and do when they first
            attend, in a step without history; otherwise they must agree with it.
        written: the layers that have stored their K and V in this step, in order.
        attended: the layers whose K and V were attended to in this step.
        mask_windows: the window of each kind of mask that the model asked for; None for plain causality.
    """

    def __init__(
        self,
        spec: KVSpec,
        store: LayerStore,
        batch: StepBatch,
        routes: LayerRoutes,
        *,
        rows: torch.Tensor | None = None,
        learning: bool = False,
    ) -> None:
        super().__init__(layers=[])
        self.spec = spec
        self.store = store
        self.batch = batch
        self.rows = batch.last_rows if rows is None else rows
        self.routes = routes
        self.learning = learning
        self.total_q = sum(batch.q_lens)
        self.written: list[int] = []
        self.attended: set[int] = set()
        self.mask_windows: set[int | None] = set()
        self._histories: dict[tuple[int | None, bool, torch.device], Histories] = {}

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
        """Store K ``[1, num_kv_heads, total_q, k_dim]`` and V of a layer; return what it is to attend to, tagged.

        That is these very K and V, or for a layer of ``routes.gathered`` all that is stored: ``[1, num_kv_heads,
        total_kv, dim]``, sequence after sequence.
        """
        self._require_expected(key_states, value_states, layer_idx)
        # [1, H, T, D] -> [T, H, D] without a copy
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self.store.write(layer_idx, k, v, self.batch)
        self.written.append(layer_idx)
        if layer_idx in self.routes.gathered:
            k, v = (states.to(key_states.dtype) for states in self.store.gather(layer_idx, self.batch))
            key_states, value_states = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        return self._tagged(key_states, layer_idx, "key"), self._tagged(value_states, layer_idx, "value")

    def _tagged(self, states: torch.Tensor, layer: int, role: str) -> torch.Tensor:
        view = states.view_as(states)
        setattr(view, _TAG, Tag(self, layer, role))
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

    def histories(self, layer: int, device: torch.device) -> Histories:
        """Return how the histories that a gathered ``layer`` was given are laid out; made once per kind of layer."""
        kv = self.spec.layers[layer]
        key = (kv.window, kv.chunked, device)
        if key not in self._histories:
            held = self.store.held_positions(layer, self.batch)
            self._histories[key] = lay_out(held, self.batch.q_lens, kv.window if kv.chunked else None, device)
        return self._histories[key]

    def agree(self, layer: int, scale: float, softcap: float | None, sink_logits: torch.Tensor | None) -> LayerSpec:
        """Check what a layer says of itself against what it said before, or learn it; return how it attends.

        Raises:
            UnsupportedModel: if it says something else than before.
        """
        bound = self.routes.specs.get(layer)
        if bound is None:
            if not self.learning:
                raise UnsupportedModel(f"layer {layer} attends, but did not when the model was tried out")
            kv = self.spec.layers[layer]
            sinks = None if sink_logits is None else sink_logits.detach()
            window = None if kv.chunked else kv.window  # a chunk is cut out, there is no window left to keep
            bound = LayerSpec(scale=scale, window=window, softcap=softcap, sink_logits=sinks)
            self.routes.specs[layer] = bound
            if layer not in self.routes.gathered:
                self.store.bind_layer(layer, bound)
        elif scale != bound.scale or softcap != bound.softcap or not _same_logits(sink_logits, bound.sink_logits):
            raise UnsupportedModel(
                f"layer {layer} must attend as bound (scale {bound.scale}, softcap {bound.softcap}, its sink logits), "
                f"now says scale {scale}, softcap {softcap}"
            )
        return bound


def _same_logits(now: torch.Tensor | None, bound: torch.Tensor | None) -> bool:
    if now is None or bound is None:
        return now is bound
    return now.data_ptr() == bound.data_ptr() or torch.equal(now, bound)

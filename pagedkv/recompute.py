"""RecomputeCache: a paged cache in which some layers keep their input states, and K and V are computed when needed.

Takes a transformers model; gives the `CacheBackend` protocol with fewer bytes a token and equal tokens; refuses models
whose layers it cannot run again (`pagedkv.transformers.layer_inputs`), and those where it would save nothing. Input
states are as wide as the model; K and V together are twice as wide where every query head has its own (MHA), but
narrower already where query heads share them (most GQA models).

The states lie in the pages as if they were K (the first half of their width) and V (the second), so prefix sharing,
forks, preemption and swap are the paged cache's. `attend` gathers them, runs the layer's own attention module over them
up to where it stores K and V, and attends to these in pages of their own, one layer at a time: beside the cache there
are one layer's K and V of the step's texts. That costs the K and V projections of each text in every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from pagedkv.attention import AttentionBatch, paged_attention, write_kv
from pagedkv.cache import PagedKVCache
from pagedkv.sizing import parse_memory, require_count
from pagedkv.spec import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagedkv.allocator import Sequence as PagedSequence
    from pagedkv.backend import StepBatch
    from pagedkv.spec import KVSpec, LayerKV
    from pagedkv.step import PagedStep, StepRow
    from pagedkv.transformers.layer_inputs import Call, LayerInputs


class RecomputeCache(PagedKVCache):
    """`PagedKVCache` whose layers in ``recovered`` keep input states. Built by `of`.

    During a step the chosen attention modules carry a hook that notes their arguments; nothing else of the model is
    touched.

    Attributes:
        model_spec: what the model stores per token; ``spec`` is what this cache stores.
        recovered: by layer, how its K and V are computed again.
    """

    def __init__(
        self, spec: KVSpec, *, model_spec: KVSpec, recovered: Mapping[int, LayerInputs], **options: Any
    ) -> None:
        super().__init__(spec, **options)
        self.model_spec = model_spec
        self.recovered = recovered
        self._handles: list[Any] = []
        self._calls: dict[int, Call] = {}
        self._recovering = False
        self._scratch: _Scratch | None = None

    @classmethod
    def of(cls, model: Any, *, num_layers: int | None = None, **options: Any) -> Self:
        """Build it for a model; ``options`` are those of `PagedKVCache.from_spec`.

        Args:
            model: a transformers decoder in eval mode.
            num_layers: how many layers keep input states, the first ones where that saves; None: all of these.
            options: ``kv_dtype`` must be None: input states are kept as they are.

        Raises:
            UnsupportedModel: no layer would save, or one's K and V cannot be computed again.
            TypeError, ValueError: for other arguments out of their range.
        """
        from pagedkv.transformers.forward import RaggedForward
        from pagedkv.transformers.layer_inputs import find_layer_inputs

        if options.get("kv_dtype") is not None:
            raise ValueError(f"kv_dtype must be None for strategy 'recompute', was {options['kv_dtype']!r}")
        forward = RaggedForward(model)
        spec = forward.spec
        eligible = [index for index, layer in enumerate(spec.layers) if layer.window is None and layer.num_kv_heads]
        found = find_layer_inputs(forward, eligible)
        saving = [index for index in eligible if _kept(spec.layers[index], found[index].width) is not None]
        if not saving:
            raise UnsupportedModel(
                f"a {model.config.model_type!r} model saves nothing by strategy 'recompute': no layer of full "
                "attention has input states narrower than its K and V together"
            )
        if num_layers is not None:
            del saving[require_count("num_layers", num_layers) :]
        layers = list(spec.layers)
        for index in saving:
            layers[index] = _kept(layers[index], found[index].width) or layers[index]
        kept = replace(spec, layers=tuple(layers))
        return cls.from_spec(kept, model_spec=spec, recovered={index: found[index] for index in saving}, **options)

    def begin_step(self, inputs: Mapping[PagedSequence, Sequence[int] | int]) -> PagedStep:
        """Lay the step out, and listen to the attention modules until it ends; see `PagedKVCache.begin_step`."""
        step = super().begin_step(inputs)
        self._calls.clear()
        self._scratch = None
        for layer, own in self.recovered.items():
            self._handles.append(own.module.register_forward_pre_hook(self._listener(layer), with_kwargs=True))
        return step

    def _listener(self, layer: int) -> Any:
        from pagedkv.transformers.layer_inputs import Call

        def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._recovering:
                self._calls[layer] = Call(module, args, kwargs)

        return note

    def _leave_step(self, step: PagedStep, rows: Sequence[StepRow]) -> None:
        super()._leave_step(step, rows)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()
        self._scratch = None

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store K and V of the step, or the input states that they come from; arguments as in `PagedKVCache.write`.

        Raises:
            UnsupportedModel: the layer's attention module did not run: something stands in for it.
        """
        if layer in self.recovered:
            if layer not in self._calls:
                raise UnsupportedModel(f"layer {layer} must run its own attention module, something stands in for it")
            states = self.recovered[layer].note(self._calls[layer], batch.position_ids, batch)
            kept = self.spec.layers[layer]
            k, v = (half.reshape(len(half), kept.num_kv_heads, -1) for half in states.chunk(2, dim=1))
        super().write(layer, k, v, batch)

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Attend to everything stored, K and V computed again where they are not; as in `PagedKVCache.attend`."""
        if layer not in self.recovered:
            return super().attend(layer, q, batch)
        scratch = self._scratch_of(layer, batch)
        states = torch.cat([half.flatten(1) for half in self.gather(layer, batch)], dim=1)
        self._recovering = True
        try:
            k, v = self.recovered[layer].recover(self._calls[layer], states, scratch.positions)
        finally:
            self._recovering = False
        k_pages, v_pages = (
            one.new_empty(scratch.num_pages, one.shape[1], self.page_size, one.shape[2]) for one in (k, v)
        )
        write_kv(k, v, k_pages, v_pages, scratch.slots.to(k.device), backend=self._attention_backend)
        return paged_attention(
            q,
            k_pages,
            v_pages,
            scratch.attention,
            self.layer_specs[layer],
            backend=self._attention_backend,
            check=self._check,
        )

    def _scratch_of(self, layer: int, batch: StepBatch) -> _Scratch:
        """Return where a layer's recovered K and V go: the same for all layers of a step on one device."""
        own = self._group_step(layer, batch).attention
        if self._scratch is None or self._scratch.attention.kv_lens is not own.kv_lens:
            self._scratch = _Scratch.of(self.held_positions(layer, batch), self.page_size, own)
        return self._scratch


class _Scratch(NamedTuple):
    """Pages for one layer's K and V of a step's texts, each text's from a page of its own on.

    Attributes:
        positions: int64 ``[n]``: of all texts' tokens, text after text.
        slots: int64 ``[n]``: where they go.
        num_pages: the null page among them.
        attention: the step's `AttentionBatch` over these pages.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    num_pages: int
    attention: AttentionBatch

    @classmethod
    def of(cls, held: Sequence[np.ndarray[Any, np.dtype[np.int64]]], page_size: int, own: AttentionBatch) -> Self:
        """Lay out texts of ``held`` positions."""
        blocks = [-(-len(positions) // page_size) for positions in held]
        ends = np.cumsum([1, *blocks])
        tables = np.zeros((len(held), max(blocks)), np.int32)
        for row, (first, count) in enumerate(zip(ends, blocks, strict=False)):
            tables[row, :count] = np.arange(first, first + count)
        slots = np.concatenate([first * page_size + row for first, row in zip(ends, held, strict=False)])
        attention = AttentionBatch(
            block_tables=torch.from_numpy(tables).to(own.block_tables.device),
            kv_lens=own.kv_lens,
            cu_q_lens=own.cu_q_lens,
            max_q_len=own.max_q_len,
            max_kv_len=own.max_kv_len,
        )
        return cls(torch.from_numpy(np.concatenate(held)), torch.from_numpy(slots), int(ends[-1]), attention)


def _kept(layer: LayerKV, width: int) -> LayerKV | None:
    """Return how a page keeps input states of ``width`` instead of a layer's K and V; None where that saves nothing."""
    if width >= layer.num_kv_heads * (layer.k_dim + layer.v_dim) or width % 2:
        return None
    heads = layer.num_kv_heads if width % (2 * layer.num_kv_heads) == 0 else 1
    dim = width // (2 * heads)
    return replace(layer, num_kv_heads=heads, k_dim=dim, v_dim=dim)


def layers_to_recompute(spec: KVSpec, width: int, num_tokens: int, dtype: torch.dtype, memory: int | str) -> int:
    """Return the fewest layers that must keep input states of ``width`` for ``num_tokens`` to fit ``memory``.

    At least 1. Where not all together would do, all of them: preemption does the rest.
    """
    savings = [
        layer.num_kv_heads * (layer.k_dim + layer.v_dim) - width
        for layer in spec.layers
        if layer.window is None and _kept(layer, width) is not None
    ]
    excess = spec.bytes_per_token(dtype) * num_tokens - parse_memory(memory)
    count = 0
    for saving in savings:
        if excess <= 0 and count:
            break
        excess -= saving * num_tokens * dtype.itemsize
        count += 1
    return max(count, 1)

"""ModelRunner: one ragged step of a batch engine through any transformers decoder.

Takes a model and a cache backend, gives the logits of each sequence's last token or of those wanted, and refuses at
construction a model whose attention cannot be routed through the cache. It knows no requests and no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.transformers.forward import RaggedForward
from pagedkv.transformers.graphs import DecodeGraphs, PaddingBackend
from pagedkv.transformers.probe import learn_layers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from pagedkv.backend import CacheBackend, StepBatch
    from pagedkv.transformers.ragged_cache import LayerStore


class ModelRunner:
    """Runs steps of ``backend`` through ``model``.

    At construction a few tokens are tried out against the model's own eager attention, and every layer's scale,
    window, softcap and sink logits are bound to the backend. The model is not changed; its config says only
    during `forward` that attention is ours, and its random number generators are left as they were.

    Args:
        model: a causal language model in eval mode.
        backend: where K and V go.
        cuda_graphs: replay decode steps as captured CUDA graphs, one per padded batch size (`DecodeGraphs`); by
            default where the model is on a GPU, no layer is gathered and the backend can pad a step.

    Attributes:
        spec: what the model stores per token (`KVSpec`).
        layer_specs: how each layer attends, by number.
        gathered_layers: the layers that attend to something else than they store (latents expanded afterwards, say) or
            within chunks. They are handed their histories at each step, which costs a gather.

    Raises:
        TypeError: if ``model`` is no transformers model.
        ValueError: if the model is in training mode, the backend refuses a layer, or graphs are asked for and cannot
            be had.
        UnsupportedModel: if its attention cannot be routed; the message says what and why.
    """

    def __init__(self, model: PreTrainedModel, backend: CacheBackend, *, cuda_graphs: bool | None = None) -> None:
        self._forward = RaggedForward(model)
        self.model = model
        self.backend = backend
        self.spec = self._forward.spec
        self._routes = learn_layers(self._forward)
        self.layer_specs = self._routes.specs
        self.gathered_layers = frozenset(self._routes.gathered)
        for layer, spec in sorted(self.layer_specs.items()):
            if layer not in self.gathered_layers:
                backend.bind_layer(layer, spec)
        self._graphs = None if cuda_graphs is False else self._make_graphs(required=cuda_graphs is True)

    def _make_graphs(self, *, required: bool) -> DecodeGraphs | None:
        """Return what captures decode steps, None where that cannot be, unless it is ``required``."""
        devices = sorted({str(parameter.device) for parameter in self.model.parameters()})
        if self.model.device.type != "cuda" or len(devices) > 1:
            reason = f"the model is on {', '.join(devices)}"
        elif self.gathered_layers:
            reason = f"layers {sorted(self.gathered_layers)} are handed their histories, whose lengths differ"
        elif isinstance(self.backend, PaddingBackend):
            return DecodeGraphs(self._forward, self.backend, self._routes)
        else:
            reason = f"{type(self.backend).__name__} cannot pad a step"
        if required:
            raise ValueError(f"cuda_graphs must be None or False here, was True: {reason}")
        return None

    def forward(self, batch: StepBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step that ``backend.begin_step`` laid out: K and V of its tokens are written, nothing is committed.

        Args:
            batch: the step.
            rows: int64 ``[n]``: the tokens of the step, 0 to ``total_q - 1``, whose logits are wanted; by default each
                sequence's last.

        Returns:
            float32 logits ``[n, vocab]``, in the order of ``rows`` or of ``batch.sequences``.

        Raises:
            UnsupportedModel: if a layer says something else than at construction. After this or any other
                exception the caller abandons the step.
        """
        if self._graphs is not None and self._graphs.serves(batch):
            logits = self._graphs.run(batch)
            return logits if rows is None else logits[rows]  # one token each: a token's number is its sequence's
        return self.forward_on(self.backend, batch, rows)

    def forward_on(self, store: LayerStore, batch: StepBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step of another ``store`` than the backend, as `forward` does, without graphs."""
        return self._forward(self._forward.cache(store, batch, self._routes, rows=rows))

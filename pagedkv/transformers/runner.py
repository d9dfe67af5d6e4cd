"""ModelRunner: one ragged step of a batch engine through any transformers decoder.

Takes a model and a cache backend, gives the logits of each sequence's last token, and refuses at construction a
model whose attention cannot be routed through the cache. It knows no requests and no memory.
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


class ModelRunner:
    """Runs steps of ``backend`` through ``model``.

    At construction a few tokens are tried out against the model's own eager attention, and every layer's scale,
    window, softcap and sink logits are bound to the backend. The model is not changed; its config says only
    during `forward` that attention is ours, and its random number generators are left as they were.

    Args:
        model: a causal language model in eval mode.
        backend: where K and V go.
        cuda_graphs: replay decode steps as captured CUDA graphs, one per padded batch size (`DecodeGraphs`); by
            default where the model is on a GPU and the backend can pad a step.

    Attributes:
        spec: what the model stores per token (`KVSpec`).
        layer_specs: how each layer attends, by number.

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
        self.layer_specs = learn_layers(self._forward)
        for layer, spec in sorted(self.layer_specs.items()):
            backend.bind_layer(layer, spec)
        on_gpu, pads = model.device.type == "cuda", isinstance(backend, PaddingBackend)
        if cuda_graphs and not (on_gpu and pads):
            reason = f"{type(backend).__name__} cannot pad a step" if on_gpu else f"the model is on {model.device}"
            raise ValueError(f"cuda_graphs must be None or False here, was True: {reason}")
        self._graphs: DecodeGraphs | None = None
        if isinstance(backend, PaddingBackend) and on_gpu and cuda_graphs is not False:
            self._graphs = DecodeGraphs(self._forward, backend, self.layer_specs)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Run a step that ``backend.begin_step`` laid out: K and V of its tokens are written, nothing is committed.

        Returns:
            float32 logits ``[num_sequences, vocab]`` of each sequence's last token, in the order of
            ``batch.sequences``.

        Raises:
            UnsupportedModel: if a layer says something else than at construction. After this or any other
                exception the caller abandons the step.
        """
        if self._graphs is not None and self._graphs.serves(batch):
            return self._graphs.run(batch)
        return self._forward(self._forward.cache(self.backend, batch, self.layer_specs))

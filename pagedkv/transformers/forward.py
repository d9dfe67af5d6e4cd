"""A model's forward on a ragged step: which keywords it takes, and how its config is set for it.

Takes a causal language model and a step, gives logits, and refuses models whose forward has no place for a
ragged step. It knows no memory: where K and V go is the store's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.hook import IMPLEMENTATION, active, implementation
from pagedkv.transformers.observe import cache_keyword, observe_kv_spec
from pagedkv.transformers.ragged_cache import RaggedCache

if TYPE_CHECKING:
    from pagedkv.backend import StepBatch
    from pagedkv.transformers.ragged_cache import LayerRoutes, LayerStore


class RaggedForward:
    """Calls ``model`` on one step of many sequences, or on one sequence in its own eager way.

    Raises:
        TypeError: if ``model`` is no transformers model.
        ValueError: if it is in training mode (dropout would make its answers random).
        UnsupportedModel: if its forward has no place for positions, a cache or the rows to keep.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model must be a transformers PreTrainedModel, was {type(model).__name__}")
        if model.training:
            raise ValueError("model must be in eval mode (model.eval()), was in training mode")
        self.model = model
        self._cache_keyword = cache_keyword(model)
        self.spec = observe_kv_spec(model)
        modules = [getattr(module, "config", None) for module in model.modules()]
        self._configs = list({id(one): one for one in modules if isinstance(one, PreTrainedConfig)}.values())

    @torch.inference_mode()
    def __call__(self, cache: RaggedCache) -> torch.Tensor:
        """Run the step of ``cache``; return float32 logits ``[n, vocab]`` of its ``rows``.

        Raises:
            UnsupportedModel: if a layer says something that the cache cannot honour; K and V of the step may be
                written by then, and the step is to be abandoned.
        """
        batch = cache.batch
        with implementation(self._configs, IMPLEMENTATION), active(cache):
            output = self.model(
                input_ids=batch.input_ids.unsqueeze(0),
                position_ids=batch.position_ids.unsqueeze(0),
                use_cache=True,
                logits_to_keep=cache.rows,
                **{self._cache_keyword: cache},
            )
        if set(cache.written) != cache.attended:
            layers = sorted(cache.attended ^ set(cache.written))
            raise UnsupportedModel(
                f"{type(self.model).__name__} stores K and V of layers {layers} but attends to them past the "
                f"attention interface"
            )
        return _logits(output)[0].float()

    @torch.inference_mode()
    def stock(self, tokens: list[int]) -> torch.Tensor:
        """Return float32 logits ``[len(tokens), vocab]`` of one sequence by the library's eager attention."""
        with implementation(self._configs, "eager"):
            ids = torch.tensor([tokens], device=self.model.device)
            positions = torch.arange(len(tokens), device=self.model.device).unsqueeze(0)
            return _logits(self.model(input_ids=ids, position_ids=positions, use_cache=False))[0].float()

    def cache(
        self,
        store: LayerStore,
        batch: StepBatch,
        routes: LayerRoutes,
        *,
        rows: torch.Tensor | None = None,
        learning: bool = False,
    ) -> RaggedCache:
        """Return the cache object of one step; ``rows`` are the tokens whose logits are wanted, or each last one."""
        return RaggedCache(self.spec, store, batch, routes, rows=rows, learning=learning)


def _logits(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits

"""Models whose steps are planned, or are not, and the steps that they are compared on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from pagedkv import PagedKVCache
from pagedkv.engine.model_step.runner import FastRunner
from pagedkv.transformers import ModelRunner, observe_kv_spec
from tests.tiny_models import build, tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable


def runner_of(model: Any, **options: Any) -> tuple[FastRunner, PagedKVCache]:
    """Return a fast runner and its cache."""
    shape: dict[str, Any] = {"num_pages": 256, "page_size": 4, "dtype": model.dtype, "prefix_cache": False}
    cache = PagedKVCache.from_spec(observe_kv_spec(model), **shape)
    return FastRunner(ModelRunner(model, cache), **options), cache


def run(runner: FastRunner, cache: PagedKVCache, *, planned: bool) -> list[torch.Tensor]:
    """Return the logits of some ragged steps of up to 90 tokens, by the plan or by the modules."""
    draw, vocab_size = random.Random(0), cache.spec.vocab_size
    texts = [[draw.randrange(1, vocab_size) for _ in range(96)] for _ in range(3)]
    sequences = [cache.open(text) for text in texts]
    if not planned:
        runner._plan = None
    logits = []
    for counts in ((1, 0, 0), (70, 3, 17), (1, 1, 1), (5, 0, 2), (1, 30, 1)):
        steps = {
            sequence: text[sequence.num_tokens : sequence.num_tokens + count]
            for sequence, text, count in zip(sequences, texts, counts, strict=True)
            if count
        }
        batch = cache.begin_step(steps)
        total = sum(counts)
        rows = torch.tensor([draw.randrange(total) for _ in range(draw.randint(1, total))])
        logits.append(runner.forward(batch, rows if total > len(steps) else None))
        cache.end_step(batch)
    for sequence in sequences:
        sequence.close()
    return logits


def twisted(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    """Return a llama whose first layer's output goes through ``change``."""
    model = build(tiny_config("llama"))
    layer = model.model.layers[0]

    class Twisted(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return change(self, super().forward(*args, **kwargs))

    layer.__class__ = Twisted
    return model

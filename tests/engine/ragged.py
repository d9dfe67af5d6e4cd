"""A hand-made schedule over a runner: prompts that join mid-way and in chunks, beside sequences that decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.tiny_models import VOCAB, stock_logits

if TYPE_CHECKING:
    from pagedkv.transformers import ModelRunner

# Prompt lengths, and how many tokens of each text are known to the cache after each step: 10 at once, 3 at once,
# 13 in two chunks of which the first joins a decode step and the second is longer.
PROMPTS = (10, 3, 13)
SCHEDULE = ((10, 0, 0), (11, 3, 0), (12, 4, 6), (13, 5, 13), (14, 6, 14), (15, 7, 15), (16, 8, 16), (17, 9, 17))


def prompts(seed: int = 0) -> list[list[int]]:
    """Return one random prompt for each of `PROMPTS`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in PROMPTS]


def run_schedule(runner: ModelRunner, backend: Any) -> tuple[list[list[int]], float]:
    """Run `SCHEDULE` greedily; return the texts and the largest error of any logit against the model alone.

    Every sequence is closed afterwards.
    """
    texts = prompts()
    sequences = [backend.open(text) for text in texts]
    error = 0.0
    for known in SCHEDULE:
        rows = [row for row, count in enumerate(known) if count]
        batch = backend.begin_step({sequences[row]: texts[row][sequences[row].num_tokens : known[row]] for row in rows})
        logits = runner.forward(batch)
        backend.end_step(batch)
        for row, row_logits in zip(rows, logits, strict=True):
            expected = stock_logits(runner.model, texts[row][: known[row]])[-1]
            error = max(error, float((row_logits - expected).abs().max()))
            if known[row] == len(texts[row]):
                texts[row].append(int(row_logits.argmax()))
    for sequence in sequences:
        sequence.close()
    return texts, error

"""A model of a few lines: the next token is a fixed function of the text, read back from the cache.

`ScriptedRunner` reads every mark of a sequence through its pages, so that a wrong page, a lost token or another
request's page changes the answer or fails at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.engine.core import EngineCore
from tests.engine.naive_cache import NaiveCache

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from pagedkv.backend import StepBatch
    from pagedkv.engine import SamplingParams, StepOutput

VOCAB = 50


def hashed(text: Sequence[int]) -> int:
    """Return a next token that depends on every token of the text and its place."""
    value = 17
    for token in text:
        value = (value * 31 + token + 1) % 1000003
    return value % VOCAB


def constant(token: int) -> Callable[[Sequence[int]], int]:
    """Return a rule that always says ``token``."""
    return lambda text: token


class ScriptedRunner:
    """Runs ``rule`` over what the cache has stored; the logits peak at its answer, smoothly falling to both sides."""

    def __init__(self, cache: NaiveCache, rule: Callable[[Sequence[int]], int] = hashed, vocab: int = VOCAB) -> None:
        self.cache = cache
        self.rule = rule
        self.vocab = vocab
        self.fed: list[dict[tuple[int, ...], int]] = []
        self.fail_next = 0

    def forward(self, batch: StepBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Store the step's marks, check all of a sequence's, and answer for each of the step's tokens."""
        self.cache.store(batch)
        wanted = set((batch.last_rows if rows is None else rows).tolist())
        logits = torch.zeros(sum(batch.q_lens), self.vocab)
        step = {}
        first = 0
        for sequence, count in zip(batch.sequences, batch.q_lens, strict=True):
            marks = sequence.marks()
            assert [position for position, _ in marks] == list(range(sequence.num_tokens + count))
            text = [token for _, token in marks]
            for row in wanted & set(range(first, first + count)):
                logits[row] = self.answer(text[: sequence.num_tokens + row - first + 1])
            first += count
            step[tuple(text)] = count
        self.fed.append(step)
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("the scripted runner fails on purpose")
        return logits[batch.last_rows if rows is None else rows]

    def answer(self, text: Sequence[int]) -> torch.Tensor:
        """Return the logits ``[vocab]`` after ``text``."""
        return -((torch.arange(self.vocab) - self.rule(text)) % self.vocab).float() / 10


def make_core(
    num_pages: int = 64,
    page_size: int = 4,
    *,
    rule: Callable[[Sequence[int]], int] = hashed,
    prefix_cache: bool = True,
    **options: object,
) -> tuple[EngineCore, NaiveCache, ScriptedRunner]:
    """Return a core over a naive cache and a scripted runner."""
    cache = NaiveCache(num_pages, page_size, prefix_cache=prefix_cache)
    runner = ScriptedRunner(cache, rule)
    given = {
        "vocab_size": VOCAB,
        "max_len": 4096,
        "watermark": 0.0,
        "seed": 0,
        "prefix_page_size": page_size if prefix_cache else None,
        **options,
    }
    return EngineCore(runner, cache, **given), cache, runner  # type: ignore[arg-type]  # options of many types


def drain(core: EngineCore, *, most_steps: int = 10_000) -> dict[Hashable, list[StepOutput]]:
    """Step until nothing is left and return every request's outputs; fail after ``most_steps``."""
    outputs: dict[Hashable, list[StepOutput]] = {}
    steps = 0
    while core.has_unfinished:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        steps += 1
        assert steps <= most_steps, "the engine does not come to an end"
    return outputs


def tokens_of(outputs: Mapping[Hashable, Sequence[StepOutput]]) -> dict[Hashable, list[int]]:
    """Return every request's tokens."""
    return {name: [token for output in row for token in output.token_ids] for name, row in outputs.items()}


def cold(prompt: Sequence[int], params: SamplingParams, **options: object) -> list[int]:
    """Return a request's tokens alone: a large cache, no prefix sharing, the prompt in one chunk."""
    core, _, _ = make_core(1024, 4, prefix_cache=False, max_step_tokens=4096, **options)  # type: ignore[arg-type]
    core.add_request("cold", prompt, params)
    return tokens_of(drain(core))["cold"]

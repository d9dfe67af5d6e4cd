"""The same prompts served three ways: by the engine over a cache backend, and by transformers' own ``generate``.

Takes token ids, gives the tokens that came out with what they cost in time and KV memory, and refuses to print.
Decoding is greedy throughout. A `Watcher` hears of every step, for all subjects alike, so that showing progress weighs
on each of them the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from pagedkv.backend import CacheUsage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pagedkv.engine import Engine, SamplingParams
    from pagedkv.engine.outputs import StepOutput


NOTHING = CacheUsage(0, 0, 0, 0, 0)


class Watcher(Protocol):
    """Hears of every step of a subject."""

    def step(self, num_tokens: int, outputs: Sequence[StepOutput], usage: CacheUsage | None) -> None:
        """Take in a step that made ``num_tokens`` tokens; ``outputs`` and ``usage`` where the subject tells."""


@dataclass
class MemoryMeter:
    """What a subject held, step by step.

    Attributes:
        peak: the usage at the step that held most bytes.
        num_steps: the steps at which anything was held.
    """

    peak: CacheUsage = NOTHING
    num_steps: int = 0
    _waste: float = 0.0

    def observe(self, usage: CacheUsage) -> None:
        """Take in one step's usage; a step that held nothing says nothing."""
        if not usage.slots_held:
            return
        self.num_steps += 1
        self._waste += 1 - usage.tokens_stored / usage.slots_held
        if usage.bytes_held > self.peak.bytes_held:
            self.peak = usage

    @property
    def waste(self) -> float:
        """The fraction of held slots that stored no token, mean over steps."""
        return self._waste / self.num_steps if self.num_steps else 0.0


@dataclass
class Served:
    """What one subject made of the prompts: ``tokens[i]`` answers prompt ``i``, its EOS included.

    ``seconds`` run from the first prompt handed over to the last token; ``in_use_after`` is what the backend still
    holds when everybody is done.
    """

    subject: str
    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    memory: MemoryMeter = field(default_factory=MemoryMeter)
    prefix_tokens_reused: int = 0
    preemptions: int = 0
    in_use_after: int = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens over all prompts."""
        return sum(len(row) for row in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time, prefill included."""
        return self.num_tokens / self.seconds


def request_index(output: StepOutput) -> int:
    """Return the prompt's index, which is what the commands use as request id."""
    return cast("int", output.request_id)


def serve(
    subject: str, engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, watcher: Watcher
) -> Served:
    """Serve all prompts at once with a new ``engine``; nothing is stored when the clock starts."""
    served = Served(subject, [[] for _ in prompts])
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(index, prompt, params)
    while engine.has_unfinished:
        outputs = engine.step()
        usage = engine.backend.usage()
        served.memory.observe(usage)
        for output in outputs:
            served.tokens[request_index(output)].extend(output.token_ids)
        watcher.step(sum(len(output.token_ids) for output in outputs), outputs, usage)
    served.seconds = time.perf_counter() - start
    served.prefix_tokens_reused = engine.stats.cached_tokens
    served.preemptions = engine.stats.preemptions
    served.in_use_after = engine.backend.usage().in_use
    return served


def generate(
    model: Any, eos: Sequence[int], prompts: Sequence[Sequence[int]], max_new_tokens: int, watcher: Watcher
) -> Served:
    """Serve all prompts as one left-padded batch with ``model.generate``, greedily, on its own cache.

    An answer ends at the first of the token ids ``eos``, which also pad it.
    """
    import torch

    pad = eos[0] if eos else 0
    longest = max(len(prompt) for prompt in prompts)
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]

    def heard(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        watcher.step(len(prompts), (), None)
        return torch.zeros(len(prompts), dtype=torch.bool, device=input_ids.device)

    start = time.perf_counter()
    output = model.generate(
        input_ids=torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=pad,
        eos_token_id=list(eos) or None,
        stopping_criteria=[heard],
    )
    seconds = time.perf_counter() - start
    answers = [_until_eos(row, eos) for row in output[:, longest:].tolist()]
    return Served("generate", answers, seconds, _padded_memory(model, prompts, answers))


def _until_eos(row: list[int], eos: Sequence[int]) -> list[int]:
    """Return a row without the padding that follows its first EOS."""
    end = next((index for index, token in enumerate(row) if token in eos), len(row))
    return row[: end + 1]


def _padded_memory(model: Any, prompts: Sequence[Sequence[int]], answers: list[list[int]]) -> MemoryMeter:
    """Return what a padded batch holds: every row as long as the longest, to the end of the slowest.

    The second copy that ``torch.cat`` holds while it runs, one layer at a time, is not counted.
    """
    from pagedkv.spec import KVSpec

    token_bytes = KVSpec.from_config(model.config).bytes_per_token(model.dtype)
    longest = max(len(prompt) for prompt in prompts)
    meter = MemoryMeter()
    for step in range(max(len(answer) for answer in answers)):
        held = len(prompts) * (longest + step)
        lengths = (len(p) + min(step, len(a) - 1) for p, a in zip(prompts, answers, strict=True))
        stored = sum(lengths)
        meter.observe(CacheUsage(stored, held, stored * token_bytes, held * token_bytes, len(prompts)))
    return meter


def reference_logits(model: Any, prompt: Sequence[int], answer: Sequence[int], index: int) -> torch.Tensor:
    """Return the model's own logits ``[vocab]`` for token ``index`` of an answer it gave."""
    import torch

    with torch.inference_mode():
        text = torch.tensor([[*prompt, *answer[:index]]], device=model.device)
        logits: torch.Tensor = model(text).logits[0, -1].float()
    return logits


def warm_up(model: Any) -> None:
    """Run the model once on a few tokens, so that the first subject does not pay for what all of them use."""
    import torch

    with torch.inference_mode():
        model(torch.zeros((2, 32), dtype=torch.int64, device=model.device))

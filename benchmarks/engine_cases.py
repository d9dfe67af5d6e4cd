"""The workloads that engines are measured on: prompts, how many tokens each makes, and when each arrives.

Takes a vocabulary's size and a seed, gives `Case` objects, and knows no engine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.generated_trace import chats
from pagedkv.allocator.traces import read_trace

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ("pagedkv", "vllm", "generate_batch", "generate")
CACHES = ("pagedkv", "concat", "static", "generate")


@dataclass(frozen=True)
class Case:
    """One workload.

    Attributes:
        name: for the report.
        prompts: token ids.
        new_tokens: of each prompt.
        subjects: who can serve it, ours first.
        arrivals: seconds from the start at which each request comes; None: all at once.
        num_pages: of our cache, where there are to be too few.
    """

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]
    subjects: tuple[str, ...] = ENGINES
    arrivals: list[float] | None = None
    num_pages: int | None = None


def cases(vocab_size: int, *, quick: bool, trace: Path | None, span: float) -> list[Case]:
    """Return all workloads; see `arriving` for ``trace`` and ``span``."""
    draw = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(tokens)]

    def even(count: int, length: int, new: int, subjects: tuple[str, ...] = ENGINES) -> Case:
        name = f"{'caches: ' if subjects != ENGINES else ''}{count} x ({length} + {new})"
        return Case(name, [prompt(length) for _ in range(count)], [new] * count, subjects)

    size, long = (32, 128) if quick else (128, 1024)
    shared, new = prompt(64 if quick else 500), 16 if quick else 64
    shared_prompts = [shared + prompt(24) for _ in range(16)]
    few = [prompt(draw.randint(1, 60 if quick else 300)) for _ in range(16 if quick else 64)]
    return [
        even(16, size, size),
        even(1, size, size),
        even(64, size, size),
        even(4, long, 32),
        Case(f"16 chats ({len(shared)} shared + 24 + {new})", shared_prompts, [new] * 16),
        arriving(vocab_size, 20 if quick else 200, trace, span / 10 if quick else span),
        even(16, size, size // 2, CACHES),
        # Backend "none" computes everything again for every token.
        even(16, size, 4, ("pagedkv", "none", "concat", "static", "generate")),
        # A third of the pages that all of them would take.
        Case(
            f"caches: {len(few)} x (1..{max(map(len, few))} + 32), few pages",
            few,
            [32] * len(few),
            CACHES,
            num_pages=24 if quick else 240,
        ),
    ]


def arriving(vocab_size: int, count: int, trace: Path | None, span: float, divisor: int = 16) -> Case:
    """Return requests of a trace's lengths, divided by ``divisor``, random tokens, that arrive within ``span`` seconds.

    The trace is Azure's conversation trace of 2023 as a file; without one, lengths of its shape arrive at random.
    """
    draw = random.Random(1)
    if trace is None:
        requests = chats(count)
        times = sorted(draw.random() for _ in requests)
    else:
        requests = list(read_trace(trace, limit=count).requests)
        times = [request.arrival for request in requests]
    longest = max(times[-1] - times[0], 1e-9)
    prompts = [
        [draw.randrange(vocab_size) for _ in range(max(1, len(request.prompt) // divisor))] for request in requests
    ]
    new_tokens = [max(1, len(request.output) // divisor) for request in requests]
    arrivals = [(time - times[0]) / longest * span for time in times]
    return Case(f"{count} arriving within {span:g} s", prompts, new_tokens, ("pagedkv", "vllm"), arrivals)

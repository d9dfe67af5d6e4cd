"""A process that measures one engine: reads a JSON object a line, does it, answers with one.

Takes the subject's name, a model folder, a dtype and a number of threads as arguments, and refuses to know the other
subjects. Started by `bench_engine.py` with the interpreter of the environment that has the subject. Times are wall
times; what loads the model, and what a first run warms up, is outside them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine_subjects import Subject, Whole, make

if TYPE_CHECKING:
    from collections.abc import Sequence


def serve(
    subject: Subject,
    prompts: Sequence[list[int]],
    new_tokens: Sequence[int],
    arrivals: Sequence[float] | None,
    num_pages: int | None,
) -> dict[str, Any]:
    """Serve all requests, each from its arrival on; return tokens, seconds and when each token came.

    Time to first token and between tokens are in seconds; tokens that come in one step have come together.
    """
    subject.start(num_pages)
    due = [0.0] * len(prompts) if arrivals is None else list(arrivals)
    tokens: list[list[int]] = [[] for _ in prompts]
    last = list(due)
    first: list[float] = []
    gaps: list[float] = []
    waiting, unfinished = 0, 0
    start = time.perf_counter()
    while waiting < len(prompts) or unfinished:
        now = time.perf_counter() - start
        while waiting < len(prompts) and due[waiting] <= now:
            subject.add(waiting, prompts[waiting], new_tokens[waiting])
            waiting, unfinished = waiting + 1, unfinished + 1
        if not unfinished:
            time.sleep(due[waiting] - now)
            continue
        outputs = subject.step()
        now = time.perf_counter() - start
        for index, new in outputs.items():
            if not new:
                continue
            (gaps if tokens[index] else first).append(now - last[index])
            last[index] = now
            tokens[index] += new
            unfinished -= len(tokens[index]) >= new_tokens[index]
    seconds = time.perf_counter() - start
    if [len(row) for row in tokens] != list(new_tokens):
        raise RuntimeError(f"wanted {list(new_tokens)} tokens, got {[len(row) for row in tokens]}")
    return {
        "seconds": seconds,
        "tokens": tokens,
        "first": first,
        "gaps": gaps,
        "costs": subject.close(),
        "load": os.getloadavg()[0],
    }


def compare(model: Any, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Compare two runs by the project's rule; ``theirs`` are the model's own tokens."""
    from pagedkv.cli.subjects import reference_logits
    from pagedkv.engine.equality import all_token_equal, compare_tokens

    found = [
        compare_tokens(mine, stock, partial(reference_logits, model, prompt, stock))
        for prompt, mine, stock in zip(prompts, ours, theirs, strict=True)
    ]
    return {"equal": all_token_equal(found), "ties": sum(one.tie for one in found)}


def main() -> None:
    """Answer until there is nothing more to read."""
    kind, folder, dtype, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a peer prints must not get between our answers
    if kind != "vllm":
        torch.set_num_threads(int(threads))  # vLLM binds its own
    subject = make(kind, folder, dtype)
    for line in sys.stdin:
        order = json.loads(line)
        if order.pop("do") == "serve":
            answer = serve(subject, **order)
        else:
            assert isinstance(subject, Whole)
            answer = compare(subject.model, **order)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

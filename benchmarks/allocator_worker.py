"""A process that measures one allocator: reads a JSON object a line, does it, answers with one.

Takes the subject's name as its argument and a workload as a file, and refuses to know the other subjects. Started by
`bench_allocator.py` with the interpreter of the environment that has the subject. Times are this thread's processor
time: an allocator waits for nothing, so what else the machine does is not its cost.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import tracemalloc
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.allocator_subjects import SUBJECTS

if TYPE_CHECKING:
    from benchmarks.allocator_subjects import Subject

Requests = list[tuple[list[int], list[int]]]


def load(path: str) -> Requests:
    """Return ``(prompt, output)`` token ids of each request of a workload file."""
    with np.load(path) as data:
        prompts = np.split(data["prompts"], np.cumsum(data["prompt_lens"])[:-1])
        outputs = np.split(data["outputs"], np.cumsum(data["output_lens"])[:-1])
    return [(prompt.tolist(), output.tolist()) for prompt, output in zip(prompts, outputs, strict=True)]


def serve(subject: Subject, requests: Requests, running: int) -> dict[str, Any]:
    """Serve all requests, ``running`` at a time in order, one token each per round; time each verb apart."""
    clock = time.thread_time
    waiting = deque(requests)
    active: list[list[Any]] = []  # handle, output, tokens stored of it
    admit = decode = close = 0.0
    hits, steps = [], 0
    while waiting or active:
        while waiting and len(active) < running:
            prompt, output = waiting.popleft()
            start = clock()
            handle, cached = subject.admit(prompt)
            admit += clock() - start
            hits.append(cached)
            active.append([handle, output, 0])
        growing = [job for job in active if job[2] < len(job[1])]
        if growing:
            handles, tokens = [job[0] for job in growing], [job[1][job[2]] for job in growing]
            start = clock()
            subject.decode(handles, tokens)
            decode += clock() - start
            steps += len(growing)
            for job in growing:
                job[2] += 1
        ended = [job for job in active if job[2] == len(job[1])]
        active = [job for job in active if job[2] < len(job[1])]
        start = clock()
        for job in ended:
            subject.close(job[0])
        close += clock() - start
    return {
        "admission_us": 1e6 * admit / len(requests),
        "decode_us": 1e6 * decode / max(steps, 1),
        "close_us": 1e6 * close / len(requests),
        "hits": hits,
        "in_use": subject.in_use(),
    }


def fill(subject: Subject, num_pages: int, page_size: int, first: int) -> int:
    """Store and close distinct prompts until the whole pool is idle; return the next unused token id."""
    for _ in range(-(-num_pages // 1024)):
        length = 1024 * page_size
        handle, _ = subject.admit(list(range(first, first + min(length, (num_pages - 2) * page_size))))
        subject.close(handle)
        first += length
    return first


def grow(
    subject: Subject, num_pages: int, page_size: int, *, sequences: int, prompt: int, steps: int
) -> dict[str, Any]:
    """Time admissions into a full pool and then ``steps`` decode steps of all ``sequences``.

    Prompts are of ``prompt`` tokens and up to a page more, so that sequences do not all start a new page in one step.
    """
    first = fill(subject, num_pages, page_size, 0)
    clock = time.thread_time
    stride = prompt + page_size
    starts = range(first, first + sequences * stride, stride)
    prompts = [list(range(start, start + prompt + i % page_size)) for i, start in enumerate(starts)]
    start = clock()
    handles = [subject.admit(tokens)[0] for tokens in prompts]
    admit = clock() - start
    tokens = list(range(sequences))
    subject.decode(handles, tokens)
    start = clock()
    for _ in range(steps):
        subject.decode(handles, tokens)
    decode = clock() - start
    for handle in handles:
        subject.close(handle)
    return {
        "admission_us": 1e6 * admit / sequences,
        "decode_us": 1e6 * decode / (steps * sequences),
        "in_use": subject.in_use(),
    }


def weigh(name: str, num_pages: int, page_size: int) -> dict[str, Any]:
    """Return the bytes of bookkeeping per page: of an empty pool, and of one whose pages are all cached."""
    SUBJECTS[name](64, page_size, prefix_cache=True)  # its imports are no bookkeeping, and take minutes when traced
    gc.collect()
    tracemalloc.start()
    subject = SUBJECTS[name](num_pages, page_size, prefix_cache=True)
    gc.collect()
    empty = tracemalloc.get_traced_memory()[0]
    fill(subject, num_pages, page_size, 0)
    gc.collect()
    full = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"empty_bytes": empty / num_pages, "full_bytes": full / num_pages, "in_use": subject.in_use()}


def main() -> None:
    """Answer until there is nothing more to read."""
    name = sys.argv[1]
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a peer prints must not get between our answers
    requests: dict[str, Requests] = {}
    for line in sys.stdin:
        order = json.loads(line)
        do, path = order.pop("do"), order.pop("workload", None)
        if do == "weigh":
            answer = weigh(name, **order)
        else:
            pool = {key: order.pop(key) for key in ("num_pages", "page_size", "prefix_cache")}
            subject = SUBJECTS[name](**pool)
            if path and path not in requests:
                requests[path] = load(path)
            gc.collect()
            gc.freeze()
            if do == "serve":
                answer = serve(subject, requests[path], **order)
            else:
                answer = grow(subject, pool["num_pages"], pool["page_size"], **order)
            del subject
            gc.unfreeze()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

"""What does bookkeeping cost? Our allocator beside vLLM's KVCacheManager and transformers' continuous batching.

    python benchmarks/bench_allocator.py [--trace FILE] [--quick] [--json FILE]

The first 200 requests of a trace (a Mooncake JSONL, say; a generated one of that shape where none is given), 32 at a
time, one token each per round, out of 100,000 pages of 16. Every subject runs in a process of its own, in turn, and
gets the same lists of token ids. Times are processor time of the calling thread: admission is everything from a list
of ids to pages stored and findable, decode is one token of one request, its commit into the index included.

vLLM is looked for in .peers/vllm (`make peers`).
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from benchmarks import generated_trace
from benchmarks.harness import Report, arguments, finish
from benchmarks.worker_pool import WorkerPool
from pagedkv.allocator.traces import NextUses, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.allocator.traces import Request

ROOT = Path(__file__).resolve().parents[1]
OURS = "pagedkv"
PAGE_SIZE, NUM_PAGES, RUNNING, REQUESTS = 16, 100_000, 32, 200
POOLS = (1_000, 10_000, 100_000, 1_000_000)
BATCHES = (1, 8, 32, 128, 1024)
VERBS = (
    ("admission", "admission_us", "us/request"),
    ("decode", "decode_us", "us/token"),
    ("close", "close_us", "us/request"),
)
WEIGHED_PAGES = 10_000  # tracing every allocation of more takes minutes
PROMPT = 256  # tokens of a prompt in the growth cases


def write_workload(path: Path, requests: Sequence[Request]) -> None:
    """Write the token ids of all requests as arrays, numbered from 0, since a peer takes 31 bits."""
    prompts = [request.prompt.array() for request in requests]
    outputs = [request.output.array() for request in requests]
    ids = np.unique(np.concatenate(prompts + outputs), return_inverse=True)[1]
    prompt_lens, output_lens = [len(part) for part in prompts], [len(part) for part in outputs]
    parts = np.split(ids, [sum(prompt_lens)])
    np.savez(path, prompts=parts[0], outputs=parts[1], prompt_lens=prompt_lens, output_lens=output_lens)


def check(name: str, answer: dict[str, Any], expected_hits: list[int] | None) -> None:
    """Raise unless all pages came back and, where it is known, every hit is what it must be."""
    if answer["in_use"]:
        raise RuntimeError(f"{name}: {answer['in_use']} pages were not given back")
    if expected_hits is None:
        return
    whole = [hits // PAGE_SIZE * PAGE_SIZE for hits in answer["hits"]]
    unlike = [i for i, (hits, expected) in enumerate(zip(whole, expected_hits, strict=True)) if hits > expected]
    if unlike:
        at = unlike[0]
        raise RuntimeError(f"{name}: request {at} hit {whole[at]} tokens, at most {expected_hits[at]} are stored")


def possible_hits(requests: Sequence[Request]) -> list[int]:
    """Return per request the tokens in whole pages that earlier requests began with: the most a hit can be."""
    return NextUses(requests, PAGE_SIZE).seen_tokens


def side_by_side(
    report: Report, pool: WorkerPool, names: list[str], *, workload: str, most: list[int], rounds: int
) -> dict[str, int]:
    """Time all subjects on the trace, with and without a prefix cache; return each one's hit tokens."""
    hits = {}
    for label, prefix_cache in (("with prefix cache", True), ("without prefix cache", False)):
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                answer = pool.ask(
                    name,
                    {
                        "do": "serve", "workload": workload, "running": RUNNING,
                        "num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "prefix_cache": prefix_cache,
                    },
                )  # fmt: skip
                check(name, answer, most if prefix_cache else [0] * len(most))
                answers[name].append(answer)
        for verb, what, unit in (
            ("admission", "admission_us", "us/request"),
            ("decode", "decode_us", "us/token"),
            ("close", "close_us", "us/request"),
        ):
            medians = {name: statistics.median(a[what] for a in answers[name]) for name in names}
            for name in names:
                report.add(f"{verb} {label}", name, medians[name], unit, "lower")
            for peer in names:
                if peer != OURS and verb != "close":
                    report.add(f"{verb} {label}, times {peer}", OURS, medians[peer] / medians[OURS], "x")
        if prefix_cache:
            hits = {name: sum(answers[name][0]["hits"]) for name in names}
    return hits


def growth(report: Report, pool: WorkerPool, names: list[str], rounds: int) -> None:
    """Time admission and decode over the pool's size and over the batch, in a pool full of cached pages."""
    cases = [(num_pages, RUNNING, f"{num_pages:,} pages") for num_pages in POOLS]
    cases += [(NUM_PAGES, batch, f"{batch:,} sequences") for batch in BATCHES]
    for num_pages, batch, label in cases:
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                answer = pool.ask(
                    name,
                    {
                        "do": "grow", "num_pages": num_pages, "page_size": PAGE_SIZE, "prefix_cache": True,
                        "sequences": batch, "prompt": PROMPT, "steps": max(64, 1024 // batch),
                    },
                )  # fmt: skip
                check(name, answer, None)
                answers[name].append(answer)
        for name in names:
            report.add(
                f"decode {label}", name, statistics.median(a["decode_us"] for a in answers[name]), "us/token", "lower"
            )
            if label.endswith("pages"):
                median = statistics.median(a["admission_us"] for a in answers[name])
                report.add(f"admission {PROMPT} tokens, {label}", name, median, "us/request", "lower")


def memory(report: Report, pool: WorkerPool, names: list[str]) -> None:
    """Weigh the bookkeeping."""
    for name in names:
        answer = pool.ask(name, {"do": "weigh", "num_pages": WEIGHED_PAGES, "page_size": PAGE_SIZE})
        report.add("bookkeeping per page, empty pool", name, answer["empty_bytes"], "bytes", "lower")
        report.add("bookkeeping per page, all cached", name, answer["full_bytes"], "bytes", "lower")


def find_subjects(vllm_python: Path, console: Console) -> dict[str, list[str]]:
    """Return the command of each subject that is there, and say which are not."""
    worker = ("-m", "benchmarks.allocator_worker")
    commands = {name: [sys.executable, *worker, name] for name in (OURS, "transformers")}
    if vllm_python.exists():
        commands["vllm"] = [str(vllm_python), *worker, "vllm"]
    else:
        console.print(f"vllm: not found at {vllm_python} (make peers)")
    console.print(f"subjects: {', '.join(commands)}")
    return commands


def without_broken_peers(pool: WorkerPool, names: list[str], console: Console) -> list[str]:
    """Try every subject on a small pool; a peer whose package has changed under us is reported and left out."""
    able = []
    for name in names:
        try:
            pool.ask(name, {"do": "weigh", "num_pages": 64, "page_size": PAGE_SIZE})
            able.append(name)
        except RuntimeError as error:
            if name == OURS:
                raise
            console.print(f"{name}: does not run here: {error}")
    return able


def main() -> None:
    """Run the benchmark."""
    parser = arguments("What does the allocator's bookkeeping cost?")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace (default: a generated one)")
    parser.add_argument(
        "--requests", type=int, default=REQUESTS, metavar="N", help=f"its first N (default: {REQUESTS})"
    )
    parser.add_argument(
        "--vllm-python", type=Path, default=ROOT / ".peers/vllm/bin/python", metavar="FILE", help="default: .peers/vllm"
    )
    args = parser.parse_args()
    console = Console(highlight=False)
    requests = (
        read_trace(args.trace, limit=args.requests).requests
        if args.trace
        else generated_trace.conversations(args.requests)
    )
    rounds = 3 if args.quick else 7
    report = Report("the cost of bookkeeping")
    commands = find_subjects(args.vllm_python, console)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with TemporaryDirectory() as folder, WorkerPool(commands, environment) as pool:
        names = without_broken_peers(pool, list(commands), console)
        workload = Path(folder) / "workload.npz"
        write_workload(workload, requests)
        hits = side_by_side(report, pool, names, workload=str(workload), most=possible_hits(requests), rounds=rounds)
        prompt_tokens = sum(len(request.prompt) for request in requests)
        console.print(
            f"{len(requests)} requests, {prompt_tokens / len(requests):,.0f} prompt tokens each; hit tokens: {hits}"
        )
        growth(report, pool, [OURS] if args.quick else names, 1 if args.quick else 5)
        memory(report, pool, names)
    finish(report, args.json)


if __name__ == "__main__":
    main()

"""What does bookkeeping cost? Our allocator beside vLLM's KVCacheManager and transformers' continuous batching.

    python -m benchmarks.bench_allocator [--trace FILE] [--quick] [--json FILE] [--only PARTS] [--peers NAMES]

The first 200 requests of a trace (a Mooncake JSONL, say; a generated one of that shape where none is given), 32 at a
time, one token each per round, out of 100,000 pages of 16. Every subject runs in a process of its own, in turn, and
gets the same lists of token ids. Times are processor time of the calling thread: admission is everything from a list
of ids to pages stored and findable, decode is one token of one request, its commit into the index included.

The parts are `trace` (with a prefix cache), `plain` (without), `pages` (growth with the pool), `sequences` (growth with
the batch) and `memory`. With --only the figures of the other parts in --json's file stay as they are, so that a run
can be made in pieces. vLLM is looked for in .peers/vllm (`make peers`).
"""

from __future__ import annotations

import argparse
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
    from collections.abc import Callable, Sequence

    from pagedkv.allocator.traces import Request

ROOT = Path(__file__).resolve().parents[1]
OURS = "pagedkv"
PAGE_SIZE, NUM_PAGES, RUNNING, REQUESTS = 16, 100_000, 32, 200
POOLS = (1_000, 10_000, 100_000, 1_000_000)
BATCHES = (1, 8, 32, 128, 1024)
PARTS = ("trace", "plain", "pages", "sequences", "memory")
PEERS = ("vllm", "transformers")
LARGEST_OF_PEERS = 100_000  # pages; filling more takes a peer minutes
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
    report: Report,
    pool: WorkerPool,
    names: list[str],
    *,
    workload: str,
    most: list[int],
    rounds: int,
    prefix_cache: bool,
) -> dict[str, int]:
    """Time all subjects on the trace; return each one's hit tokens. ``most`` has what each request can hit."""
    label = "with prefix cache" if prefix_cache else "without prefix cache"
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
    for verb, what, unit in VERBS:
        medians = {name: statistics.median(a[what] for a in answers[name]) for name in names}
        for name in names:
            report.add(f"{verb} {label}", name, medians[name], unit, "lower")
        for peer in names:
            if peer != OURS and verb != "close":
                # Of the rounds' ratios: what the machine does in a round meets both.
                pairs = zip(answers[peer], answers[OURS], strict=True)
                ratio = statistics.median(theirs[what] / ours[what] for theirs, ours in pairs)
                report.add(f"{verb} {label}, times {peer}", OURS, ratio, "x")
    return {name: sum(answers[name][0]["hits"]) for name in names}


def growth(
    report: Report, pool: WorkerPool, names: list[str], cases: Sequence[tuple[int, int, str]], rounds: int
) -> None:
    """Time admission and decode in a pool full of cached pages; a case is pages, sequences and a name."""
    for num_pages, batch, label in cases:
        subjects = names if num_pages <= LARGEST_OF_PEERS else [OURS]
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name in subjects:
                answer = pool.ask(
                    name,
                    {
                        "do": "grow", "num_pages": num_pages, "page_size": PAGE_SIZE, "prefix_cache": True,
                        "sequences": batch, "prompt": PROMPT, "steps": max(64, 1024 // batch),
                    },
                )  # fmt: skip
                check(name, answer, None)
                answers[name].append(answer)
        for name in subjects:
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


def find_subjects(peers: list[str], vllm_python: Path, console: Console) -> dict[str, list[str]]:
    """Return the command of each subject that is there, and say which are not."""
    worker = ("-m", "benchmarks.allocator_worker")
    commands = {name: [sys.executable, *worker, name] for name in (OURS, *peers) if name != "vllm"}
    if "vllm" in peers and vllm_python.exists():
        commands["vllm"] = [str(vllm_python), *worker, "vllm"]
    elif "vllm" in peers:
        console.print(f"vllm: not found at {vllm_python} (make peers)")
    console.print(f"subjects: {', '.join(commands)}")
    return commands


def without_broken_peers(pool: WorkerPool, names: list[str], console: Console) -> list[str]:
    """Try every subject on a small pool; a peer whose package has changed under us is reported and left out."""
    able = []
    for name in names:
        try:
            pool.ask(
                name,
                {
                    "do": "grow", "num_pages": 64, "page_size": PAGE_SIZE, "prefix_cache": True,
                    "sequences": 1, "prompt": PAGE_SIZE, "steps": 1,
                },
            )  # fmt: skip
            able.append(name)
        except RuntimeError as error:
            if name == OURS:
                raise
            console.print(f"{name}: does not run here: {error}")
    return able


def _listed(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a reader of a comma-separated list of ``allowed`` names."""

    def read(text: str) -> list[str]:
        names = [part for part in text.split(",") if part]
        if not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"must be among {', '.join(allowed)}, was {text!r}")
        return names

    return read


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
    parser.add_argument(
        "--only", type=_listed(PARTS), default=list(PARTS), metavar="PART[,PART]", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--peers", type=_listed(PEERS), default=list(PEERS), metavar="NAME[,NAME]", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 7, with --quick 3")
    args = parser.parse_args()
    console = Console(highlight=False)
    requests = (
        read_trace(args.trace, limit=args.requests).requests
        if args.trace
        else generated_trace.conversations(args.requests)
    )
    rounds = args.rounds or (3 if args.quick else 7)
    report = Report("the cost of bookkeeping")
    commands = find_subjects(args.peers, args.vllm_python, console)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with TemporaryDirectory() as folder, WorkerPool(commands, environment) as pool:
        names = without_broken_peers(pool, list(commands), console)
        workload = Path(folder) / "workload.npz"
        write_workload(workload, requests)
        most = possible_hits(requests)
        prompt_tokens = sum(len(request.prompt) for request in requests)
        console.print(f"{len(requests)} requests, {prompt_tokens / len(requests):,.0f} prompt tokens each")
        for part, prefix_cache in (("trace", True), ("plain", False)):
            if part in args.only:
                hits = side_by_side(
                    report, pool, names, workload=str(workload), most=most, rounds=rounds, prefix_cache=prefix_cache
                )
                console.print(f"{part}: hit tokens {hits}")
        growing, of_growth = ([OURS], 1) if args.quick else (names, min(rounds, 5))
        if "pages" in args.only:
            growth(report, pool, growing, [(pages, RUNNING, f"{pages:,} pages") for pages in POOLS], of_growth)
        if "sequences" in args.only:
            growth(report, pool, growing, [(NUM_PAGES, batch, f"{batch:,} sequences") for batch in BATCHES], of_growth)
        if "memory" in args.only:
            memory(report, pool, names)
    finish(report, args.json, keep=set(args.only) != set(PARTS))


if __name__ == "__main__":
    main()

"""Measure how fast an engine serves a model, against vLLM and transformers' own ways.

The same greedy requests, in the same dtype and on as many threads, by ours (``pagedkv``, and over the baseline caches
``concat``, ``static`` and ``none``), by vLLM (from an environment of its own, ``make peers``), and by transformers'
``generate`` (one left-padded batch) and ``generate_batch`` (its continuous batching). Every subject is a process of its
own, stopped while others are measured; rounds are interleaved, and prefix caches emptied before each run.

No figure is shown unless our float32 tokens are token-equal to ``generate``'s (`pagedkv.engine.equality`); how many of
the others' tokens are ours is reported. Rates are output tokens per wall second, prefill included.

    python -m benchmarks.bench_engine [--quick] [--dtype bfloat16] [--only TEXT] [--subjects NAME …] [--json FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.engine_cases import CACHES, ENGINES, Case, cases
from benchmarks.harness import Report, arguments, finish
from benchmarks.worker_pool import WorkerPool
from pagedkv.cli.demo_model import NAME, demo_model

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

OURS, STOCK = "pagedkv", "generate"
SUBJECTS = tuple(dict.fromkeys((*ENGINES, *CACHES, "none")))
ROOT = Path(__file__).parents[1]
LOWER = ("seconds", "MiB", "%", "preemptions")


def environment(threads: int) -> dict[str, str]:
    """Return what the workers are started with: vLLM has no other place for these."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a child of its own would not be stopped with the worker
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def commands(args: Namespace, folder: Path, wanted: Sequence[str], console: Console) -> dict[str, list[str]]:
    """Return the command of each wanted subject, and say if vLLM is not there."""
    found = {}
    for name in wanted:
        python = args.vllm if name == "vllm" else Path(sys.executable)
        if not python.exists():
            console.print(f"vllm: not found at {python} (make peers)")
            continue
        found[name] = [str(python), "-m", "benchmarks.engine_worker", name, str(folder), args.dtype, str(args.threads)]
    return found


class Runs:
    """Every run of one case: what each subject answered, round by round."""

    def __init__(self, case: Case, names: list[str]) -> None:
        self.case = case
        self.names = names
        self.answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self.failed: dict[str, str] = {}

    def round(self, pool: WorkerPool) -> None:
        """Ask everybody once, in turn; who fails is left out from then on, unless it is ours."""
        case = self.case
        order = {"do": "serve", "prompts": case.prompts, "new_tokens": case.new_tokens, "arrivals": case.arrivals}
        for name in [name for name in self.names if name not in self.failed]:
            try:
                answer = pool.ask(name, {**order, "num_pages": case.num_pages if name == OURS else None})
            except RuntimeError as error:
                if name == OURS:
                    raise
                self.failed[name] = str(error)
                continue
            self.answers[name].append(answer)

    def counted(self, name: str) -> list[dict[str, Any]]:
        """Return the runs that count: all but the first, which warms up, if there are more."""
        return self.answers[name][1:] or self.answers[name]

    def report(self, report: Report, ties: int | None) -> None:
        """Add rates, ratios, latencies, agreement and costs."""
        case, name_of = self.case, self.case.name
        rates = {}
        for name in self.names:
            runs = self.counted(name)
            if not runs:
                continue
            if case.arrivals is None:
                rates[name] = statistics.median(sum(case.new_tokens) / run["seconds"] for run in runs)
                report.add(name_of, name, rates[name], "tok/s")
            else:
                self._latencies(report, name, runs)
            report.add(f"{name_of}: load", name, max(run["load"] for run in runs), "processes", "lower")
            for what, value in runs[-1]["costs"].items():
                label, _, unit = what.rpartition(", ")
                report.add(
                    f"{name_of}: {label or what}", name, value, unit if label else "count",
                    "higher" if "reused" in what else "lower",
                )  # fmt: skip
            if name != OURS and self.answers.get(OURS):
                report.add(f"{name_of}: tokens as ours", name, self._agreement(name), "%")
        for name, rate in rates.items():
            if name != OURS and OURS in rates:
                report.add(f"{name_of}: pagedkv against", name, rates[OURS] / rate, "x")
        if ties is not None:
            report.add(f"{name_of}: ties with generate", OURS, ties, "tokens", "lower")

    def _latencies(self, report: Report, name: str, runs: list[dict[str, Any]]) -> None:
        case = self.case
        rate = statistics.median(sum(case.new_tokens) / run["seconds"] for run in runs)
        report.add(case.name, name, rate, "tok/s")
        for what, key in (("time to first token", "first"), ("time between tokens", "gaps")):
            values = sorted(value for run in runs for value in run[key])
            for percent in (50, 99):
                value = values[min(len(values) - 1, len(values) * percent // 100)]
                report.add(f"{case.name}: {what}, p{percent}", name, 1000 * value, "ms", "lower")

    def _agreement(self, name: str) -> float:
        """Return how many of a subject's tokens are ours up to each answer's first difference, in percent."""
        same = 0
        for ours, theirs in zip(self.answers[OURS][0]["tokens"], self.answers[name][0]["tokens"], strict=True):
            differs = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
            same += differs
        return 100 * same / sum(self.case.new_tokens)


def ties_with_generate(pool: WorkerPool, runs: Runs, dtype: str) -> int | None:
    """Return the ties between our tokens and ``generate``'s; end the run where they differ otherwise in float32."""
    if not (runs.answers.get(OURS) and runs.answers.get(STOCK)):
        return None
    order = {"do": "compare", "prompts": runs.case.prompts, "ours": runs.answers[OURS][0]["tokens"]}
    verdict = pool.ask(STOCK, {**order, "theirs": runs.answers[STOCK][0]["tokens"]})
    if dtype == "float32" and not verdict["equal"]:
        raise SystemExit(f"{runs.case.name}: pagedkv is not token-equal to model.generate")
    return int(verdict["ties"])


def measure(pool: WorkerPool, case: Case, names: list[str], args: Namespace, report: Report) -> None:
    """Run a case ``rounds`` times, check, and add its figures."""
    console = Console()
    runs = Runs(case, [name for name in case.subjects if name in names])
    started = time.perf_counter()
    runs.round(pool)
    ties = ties_with_generate(pool, runs, args.dtype)  # before any figure is shown
    for _ in range(args.rounds or (0 if args.quick else 2)):
        runs.round(pool)
    runs.report(report, ties)
    for name, reason in runs.failed.items():
        names.remove(name)
        console.print(f"{name}: left out, {reason}", style="red", markup=False)
    rates = [f"{row.subject} {row.value:.1f}" for row in report.rows if row.case == case.name]
    seconds = time.perf_counter() - started
    console.print(f"{case.name}: {', '.join(rates)} tok/s ({seconds:.0f} s)", style="dim", highlight=False)


def main() -> None:
    """Run all cases and report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder (default: the demo's model)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, help="rounds after the first, which warms up (default: 2, quick: 0)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their names")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS, help="only these")
    parser.add_argument("--trace", type=Path, help="Azure's conversation trace, for the requests that arrive over time")
    parser.add_argument("--span", type=float, default=60.0, help="seconds within which they arrive (default: 60)")
    vllm = ROOT / ".peers" / "vllm" / "bin" / "python"
    parser.add_argument("--vllm", type=Path, default=vllm, help="its interpreter")
    args = parser.parse_args()
    console = Console()
    folder = args.model or demo_model(lambda line: console.print(line, style="dim"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    every = cases(config["vocab_size"], quick=args.quick, trace=args.trace, span=args.span)
    chosen = [case for case in every if args.only in case.name]
    taking_part = [name for name in args.subjects if any(name in case.subjects for case in chosen)]
    found = commands(args, folder, taking_part, console)
    name = NAME if args.model is None else args.model.name
    report = Report(f"Engine, {name}, {args.dtype}, {args.threads} threads, greedy")
    names = list(found)
    with WorkerPool(found, environment(args.threads)) as pool:
        for case in chosen:
            measure(pool, case, names, args, report)
            if args.json is not None:
                report.save(args.json, keep=True)  # so that a run that is cut off has not been for nothing
    finish(report, args.json, keep=True)


if __name__ == "__main__":
    main()

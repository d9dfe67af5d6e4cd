"""Measure how fast a batch engine goes over each cache, and how much KV memory it holds.

The same greedy requests over backends ``none``, ``concat``, ``static`` and paged (``pagedkv``), and by transformers'
``model.generate`` as one left-padded batch. No figure is shown unless the paged tokens are token-equal to
``generate``'s (the rule is in `pagedkv.engine.equality`). Rates are output tokens per wall second, prefill included.

Backend ``none`` computes everything again for every token, so it is given a few new tokens only, in a case of its own,
where the others are run too.

    python -m benchmarks.bench_engine [--quick] [--json FILE] [--model FOLDER] [--dtype float32|bfloat16]
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from benchmarks.harness import Report, arguments, finish, interleave
from pagedkv.cli import subjects
from pagedkv.cli.models import load_model
from pagedkv.engine import Engine, SamplingParams
from pagedkv.engine.equality import all_token_equal, compare_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedkv.backend import CacheUsage
    from pagedkv.engine.outputs import StepOutput

PAGE_SIZE = 16
ENGINE_SUBJECTS = ("none", "concat", "static", "pagedkv")


class Silent:
    """A watcher that shows nothing."""

    def step(self, num_tokens: int, outputs: Sequence[StepOutput], usage: CacheUsage | None) -> None:
        """Hear of a step and say nothing."""


@dataclass(frozen=True)
class Case:
    """One workload: prompts, how many tokens each makes, whom to ask, and pages if there are to be too few."""

    name: str
    prompts: list[list[int]]
    new_tokens: int
    subjects: tuple[str, ...]
    num_pages: int | None = None


def cases(vocab_size: int, *, quick: bool) -> list[Case]:
    """Return the workloads: random prompts of 128 tokens, and chats that share a long beginning."""
    draw = random.Random(0)
    length, new_tokens, few = (32, 16, 2) if quick else (128, 128, 4)
    cached = ("concat", "static", "pagedkv", "generate")

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(tokens)]

    def prompts(count: int) -> list[list[int]]:
        return [prompt(length) for _ in range(count)]

    shared, tails = prompt(96 if quick else 512), [prompt(16) for _ in range(8 if quick else 16)]
    ragged = [prompt(draw.randint(1, 60 if quick else 300)) for _ in range(16 if quick else 64)]
    found = [
        Case(f"16 x ({length} + {new_tokens})", prompts(16), new_tokens, cached),
        Case(
            f"{len(tails)} chats, shared {len(shared)}, + {new_tokens // 2}",
            [shared + t for t in tails],
            new_tokens // 2,
            cached,
        ),
        Case(f"16 x ({length} + {few})", prompts(16), few, ("none", *cached)),
        # A third of the pages that all of them would take.
        Case(f"{len(ragged)} x (1..{max(map(len, ragged))} + 32), few pages", ragged, 32, cached, 24 if quick else 240),
    ]
    if not quick:
        found.insert(1, Case("64 x (128 + 128)", prompts(64), 128, cached))
    return found


def make_engine(model: Any, subject: str, case: Case) -> Engine:
    """Return a new engine over the subject's cache, with room for the whole case."""
    longest = max(map(len, case.prompts)) + case.new_tokens
    options: dict[str, Any] = {"max_batch": len(case.prompts), "max_len": longest}
    if subject == "pagedkv":
        num_pages = case.num_pages or 2 + len(case.prompts) * -(-longest // PAGE_SIZE)
        return Engine(model, num_pages=num_pages, page_size=PAGE_SIZE, watermark=0.0, **options)
    return Engine(model, backend=subject, **options)


def run_subject(model: Any, subject: str, case: Case) -> subjects.Served:
    """Serve the case once from nothing."""
    if subject == "generate":
        return subjects.generate(model, (), case.prompts, case.new_tokens, Silent())
    params = SamplingParams(max_new_tokens=case.new_tokens, ignore_eos=True)
    served = subjects.serve(subject, make_engine(model, subject, case), case.prompts, params, Silent())
    if served.in_use_after:
        raise SystemExit(f"{case.name}: {subject} still holds {served.in_use_after} pages or slabs when all is done")
    return served


def require_token_equal(model: Any, case: Case, served: subjects.Served, stock: subjects.Served) -> int:
    """Return the ties between paged and stock tokens; end the run where they differ otherwise."""
    comparisons = [
        compare_tokens(ours, theirs, partial(subjects.reference_logits, model, prompt, theirs))
        for ours, theirs, prompt in zip(served.tokens, stock.tokens, case.prompts, strict=True)
    ]
    if model.dtype == torch.float32 and not all_token_equal(comparisons):
        raise SystemExit(f"{case.name}: {served.subject} is not token-equal to model.generate")
    return sum(comparison.tie for comparison in comparisons)


def measure(model: Any, case: Case, rounds: int, report: Report) -> None:
    """Run every subject of the case in turn, ``rounds`` times; check, then add rates, ratios and memory.

    With more than one round the first warms up and is not counted.
    """
    last: dict[str, subjects.Served] = {}

    def rate(subject: str) -> float:
        last[subject] = run_subject(model, subject, case)
        return last[subject].tokens_per_second

    runs: dict[str, Callable[[], float]] = {subject: partial(rate, subject) for subject in case.subjects}
    subjects.warm_up(model)
    first = interleave(runs, 1)
    ties = require_token_equal(model, case, last["pagedkv"], last["generate"])  # before any figure is shown
    medians = interleave(runs, rounds - 1) if rounds > 1 else first
    for subject, value in medians.items():
        report.add(case.name, subject, value, "tok/s")
    best = max(value for subject, value in medians.items() if subject != "pagedkv")
    report.add(f"{case.name}: against the best other", "pagedkv", medians["pagedkv"] / best, "x")
    for subject, served in last.items():
        peak = served.memory.peak
        report.add(f"{case.name}: KV held at most", subject, peak.bytes_held / 2**20, "MiB", "lower")
        report.add(f"{case.name}: waste, mean", subject, 100 * served.memory.waste, "%", "lower")
    report.add(f"{case.name}: prompt tokens reused", "pagedkv", last["pagedkv"].prefix_tokens_reused, "tokens")
    report.add(f"{case.name}: preemptions", "pagedkv", last["pagedkv"].preemptions, "requests", "lower")
    report.add(f"{case.name}: ties with generate", "pagedkv", ties, "tokens", "lower")


def main() -> None:
    """Run all cases and report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub name (default: the demo's model)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 3, quick: 1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their names")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    loaded = load_model(args.model, lambda line: console.print(line, style="dim"))
    model = loaded.model.to(getattr(torch, args.dtype))
    report = Report(f"Engine, {loaded.name}, {args.dtype}, {args.threads} threads, greedy")
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    for case in cases(vocab_size, quick=args.quick):
        if args.only not in case.name:
            continue
        measure(model, case, args.rounds or (1 if args.quick else 3), report)
        rates = [f"{row.subject} {row.value:.1f}" for row in report.rows if row.case == case.name]
        console.print(f"{case.name}: {', '.join(rates)} tok/s", style="dim", highlight=False)
    finish(report, args.json)


if __name__ == "__main__":
    main()

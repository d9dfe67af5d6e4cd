"""Replay recorded traffic against other eviction policies and pool sizes.

FILE is a Mooncake trace (JSONL), an Azure LLM inference trace (CSV) or an event log written by
pagedkv.allocator.traces.EventLog. Up to --running requests run at once, in the order of arrival, one output token each
per round; docs/traces.md has the rules and what the columns mean. The policies are the very objects that serve live.
'belady' knows what is to come: a strong reference, not a proof of what is possible.

A large trace takes about a minute per policy and pool size; --limit reads its first requests alone, --policy names
fewer policies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv.cli.arguments import at_least_one
from pagedkv.cli.errors import CommandError, first_line

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from pagedkv.allocator.traces import ReplayResult, Trace

HELP = "replay a trace against other eviction policies and pool sizes"
REFERENCE = "belady"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``replay``."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the trace")
    parser.add_argument(
        "--policy", metavar="P[,P…]", help=f"policies of BlockAllocator, and {REFERENCE} (default: all of them)"
    )  # fmt: skip
    parser.add_argument("--pages", required=True, type=_page_counts, metavar="N[,N…]", help="usable pages of the pool")
    parser.add_argument("--page-size", type=at_least_one, default=16, metavar="N", help="tokens per page (default: 16)")
    parser.add_argument("--running", type=at_least_one, default=32, metavar="N", help="requests at once (default: 32)")
    parser.add_argument("--limit", type=at_least_one, metavar="N", help="only the first N requests")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the hit rate over the pool's size (matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Replay every policy on every pool; return 0."""
    from rich.console import Console

    from pagedkv.allocator.traces import TraceError, read_trace

    if args.plot is not None:
        _require_plot(args.plot)
    policies = _policies(args.policy)
    _require_pool(args)
    try:
        trace = read_trace(args.file, limit=args.limit)
    except (TraceError, OSError) as error:
        raise CommandError(first_line(error)) from error
    try:
        results = _replay_all(trace, policies, args)
    except MemoryError as error:
        raise CommandError(f"--pages: there is no memory for the books of {max(args.pages):,} pages") from error
    if args.json:
        sys.stdout.write(json.dumps(_as_json(trace, results, args)) + "\n")
    else:
        _show(Console(highlight=False), trace, results)
    if args.plot is not None:
        _plot(trace, results, args.plot)
    return 0


def _page_counts(text: str) -> list[int]:
    return [at_least_one(part) for part in text.split(",")]


def _policies(text: str | None) -> list[str]:
    """Return the names, each once, all where none are given; one that no policy has is refused."""
    from pagedkv.allocator.eviction import POLICIES

    known = [*POLICIES, REFERENCE]
    names = known if text is None else list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise CommandError(f"--policy must name policies among {', '.join(known)}, named {name!r}")
    return names


def _require_pool(args: argparse.Namespace) -> None:
    """Refuse pools and pages that no allocator can have."""
    from pagedkv.allocator.block_allocator import MAX_PAGES

    for name, value, most in (("pages", max(args.pages), MAX_PAGES - 1), ("page-size", args.page_size, MAX_PAGES)):
        if value > most:
            raise CommandError(f"--{name} must be at most {most}, was {value}")


def _replay_all(trace: Trace, policies: list[str], args: argparse.Namespace) -> list[ReplayResult]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from pagedkv.allocator.traces import NextUses, replay

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("looking ahead", total=len(trace.requests))
        uses = NextUses(trace.requests, args.page_size, outputs_known=trace.outputs_known)
        for num_pages in args.pages:
            for policy in policies:
                progress.reset(task, description=f"{policy}, {num_pages:,} pages", total=len(trace.requests))
                results.append(
                    replay(
                        trace.requests,
                        num_pages=num_pages,
                        page_size=args.page_size,
                        policy=policy,
                        running=args.running,
                        uses=uses,
                        progress=lambda ended: progress.advance(task, ended),
                    )
                )
    return results


def _reference(results: list[ReplayResult], num_pages: int) -> ReplayResult | None:
    return next((r for r in results if r.policy == REFERENCE and r.num_pages == num_pages), None)


def _as_json(trace: Trace, results: list[ReplayResult], args: argparse.Namespace) -> dict[str, object]:
    from dataclasses import asdict

    rows = []
    for result in results:
        reference = _reference(results, result.num_pages) if trace.hits_known else None
        regret = None if reference is None else result.regret(reference)
        hit_rate = result.hit_rate if trace.hits_known else None
        rows.append({**asdict(result), "hit_rate": hit_rate, "regret": regret})
    return {
        "file": trace.path,
        "kind": trace.kind,
        "requests": len(trace.requests),
        "hits_known": trace.hits_known,
        "recorded_hit_tokens": trace.recorded_hit_tokens,
        "running": args.running,
        "results": rows,
    }


def _show(console: Console, trace: Trace, results: list[ReplayResult]) -> None:
    """Print a table per pool size."""
    from rich.table import Table

    console.print(f"{trace.path} ({trace.kind})", soft_wrap=True)
    console.print(f"{_counted(len(trace.requests), 'request')}, {_counted(trace.prompt_tokens, 'prompt token')}")
    if trace.recorded_hit_tokens is not None:
        console.print(f"found stored when it was recorded: {trace.recorded_hit_tokens / trace.prompt_tokens:.2%}")
    for num_pages in dict.fromkeys(result.num_pages for result in results):
        of_pool = [result for result in results if result.num_pages == num_pages]
        title = f"{num_pages:,} pages of {of_pool[0].page_size} tokens"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("policy")
        for name in ("hits", "regret", "recomputed", "evicted", "preempted", "used", "peak", "waste"):
            table.add_column(name, justify="right")
        reference = _reference(results, num_pages)
        for result in of_pool:
            regret = f"{100 * result.regret(reference):.2f}" if reference and trace.hits_known else "-"
            table.add_row(
                result.policy,
                f"{result.hit_rate:.2%}" if trace.hits_known else "-",
                regret,
                _thousands(result.recomputed_tokens),
                _thousands(result.evictions),
                f"{result.preemptions:,}",
                f"{result.occupancy:.1%}",
                f"{result.peak:.1%}",
                f"{result.waste:.2%}",
            )
        console.print()
        console.print(table)
        if of_pool[0].refused:
            refused = of_pool[0].refused
            verbs = "is longer than the pool and was" if refused == 1 else "are longer than the pool and were"
            console.print(f"{_counted(refused, 'request')} {verbs} refused")
    console.print()
    if not trace.hits_known:
        console.print("The file has lengths only: every request is distinct, and hits cannot be known.")
    elif any(result.policy == REFERENCE for result in results):
        console.print(f"regret: points of hit rate behind {REFERENCE}, a strong reference, not a proof.")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _thousands(count: int) -> str:
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:,.2f} M"


def _drawing() -> type:
    """Return matplotlib's Figure, or say how to get it."""
    from importlib import import_module

    try:
        figure: type = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise CommandError("--plot needs matplotlib: pip install 'pagedkv[plot]'") from error
    return figure


def _require_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before the work is done."""
    kinds = _drawing()().canvas.get_supported_filetypes()
    if not path.parent.is_dir():
        raise CommandError(f"--plot: cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise CommandError(f"--plot: cannot write {str(path)!r}: it is a folder")
    if path.suffix and path.suffix.removeprefix(".").lower() not in kinds:
        raise CommandError(f"--plot must end in one of {', '.join(sorted(kinds))}, was {str(path)!r}")


def _plot(trace: Trace, results: list[ReplayResult], path: Path) -> None:
    """Draw a line per policy: hit rate over pages, or memory used where hits cannot be known."""
    figure = _drawing()(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(result.policy for result in results):
        points = sorted(
            (r.num_pages, 100 * (r.hit_rate if trace.hits_known else r.occupancy))
            for r in results
            if r.policy == policy
        )
        style = "k--" if policy == REFERENCE else "o-"
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=policy)
    axes.set_xscale("log")
    sizes = sorted({result.num_pages for result in results})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"pages of {results[0].page_size} tokens")
    axes.set_ylabel("prompt tokens found stored, %" if trace.hits_known else "pages held, mean %")
    axes.set_title(f"{Path(trace.path).name}, {_counted(len(trace.requests), 'request')}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise CommandError(f"--plot: cannot write {str(path)!r}: {first_line(error)}") from error

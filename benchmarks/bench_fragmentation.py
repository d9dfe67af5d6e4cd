"""Where does KV memory go? Request lengths served out of one memory, held in six ways.

    python benchmarks/bench_fragmentation.py [--trace FILE …] [--plot FILE] [--quick] [--json FILE]

Each trace (Azure CSV, Mooncake JSONL or an event log; generated ones where none is given) is served out of the same
number of slots by: the maximum reserved per request; exact contiguous pieces that grow by reallocation; power-of-two
buddies; batches on a static cache; and pages of 1 to 256 tokens through the real allocator. ``waste`` is internal
waste: the fraction of held slots without a token. docs/traces.md has the rules.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks import generated_trace
from benchmarks.fragmentation import Lengths, Outcome, serve, serve_static
from benchmarks.harness import Report, arguments, finish
from benchmarks.memory_models import Buddy, Contiguous, Paged, ReserveMaximum
from pagedkv.allocator.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.allocator.traces import Request

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUICK, FULL = 400, 2000
SLABS = 8  # requests of the maximum length that the memory holds
SUBJECT = "pagedkv"


def measure(requests: Sequence[Request], console: Console, name: str) -> tuple[int, int, dict[str, Outcome]]:
    """Serve one trace in every way; return the slots, the maximum length, and an outcome per way."""
    lengths: list[Lengths] = [(len(request.prompt), len(request.output)) for request in requests]
    max_len = 1 << (max(map(sum, lengths)) - 1).bit_length()
    size = SLABS * max_len
    max_new = max(output for _, output in lengths)
    outcomes = {}
    with console.status(name):
        outcomes["reserve max"] = serve(ReserveMaximum(size, max_len), size, lengths)
        outcomes["static cache"] = serve_static(size, lengths, max_new)
        outcomes["buddy"] = serve(Buddy(size), size, lengths)
        outcomes["contiguous"] = serve(Contiguous(size), size, lengths)
        for page_size in PAGE_SIZES:
            memory = Paged(size, page_size)
            outcomes[f"page {page_size}"] = serve(memory, size, lengths)
            memory.allocator.check()
            if memory.allocator.stats().in_use:
                raise RuntimeError(f"pages of {page_size}: {memory.allocator.stats().in_use} were not given back")
    return size, max_len, outcomes


def show(console: Console, name: str, size: int, outcomes: dict[str, Outcome]) -> None:
    """Print a table and a bar per way: stored, wasted inside, wasted outside."""
    table = Table(title=f"{name}: {size:,} slots", title_justify="left")
    for column in (
        "memory",
        "stored ░ inside ▒ outside",
        "internal",
        "external",
        "peak",
        "running",
        "refused",
        "preempted",
    ):
        table.add_column(column, justify="left" if column.startswith(("memory", "stored")) else "right")
    for way, outcome in outcomes.items():
        inside = outcome.stored / (1 - outcome.internal) - outcome.stored if outcome.stored else 0.0
        parts = (outcome.stored, inside, outcome.external)
        bar = "".join(mark * round(24 * part) for mark, part in zip("█░▒", parts, strict=True))
        table.add_row(
            way, bar[:25], f"{outcome.internal:.2%}", f"{outcome.external:.2%}", f"{outcome.peak:.1%}",
            f"{outcome.running:.1f}", str(outcome.refused), str(outcome.preempted),
        )  # fmt: skip
    console.print(table)


def add_rows(report: Report, name: str, outcomes: dict[str, Outcome]) -> None:
    """Add the figures of one trace: waste per page size, and the ways side by side at pages of 16."""
    for page_size in PAGE_SIZES:
        report.add(
            f"waste page {page_size} {name}", SUBJECT, 100 * outcomes[f"page {page_size}"].internal, "%", "lower"
        )
    for way in ("reserve max", "static cache", "buddy", "contiguous", "page 16"):
        outcome, subject = outcomes[way], SUBJECT if way == "page 16" else way
        report.add(f"internal waste {name}", subject, 100 * outcome.internal, "%", "lower")
        report.add(f"external waste {name}", subject, 100 * outcome.external, "%", "lower")
        report.add(f"memory with tokens {name}", subject, 100 * outcome.stored, "%")
        report.add(f"peak held {name}", subject, 100 * outcome.peak, "%", "lower")
        report.add(f"running at once {name}", subject, outcome.running, "requests")
        report.add(f"refused {name}", subject, outcome.refused, "requests", "lower")


def explain(
    console: Console, name: str, max_len: int, requests: Sequence[Request], outcomes: dict[str, Outcome]
) -> None:
    """Say why the figures are what they are."""
    mean = sum(request.num_tokens for request in requests) / len(requests)
    reserve, paged = outcomes["reserve max"].internal, outcomes["page 16"].internal
    console.print(
        f"{name}: reserving the maximum wastes {reserve:.0%}. Published figures are 60 to 80 % for a maximum of 2,048 "
        f"tokens (Kwon et al., SOSP 2023, fig. 2); here the longest request needs a maximum of {max_len:,} while the "
        f"mean request ends at {mean:,.0f} tokens. Paged at 16 wastes {paged:.2%}: half a page per request, 7.5 "
        f"slots of about {mean:,.0f}. What pages waste outside "
        "is the null page. Contiguous waste is the second copy that a reallocation holds while it runs.\n"
    )


def plot(path: Path, traces: dict[str, dict[str, Outcome]]) -> bool:
    """Draw a stacked bar per way and trace; False where there is no matplotlib."""
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(6 * len(traces), 5), layout="constrained")
    except ImportError:
        return False
    for axes, (name, outcomes) in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces.items(), strict=True):
        ways = list(outcomes)[::-1]
        stored = [100 * outcomes[way].stored for way in ways]
        inside = [100 * (o.stored / (1 - o.internal) - o.stored) for o in (outcomes[way] for way in ways)]
        outside = [100 * outcomes[way].external for way in ways]
        axes.barh(ways, stored, color="tab:green", label="tokens")
        axes.barh(ways, inside, left=stored, color="tab:red", label="waste inside")
        left = [a + b for a, b in zip(stored, inside, strict=True)]
        axes.barh(ways, outside, left=left, color="tab:orange", label="free, yet refused")
        axes.set_xlabel("% of the memory")
        axes.set_title(name)
        axes.set_xlim(0, 100)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)
    return True


def main() -> None:
    """Run the benchmark."""
    parser = arguments("Where does KV memory go?")
    parser.add_argument("--trace", type=Path, nargs="+", default=[], metavar="FILE", help="public traces or event logs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture there (matplotlib)")
    parser.add_argument("--requests", type=int, metavar="N", help=f"first N of each trace (default: {QUICK} or {FULL})")
    args = parser.parse_args()
    count = args.requests or (QUICK if args.quick else FULL)
    traces: dict[str, list[Request]] = {}
    for path in args.trace:
        trace = read_trace(path, limit=count)
        traces[trace.kind if trace.kind not in traces else path.stem] = trace.requests
    if not traces:
        traces = {"chats": generated_trace.chats(count), "conversations": generated_trace.conversations(count // 4)}
    console = Console(width=max(110, Console().width), highlight=False)
    report = Report("where KV memory goes")
    pictures = {}
    for name, requests in traces.items():
        size, max_len, outcomes = measure(requests, console, name)
        show(console, name, size, outcomes)
        explain(console, name, max_len, requests, outcomes)
        add_rows(report, name, outcomes)
        pictures[name] = outcomes
    if args.plot and not plot(args.plot, pictures):
        console.print("no picture: matplotlib is not installed (pip install 'pagedkv[plot]')")
    finish(report, args.json)


if __name__ == "__main__":
    main()

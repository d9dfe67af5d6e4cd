"""What every benchmark shares: arguments, interleaved rounds, one table, one JSON form.

A benchmark checks that its subjects agree before it times them, runs them in turn within each round so that a
change of the machine's mood meets all of them, and reports medians and ratios. The JSON is
``{machine, versions, commit, load, rows: [{case, subject, value, unit, better}]}``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PACKAGES = ("pagedkv", "torch", "transformers", "triton", "numpy")


@dataclass(frozen=True)
class Row:
    """One figure: what was measured (``case``), of whom (``subject``), and which direction is good."""

    case: str
    subject: str
    value: float
    unit: str
    better: str


@dataclass
class Report:
    """The figures of one run, with the machine that gave them."""

    title: str
    rows: list[Row] = field(default_factory=list)
    load_at_start: tuple[float, ...] = field(default_factory=os.getloadavg)

    def add(self, case: str, subject: str, value: float, unit: str, better: str = "higher") -> None:
        """Add one figure; ``better`` is ``"higher"`` or ``"lower"``."""
        if better not in ("higher", "lower"):
            raise ValueError(f"better must be 'higher' or 'lower', was {better!r}")
        self.rows.append(Row(case, subject, float(value), unit, better))

    def show(self) -> None:
        """Print the figures as one table, a line per case and a column per subject."""
        subjects = list(dict.fromkeys(row.subject for row in self.rows))
        table = Table(title=self.title, title_justify="left")
        table.add_column("case", no_wrap=True)
        for subject in subjects:
            table.add_column(subject, justify="right")
        table.add_column("unit")
        for case in dict.fromkeys(row.case for row in self.rows):
            of_case = {row.subject: row for row in self.rows if row.case == case}
            cells = [_cell(of_case[s].value) if s in of_case else "-" for s in subjects]
            table.add_row(case, *cells, next(iter(of_case.values())).unit)
        console = Console()
        if not console.is_terminal:  # a file has no edge to wrap at
            console = Console(width=Console(width=10**4).measure(table).maximum)
        console.print(table)

    def save(self, path: Path, *, keep: bool = False) -> None:
        """Write the figures and what they were measured on as JSON; with ``keep`` beside those that stand there.

        A figure that was measured again takes the place of the old one; machine, versions, commit and load are this
        run's.
        """
        rows = [asdict(row) for row in self.rows]
        if keep and path.exists():
            new = {(row["case"], row["subject"]) for row in rows}
            old = json.loads(path.read_text(encoding="utf-8"))["rows"]
            rows = [row for row in old if (row["case"], row["subject"]) not in new] + rows
        content = {
            "title": self.title,
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "load": {"at_start": self.load_at_start, "at_end": os.getloadavg()},
            "rows": rows,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _cell(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def machine() -> dict[str, str | int]:
    """Return what is known of this machine: processor, cores, system."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "processor": processor,
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that take part."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit that is measured, with ``+`` where the tree differs from it."""
    root = Path(__file__).parent
    try:
        revision = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+" if changed else "")


def interleave(subjects: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run every subject once per round, in turn, and return each one's median result."""
    results: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, run in subjects.items():
            results[name].append(run())
    return {name: statistics.median(values) for name, values in results.items()}


def timed(run: Callable[[], object]) -> float:
    """Return the wall seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes: ``--quick``, ``--json FILE``, ``--threads N``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="about a minute, fewer cases and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch's pool (default 2)")
    return parser


def finish(report: Report, path: Path | None, *, keep: bool = False) -> None:
    """Show the report, and save it where ``--json`` asked; see `Report.save` for ``keep``."""
    report.show()
    if path is not None:
        report.save(path, keep=keep)
        Console().print(f"written: {path}")

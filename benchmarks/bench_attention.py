"""Measure attention on the CPU: decode, prefill, writing and the cost of a call, beside what people use today.

The project's kernels, ``sdpa`` over contiguous K and V (query heads of a group folded into the query length, as
transformers does), ``cat`` (grown by `torch.cat` first, as its `DynamicCache` is), ``gather`` (pages gathered first:
the project's own path without a compiler) and ``vllm``'s CPU operator in an environment of its own (`make peers`). Each
kind is a process of its own and stopped while another runs. *Cold* goes through more layers than the caches hold, *hot*
through one. A *call* over few keys is also timed without Python (``kernel``: the compiled function through ctypes,
everything prepared), so that the rest is what Python costs. A case is timed after each subject came within its dtype's
error of a float64 answer.

What the machine can do at most takes its turn among them, since on a shared one it changes by the minute: ``stream``
reads as many bytes in order as a cold decode must read, ``pages`` the very pages in the table's order and does nothing
with them, and ``multiply-adds`` does the fp32 multiplications of a prefill in registers.

    python -m benchmarks.bench_attention [--quick] [--only TEXT] [--json FILE] [--merge]
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.harness import Report, arguments, finish, interleave
from benchmarks.worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable

VLLM_PYTHON = Path(__file__).parents[1] / ".peers" / "vllm" / "bin" / "python"
COLD_BYTES = 160e6
SECONDS = 0.02
"""What a subject is timed for in each round, at least."""
ELEMENT_BYTES = {"bf16": 2, "fp32": 4, "int8": 1}
LARGEST_ERROR = {"bf16": 3e-2, "fp32": 5e-5, "int8": 6e-2}
SMALL, LARGE = ((9, 3), 64), ((32, 8), 128)


@dataclass(frozen=True)
class Case:
    """One measurement: ``batch`` sequences with ``q_len`` queries each over ``ctx`` tokens, in ``layers`` layers.

    ``linears`` puts a product between layers, ``write`` stores tokens instead, ``bare`` times the kernel alone as well.
    """

    name: str
    dtype: str
    heads: tuple[int, int]
    dim: int
    page: int
    batch: int
    q_len: int
    ctx: int
    layers: int
    linears: bool = False
    write: bool = False
    bare: bool = False

    @property
    def bytes_read(self) -> float:
        """K and V of a layer."""
        scales = 8 * self.batch * self.ctx * self.heads[1] if self.dtype == "int8" else 0
        return 2 * self.batch * self.ctx * self.heads[1] * self.dim * ELEMENT_BYTES[self.dtype] + scales

    @property
    def has_ceiling(self) -> bool:
        """Whether memory or arithmetic alone bounds it: a prefill, or a decode of more than the caches hold."""
        return self.q_len > 1 or (" cold " in self.name and self.dtype != "int8")

    @property
    def operations(self) -> float:
        """Multiplications and additions of a layer's two products, masked pairs left out."""
        pairs = self.q_len * (self.ctx - self.q_len) + self.q_len * (self.q_len + 1) / 2
        return 4 * self.batch * self.heads[0] * self.dim * pairs


def decode_case(
    dtype: str, shape: tuple[tuple[int, int], int], page: int, batch: int, ctx: int, *, hot: bool = False
) -> Case:
    """Return a decode case; a cold one has layers for 160 MB of K and V, 2 to 60."""
    heads, dim = shape
    mood = "hot" if hot else "cold"
    name = f"decode {dtype} {mood} {heads[0]}/{heads[1]} d{dim} page{page} B{batch} ctx{ctx}"
    case = Case(name, dtype, heads, dim, page, batch, 1, ctx, 1)
    layers = 1 if hot else max(2, min(60, int(COLD_BYTES / case.bytes_read)))
    return Case(**asdict(case) | {"heads": heads, "layers": layers})


def cases(*, quick: bool) -> list[Case]:
    """Return the grid."""
    found = []
    for dtype in ("bf16", "fp32"):
        for shape, pages in ((SMALL, (16, 64)), (LARGE, (32, 128))):
            for page in pages[:1] if quick else pages:
                found += [decode_case(dtype, shape, page, *size) for size in ((1, 1024), (1, 16384), (16, 1024))]
                found.append(decode_case(dtype, shape, page, 4, 512, hot=True))
        found.append(decode_case(dtype, SMALL, 16, 64, 512))
    found += [decode_case("int8", shape, page, 16, 1024) for shape, page in ((SMALL, 16), (LARGE, 32))]
    sizes = ((1, 128, 128), (16, 128, 128), (1, 1024, 1024), (1, 512, 4096), (8, 32, 2048), (8, 4, 1024))
    for dtype in ("bf16", "fp32"):
        for (heads, dim), page in ((SMALL, 32), (LARGE, 64)):
            for batch, q_len, ctx in sizes[:3] if quick else sizes:
                rows = min(batch, 8) if dim == 128 else batch
                name = f"prefill {dtype} {heads[0]}/{heads[1]} d{dim} page{page} B{rows} q{q_len} ctx{ctx}"
                found.append(Case(name, dtype, heads, dim, page, rows, q_len, ctx, 1))
    heads, dim = SMALL
    for dtype in ("bf16", "fp32"):
        found.append(Case(f"call {dtype} B1 ctx64", dtype, heads, dim, 32, 1, 1, 64, 30, bare=True))
        found += [
            Case(f"write {dtype} {tokens} tokens", dtype, heads, dim, 32, tokens, 1, 32, 1, write=True)
            for tokens in (1, 1024)
        ]
        for linears in (False, True):
            name = f"step {dtype} B1 ctx192, {'with linears' if linears else 'attention'}"
            found.append(Case(name, dtype, heads, dim, 32, 1, 1, 192, 30, linears=linears))
    return found


def measure(case: Case, pool: WorkerPool, kinds: list[str], rounds: int, report: Report) -> None:
    """Prepare every kind, check, time all in turn, and add rates and ratios."""
    runs: dict[str, Callable[[], float]] = {}
    for kind in kinds:
        if (case.dtype == "int8" and kind != "pagedkv") or (kind == "machine" and not case.has_ceiling):
            continue
        errors = pool.ask(kind, {"do": "prepare", "case": asdict(case)})["errors"]
        for subject, error in errors.items():
            if not error <= LARGEST_ERROR[case.dtype]:
                raise SystemExit(f"{case.name}: {subject} is {error:.3g} from the exact answer")
            if subject == "cat" and (case.q_len > 1 or case.linears):
                continue
            runs[subject] = partial(_seconds, pool, kind, subject)
    medians = interleave(runs, rounds)
    _add(case, medians, report)


def _seconds(pool: WorkerPool, kind: str, subject: str) -> float:
    return float(pool.ask(kind, {"do": "time", "name": subject, "at_least": SECONDS})["seconds"])


def _add(case: Case, medians: dict[str, float], report: Report) -> None:
    kind = case.name.split()[0]
    for subject, seconds in medians.items():
        if kind == "decode" and subject == "bf16":
            report.add(case.name, subject, 1e6 * seconds, "us", "lower")
        elif kind == "decode":
            report.add(case.name, subject, case.bytes_read / seconds / 1e9, "GB/s")
        elif kind == "prefill":
            report.add(case.name, subject, case.operations / seconds / 1e9, "GFLOP/s")
        else:
            report.add(case.name, subject, 1e6 * seconds, "us", "lower")
    if "kernel" in medians:
        report.add(case.name, "pagedkv without kernel", 1e6 * (medians["pagedkv"] - medians["kernel"]), "us", "lower")
    for peer in ("vllm", "sdpa", "cat", "gather", "bf16"):
        if peer in medians:
            report.add(case.name, f"x {peer}", medians[peer] / medians["pagedkv"], "ratio")
    for ceiling in ("stream", "pages", "multiply-adds"):
        if ceiling in medians:
            report.add(case.name, f"% of {ceiling}", 100 * medians[ceiling] / medians["pagedkv"], "%")


def drop(path: Path, cases: set[str]) -> None:
    """Take cases that were measured again out of an earlier file, with all their subjects: ratios are of one run."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["rows"] = [row for row in content["rows"] if row["case"] not in cases]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run all cases and report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their names")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 7, quick: 3)")
    parser.add_argument("--merge", action="store_true", help="keep the other cases that --json's file has already")
    args = parser.parse_args()
    console = Console()
    worker = ["-m", "benchmarks.attention_worker"]
    commands = {kind: [sys.executable, *worker, kind, str(args.threads)] for kind in ("pagedkv", "torch", "machine")}
    if VLLM_PYTHON.exists():
        commands["vllm"] = [str(VLLM_PYTHON), *worker, "vllm", str(args.threads)]
    else:
        console.print("vLLM is missing: `make peers` makes its environment", style="dim")
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    report = Report(f"Attention on the CPU, {args.threads} threads")
    with WorkerPool(commands, environment) as pool:
        for case in cases(quick=args.quick):
            if args.only in case.name:
                measure(case, pool, list(commands), args.rounds or (3 if args.quick else 7), report)
                values = [f"{row.subject} {row.value:.3g}" for row in report.rows if row.case == case.name]
                console.print(f"{case.name}: {', '.join(values)}", style="dim", highlight=False)
    if args.merge and args.json is not None and args.json.exists():
        drop(args.json, {row.case for row in report.rows})
    finish(report, args.json, keep=args.merge)


if __name__ == "__main__":
    main()

"""Everything that only a GPU can tell, in one run of under eight minutes: right first, then how fast.

``PYTHONPATH=. python benchmarks/gpu.py --json gpu.json`` from the checkout; it needs torch, triton, transformers,
pytest and hypothesis, and installs nothing. First the kernel tests run on the device in bf16. Then at most 24 named
cells run, the most important first, until the time is up: decode as a fraction of the copy bandwidth measured in the
same run, prefill as a fraction of the matrix rate, each beside what else could serve it; at last the engine. ``--dry-
run`` goes the same way with tiny shapes on a CPU, so that no line is new when a GPU is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import gpu_peers
from benchmarks.gpu_engine import ENGINE_SUBJECTS, EngineRun
from benchmarks.gpu_tests import ROOT, kernel_tests

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Cell:
    """One thing to measure. ``kind`` is decode, prefill, chunk, shared, write or engine."""

    name: str
    kind: str
    batch: int
    length: int
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    page_size: int = 16
    kv_dtype: str | None = None
    window: int | None = None
    peers: tuple[str, ...] = ("sdpa", "gather")

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the cell's sequences hold."""
        item = 2 if self.kv_dtype is None else 1
        scales = 0 if self.kv_dtype is None else 8
        return self.batch * self.length * self.heads[1] * (2 * self.dim * item + scales)

    @property
    def q_len(self) -> int:
        """Query rows of each sequence."""
        return {"prefill": self.length, "chunk": min(2048, self.length // 2)}.get(self.kind, 1)

    def tiny(self) -> Cell:
        """Return the cell as small as the interpreter can take."""
        size = max(self.page_size * 2, 32) if self.kind != "shared" else 160
        return replace(self, batch=2, length=min(size + 3, 300), heads=(4, 2), dim=32)


CELLS = (
    Cell("decode 64 x 8k, page 16", "decode", 64, 8192, peers=("sdpa", "gather", "flex")),
    Cell("prefill 8k, page 64", "prefill", 1, 8192, page_size=64, peers=("sdpa", "gather", "flex")),
    Cell("decode 1 x 128k, page 16", "decode", 1, 131072),
    Cell("engine, Llama 1B class", "engine", 32, 512),
    Cell("decode 16 x 32k, page 16", "decode", 16, 32768),
    Cell("decode 256 x 1k, page 16", "decode", 256, 1024),
    Cell("decode 64 x 8k, page 64", "decode", 64, 8192, page_size=64, peers=()),
    Cell("decode 64 x 8k, fp8", "decode", 64, 8192, kv_dtype="float8_e4m3fn", peers=()),
    Cell("prefill 8k, page 16", "prefill", 1, 8192, peers=()),
    Cell("shared 64 x 8k", "shared", 64, 8192, peers=()),
    Cell("decode 64 x 8k, 64/8 heads", "decode", 64, 8192, heads=(64, 8)),
    Cell("decode 64 x 8k, 64/8 heads of 64", "decode", 64, 8192, heads=(64, 8), dim=64),
    Cell("decode 1 x 8k", "decode", 1, 8192),
    Cell("chunk of 2k at 32k, page 64", "chunk", 1, 32768, page_size=64, peers=()),
    Cell("prefill 8 x 2k, page 64", "prefill", 8, 2048, page_size=64),
    Cell("decode 64 x 8k, int8", "decode", 64, 8192, kv_dtype="int8", peers=()),
    Cell("decode 64 x 8k, page 256", "decode", 64, 8192, page_size=256, peers=()),
    Cell("shared 256 x 2k", "shared", 256, 2048, peers=()),
    Cell("prefill 8k, 64/8 heads of 64", "prefill", 1, 8192, heads=(64, 8), dim=64, page_size=64),
    Cell("decode 64 x 32k, window 4k", "decode", 64, 32768, window=4096, peers=()),
    Cell("prefill 8k, fp8", "prefill", 1, 8192, page_size=64, kv_dtype="float8_e4m3fn", peers=()),
    Cell("write 16k tokens", "write", 16, 1024, peers=()),
    Cell("write 16k tokens, fp8", "write", 16, 1024, kv_dtype="float8_e4m3fn", peers=()),
    Cell("decode 8 x 4k, page 1", "decode", 8, 4096, page_size=1, peers=()),
)


class Bench:
    """A run: its device, its clock and what it found."""

    def __init__(self, limit: float, *, dry: bool) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        self.dtype = torch.float16 if dry else torch.bfloat16
        self.backend = "triton"
        self.started = time.monotonic()
        self.limit = limit
        self.rows: list[dict[str, Any]] = []
        self.bandwidth = gpu_peers.copy_bandwidth(self.device, 1 << (16 if dry else 32), self.seconds)
        self.rate = gpu_peers.matrix_rate(self.device, 64 if dry else 8192, self.dtype, self.seconds)

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.limit - (time.monotonic() - self.started)

    def fail(self, cell: Cell, error: Exception, subject: str = "") -> None:
        """Keep what could not be measured, and why."""
        why = f"{type(error).__name__}: {error}"[:300]
        self.rows.append({"cell": cell.name, "subject": subject, "failed": why})
        print(f"{cell.name:34} {subject:16} failed: {why}", flush=True)

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of ``run``: enough repeats for a quarter of a second, at most 200."""
        run()
        if self.dry:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        repeats = max(5, min(200, int(250 / max(first.elapsed_time(last), 0.01))))
        events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
        for before, after in events:
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        return float(statistics.median(before.elapsed_time(after) for before, after in events)) / 1e3

    def add(self, cell: Cell, subject: str, seconds: float, fraction: float | None, note: str = "") -> None:
        """Keep one figure; ``fraction`` is of the ceiling that bounds the cell."""
        row = {"cell": cell.name, "subject": subject, "ms": seconds * 1e3, "fraction": fraction, "note": note}
        self.rows.append(row)
        share = "      " if fraction is None else f"{fraction:6.1%}"
        print(f"{cell.name:34} {subject:16} {seconds * 1e3:10.3f} ms  {share}  {note}", flush=True)


def paged(bench: Bench, cell: Cell) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return q, page tensors, scales, tables and the batch of a cell, all pages shuffled and filled."""
    from pagedkv.attention import AttentionBatch, write_kv

    (heads, kv_heads), size = cell.heads, cell.page_size
    width = -(-cell.length // size)
    total = cell.batch * width
    shuffled = torch.randperm(total, device=bench.device, dtype=torch.int32).view(cell.batch, width) + 1
    tables = shuffled[:1].expand(cell.batch, -1).clone() if cell.kind == "shared" else shuffled
    if cell.kind == "shared":
        tables[:, -1] = shuffled[:, -1]
    stored = bench.dtype if cell.kv_dtype is None else getattr(torch, cell.kv_dtype)
    shape = (total + 1, kv_heads, size)
    if cell.kv_dtype is None:
        pages = [torch.randn(*shape, cell.dim, device=bench.device, dtype=bench.dtype) for _ in range(2)]
        scales = None
    else:
        pages = [torch.empty(*shape, cell.dim, device=bench.device, dtype=torch.uint8).view(stored) for _ in range(2)]
        scales = torch.empty(shape, device=bench.device), torch.empty(shape, device=bench.device)
        for first in range(0, (total + 1) * size, 65536):
            slots = torch.arange(first, min(first + 65536, (total + 1) * size), device=bench.device)
            k, v = (
                torch.randn(len(slots), kv_heads, cell.dim, device=bench.device, dtype=bench.dtype) for _ in range(2)
            )
            write_kv(k, v, pages[0], pages[1], slots, kv_scales=scales, backend=bench.backend)
    q = torch.randn(cell.batch * cell.q_len, heads, cell.dim, device=bench.device, dtype=bench.dtype)
    kv_lens = torch.full((cell.batch,), cell.length, dtype=torch.int32, device=bench.device)
    cu_q_lens = torch.arange(cell.batch + 1, dtype=torch.int32, device=bench.device) * cell.q_len
    return q, pages, scales, tables, AttentionBatch(tables, kv_lens, cu_q_lens, cell.q_len, cell.length), kv_lens


def attention_cell(bench: Bench, cell: Cell) -> None:
    """Measure decode, prefill or a chunk, beside its peers, once the answers agree."""
    from pagedkv.attention import LayerSpec, paged_attention

    q, pages, scales, tables, batch, _ = paged(bench, cell)
    spec = LayerSpec(cell.dim**-0.5, window=cell.window)
    out = torch.empty_like(q)

    def ours() -> torch.Tensor:
        return paged_attention(q, pages[0], pages[1], batch, spec, kv_scales=scales, out=out, backend=bench.backend)

    def whole(seconds: float) -> float:
        seen = min(cell.length, cell.window or cell.length)
        if cell.q_len == 1:
            return cell.kv_bytes * seen / cell.length / seconds / bench.bandwidth
        pairs = cell.q_len * (cell.length - (cell.q_len - 1) / 2) * cell.batch
        return 4 * pairs * cell.heads[0] * cell.dim / seconds / bench.rate

    subjects: dict[str, Callable[[], torch.Tensor]] = {"pagedkv": ours}
    if "sdpa" in cell.peers:
        k, v = (gpu_peers.gather(side, tables, cell.length).contiguous() for side in pages)
        subjects["sdpa contiguous"] = lambda: gpu_peers.contiguous(q, k, v, cell.q_len)
    if "gather" in cell.peers:
        subjects["gather + sdpa"] = lambda: gpu_peers.contiguous(
            q,
            gpu_peers.gather(pages[0], tables, cell.length),
            gpu_peers.gather(pages[1], tables, cell.length),
            cell.q_len,
        )
    if "flex" in cell.peers and bench.left > 60:
        subjects["flex on pages"] = gpu_peers.flex(q, pages[0], pages[1], tables, length=cell.length, q_len=cell.q_len)
    expected = ours().clone()
    for subject, run in subjects.items():
        try:
            difference = float((run().float() - expected.float()).abs().max())
        except Exception as error:  # a peer that fails must not end the run
            bench.fail(cell, error, subject)
            continue
        seconds = bench.seconds(run)
        bench.add(cell, subject, seconds, whole(seconds), f"largest difference {difference:.2g}")


def shared_cell(bench: Bench, cell: Cell) -> None:
    """Measure sequences that share all but their last page, read row by row and once for all."""
    import numpy as np

    from pagedkv.attention import LayerSpec, paged_attention
    from pagedkv.attention.shared_prefix import share_prefixes

    q, pages, _, tables, batch, kv_lens = paged(bench, cell)
    spec, answers = LayerSpec(cell.dim**-0.5), {}
    for mode in ("never", "always"):
        share_prefixes(
            batch, cell.page_size, mode=mode, tables=tables.cpu().numpy(),
            kv_lens=kv_lens.cpu().numpy().astype(np.int64), q_lens=np.ones(cell.batch, dtype=np.int64),
        )  # fmt: skip

        def run() -> torch.Tensor:
            return paged_attention(q, pages[0], pages[1], batch, spec, backend=bench.backend)

        answers[mode] = run().float()
        note = f"largest difference {float((answers[mode] - answers['never']).abs().max()):.2g}"
        bench.add(cell, f"cascade {mode}", bench.seconds(run), None, note)


def write_cell(bench: Bench, cell: Cell) -> None:
    """Measure writing a step's K and V, in bytes read and written."""
    from pagedkv.attention import write_kv

    _, pages, scales, tables, _, _ = paged(bench, cell)
    tokens = cell.batch * cell.length
    slots = (tables.long()[:, :, None] * cell.page_size + torch.arange(cell.page_size, device=bench.device)).flatten()
    slots = slots[:tokens].contiguous()
    k, v = (torch.randn(tokens, cell.heads[1], cell.dim, device=bench.device, dtype=bench.dtype) for _ in range(2))
    seconds = bench.seconds(lambda: write_kv(k, v, pages[0], pages[1], slots, kv_scales=scales, backend=bench.backend))
    moved = 2 * k.nbytes + cell.kv_bytes
    bench.add(cell, "pagedkv", seconds, moved / seconds / bench.bandwidth)


def engine_cell(bench: Bench, cell: Cell) -> None:
    """Measure the engine with and without graphs, beside the library's own ways to generate."""
    run = EngineRun(cell.batch, cell.length, bench.device, bench.dtype, small=bench.dry)
    for subject in ENGINE_SUBJECTS:
        if bench.dry and subject == "generate_batch":
            continue  # its own cache takes minutes on a CPU
        try:
            seconds = run.seconds(subject)
            bench.add(cell, subject, seconds, None, f"{run.made / seconds:,.0f} new tokens a second")
        except Exception as error:  # what fails is told, and the others are still measured
            bench.fail(cell, error, subject)


def machine(bench: Bench) -> dict[str, Any]:
    """Return what was measured on."""
    import transformers
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "device": platform.processor() if bench.dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
        "copy_bandwidth": bench.bandwidth,
        "matrix_rate": bench.rate,
    }


def main() -> None:
    """Run the tests and the cells until the time is up; print a table and write the JSON whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--limit", type=float, default=450.0, help="seconds after which no cell is begun")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU, interpreted")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # nothing has imported triton yet
    bench = Bench(options.limit, dry=options.dry_run)
    print(f"copy {bench.bandwidth / 1e12:.2f} TB/s, matrix product {bench.rate / 1e12:.0f} TFLOP/s", flush=True)
    kinds = {"shared": shared_cell, "write": write_cell, "engine": engine_cell}
    tests = {} if options.skip_tests else kernel_tests(bench.device, bench.left / 2)
    left_out = []
    for cell in CELLS:
        if bench.left < 15:
            left_out.append(cell.name)
            continue
        try:
            kinds.get(cell.kind, attention_cell)(bench, cell.tiny() if bench.dry else cell)
        except Exception as error:  # the other cells are still worth having
            bench.fail(cell, error)
        if not bench.dry:
            torch.cuda.empty_cache()
    report = {"machine": machine(bench), "tests": tests, "rows": bench.rows, "left_out": left_out}
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'cell':34} {'of the ceiling':>14}   beside (time of ours / theirs)")
    for cell in CELLS:
        rows: dict[str, Any] = {row["subject"]: row for row in bench.rows if row["cell"] == cell.name and "ms" in row}
        if "pagedkv" in rows:
            beside = ", ".join(
                f"{name} {rows['pagedkv']['ms'] / row['ms']:.2f}" for name, row in rows.items() if name != "pagedkv"
            )
            print(f"{cell.name:34} {rows['pagedkv']['fraction']:14.1%}   {beside}")
    print(f"left out: {', '.join(left_out) or 'nothing'}; {time.monotonic() - bench.started:.0f} s")


if __name__ == "__main__":
    main()

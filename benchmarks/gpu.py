"""Everything that only a GPU can tell, in one run of under eight minutes: right first, then how fast.

``PYTHONPATH=. python benchmarks/gpu.py --json gpu.json`` from the checkout; it needs torch, triton, transformers, pytest
and hypothesis, and installs nothing. First the kernel tests run on the device in bf16. Then at most 24 named cells run,
the most important first, until the time is up: decode as a fraction of the copy bandwidth measured in the same run,
prefill as a fraction of the matrix rate, each beside what else could serve it; at last the engine. ``--dry-run`` goes
the same way with tiny shapes on a CPU, so that no line is new when a GPU is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from benchmarks import gpu_peers

if TYPE_CHECKING:
    from collections.abc import Callable

TEST_GROUPS = (
    "mixed_batch or half",
    "every_shape",
    "splits or independent or chunks or accumulates",
    "strided or writes or copies or refused or cascade or members",
)
"""The kernel tests in processes side by side: most of their time is compiling."""


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
        return {"prefill": self.length, "chunk": 2048}.get(self.kind, 1)

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

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of ``run``: enough repeats for a quarter of a second, at most 200."""
        run()
        if self.dry:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        repeats = max(5, min(200, int(250 / max(start.elapsed_time(stop), 0.01))))
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for before, after in events:
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3

    def add(self, cell: Cell, subject: str, seconds: float, fraction: float | None, note: str = "") -> None:
        """Keep one figure; ``fraction`` is of the ceiling that bounds the cell."""
        row = {"cell": cell.name, "subject": subject, "ms": seconds * 1e3, "fraction": fraction, "note": note}
        self.rows.append(row)
        share = "      " if fraction is None else f"{fraction:6.1%}"
        print(f"{cell.name:34} {subject:16} {seconds * 1e3:10.3f} ms  {share}  {note}", flush=True)


def kernel_tests(bench: Bench) -> dict[str, str]:
    """Run the kernel tests on the device, in processes side by side; return each group's last line."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PAGEDKV_TEST_DEVICE": bench.device}
    files = ["tests/attention/test_triton.py", "tests/attention/test_shared_prefix.py"]
    options = ["-q", "-x", "-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider"]
    groups = ("accumulates",) if bench.dry else TEST_GROUPS
    running = []
    for group in groups:
        output = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "pytest", *options, "-m", "not slow", "-k", group, *files]
        running.append((group, output, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)))
    found, deadline = {}, time.monotonic() + min(150.0, bench.left / 2)
    for group, output, process in running:
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.seek(0)
        lines = output.read().strip().splitlines() or ["nothing"]
        found[group] = lines[-1] if process.returncode in {0, 1} else f"not finished: {lines[-1]}"
        if process.returncode:
            print("\n".join(lines[-25:]), flush=True)
        print(f"tests {group!r}: {found[group]}", flush=True)
        output.close()
    return found


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
        scales = tuple(torch.empty(shape, device=bench.device) for _ in range(2))
        for first in range(0, (total + 1) * size, 65536):
            slots = torch.arange(first, min(first + 65536, (total + 1) * size), device=bench.device)
            k, v = (torch.randn(len(slots), kv_heads, cell.dim, device=bench.device, dtype=bench.dtype) for _ in range(2))
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
        return paged_attention(
            q, pages[0], pages[1], batch, spec, kv_scales=scales, out=out, backend=bench.backend
        )

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
            q, *(gpu_peers.gather(side, tables, cell.length) for side in pages), cell.q_len
        )
    if "flex" in cell.peers and bench.left > 60:
        subjects["flex on pages"] = gpu_peers.flex(q, pages[0], pages[1], tables, cell.length, cell.q_len)
    expected = ours().clone()
    for subject, run in subjects.items():
        try:
            difference = float((run().float() - expected.float()).abs().max())
        except Exception as error:  # a peer that fails must not end the run
            bench.rows.append({"cell": cell.name, "subject": subject, "failed": f"{type(error).__name__}: {error}"[:300]})
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
            batch, cell.page_size, mode=mode, tables=tables.cpu().numpy(), kv_lens=kv_lens.cpu().numpy().astype(np.int64),
            q_lens=np.ones(cell.batch, dtype=np.int64),
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
    seconds = bench.seconds(
        lambda: write_kv(k, v, pages[0], pages[1], slots, kv_scales=scales, backend=bench.backend)
    )
    moved = 2 * k.nbytes + cell.kv_bytes
    bench.add(cell, "pagedkv", seconds, moved / seconds / bench.bandwidth)


def engine_cell(bench: Bench, cell: Cell) -> None:
    """Measure the engine on a random Llama of 1B parameters, with and without graphs, beside the library's own ways."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from pagedkv.engine import Engine, SamplingParams

    new_tokens = 3 if bench.dry else 128
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 64}  # fmt: skip
    if bench.dry:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 101, "head_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    dtype = torch.float32 if bench.dry else bench.dtype
    with torch.device(bench.device):
        model = LlamaForCausalLM(config).to(dtype).eval()
    ids = torch.randint(1, sizes["vocab_size"], (cell.batch, cell.length))
    prompts, made = ids.tolist(), cell.batch * new_tokens
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)

    def serve(graphs: bool | None) -> Callable[[], object]:
        engine = Engine(model, num_pages=2 + cell.batch * (-(-(cell.length + new_tokens) // 16)), max_batch=cell.batch,
                        prefix_cache=False, max_step_tokens=4096, cuda_graphs=graphs)  # fmt: skip
        return lambda: engine.generate(prompts, params)

    def library() -> object:
        return model.generate(ids.to(bench.device), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)

    def library_batch() -> object:
        from transformers import GenerationConfig

        options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        return model.generate_batch(inputs=prompts, generation_config=options)

    subjects = {"engine, no graphs": lambda: serve(False), "engine, graphs": lambda: serve(None),
                "model.generate": lambda: library, "generate_batch": lambda: library_batch}  # fmt: skip
    for subject, make in subjects.items():
        try:
            run = make()
            run()
            start = time.perf_counter()
            run()
            if not bench.dry:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            bench.add(cell, subject, seconds, None, f"{made / seconds:,.0f} new tokens a second")
        except Exception as error:  # what fails is told, and the others are still measured
            bench.rows.append({"cell": cell.name, "subject": subject, "failed": f"{type(error).__name__}: {error}"[:300]})
            print(f"{cell.name:34} {subject:16} failed: {type(error).__name__}: {error}"[:200], flush=True)


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
    bench = Bench(options.limit, dry=options.dry_run)
    print(f"copy {bench.bandwidth / 1e12:.2f} TB/s, matrix product {bench.rate / 1e12:.0f} TFLOP/s", flush=True)
    kinds = {"shared": shared_cell, "write": write_cell, "engine": engine_cell}
    tests = {} if options.skip_tests else kernel_tests(bench)
    left_out = []
    for cell in CELLS:
        if bench.left < 15:
            left_out.append(cell.name)
            continue
        try:
            kinds.get(cell.kind, attention_cell)(bench, cell.tiny() if bench.dry else cell)
        except Exception as error:  # the other cells are still worth having
            bench.rows.append({"cell": cell.name, "failed": f"{type(error).__name__}: {error}"[:300]})
            print(f"{cell.name:34} failed: {type(error).__name__}: {error}"[:300], flush=True)
        if not bench.dry:
            torch.cuda.empty_cache()
    report = {"machine": machine(bench), "tests": tests, "rows": bench.rows, "left_out": left_out}
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'cell':34} {'of the ceiling':>14}   beside (time of ours / theirs)")
    for cell in CELLS:
        rows = {row["subject"]: row for row in bench.rows if row["cell"] == cell.name and "ms" in row}
        if "pagedkv" in rows:
            beside = ", ".join(
                f"{name} {rows['pagedkv']['ms'] / row['ms']:.2f}" for name, row in rows.items() if name != "pagedkv"
            )
            print(f"{cell.name:34} {rows['pagedkv']['fraction']:14.1%}   {beside}")
    print(f"left out: {', '.join(left_out) or 'nothing'}; {time.monotonic() - bench.started:.0f} s")


if __name__ == "__main__":
    main()

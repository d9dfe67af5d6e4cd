"""Compiling kernels for GPUs that are not there, and reading what came out: registers, spills, shared memory.

A program of its own, since a process either interprets kernels or compiles them: ``python -m
tests.attention.compiled`` takes a JSON list of ``[target, variant]`` and prints what each of its kernels became, as
JSON. The kernels are launched by the package's own code with a driver that only compiles, so that constants, tiles,
strides and specialisation are those of production.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one program may have, from the vendors' manuals."""

BF16, FP16, FP32 = "bfloat16", "float16", "float32"


@dataclass(frozen=True)
class Variant:
    """A layer and a step, by sizes: ``rows`` queries a sequence; the kernels it needs are compiled."""

    dtype: str = BF16
    kv_dtype: str | None = None
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    page_size: int = 16
    rows: int = 512
    features: tuple[str, ...] = ()


VARIANTS = {
    "bf16, d128, page 16": Variant(),
    "bf16, d128, page 64": Variant(page_size=64),
    "bf16, d128, page 256": Variant(page_size=256),
    "bf16, d64, 64/8 heads": Variant(heads=(64, 8), dims=(64, 64)),
    "fp16, d64, MHA": Variant(FP16, heads=(16, 16), dims=(64, 64)),
    "bf16, d128, fp8 KV": Variant(kv_dtype="float8_e4m3fn"),
    "bf16, d128, int8 KV": Variant(kv_dtype="int8"),
    "bf16, d80": Variant(dims=(80, 80)),
    "bf16, d96": Variant(dims=(96, 96)),
    "bf16, d112": Variant(dims=(112, 112)),
    "bf16, d192/128": Variant(dims=(192, 128)),
    "bf16, d256, softcap, window": Variant(heads=(16, 8), dims=(256, 256), features=("softcap", "window")),
    "bf16, d64, sink logits, window": Variant(heads=(64, 8), dims=(64, 64), features=("sink_logits", "window")),
    "bf16, d128, everything": Variant(features=("softcap", "window", "sink_logits", "alibi")),
    "bf16, d128, MQA 71": Variant(heads=(71, 1), dims=(64, 64)),
    "fp32, d128": Variant(FP32),
    "fp32, d64, everything": Variant(FP32, dims=(64, 64), features=("softcap", "window", "sink_logits", "alibi")),
}
MAIN = tuple(VARIANTS)[:4]
"""The variants that most models use: they must not spill anywhere."""


def compile_elsewhere(targets: list[str], variants: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Compile in a process that does not interpret; return ``{target: {variant: {kernel: resources}}}``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        run = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps([[t, v] for t in targets for v in variants])],
            env=environment | {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1"},
            cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(run.stdout.splitlines()[-1])
    return found


class CompilingDriver:
    """Stands where triton looks for a GPU; knows its target and nothing else."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        """Return what to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return a number that tells targets apart."""
        return hash(str(self._target))

    def get_current_stream(self, device: int) -> int:
        """Return no stream: nothing is launched."""
        return 0


def compile_variant(target: str, variant: Variant) -> dict[str, dict[str, Any]]:
    """Compile what a step of ``variant`` launches, ``{kernel: resources}``."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from pagedkv.attention.triton import launch_write, tuning

    launch: Any = import_module("pagedkv.attention.triton.launch")
    driver.set_active(CompilingDriver(GPUTarget(*TARGETS[target])))
    kind, capability, _ = TARGETS[target]
    launch.target_of = lambda _: tuning.Target(kind, capability if isinstance(capability, int) else 0)
    found: dict[str, dict[str, Any]] = {}
    real = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = real(self, *args, grid=grid, warmup=True, **kwargs)
        found[self.__name__.removesuffix("_kernel")] = resources(kernel, target)
        return kernel

    JITFunction.run = compile_only
    try:
        _launch(variant, launch, launch_write)
    finally:
        JITFunction.run = real
    return found


def _launch(variant: Variant, launch: Any, launch_write: Any) -> None:
    """Launch attention, write and copy of a step on small tensors of the variant's kind."""
    from pagedkv.attention import AttentionBatch, LayerSpec
    from pagedkv.attention.calls import AttendCall, WriteCall

    (q_heads, kv_heads), (k_dim, v_dim) = variant.heads, variant.dims
    dtype = getattr(torch, variant.dtype)
    slots = (4, kv_heads, variant.page_size)
    kv_dtype = dtype if variant.kv_dtype is None else getattr(torch, variant.kv_dtype)
    pages = torch.zeros(*slots, k_dim).to(kv_dtype), torch.zeros(*slots, v_dim).to(kv_dtype)
    scales = None if variant.kv_dtype is None else (torch.zeros(slots), torch.zeros(slots))
    q = torch.zeros(variant.rows, q_heads, k_dim, dtype=dtype)
    width = 32768 // variant.page_size
    lens = torch.tensor([16384], dtype=torch.int32), torch.tensor([0, variant.rows], dtype=torch.int32)
    batch = AttentionBatch(torch.zeros(1, width, dtype=torch.int32), *lens, variant.rows, 16384)
    spec = LayerSpec(
        k_dim**-0.5,
        window=4096 if "window" in variant.features else None,
        softcap=30.0 if "softcap" in variant.features else None,
        sink_logits=torch.zeros(q_heads) if "sink_logits" in variant.features else None,
        alibi_slopes=torch.zeros(q_heads) if "alibi" in variant.features else None,
    )
    launch.launch_attention(
        AttendCall(q, *pages, batch, spec, scales, None, {}), torch.empty(variant.rows, q_heads, v_dim, dtype=dtype)
    )
    k, v = (torch.zeros(8, kv_heads, dim, dtype=dtype) for dim in (k_dim, v_dim))
    launch_write.launch_write(WriteCall(k, v, *pages, torch.zeros(8, dtype=torch.int64), scales, {}))
    launch_write.launch_copies(pages, torch.tensor([[1, 2]], dtype=torch.int32))


def resources(kernel: Any, target: str) -> dict[str, Any]:
    """Return registers, spilled bytes or registers, shared memory and matrix instructions of a compiled kernel."""
    shared = kernel.metadata.shared
    if target == "gfx942":
        text = kernel.asm["amdgcn"]
        text = text.decode() if isinstance(text, bytes) else text
        return {
            "registers": int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0]),
            "spills": int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0]),
            "shared": shared,
            "matrix": sorted(set(re.findall(r"v_mfma_\w+", text))),
        }
    ptx = kernel.asm["ptx"]
    package = find_spec("triton")
    assert package is not None
    tool = Path(str(package.origin)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    both = usage.stdout + usage.stderr
    return {
        "registers": int(re.findall(r"REG:(\d+)", both)[0]),
        "spills": int(re.findall(r"STACK:(\d+)", both)[0]) + int(re.findall(r"LOCAL:(\d+)", both)[0]),
        "shared": shared,
        "matrix": sorted(set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx))),
    }


def main() -> None:
    """Compile the variants named on the command line and print their resources."""
    result: dict[str, dict[str, Any]] = {}
    for target, name in json.loads(sys.argv[1]):
        result.setdefault(target, {})[name] = compile_variant(target, VARIANTS[name])
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

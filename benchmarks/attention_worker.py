"""A process that times one way to attend: reads a JSON object a line, does it, answers with one.

Takes its kind as argument (``pagedkv``, ``torch`` for the ways that need no kernel, ``vllm``, and ``machine``, which
attends to nothing but reads or multiplies as much as a case must) and cases by their sizes;
every kind draws the same tensors from the same seed, and answers with its error against float64 before it is timed.
Started by `bench_attention.py` with the interpreter of the environment that has the subject.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    Way = Callable[[int], Any]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.bfloat16}
LARGEST_CHECKED = 4e8
"""Score elements up to which the float64 answer is computed: a larger case is the same code on more of the same."""


class Data:
    """Random pages of some layers in random order, and queries: a case of equal lengths.

    Attributes:
        q: ``[batch * q_len, num_q_heads, dim]``.
        k, v: pages of each layer, ``[num_pages, num_kv_heads, page_size, dim]``.
        tables: int32 ``[batch, blocks]``.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self.batch, self.q_len, self.ctx = case["batch"], case["q_len"], case["ctx"]
        (self.q_heads, self.kv_heads), self.dim, self.page = case["heads"], case["dim"], case["page"]
        self.dtype, self.quantised = DTYPES[case["dtype"]], case["dtype"] == "int8"
        self.layers, self.scale, self.bare = case["layers"], case["dim"] ** -0.5, case["bare"]
        draw = torch.Generator().manual_seed(0)
        blocks = -(-self.ctx // self.page)
        num_pages = self.batch * blocks + 1
        order = torch.randperm(num_pages - 1, generator=draw) + 1
        self.tables = order.to(torch.int32).view(self.batch, blocks)
        shape = (num_pages, self.kv_heads, self.page, self.dim)
        # One layer is drawn, the others hold the same numbers elsewhere: drawing them all would take the longest.
        k, v = (torch.randn(shape, generator=draw).to(self.dtype) for _ in range(2))
        self.k, self.v = [k.clone() for _ in range(self.layers)], [v.clone() for _ in range(self.layers)]
        self.q = torch.randn(self.batch * self.q_len, self.q_heads, self.dim, generator=draw).to(self.dtype)
        self.kv_lens = torch.full((self.batch,), self.ctx, dtype=torch.int32)
        self.cu_q_lens = torch.arange(self.batch + 1, dtype=torch.int32) * self.q_len

    def dense(self, pages: torch.Tensor) -> torch.Tensor:
        """Return a layer's K or V in order, ``[batch, num_kv_heads, ctx, dim]``."""
        picked = pages.index_select(0, self.tables.flatten()).view(self.batch, -1, self.kv_heads, self.page, self.dim)
        return picked.transpose(1, 2).reshape(self.batch, self.kv_heads, -1, self.dim)[:, :, : self.ctx]

    def mask(self) -> torch.Tensor | None:
        """Return what a chunk of queries sees, 0 or -inf ``[q_len, ctx]``; None where there is nothing to mask."""
        if self.q_len in {1, self.ctx}:
            return None
        behind = torch.arange(self.ctx - self.q_len, self.ctx)[:, None] - torch.arange(self.ctx)
        return torch.zeros(behind.shape, dtype=self.dtype).masked_fill_(behind < 0, -torch.inf)

    def exact(self) -> torch.Tensor:
        """Return the answer in float64, one sequence at a time."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        k, v = self.dense(self.k[0]), self.dense(self.v[0])
        behind = torch.arange(self.ctx - self.q_len, self.ctx)[:, None] - torch.arange(self.ctx)
        for row in range(self.batch):
            rows = slice(row * self.q_len, (row + 1) * self.q_len)
            keys, values = (x[row].double().repeat_interleave(self.q_heads // self.kv_heads, 0) for x in (k, v))
            scores = self.q[rows].double().transpose(0, 1) @ keys.transpose(1, 2) * self.scale
            scores.masked_fill_(behind < 0, -torch.inf)
            out[rows] = (scores.softmax(-1) @ values).transpose(0, 1)
        return out


def pagedkv_ways(data: Data) -> dict[str, Way]:
    """Attend by the project's operator; one batch, as all layers of a step have."""
    from pagedkv.attention import AttentionBatch, LayerSpec, paged_attention, write_kv

    specs = [LayerSpec(data.scale) for _ in range(data.layers)]
    batch = AttentionBatch(data.tables, data.kv_lens, data.cu_q_lens, data.q_len, data.ctx)
    pages: list[tuple[Any, Any, Any]] = [(k, v, None) for k, v in zip(data.k, data.v, strict=True)]
    if data.quantised:
        slots = torch.arange(data.k[0].shape[0] * data.page)
        for layer, (k, v, _) in enumerate(pages):
            k_codes, v_codes = torch.empty(k.shape, dtype=torch.int8), torch.empty(v.shape, dtype=torch.int8)
            scales = torch.empty(k.shape[:3]), torch.empty(k.shape[:3])
            k_rows, v_rows = (x.transpose(1, 2).reshape(-1, data.kv_heads, data.dim) for x in (k, v))
            write_kv(k_rows, v_rows, k_codes, v_codes, slots, kv_scales=scales)
            pages[layer] = k_codes, v_codes, scales

    def run(layer: int) -> torch.Tensor:
        k, v, scales = pages[layer]
        return paged_attention(data.q, k, v, batch, specs[layer], kv_scales=scales, backend="cpu")

    if data.bare:
        return {"pagedkv": run, "kernel": _bare_calls(run, data, batch, specs)}
    if not data.quantised:
        return {"pagedkv": run}
    plain = [LayerSpec(data.scale) for _ in range(data.layers)]
    return {
        "pagedkv": run,
        "bf16": lambda layer: paged_attention(data.q, data.k[layer], data.v[layer], batch, plain[layer], backend="cpu"),
    }


def _bare_calls(run: Way, data: Data, batch: Any, specs: list[Any]) -> Way:
    """Return the compiled function alone, with the structs that the operator prepared for its first calls."""
    from pagedkv.attention.cpu import structs
    from pagedkv.attention.proofs import known_pages

    layers, out, threads = [], torch.empty_like(data.q), torch.get_num_threads()
    for layer, (k, v, spec) in enumerate(zip(data.k, data.v, specs, strict=True)):
        run(layer)
        pages = known_pages(k, v, None)
        if pages is None:
            raise RuntimeError("the operator did not remember its page tensors")
        layers.append(pages.attends[id(spec)].kept["cpu"].address)
    attend, step = structs.functions().attend, batch.prepared["cpu"].address
    q_address, out_address = data.q.data_ptr(), out.data_ptr()

    def call(layer: int) -> torch.Tensor:
        if attend(layers[layer], step, q_address, out_address, threads):
            raise RuntimeError("the kernel refused")
        return out

    return call


def torch_ways(data: Data) -> dict[str, Way]:
    """Attend over contiguous K and V, after growing them by `torch.cat`, and after gathering pages."""
    from pagedkv.attention import AttentionBatch, LayerSpec, paged_attention

    dense = [(data.dense(k).contiguous(), data.dense(v).contiguous()) for k, v in zip(data.k, data.v, strict=True)]
    parts = [(k[:, :, :-1], k[:, :, -1:], v[:, :, :-1], v[:, :, -1:]) for k, v in dense]
    group, mask, spec = data.q_heads // data.kv_heads, data.mask(), LayerSpec(data.scale)
    batch = AttentionBatch(data.tables, data.kv_lens, data.cu_q_lens, data.q_len, data.ctx)
    if data.q_len == 1:
        folded = data.q.view(data.batch, data.kv_heads, group, data.dim)

        def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(folded, k, v, scale=data.scale).view(data.q.shape)
    else:
        q = data.q.view(data.batch, data.q_len, data.q_heads, data.dim).transpose(1, 2)

        def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=data.scale, enable_gqa=group > 1
            )
            return out.transpose(1, 2).reshape(data.q.shape)

    def grow(layer: int) -> torch.Tensor:
        k, k_new, v, v_new = parts[layer]
        return attend(torch.cat([k, k_new], 2), torch.cat([v, v_new], 2))

    return {
        "sdpa": lambda layer: attend(*dense[layer]),
        "cat": grow,
        "gather": lambda layer: paged_attention(data.q, data.k[layer], data.v[layer], batch, spec, backend="torch"),
    }


def vllm_ways(data: Data) -> dict[str, Way]:
    """Attend by vLLM's CPU operator, its scheduler's metadata made beforehand, which favours it."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    isa = "vec" if data.page % 32 == 0 else "vec16"
    slots = torch.arange(data.page, data.k[0].shape[0] * data.page)
    caches = []
    for k, v in zip(data.k, data.v, strict=True):
        both = torch.zeros(k.shape[0], data.kv_heads, 2 * data.page, data.dim, dtype=data.dtype)
        cache = both.chunk(2, dim=2)
        rows = [x.transpose(1, 2).reshape(-1, data.kv_heads, data.dim)[data.page :] for x in (k, v)]
        ops.cpu_attn_reshape_and_cache(*rows, *cache, slots, isa)
        caches.append(cache)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=data.batch, num_heads=data.q_heads, num_kv_heads=data.kv_heads, head_dim=data.dim,
        seq_lens=data.kv_lens, dtype=data.dtype, query_start_loc=data.cu_q_lens, causal=True,
        sliding_window_size=-1, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    out = torch.empty_like(data.q)

    def run(layer: int) -> torch.Tensor:
        k_cache, v_cache = caches[layer]
        ops.cpu_attention_with_kv_cache(
            query=data.q, key_cache=k_cache, value_cache=v_cache, output=out, query_start_loc=data.cu_q_lens,
            seq_lens=data.kv_lens, scale=data.scale, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=data.tables, softcap=0.0, scheduler_metadata=plan, s_aux=None,
        )  # fmt: skip
        return out

    return {"vllm": run}


def write_ways(kind: str, data: Data) -> dict[str, Way]:
    """Store ``batch`` tokens of K and V in random slots; plain torch is `index_copy_` over token-major pages."""
    shape = data.batch, data.kv_heads, data.dim
    k, v = torch.randn(shape).to(data.dtype), torch.randn(shape).to(data.dtype)
    slots = torch.randperm((data.k[0].shape[0] - 1) * data.page)[: data.batch] + data.page
    if kind == "pagedkv":
        from pagedkv.attention import write_kv

        def store(layer: int) -> torch.Tensor:
            write_kv(k, v, data.k[layer], data.v[layer], slots, backend="cpu")
            return k

        return {"pagedkv": store}
    if kind == "vllm":
        from vllm import _custom_ops as ops
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        isa = "vec" if data.page % 32 == 0 else "vec16"
        both = torch.zeros(data.k[0].shape[0], data.kv_heads, 2 * data.page, data.dim, dtype=data.dtype)
        cache = both.chunk(2, dim=2)
        return {"vllm": lambda _: ops.cpu_attn_reshape_and_cache(k, v, *cache, slots, isa) or k}
    rows = [torch.zeros(data.k[0].shape[0] * data.page, data.kv_heads, data.dim, dtype=data.dtype) for _ in range(2)]
    return {"index_copy": lambda _: (rows[0].index_copy_(0, slots, k), rows[1].index_copy_(0, slots, v))[0]}


def machine_ways(data: Data) -> dict[str, Way]:
    """Read what a decode must, in order (``stream``) and page by page (``pages``); multiply what a prefill must."""
    functions = _ceilings()
    threads = torch.get_num_threads()
    addresses = []
    for k, v in zip(data.k, data.v, strict=True):
        head = torch.arange(data.kv_heads)[:, None, None]
        block = data.tables.to(torch.int64).flatten()[None, :, None]
        starts = torch.tensor([k.data_ptr(), v.data_ptr()])
        addresses.append((starts + (block * data.kv_heads + head) * data.page * data.dim * k.element_size()).flatten())
    run_floats = data.page * data.dim * data.k[0].element_size() // 4
    pairs = data.q_len * (data.ctx - data.q_len) + data.q_len * (data.q_len + 1) // 2
    rounds = 2 * data.batch * data.q_heads * data.dim * pairs // (functions.chains() * threads)

    def stream(layer: int) -> None:
        k, v = data.k[layer][1:], data.v[layer][1:]  # without the null page
        functions.stream_read(k.data_ptr(), v.data_ptr(), k.numel() * k.element_size() // 4, threads)

    def read_pages(layer: int) -> None:
        functions.page_read(addresses[layer].data_ptr(), addresses[layer].numel(), run_floats, threads)

    if data.q_len > 1:
        return {"multiply-adds": lambda _: functions.multiply_adds(rounds, threads)}
    return {"stream": stream, "pages": read_pages}


@cache
def _ceilings() -> ctypes.CDLL:
    """Compile and load ``ceilings.cpp``."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "ceilings.so"
        source = Path(__file__).with_name("ceilings.cpp")
        flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
        functions = ctypes.CDLL(str(library))
    functions.stream_read.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    functions.page_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    functions.multiply_adds.argtypes, functions.multiply_adds.restype = (ctypes.c_long, ctypes.c_int), ctypes.c_double
    return functions


WAYS = {"pagedkv": pagedkv_ways, "torch": torch_ways, "vllm": vllm_ways, "machine": machine_ways}


class Worker:
    """The case that is prepared, and what can be timed of it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._ways: dict[str, Callable[[], object]] = {}
        self._layers = 1

    def prepare(self, case: dict[str, Any]) -> dict[str, Any]:
        """Draw the case and return each way's largest error."""
        self._ways.clear()
        data = Data(case)
        self._layers = data.layers
        ways = write_ways(self._kind, data) if case["write"] else WAYS[self._kind](data)
        errors = dict.fromkeys(ways, 0.0)
        measurable = self._kind != "machine" and not case["write"]
        if measurable and data.q.shape[0] * data.ctx * data.q_heads <= LARGEST_CHECKED:
            exact = data.exact()
            errors = {name: float((run(0).double() - exact).abs().max()) for name, run in ways.items()}
        for name, run in ways.items():
            self._ways[name] = self._with_linears(run, data) if case["linears"] else self._all_layers(run)
        return {"errors": errors}

    def _all_layers(self, run: Way) -> Callable[[], object]:
        return lambda: [run(layer) for layer in range(self._layers)]

    def _with_linears(self, run: Way, data: Data) -> Callable[[], object]:
        """Put a product of the model's width before each layer's attention, as a model's step does."""
        width = data.q_heads * data.dim
        weight, x = torch.randn(width, width).to(data.dtype), torch.randn(data.batch, width).to(data.dtype)
        return lambda: [(linear(x, weight), run(layer)) for layer in range(self._layers)]

    def time(self, name: str, at_least: float) -> dict[str, Any]:
        """Return the seconds of one call of a layer, over passes through all layers for ``at_least`` seconds."""
        run = self._ways[name]
        run()
        passes, start = 0, time.perf_counter()
        while True:
            run()
            passes += 1
            seconds = time.perf_counter() - start
            if seconds >= at_least:
                return {"seconds": seconds / (passes * self._layers)}


def main() -> None:
    """Answer until there is nothing more to read."""
    kind, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a peer prints must not get between our answers
    worker = Worker(kind)
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        answer = worker.prepare(**order) if do == "prepare" else worker.time(**order)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

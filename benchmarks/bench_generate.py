"""Measure ``model.generate`` on a paged cache against transformers' own: time per token, peak memory, beams' sharing.

Each subject gets the same K and V in its cache (random ones, as long as the context: what a decode step costs follows
from their shape alone), then ``generate`` decodes from there; tokens must be token-equal to the dynamic cache's in
float32. Times are medians of interleaved rounds, on a fresh cache each. Memory is measured in a process of its own:
the most resident memory from before the cache was made until the last token, less what was resident before.

    python -m benchmarks.bench_generate [--quick] [--only TEXT] [--json FILE] [--model FOLDER]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import DynamicCache, StaticCache

from benchmarks.harness import Report, arguments, finish, interleave
from pagedkv import PagedCache
from pagedkv.cli.models import load_model
from pagedkv.engine.equality import all_token_equal, compare_tokens
from pagedkv.transformers.stock import cache_keyword
from pagedkv.transformers.versions import hide_renaming_warning

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_SIZE = 16
SUBJECTS = ("paged", "dynamic", "static")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """One batch: how many columns its cache holds, how many rows, in which dtype, and how many tokens it makes."""

    dtype: str
    context: int
    batch: int
    new_tokens: int

    @property
    def name(self) -> str:
        """The case as the table shows it."""
        return f"{self.dtype}, context {self.context}, batch {self.batch}"

    def arguments(self) -> list[str]:
        """Return what makes this case again in another process."""
        return [self.dtype, *map(str, (self.context, self.batch, self.new_tokens))]


def cases(*, quick: bool) -> list[Case]:
    """Return the grid; when quick, its corners below 2,048 columns."""
    contexts, batches, new_tokens = ((128, 1024), (1, 4), 8) if quick else ((128, 512, 2048, 8192), (1, 4, 16), 16)
    return [Case(d, context, batch, new_tokens) for d in DTYPES for context in contexts for batch in batches]


def weighed(cases: list[Case], *, quick: bool) -> list[Case]:
    """Return the cases whose peak memory is measured, three processes each: when quick, the largest in float32."""
    if not quick:
        return cases
    return sorted((case for case in cases if case.dtype == DTYPES[0]), key=lambda case: case.context * case.batch)[-1:]


def make_cache(model: Any, subject: str, case: Case) -> Any:
    """Return an empty cache that has room for the case and no more than it must have."""
    length = case.context + case.new_tokens + 1
    if subject == "paged":
        pages = case.batch * -(-length // PAGE_SIZE) + 1
        return PagedCache(model, num_pages=pages, page_size=PAGE_SIZE, max_len=length, max_batch=case.batch)
    config = model.config.get_text_config(decoder=True)
    return DynamicCache(config=config) if subject == "dynamic" else StaticCache(config=config, max_cache_len=length)


@torch.no_grad()
def fill(model: Any, cache: Any, case: Case) -> None:
    """Store random K and V of ``case.context`` columns, the same for every subject, as one forward."""
    config = model.config.get_text_config(decoder=True)
    heads, dim = config.num_key_value_heads, getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, heads, case.context, dim, generator=generator).to(model.dtype) for _ in range(2))

    def store(**kwargs: Any) -> SimpleNamespace:
        for layer in range(config.num_hidden_layers):
            rows = (case.batch, -1, -1, -1)
            cache.update(k.roll(layer, 2).expand(rows), v.roll(layer, 2).expand(rows), layer)
        return SimpleNamespace()

    model.forward, inputs = store, torch.zeros(case.batch, case.context, dtype=torch.long)
    try:
        model(input_ids=inputs, use_cache=True, **{cache_keyword_of(model): cache})
    finally:
        del model.forward


def cache_keyword_of(model: Any) -> str:
    """Return the forward's name for a cache, also while `fill` stands in for it."""
    return cache_keyword(SimpleNamespace(forward=type(model).forward))


def decode(model: Any, cache: Any, case: Case) -> tuple[float, list[list[int]]]:
    """Generate from a filled cache; return seconds per token (of all rows together) and each row's tokens."""
    generator = torch.Generator().manual_seed(1)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocab_size, (case.batch, case.context + 1), generator=generator)
    options = {"max_new_tokens": case.new_tokens, "min_new_tokens": case.new_tokens, "do_sample": False}
    start = time.perf_counter()
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, pad_token_id=0, **options
    )
    seconds = time.perf_counter() - start
    return seconds / case.new_tokens, out[:, case.context + 1 :].tolist()


def run(model: Any, subject: str, case: Case) -> tuple[float, list[list[int]]]:
    """Make, fill, decode and let go of a cache."""
    cache = make_cache(model, subject, case)
    try:
        fill(model, cache, case)
        return decode(model, cache, case)
    finally:
        if subject == "paged":
            cache.close()


def _seconds(model: Any, subject: str, case: Case) -> float:
    return run(model, subject, case)[0]


def require_equal(model: Any, case: Case) -> None:
    """Raise unless the paged tokens are token-equal to the dynamic cache's."""
    _, expected = run(model, "dynamic", case)
    _, got = run(model, "paged", case)

    def logits_at(row: int, index: int) -> torch.Tensor:
        cache = make_cache(model, "dynamic", case)
        fill(model, cache, case)
        generator = torch.Generator().manual_seed(1)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        ids = torch.randint(vocab_size, (case.batch, case.context + 1), generator=generator)[:, -1:]
        text = torch.cat([ids, torch.tensor(expected)[:, :index]], 1)
        with torch.no_grad():
            output = model(input_ids=text, use_cache=True, **{cache_keyword_of(model): cache})
        logits: torch.Tensor = output.logits[row, -1].float()
        return logits

    pairs = enumerate(zip(got, expected, strict=True))
    compared = [compare_tokens(mine, theirs, partial(logits_at, row)) for row, (mine, theirs) in pairs]
    if not all_token_equal(compared):
        raise SystemExit(f"{case.name}: the paged tokens are not those of the dynamic cache: {compared}")


def measure(model: Any, case: Case, rounds: int, report: Report) -> None:
    """Add one case's times."""
    if case.dtype == "float32":
        require_equal(model, case)
    times = interleave({name: partial(_seconds, model, name, case) for name in SUBJECTS}, rounds)
    for name, seconds in times.items():
        report.add(f"{case.name}: per token", name, 1e3 * seconds, "ms", "lower")


# Memory.


def peak_memory(model: Any, subject: str, case: Case) -> int:
    """Return the most resident bytes of a run, less those before it; Linux only."""
    warm = Case(case.dtype, 32, case.batch, 2)
    run(model, subject, warm)  # what is made once per process is no part of the cache
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")
    before = _status("VmRSS")
    run(model, subject, case)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure_memory(case: Case, model_name: str | None, threads: int, report: Report) -> None:
    """Add one case's peaks, each measured in a process of its own."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return
    for subject in SUBJECTS:
        command = [sys.executable, "-m", "benchmarks.bench_generate", "--threads", str(threads)]
        command += ["--peak", subject, *case.arguments()] + ([] if model_name is None else ["--model", model_name])
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        report.add(f"{case.name}: peak memory", subject, peak / 2**20, "MiB", "lower")


# Beams.


def measure_beams(model: Any, rounds: int, report: Report, *, quick: bool) -> None:
    """Add the time per token of four beams, and the K and V that they hold at the end."""
    prompt, beams, new_tokens = (128 if quick else 1024), 4, (8 if quick else 32)
    name = f"{str(model.dtype).removeprefix('torch.')}, prompt {prompt}, {beams} beams"
    generator = torch.Generator().manual_seed(2)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocab_size, (1, prompt), generator=generator)
    held: dict[str, float] = {}

    def search(subject: str) -> float:
        config = model.config.get_text_config(decoder=True)
        pages = beams * -(-(prompt + new_tokens) // PAGE_SIZE) + beams + 1
        cache = PagedCache(model, num_pages=pages) if subject == "paged" else DynamicCache(config=config)
        if subject == "paged":
            cache.match(ids)  # equal pages of the beams' prompts become one
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beams,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            past_key_values=cache,
        )
        seconds = time.perf_counter() - start
        held[subject] = cache.usage().bytes_held if subject == "paged" else sum(_bytes(layer) for layer in cache.layers)
        if subject == "paged":
            cache.close()
        return seconds / new_tokens

    times = interleave({one: partial(search, one) for one in SUBJECTS[:2]}, rounds)
    for subject, seconds in times.items():
        report.add(f"{name}: per token, prefill included", subject, 1e3 * seconds, "ms", "lower")
        report.add(f"{name}: K and V held", subject, held[subject] / 2**20, "MiB", "lower")


def _bytes(layer: Any) -> int:
    return int(layer.keys.nbytes + layer.values.nbytes)


def models(name: str | None, console: Console) -> Iterator[tuple[str, Any, str]]:
    """Yield the model in each dtype, with the name that it is shown by."""
    for dtype in DTYPES:
        loaded = load_model(name, lambda line: console.print(line, style="dim"))
        yield dtype, loaded.model.to(getattr(torch, dtype)), loaded.name


def main() -> None:
    """Run all cases and report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub name (default: the demo's model)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 3, quick: 1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their names")
    parser.add_argument("--peak", nargs=5, metavar=("SUBJECT", "DTYPE", "CONTEXT", "BATCH", "TOKENS"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hide_renaming_warning()
    console = Console()
    if args.peak:
        subject, dtype, *numbers = args.peak
        model = load_model(args.model, lambda line: None).model.to(getattr(torch, dtype))
        print(peak_memory(model, subject, Case(dtype, *map(int, numbers))))
        return
    rounds = args.rounds or (1 if args.quick else 3)
    report: Report | None = None
    for dtype, model, name in models(args.model, console):
        report = report or Report(f"model.generate, {name}, {args.threads} threads, greedy")
        chosen = [case for case in cases(quick=args.quick) if case.dtype == dtype and args.only in case.name]
        for case in chosen:
            measure(model, case, rounds, report)
            if case in weighed(chosen, quick=args.quick):
                measure_memory(case, args.model, args.threads, report)
            console.print(f"{case.name}: done", style="dim", highlight=False)
        if args.only in f"{dtype}, beams":
            measure_beams(model, rounds, report, quick=args.quick)
    assert report is not None
    finish(report, args.json)


if __name__ == "__main__":
    main()

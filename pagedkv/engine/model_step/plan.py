"""A model's step without its modules: the calls that its forward pass makes, in a row, compiled into one function.

Takes a runner, records its forward pass on a few small steps, and makes of what they have in common a function of any
step. Between two calls of a decoder's forward lie hundreds of Python lines of modules, hooks and checks, which at one
sequence take as long as the arithmetic. The same calls in the same order give the same bits; whether they are the same
for every step is tried on steps of other sizes. Where anything differs there is no plan, and the modules run.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pagedkv.engine.model_step.recording import (
    STORE_CALLS,
    Call,
    CannotRecordError,
    Constant,
    Recorder,
    Recording,
    Value,
    attend,
    write,
)
from pagedkv.transformers.probe import ProbeStore, trial_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pagedkv.attention import LayerSpec
    from pagedkv.backend import StepBatch
    from pagedkv.transformers import ModelRunner
    from pagedkv.transformers.ragged_cache import LayerStore

_LOGGER = logging.getLogger("pagedkv")

MOST_TOKENS = 64
"""Of the steps that a plan serves, and of the largest that it was tried on: what may bend beyond is not asked."""

# New tokens of each sequence, and the rows wanted (None: each sequence's last). An integer of the calls that differs
# between steps is a + b * tokens + c * rows: three recorded steps determine it, two more and other sizes try it.
_RECORDED: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...] = (
    ((3, 2), None),
    ((1, 2), None),
    ((2, 1), (0, 1, 2)),
    ((1,), None),
    ((1, 2), (2,)),
)
_TRIED = (
    *_RECORDED,
    ((1, 1), None),
    ((4, 2), (5,)),
    ((3, 5), None),
    ((7, 9), (3, 11, 15)),
    ((14, 9), (3, 20)),
    ((MOST_TOKENS - 5, 5), None),
)
_DETERMINING = 3
_PAGE_SIZE = sum(counts[0] for counts, _ in _TRIED)


class Differs(Exception):  # noqa: N818  (no error: it says that there is no plan)
    """Recordings of two steps are no two cases of one plan; the message says where."""


class _RecordingStore:
    """A store that tells a recorder what it is asked for."""

    def __init__(self, store: ProbeStore, recorder: Recorder) -> None:
        self._store = store
        self._recorder = recorder

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        self._recorder.call(write, layer, k, v, store=self._store, batch=batch)

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        output: torch.Tensor = self._recorder.call(attend, layer, q, store=self._store, batch=batch)
        return output

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        raise CannotRecordError("a layer attends that did not before")

    def gather(self, layer: int, batch: StepBatch) -> Any:
        raise CannotRecordError(f"layer {layer} is handed its histories, whose lengths differ")

    held_positions = gather


class StepPlan:
    """Runs steps of up to `MOST_TOKENS` tokens by the calls that the recorded ones had in common."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._run = function

    @torch.inference_mode()
    def __call__(self, store: LayerStore, batch: StepBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step as `ModelRunner.forward` does, on ``store``."""
        wanted = batch.last_rows if rows is None else rows
        tokens = batch.input_ids
        return self._run(tokens, batch.position_ids, wanted, store, batch, tokens.shape[0], wanted.shape[0])


def make_plan(runner: ModelRunner) -> StepPlan | None:
    """Return the plan of the runner's forward pass as it is now, or None where there is none; logs why, for debugging.

    Random number generators and the runner's own backend are left alone.
    """
    try:
        if runner.gathered_layers:
            raise CannotRecordError(f"layers {sorted(runner.gathered_layers)} are handed their histories")
        with torch.random.fork_rng(devices=[]):
            plan = _compile(*_record(runner))
            _try(plan, runner)
    except Exception as reason:  # whatever it is, the modules serve
        _LOGGER.debug("%s runs by its modules: %s", type(runner.model).__name__, reason)
        return None
    return plan


class _Step(NamedTuple):
    tokens: list[list[int]]
    starts: list[int]
    rows: torch.Tensor | None


def _store(runner: ModelRunner) -> ProbeStore:
    # Both sides of a comparison attend by the same backend: the fastest will do.
    store = ProbeStore(runner.spec, _PAGE_SIZE, backend=None)
    for layer, spec in runner.layer_specs.items():
        store.bind_layer(layer, spec)
    return store


def _steps(runner: ModelRunner, sizes: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None]]) -> list[_Step]:
    """Return steps of two texts, one after the other, with new tokens and wanted rows as ``sizes`` says."""
    ids = trial_tokens(2 * _PAGE_SIZE, runner.spec.vocab_size)
    texts = (ids[:_PAGE_SIZE], ids[_PAGE_SIZE:])
    steps, starts = [], [0, 0]
    for counts, rows in sizes:
        at = starts[: len(counts)]
        tokens = [text[start : start + count] for text, start, count in zip(texts, at, counts, strict=False)]
        steps.append(_Step(tokens, at, None if rows is None else torch.tensor(rows)))
        starts = [start + count for start, count in zip(starts, (*counts, 0), strict=False)]
    return steps


@torch.inference_mode()
def _record(runner: ModelRunner) -> tuple[list[Recording], list[tuple[int, int]]]:
    """Return the recordings of some steps, with their numbers of tokens and rows."""
    store, recordings, sizes = _store(runner), [], []
    for step in _steps(runner, _RECORDED):
        batch = store.begin_step(step.tokens, step.starts, torch.device("cpu"))
        wanted = batch.last_rows if step.rows is None else step.rows
        recorder = Recorder([batch.input_ids, batch.position_ids, wanted])
        with recorder:
            output = runner.forward_on(_RecordingStore(store, recorder), batch, step.rows)
        recordings.append(recorder.finish(output))
        sizes.append((len(batch.input_ids), len(wanted)))
    return recordings, sizes


def _try(plan: StepPlan, runner: ModelRunner) -> None:
    """Compare the plan's bits with the modules', which nobody records, on those steps again and on larger ones."""
    ours, theirs = _store(runner), _store(runner)
    for step in _steps(runner, _TRIED):
        logits, expected = (
            run(store, store.begin_step(step.tokens, step.starts, torch.device("cpu")), step.rows)
            for run, store in ((plan, ours), (runner.forward_on, theirs))
        )
        if not torch.equal(logits, expected):
            raise Differs(f"its logits of a step of {sum(map(len, step.tokens))} tokens are others")


# ---- From recordings to a function -----------------------------------------------------------------------------------


def _compile(recordings: Sequence[Recording], sizes: Sequence[tuple[int, int]]) -> StepPlan:
    first = recordings[0]
    lengths = {(len(one.calls), one.result) for one in recordings}
    if len(lengths) != 1:
        raise Differs(f"steps make {sorted(length for length, _ in lengths)} calls")
    writer = _Writer(_same_constants(recordings), sizes)
    for calls in zip(*(one.calls for one in recordings), strict=True):
        writer.add(calls)
    return StepPlan(writer.finish(first.result))


def _same_constants(recordings: Sequence[Recording]) -> list[torch.Tensor]:
    first = recordings[0].constants
    for other in recordings[1:]:
        if len(other.constants) != len(first):
            raise Differs("steps use different constants")
        for one, two in zip(first, other.constants, strict=True):
            if one is not two and (one.dtype != two.dtype or not torch.equal(one, two)):
                raise Differs(f"a constant of shape {[*one.shape]} is made anew in each step")
    return first


_INPUTS = ("v0", "v1", "v2", "store", "batch", "num_tokens", "num_rows")


class _Writer:
    """Writes what all recordings have in common as a function's lines, and drops each value after its last use."""

    def __init__(self, constants: list[torch.Tensor], sizes: Sequence[tuple[int, int]]) -> None:
        self._sizes = sizes
        self._names: dict[str, Any] = {f"constant{number}": tensor for number, tensor in enumerate(constants)}
        self._lines: list[str] = []
        self._last_use: dict[int, int] = {}

    def add(self, calls: Sequence[Call]) -> None:
        """Add what is one call in each recording."""
        first = calls[0]
        if any((one.target, one.outputs, one.single) != (first.target, first.outputs, first.single) for one in calls):
            raise Differs(f"steps part at {first.target}")
        if any(one.kwargs.keys() != first.kwargs.keys() for one in calls):
            raise Differs(f"steps name other arguments of {first.target}")
        args = [self._common(values) for values in _columns([one.args for one in calls])]
        args += [f"{name}={self._common([one.kwargs[name] for one in calls])}" for name in first.kwargs]
        if first.target in STORE_CALLS:
            args += ["store=store", "batch=batch"]
        results = "".join(f"v{number}, " for number in first.outputs)
        left = f"{results[:-2] if first.single else results}= " if results else ""
        self._last_use |= dict.fromkeys(first.outputs, len(self._lines))
        self._lines.append(f"{left}{self._named(first.target)}({', '.join(args)})")

    def finish(self, result: int) -> Callable[..., torch.Tensor]:
        """Return the function that ends with value number ``result``."""
        lines, dropped = [], dict[int, list[int]]()
        for value, place in self._last_use.items():
            if value != result:
                dropped.setdefault(place, []).append(value)
        for place, line in enumerate(self._lines):
            lines += [line, *(f"v{value} = None" for value in dropped.get(place, ()))]
        body = "".join(f"    {line}\n" for line in [*lines, f"return v{result}"])
        # The function is taken out of its own globals: nothing of it waits for the garbage collector.
        exec(compile(f"def run({', '.join(_INPUTS)}):\n{body}", "<plan>", "exec"), self._names)
        function: Callable[..., torch.Tensor] = self._names.pop("run")
        return function

    def _named(self, thing: Any) -> str:
        name = f"thing{len(self._names)}"
        self._names[name] = thing
        return name

    def _common(self, values: Sequence[Any]) -> str:
        """Return the argument that is each of ``values`` in its recording."""
        first = values[0]
        if any(type(one) is not type(first) for one in values):
            raise Differs(f"an argument is a {' or a '.join(sorted({type(one).__name__ for one in values}))}")
        if isinstance(first, Value | Constant):
            if any(one != first for one in values):
                raise Differs("an argument comes from different calls")
            if isinstance(first, Constant):
                return f"constant{first.number}"
            self._last_use[first.number] = len(self._lines)
            return f"v{first.number}"
        if isinstance(first, tuple | list):
            inner = "".join(f"{self._common(parts)}, " for parts in _columns(values))
            return f"({inner})" if isinstance(first, tuple) else f"[{inner}]"
        if type(first) is int:
            return self._integer(values)
        if isinstance(first, dict):
            raise Differs("an argument is a dict")
        if any(one != first for one in values):
            raise Differs(f"an argument is {first} or something else")
        return self._named(first)

    def _integer(self, values: Sequence[int]) -> str:
        (one, two, three), (first, second, _) = values[:_DETERMINING], self._sizes[:_DETERMINING]
        # The first two steps differ in their tokens alone.
        slope, rest = divmod(one - two, first[0] - second[0])
        # The third has as many tokens as the second, and a row more.
        row_slope = three - two
        base = one - slope * first[0] - row_slope * first[1]
        fits = all(
            base + slope * tokens + row_slope * rows == value
            for (tokens, rows), value in zip(self._sizes, values, strict=True)
        )
        if rest or not fits:
            raise Differs(f"an argument is {list(values)} in steps of {self._sizes} tokens and rows")
        terms = [f"{factor} * {size}" for size, factor in (("num_tokens", slope), ("num_rows", row_slope)) if factor]
        return " + ".join([*terms, str(base)] if base or not terms else terms)


def _columns(values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield what stands at each place of sequences, which must be of one length."""
    if len({len(one) for one in values}) != 1:
        raise Differs("an argument has different lengths")
    yield from zip(*values, strict=True)

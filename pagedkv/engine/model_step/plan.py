"""A model's step without its modules: the calls that its forward pass makes, in a row, compiled into one function.

Takes a runner, records its forward pass on a few small steps, and makes of what they have in common a function of any
step. Between two calls of a decoder's forward lie hundreds of Python lines of modules, hooks and checks, which at one
sequence take as long as the arithmetic. The same calls in the same order give the same bits; whether they are the same
for every step is tried on steps of other sizes. Where anything differs there is no plan, and the modules run.
"""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from pagedkv.engine.model_step.recording import (
    STORE_CALLS,
    Call,
    CannotRecordError,
    Constant,
    Recorder,
    Recording,
    Value,
)
from pagedkv.transformers.probe import ProbeStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.attention import LayerSpec
    from pagedkv.backend import StepBatch
    from pagedkv.transformers import ModelRunner
    from pagedkv.transformers.ragged_cache import LayerStore

_LOGGER = logging.getLogger("pagedkv")

MOST_TOKENS = 64
"""Of the steps that a plan serves, and of the largest that it was tried on: what may bend beyond is not asked."""

# New tokens of each sequence, and the rows wanted (None: each sequence's last). An integer of the calls that differs
# between steps is a + b * tokens + c * rows: three recorded steps determine it, two more and larger ones try it.
_RECORDED: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...] = (
    ((3, 2), None),
    ((1, 2), None),
    ((2, 1), (0, 1, 2)),
    ((1,), None),
    ((1, 2), (2,)),
)
_TRIED = (*_RECORDED, ((9, 14), (3, 20)), ((MOST_TOKENS - 5, 5), None))
_DETERMINING = 3
_PAGE_SIZE = sum(counts[0] for counts, _ in _TRIED)
_REASONS = (CannotRecordError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)


class Differs(Exception):  # noqa: N818  (no error: it says that there is no plan)
    """Recordings of two steps are no two cases of one plan; the message says where."""


class _RecordingStore:
    """A store that tells a recorder what it is asked for."""

    def __init__(self, store: ProbeStore, recorder: Recorder) -> None:
        self._store = store
        self._recorder = recorder

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        with self._recorder.one_call():
            self._store.write(layer, k, v, batch)
        self._recorder.write(layer, k, v)

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        with self._recorder.one_call():
            output = self._store.attend(layer, q, batch)
        self._recorder.attend(layer, q, output)
        return output

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        raise CannotRecordError("a layer attends that did not before")

    def gather(self, layer: int, batch: StepBatch) -> Any:
        raise CannotRecordError(f"layer {layer} is handed its histories, whose lengths differ")

    held_positions = gather


class StepPlan:
    """Runs steps of up to `MOST_TOKENS` tokens by the calls that the recorded ones had in common."""

    def __init__(self, function: GraphModule) -> None:
        self._run = function.forward

    @torch.inference_mode()
    def __call__(self, store: LayerStore, batch: StepBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step as `ModelRunner.forward` does, on ``store``."""
        wanted = batch.last_rows if rows is None else rows
        tokens = batch.input_ids
        logits: torch.Tensor = self._run(
            tokens, batch.position_ids, wanted, store, batch, tokens.shape[0], wanted.shape[0]
        )
        return logits


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
    except (*_REASONS, Differs) as reason:
        _LOGGER.debug("%s runs by its modules: %s", type(runner.model).__name__, reason)
        return None
    return plan


class _Step(NamedTuple):
    tokens: list[list[int]]
    starts: list[int]
    rows: torch.Tensor | None


def _store(runner: ModelRunner) -> ProbeStore:
    store = ProbeStore(runner.spec, _PAGE_SIZE)
    for layer, spec in runner.layer_specs.items():
        store.bind_layer(layer, spec)
    return store


def _steps(runner: ModelRunner, sizes: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None]]) -> list[_Step]:
    """Return steps of two texts, one after the other, with new tokens and wanted rows as ``sizes`` says."""
    steps, starts = [], [0, 0]
    for place, (counts, rows) in enumerate(sizes):
        at = starts[: len(counts)]
        tokens = [
            [1 + (101 * place + 37 * i) % (runner.spec.vocab_size - 1) for i in range(3 * start, 3 * start + count)]
            for start, count in zip(at, counts, strict=True)
        ]
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
    constants = _same_constants(recordings)
    builder = _Builder(constants, sizes)
    for calls in zip(*(one.calls for one in recordings), strict=True):
        builder.add(calls)
    return StepPlan(builder.finish(first.result))


def _same_constants(recordings: Sequence[Recording]) -> list[torch.Tensor]:
    first = recordings[0].constants
    for other in recordings[1:]:
        if len(other.constants) != len(first):
            raise Differs("steps use different constants")
        for one, two in zip(first, other.constants, strict=True):
            if one is not two and (one.dtype != two.dtype or not torch.equal(one, two)):
                raise Differs(f"a constant of shape {[*one.shape]} is made anew in each step")
    return first


class _Builder:
    """Writes calls that all recordings have in common into a graph."""

    def __init__(self, constants: list[torch.Tensor], sizes: Sequence[tuple[int, int]]) -> None:
        self._graph = Graph()
        self._sizes = sizes
        names = ("input_ids", "position_ids", "rows", "store", "batch", "num_tokens", "num_rows")
        inputs = [self._graph.placeholder(name) for name in names]
        self._values: dict[int, Node] = dict(enumerate(inputs[:3]))
        self._store, self._batch, self._num_tokens, self._num_rows = inputs[3:]
        self._root = {f"constant_{number}": tensor for number, tensor in enumerate(constants)}
        self._constants = [self._graph.get_attr(name) for name in self._root]
        self._integers: dict[tuple[int, int, int], Node | int] = {}

    def add(self, calls: Sequence[Call]) -> None:
        """Add what is one call in each recording."""
        first = calls[0]
        if any((one.target, one.outputs, one.single) != (first.target, first.outputs, first.single) for one in calls):
            raise Differs(f"steps part at {first.target}")
        args = self._common([one.args for one in calls])
        if any(one.kwargs.keys() != first.kwargs.keys() for one in calls):
            raise Differs(f"steps name other arguments of {first.target}")
        kwargs = {name: self._common([one.kwargs[name] for one in calls]) for name in first.kwargs}
        if first.target in STORE_CALLS:
            kwargs |= {"store": self._store, "batch": self._batch}
        node = self._graph.call_function(first.target, args, kwargs)
        for place, number in enumerate(first.outputs):
            item = node if first.single else self._graph.call_function(operator.getitem, (node, place))
            self._values[number] = item

    def finish(self, result: int) -> GraphModule:
        """Return the function that ends with value number ``result``."""
        self._graph.output(self._values[result])
        module = GraphModule(self._root, self._graph)
        module.recompile()
        return module

    def _common(self, values: Sequence[Any]) -> Any:
        """Return the argument that is each of ``values`` in its recording."""
        first = values[0]
        if any(type(one) is not type(first) for one in values):
            raise Differs(f"an argument is a {' or a '.join(sorted({type(one).__name__ for one in values}))}")
        if isinstance(first, Value | Constant):
            if any(one != first for one in values):
                raise Differs("an argument comes from different calls")
            return self._values[first.number] if isinstance(first, Value) else self._constants[first.number]
        if isinstance(first, tuple | list):
            if len({len(one) for one in values}) != 1:
                raise Differs("an argument has different lengths")
            return type(first)(self._common(parts) for parts in zip(*values, strict=True))
        if type(first) is int:
            return self._integer(values)
        if any(one != first for one in values):
            raise Differs(f"an argument is {first} or something else")
        return first

    def _integer(self, values: Sequence[int]) -> Node | int:
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
        key = (base, slope, row_slope)
        if key not in self._integers:
            node: Any = base
            for size, factor in ((self._num_tokens, slope), (self._num_rows, row_slope)):
                if factor:
                    scaled = size if factor == 1 else self._graph.call_function(operator.mul, (size, factor))
                    node = scaled if node == 0 else self._graph.call_function(operator.add, (scaled, node))
            self._integers[key] = node
        return self._integers[key]

"""A layer's K and V from its input states: the layer's own attention module, run again up to where it stores them.

Takes a model's forward; finds by a few trial steps which module stores each layer's K and V, which of its arguments is
the input states, and which follow from a token's position alone (rotary tables); gives K and V for any tokens seen
before; refuses a model where these do not come out equal. No architecture is known by name.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.probe import ProbeStore
from pagedkv.transformers.ragged_cache import LayerRoutes, RaggedCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pagedkv.backend import StepBatch
    from pagedkv.transformers.forward import RaggedForward

Path = tuple[str | int, ...]
# Tokens of two texts in each trial step: both begin at position 0, and the totals differ.
_STEPS = ((3, 3), (2, 3))
_TEXTS = ((5, 11, 7, 3, 9), (8, 2, 13, 6, 4, 12))


class Call(NamedTuple):
    """What a module was called with."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaves(self) -> dict[Path, torch.Tensor]:
        """Return its tensors by their path."""
        found: dict[Path, torch.Tensor] = {}
        _collect(found, (), {"args": self.args, **self.kwargs})
        return found

    def filled(self, change: Callable[[Path, Any], Any]) -> Call:
        """Return the call with every leaf changed."""
        kwargs = _rebuilt((), {"args": self.args, **self.kwargs}, change)
        return Call(self.module, kwargs.pop("args"), kwargs)


def _collect(found: dict[Path, torch.Tensor], path: Path, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = value
    elif isinstance(value, dict | tuple | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            _collect(found, (*path, key), one)


def _rebuilt(path: Path, value: Any, change: Callable[[Path, Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _rebuilt((*path, key), one, change) for key, one in value.items()}
    if type(value) in {tuple, list}:
        return type(value)(_rebuilt((*path, index), one, change) for index, one in enumerate(value))
    return change(path, value)


class PositionTable:
    """One argument's rows by position, as steps bring them."""

    def __init__(self, axis: int) -> None:
        """``axis`` is the argument's dimension of tokens."""
        self.axis = axis
        self._rows = torch.empty(0)
        self._noted: object = None

    def note(self, leaf: torch.Tensor, positions: torch.Tensor, step: object) -> None:
        """Keep a step's rows, once; ``positions`` int64 ``[total_q]``."""
        if self._noted is step:
            return
        self._noted = step
        rows = leaf.movedim(self.axis, 0)
        needed = int(positions.max()) + 1
        if needed > len(self._rows):
            grown = rows.new_zeros(max(needed, 2 * len(self._rows)), *rows.shape[1:])
            if len(self._rows):
                grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._rows[positions.to(rows.device)] = rows

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the argument as it is for tokens at ``positions``."""
        return self._rows[positions.to(self._rows.device)].movedim(0, self.axis)


class LayerInputs:
    """One layer's way from input states to K and V.

    Attributes:
        module: its attention module.
        width: of its input states.
    """

    def __init__(
        self, layer: int, module: torch.nn.Module, states: Path, width: int, tables: dict[Path, PositionTable]
    ) -> None:
        self.layer = layer
        self.module = module
        self.width = width
        self._states = states
        self._tables = tables

    def note(self, call: Call, positions: torch.Tensor, step: object) -> torch.Tensor:
        """Return a call's input states ``[total_q, width]``, having kept what follows from positions."""
        leaves = call.leaves()
        for path, table in self._tables.items():
            table.note(leaves[path], positions, step)
        return leaves[self._states][0]

    def recover(self, call: Call, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V ``[n, num_kv_heads, dim]`` of tokens by their input states ``[n, width]``.

        ``call`` is one of this step's: what is neither states nor positions is as it says.
        """

        def change(path: Path, value: Any) -> Any:
            if path == self._states:
                return states.unsqueeze(0)
            if path in self._tables:
                return self._tables[path].at(positions)
            return _Recorder(value) if isinstance(value, RaggedCache) else value

        again = call.filled(change)
        try:
            again.module(*again.args, **again.kwargs)
        except _Stored as stored:
            return stored.k[0].transpose(0, 1), stored.v[0].transpose(0, 1)
        raise UnsupportedModel(f"layer {self.layer} must store K and V each time it runs, did not")


class _Stored(Exception):  # noqa: N818  (no error: it ends a module's run where K and V are known)
    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.k, self.v = k, v


class _Recorder(RaggedCache):
    """A cache that hands over what is stored first, and ends the run there."""

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__(cache.spec, cache.store, cache.batch, cache.specs)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise _Stored(key_states, value_states)


class _Watcher(ProbeStore):
    """Notes which module was running when a layer stored its K and V, and what it was called with."""

    def __init__(self, forward: RaggedForward) -> None:
        super().__init__(forward.spec)
        self._model = forward.model
        self._running: list[Call] = []
        self.calls: dict[int, Call] = {}
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        self.calls[layer], self.kv[layer] = self._running[-1], (k.clone(), v.clone())
        super().write(layer, k, v, batch)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the model's modules in and out."""

        def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(Call(module, args, kwargs))

        def leave(*_: object) -> None:
            self._running.pop()

        handles = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@torch.inference_mode()
def find_layer_inputs(forward: RaggedForward, layers: Sequence[int]) -> dict[int, LayerInputs]:
    """Return how each of ``layers`` gets its K and V from its input states, proved on two ragged steps.

    Raises:
        UnsupportedModel: a layer's K and V need more than its input states and positions, or do not come out equal.
    """
    watcher, routes = _Watcher(forward), LayerRoutes()
    steps: list[tuple[torch.Tensor, dict[int, Call], dict[int, tuple[torch.Tensor, torch.Tensor]]]] = []
    starts = [0, 0]
    for counts in _STEPS:
        rows = [
            [token % forward.spec.vocab_size for token in text[start : start + count]]
            for text, start, count in zip(_TEXTS, starts, counts, strict=True)
        ]
        batch = watcher.begin_step(rows, starts, torch.device(forward.model.device))
        with watcher.watching():
            forward(forward.cache(watcher, batch, routes, learning=True))
        steps.append((batch.position_ids, dict(watcher.calls), dict(watcher.kv)))
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    changed = sorted(routes.gathered.intersection(layers))
    if changed:
        raise UnsupportedModel(f"layer {changed[0]} must attend to the K and V that it stores, it changes them first")
    shared: dict[tuple[int, int], PositionTable] = {}
    found = {
        layer: _read_calls(layer, [calls[layer] for _, calls, _ in steps], steps[0][0], shared) for layer in layers
    }
    for layer, inputs in found.items():
        _prove(inputs, [(positions, calls[layer], kv[layer]) for positions, calls, kv in steps])
    return found


def _read_calls(
    layer: int, calls: list[Call], positions: torch.Tensor, shared: dict[tuple[int, int], PositionTable]
) -> LayerInputs:
    """Tell a module's arguments apart by two steps of different totals, the first of two texts from position 0."""
    first, second = (call.leaves() for call in calls)
    if first.keys() != second.keys() or calls[0].module is not calls[1].module:
        raise UnsupportedModel(f"layer {layer} must be called alike in every step")
    states: list[Path] = []
    tables: dict[Path, PositionTable] = {}
    half = len(positions) // 2
    for path, leaf in first.items():
        axes = [axis for axis, (a, b) in enumerate(zip(leaf.shape, second[path].shape, strict=True)) if a != b]
        if not axes:
            continue
        rows = leaf.movedim(axes[0], 0)
        if torch.equal(rows[:half], rows[half:]):
            tables[path] = shared.setdefault((id(leaf), axes[0]), PositionTable(axes[0]))
        elif leaf.dim() == 3 and axes == [1]:
            states.append(path)
        else:
            raise UnsupportedModel(f"layer {layer} takes {path} of shape {tuple(leaf.shape)}, which is no input state")
    if len(states) != 1:
        raise UnsupportedModel(f"layer {layer} must get K and V from one tensor of input states, takes {states}")
    return LayerInputs(layer, calls[0].module, states[0], first[states[0]].shape[-1], tables)


def _prove(inputs: LayerInputs, steps: list[tuple[torch.Tensor, Call, tuple[torch.Tensor, torch.Tensor]]]) -> None:
    """Recover the K and V of all steps at once, last token first, and compare with what was stored."""
    states = torch.cat([inputs.note(call, positions, call) for positions, call, _ in steps]).flip(0)
    positions = torch.cat([positions for positions, _, _ in steps]).flip(0)
    recovered = inputs.recover(steps[-1][1], states, positions)
    for name, one, stored in zip("KV", recovered, zip(*(kv for _, _, kv in steps), strict=True), strict=True):
        expected = torch.cat(stored).flip(0)
        allowed = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.max() - expected.min())
        error = float((one - expected).abs().max())
        if not error <= allowed:
            raise UnsupportedModel(
                f"layer {inputs.layer} must give the same {name} from the same input states, differs by {error:.3g}, "
                f"allowed are {allowed:.3g}"
            )

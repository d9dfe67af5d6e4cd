"""Checks for a cache backend of your own: a state machine that holds it against plain dense attention.

Takes a function that makes the backend, gives an error where it breaks the protocol `pagedkv.backend.CacheBackend`,
and refuses to know how it keeps memory. Needs Hypothesis; nothing else in the package imports this module.

    def test_my_backend():
        check_cache_backend(lambda spec: MyBackend(spec))
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from pagedkv.allocator import OutOfPages
from pagedkv.attention import LayerSpec
from pagedkv.spec import KVSpec, LayerKV

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pagedkv.backend import CacheBackend, CacheSequence, StepBatch

NUM_Q_HEADS = 4
MAX_LEN = 48
MAX_SEQUENCES = 6
_TOKENS = st.integers(0, 2)


class BackendError(AssertionError):
    """A backend did what the protocol forbids; the message says what."""


def backend_spec(window: int | None = None) -> KVSpec:
    """Return what the checked backend is built for: two small layers of unlike widths, the second with ``window``."""
    layers = (
        LayerKV(num_kv_heads=2, k_dim=8, v_dim=6),
        LayerKV(num_kv_heads=2, k_dim=8, v_dim=6, window=window),
    )
    return KVSpec(layers=layers, max_len=MAX_LEN, vocab_size=16)


class DenseModel:
    """Stands for a model: Q, K and V of a token are a function of all tokens up to it, attention is a softmax.

    K and V that came from another beginning, or from another place, therefore show in the output.
    """

    def __init__(self, spec: KVSpec) -> None:
        """Take the layers' widths."""
        self.spec = spec

    def q(self, tokens: Sequence[int], layer: int) -> torch.Tensor:
        """Return queries, float32 ``[len(tokens), NUM_Q_HEADS, k_dim]``."""
        return _features(tokens, 3 * layer, NUM_Q_HEADS, self.spec.layers[layer].k_dim)

    def k(self, tokens: Sequence[int], layer: int) -> torch.Tensor:
        """Return keys, float32 ``[len(tokens), num_kv_heads, k_dim]``."""
        shape = self.spec.layers[layer]
        return _features(tokens, 3 * layer + 1, shape.num_kv_heads, shape.k_dim)

    def v(self, tokens: Sequence[int], layer: int) -> torch.Tensor:
        """Return values, float32 ``[len(tokens), num_kv_heads, v_dim]``."""
        shape = self.spec.layers[layer]
        return _features(tokens, 3 * layer + 2, shape.num_kv_heads, shape.v_dim)

    def attention(self, tokens: Sequence[int], layer: int, num_new: int) -> torch.Tensor:
        """Return what the last ``num_new`` tokens attend to, float64 ``[num_new, NUM_Q_HEADS, v_dim]``."""
        shape = self.spec.layers[layer]
        group = NUM_Q_HEADS // shape.num_kv_heads
        q = self.q(tokens, layer).double()[len(tokens) - num_new :]
        k = self.k(tokens, layer).double().repeat_interleave(group, dim=1)
        v = self.v(tokens, layer).double().repeat_interleave(group, dim=1)
        positions = torch.arange(len(tokens))
        distance = positions[len(tokens) - num_new :, None] - positions
        visible = (distance >= 0) & (distance < (shape.window or MAX_LEN + 1))
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.k_dim**-0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)


def _features(tokens: Sequence[int], salt: int, heads: int, dim: int) -> torch.Tensor:
    wave = torch.arange(1, heads * dim + 1, dtype=torch.float64)
    state, rows = 17 + 101 * salt, []
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
        rows.append(torch.sin(wave * (state % 997 + 1) * 0.37).reshape(heads, dim))
    return torch.stack(rows).float()


class BackendMachine(RuleBasedStateMachine):
    """Runs steps on the backends of ``make_backend``; `backend_machine` makes its subclasses."""

    make_backend: ClassVar[staticmethod[[KVSpec], CacheBackend]]
    window: ClassVar[int | None]
    tolerance: ClassVar[float]
    sequences: Bundle[CacheSequence] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.model = DenseModel(backend_spec(self.window))
        self.backend = self.make_backend(self.model.spec)
        for layer, shape in enumerate(self.model.spec.layers):
            self.backend.bind_layer(layer, LayerSpec(scale=shape.k_dim**-0.5, window=shape.window))
        self.histories: dict[CacheSequence, list[int]] = {}
        self.prompts: dict[CacheSequence, list[int]] = {}
        self.broken = False

    @rule(target=sequences, prompt=st.lists(_TOKENS, min_size=1, max_size=12))
    def open(self, prompt: list[int]) -> Any:
        """Ask for room, then open a sequence: what is found is a beginning of its prompt, never all."""
        if len(self.histories) == MAX_SEQUENCES:
            return multiple()
        self._ask_room(prompt)
        try:
            sequence = self.backend.open(prompt)
        except OutOfPages:
            return multiple()
        stored = sequence.num_tokens
        self._require(
            0 <= stored < len(prompt), f"open must leave a token to compute, stored {stored} of {len(prompt)}"
        )
        self._require(sequence.num_cached_tokens == stored, "num_cached_tokens must be what open found")
        self.histories[sequence], self.prompts[sequence] = prompt[:stored], prompt
        return sequence

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: CacheSequence) -> Any:
        """Make a second sequence of the same tokens."""
        if len(self.histories) == MAX_SEQUENCES:
            return multiple()
        before = self._state()
        try:
            child = parent.fork()
        except OutOfPages:
            self._require(before == self._state(), "a fork that raises must change nothing")
            return multiple()
        self._require(child.num_tokens == parent.num_tokens, "a fork must have its parent's tokens")
        self.histories[child], self.prompts[child] = list(self.histories[parent]), self.prompts[parent]
        return child

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: CacheSequence, share: float) -> None:
        """Cut a sequence."""
        length = int(share * sequence.num_tokens)
        sequence.truncate(length)
        self._require(
            sequence.num_tokens == length, f"truncate({length}) must leave as many, left {sequence.num_tokens}"
        )
        self.histories[sequence] = self.histories[sequence][:length]

    @rule(sequence=consumes(sequences))
    def close(self, sequence: CacheSequence) -> None:
        """Let a sequence go; its handle is dead."""
        sequence.close()
        del self.histories[sequence], self.prompts[sequence]
        try:
            sequence.fork()
        except Exception:
            return
        self._require(False, "a sequence must not be used after close")

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Run a step over any sequences: all or nothing, every output that of the sequence's own text."""
        if not self.histories:
            return
        chosen = data.draw(st.lists(st.sampled_from(list(self.histories)), unique=True, min_size=1))
        rows = {sequence: self._next_tokens(sequence, data.draw) for sequence in chosen}
        rows = {sequence: row for sequence, row in rows.items() if row}
        if not rows:
            return
        before = self._state()
        rooms = [sequence.room(len(row)) for sequence, row in rows.items()]
        self._require(before == self._state(), "room must change nothing")
        try:
            batch = self.backend.begin_step(rows)
        except OutOfPages:
            self._require(before == self._state(), "a step that does not fit must change nothing")
            self._require(len(rows) > 1 or not rooms[0].fits, f"room said that the step fits: {rooms[0]}")
            return
        self._run_layers(batch, rows)
        self._finish(batch, rows, data.draw)

    def _next_tokens(self, sequence: CacheSequence, draw: Callable[[Any], Any]) -> list[int]:
        """Return what is next to be fed: tokens of which nothing is stored yet, then new ones."""
        history, prompt = self.histories[sequence], self.prompts[sequence]
        new: list[int] = draw(st.lists(_TOKENS, min_size=1, max_size=6))
        rest = prompt[len(history) :]
        fed = (rest[: len(new)] + new[len(rest) :])[: len(new)]
        return [*history[sequence.num_tokens :], *fed] if len(history) + len(fed) <= MAX_LEN else []

    def _run_layers(self, batch: StepBatch, rows: Mapping[CacheSequence, list[int]]) -> None:
        model = self.model
        order = batch.sequences
        self._require(list(order) == list(rows), "batch.sequences must be in the order of the inputs")
        texts = [self.histories[seq][: seq.num_tokens] + rows[seq] for seq in order]
        counts = [len(rows[seq]) for seq in order]

        def new_rows(of: Callable[[Sequence[int], int], torch.Tensor], layer: int) -> torch.Tensor:
            parts = [of(text, layer)[-count:] for text, count in zip(texts, counts, strict=True)]
            return torch.cat(parts)

        fed = [token for seq in order for token in rows[seq]]
        self._require(batch.input_ids.tolist() == fed, "batch.input_ids must be the inputs, row after row")
        places = [at for text, n in zip(texts, counts, strict=True) for at in range(len(text) - n, len(text))]
        self._require(batch.position_ids.tolist() == places, "batch.position_ids must be the text's own positions")
        for layer in range(len(model.spec.layers)):
            self.backend.write(layer, new_rows(model.k, layer), new_rows(model.v, layer), batch)
            out = self.backend.attend(layer, new_rows(model.q, layer), batch)
            expected = torch.cat([model.attention(t, layer, n) for t, n in zip(texts, counts, strict=True)])
            self._require(
                out.shape == expected.shape, f"attend must return {tuple(expected.shape)}, {tuple(out.shape)}"
            )
            gap = (out.double() - expected).abs().max().item()
            self._require(gap <= self.tolerance, f"layer {layer} must attend to its own text, was off by {gap}")
            self._require_gathered(layer, batch, texts, counts)

    def _require_gathered(
        self, layer: int, batch: StepBatch, texts: Sequence[list[int]], counts: Sequence[int]
    ) -> None:
        """Check that what is handed out is what was stored, of all positions that a query of the step sees."""
        held = self.backend.held_positions(layer, batch)
        for text, count, positions in zip(texts, counts, held, strict=True):
            seen = min(len(text), len(text) if self.window is None else self.window - 1 + count)
            self._require(
                positions[-seen:].tolist() == list(range(len(text) - seen, len(text))),
                f"held_positions of layer {layer} must end in the last {seen} of {len(text)}, was {positions.tolist()}",
            )
        for name, states, of in zip("KV", self.backend.gather(layer, batch), (self.model.k, self.model.v), strict=True):
            stored = torch.cat([of(text, layer)[at.tolist()] for text, at in zip(texts, held, strict=True)])
            same = states.shape == stored.shape and bool(((states - stored).abs() <= self.tolerance).all())
            self._require(same, f"gather must return the stored {name} of layer {layer}, row after row")

    def _finish(self, batch: StepBatch, rows: Mapping[CacheSequence, list[int]], draw: Callable[[Any], Any]) -> None:
        starts = {sequence: sequence.num_tokens for sequence in rows}
        end = draw(st.sampled_from(["all", "some", "abandon"]))
        keep = {seq: draw(st.integers(0, len(row))) for seq, row in rows.items()} if end == "some" else None
        if end == "abandon":
            self.backend.abandon_step(batch)
        else:
            self.backend.end_step(batch, keep=keep)
        for sequence, row in rows.items():
            kept = 0 if end == "abandon" else len(row) if keep is None else keep[sequence]
            # A backend may keep nothing between steps: then it stays at 0 and is fed everything again.
            allowed = {starts[sequence] + kept} | ({0} if starts[sequence] == 0 else set())
            stored = sequence.num_tokens
            self._require(stored in allowed, f"after a step num_tokens must be {max(allowed)}, was {stored}")
            if stored:
                self.histories[sequence] = self.histories[sequence][: starts[sequence]] + row[:kept]
            elif end == "all":
                self.histories[sequence] = row

    def _ask_room(self, prompt: list[int]) -> None:
        before = self._state()
        room = self.backend.room(prompt)
        self._require(before == self._state(), "room must change nothing")
        self._require(self.backend.room(prompt) == room, "room asked twice must say the same")

    def _state(self) -> object:
        return self.backend.usage(), [sequence.num_tokens for sequence in self.histories]

    @invariant()
    def sound(self) -> None:
        """Look whether what is stored lies in what is held."""
        usage = self.backend.usage()
        self._require(min(usage) >= 0, f"usage must not be negative, was {usage}")
        self._require(usage.tokens_stored <= usage.slots_held, f"tokens need slots: {usage}")
        self._require(usage.bytes_used <= usage.bytes_held, f"tokens need bytes: {usage}")

    def teardown(self) -> None:
        """Close everything: nothing is left."""
        if self.broken:
            return
        for sequence in self.histories:
            sequence.close()
        usage = self.backend.usage()
        self._require(usage.in_use == 0, f"nothing may be held when all sequences are closed, was {usage}")

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            self.broken = True  # so that the complaint is this one, and not what is still held
            raise BackendError(message)


def backend_machine(
    make_backend: Callable[[KVSpec], CacheBackend], *, window: int | None = None, tolerance: float = 1e-5
) -> type[BackendMachine]:
    """Return a Hypothesis state machine that runs steps on a backend and compares every output with dense attention.

    Args:
        make_backend: makes an empty backend for a spec, float32, on the CPU; give it so little memory that it runs out
            at times (a few dozen tokens), or room and atomicity are hardly tested.
        window: of the second layer; None where the backend knows no windows.
        tolerance: largest difference to float64 attention; more for a backend that quantises.
    """
    bound = {"make_backend": staticmethod(make_backend), "window": window, "tolerance": tolerance}
    return type("CheckedBackendMachine", (BackendMachine,), bound)


def check_cache_backend(
    make_backend: Callable[[KVSpec], CacheBackend],
    *,
    window: int | None = None,
    tolerance: float = 1e-5,
    settings: hypothesis_settings | None = None,
) -> None:
    """Drive backends of ``make_backend`` through random steps; see `backend_machine`.

    Raises:
        BackendError: a backend broke the protocol; Hypothesis prints the shortest sequence of operations it found.
    """
    settings = settings or hypothesis_settings(max_examples=25, stateful_step_count=25, deadline=None)
    machine = backend_machine(make_backend, window=window, tolerance=tolerance)
    run_state_machine_as_test(machine, settings=settings)

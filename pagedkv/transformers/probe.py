"""The check at the door: a few tokens through a model, ragged and in chunks, against its own eager attention.

Takes a `RaggedForward`, gives how each layer attends, and refuses a model whose answers differ. It catches what
no list of models could: attention past the interface, positions taken from elsewhere, a layer that looks at the
cache on the side. The cache behind it is two pages and the reference operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedkv.attention import AttentionBatch, LayerSpec, paged_attention, write_kv
from pagedkv.backend import StepBatch
from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.ragged_cache import LayerRoutes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagedkv.spec import KVSpec
    from pagedkv.transformers.forward import RaggedForward

_PAGE_SIZE = 8
# (tokens of the first sequence, tokens of the second) per step: a whole prompt beside a chunk, then a decode
# step beside the rest.
_STEPS = ((3, 2), (1, 3))


class ProbeStore:
    """K and V of two short sequences, of at most ``page_size`` tokens each: sequence ``i`` is page ``i + 1``.

    Attention is ``backend``'s, by default the reference's.
    """

    def __init__(self, spec: KVSpec, page_size: int = _PAGE_SIZE, backend: str | None = "reference") -> None:
        self._layers = spec.layers
        self._page_size = page_size
        self._backend = backend
        self._pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._specs: dict[int, LayerSpec] = {}

    def begin_step(self, tokens: list[list[int]], starts: list[int], device: torch.device) -> StepBatch:
        """Lay out the next tokens of both sequences."""
        batch = StepBatch(range(len(tokens)), tokens, starts, device)
        ends = [start + len(row) for start, row in zip(starts, tokens, strict=True)]
        slots = [
            (page + 1) * self._page_size + position
            for page, (start, end) in enumerate(zip(starts, ends, strict=True))
            for position in range(start, end)
        ]
        self._slots = torch.tensor(slots)
        lengths = torch.tensor([0, *batch.q_lens], dtype=torch.int32)
        self._attention = (torch.tensor(ends, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32))
        self._longest = (max(batch.q_lens), max(ends))
        return batch

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """Say how ``layer`` attends."""
        self._specs[layer] = spec

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store the step's K and V of ``layer``, on the device where they are."""
        if layer not in self._pages:
            self._pages[layer] = (self._pages_like(k), self._pages_like(v))
        write_kv(k, v, *self._pages[layer], self._slots.to(k.device))

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Attend by the store's backend."""
        kv_lens, cu_q_lens = (part.to(q.device) for part in self._attention)
        tables = torch.arange(1, len(batch.q_lens) + 1, dtype=torch.int32, device=q.device).unsqueeze(1)
        attention = AttentionBatch(tables, kv_lens, cu_q_lens, *self._longest)
        return paged_attention(q, *self._pages[layer], attention, self._specs[layer], backend=self._backend)

    def _pages_like(self, states: torch.Tensor) -> torch.Tensor:
        _, num_heads, dim = states.shape
        return states.new_zeros(len(_STEPS[0]) + 1, num_heads, self._page_size, dim)

    def gather(self, layer: int, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of both sequences, one after the other, ``[total_kv, num_kv_heads, dim]``."""
        k_pages, v_pages = self._pages[layer]
        lengths = list(enumerate(self._attention[0].tolist(), start=1))
        k, v = (torch.cat([pages[page, :, :end] for page, end in lengths], dim=1) for pages in (k_pages, v_pages))
        return k.transpose(0, 1), v.transpose(0, 1)

    def held_positions(self, layer: int, batch: StepBatch) -> list[NDArray[np.int64]]:
        """Return all positions of both sequences."""
        return [np.arange(end) for end in self._attention[0].tolist()]


def learn_layers(forward: RaggedForward) -> LayerRoutes:
    """Return how each layer that attends does so, after the model has proved that it can be routed.

    Random number generators are as before.

    Raises:
        UnsupportedModel: if the model fails on a ragged step, or its logits differ from its own eager attention.
    """
    device = torch.device(forward.model.device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        texts = _texts(forward.spec)
        expected = [forward.stock(text) for text in texts]
        store = ProbeStore(forward.spec)
        gathered = {index for index, layer in enumerate(forward.spec.layers) if layer.chunked}
        routes = LayerRoutes(gathered=gathered)
        starts = [0] * len(texts)
        for counts in _STEPS:
            rows = [text[start : start + n] for text, start, n in zip(texts, starts, counts, strict=True)]
            batch = store.begin_step(rows, starts, device)
            cache = forward.cache(store, batch, routes, learning=True)
            try:
                logits = forward(cache)
            except (UnsupportedModel, torch.OutOfMemoryError):
                raise
            except Exception as error:
                name = type(forward.model).__name__
                raise UnsupportedModel(f"{name} fails on a ragged step: {type(error).__name__}: {error}") from error
            _require_layers(forward, set(cache.written), cache.mask_windows)
            starts = [start + n for start, n in zip(starts, counts, strict=True)]
            _require_equal(
                forward, logits, torch.stack([one[end - 1] for one, end in zip(expected, starts, strict=True)])
            )
    return routes


def trial_tokens(count: int, vocab_size: int) -> list[int]:
    """Return so many tokens of a text to try a model with: none of them 0, seldom two alike."""
    return [1 + 37 * i % (vocab_size - 1) for i in range(1, count + 1)]


def _texts(spec: KVSpec) -> list[list[int]]:
    lengths = [sum(counts) for counts in zip(*_STEPS, strict=True)]
    ids = trial_tokens(sum(lengths), spec.vocab_size)
    return [ids[: lengths[0]], ids[lengths[0] :]]


def _require_layers(forward: RaggedForward, written: set[int], mask_windows: set[int | None]) -> None:
    name = type(forward.model).__name__
    expected = {index for index, layer in enumerate(forward.spec.layers) if layer.num_kv_heads}
    if written != expected:
        raise UnsupportedModel(
            f"{name} must store K and V of the layers that its config names, misses {sorted(expected - written)} "
            f"and adds {sorted(written - expected)}"
        )
    windows = {layer.window for layer in forward.spec.layers if layer.num_kv_heads}
    if not windows <= mask_windows:
        raise UnsupportedModel(
            f"{name} must attend within the windows of its config, {windows}, asks for {mask_windows}"
        )


def _require_equal(forward: RaggedForward, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare within half the digits of the model's dtype, relative to the spread of the logits.

    Leaving out the history moves logits by a tenth of their spread and more; rounding moves them by 1e-6 of it in
    float32.
    """
    name = type(forward.model).__name__
    if logits.shape != expected.shape:
        raise UnsupportedModel(f"{name} must give logits {tuple(expected.shape)}, gives {tuple(logits.shape)}")
    spread = float(expected.max() - expected.min())
    error = float((logits - expected).abs().max())
    allowed = torch.finfo(forward.model.dtype).eps ** 0.5 * spread
    if not error <= allowed:
        raise UnsupportedModel(
            f"{name} gives other logits on a ragged step than by its own eager attention: they differ by {error:.3g}, "
            f"allowed are {allowed:.3g} ({forward.model.dtype})"
        )

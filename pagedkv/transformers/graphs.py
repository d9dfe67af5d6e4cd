"""Decode steps as CUDA graphs: a step's kernels are launched by one call, whatever Python would have cost.

Takes a forward and a backend that can pad a step, gives logits, and refuses nothing: a step that is not pure decode
is not served, and the runner runs it as it is. A graph is captured when a padded batch size first occurs, and
replayed on the same memory from then on. Its grids are sized for the cache's longest sequence; programs past a
sequence's own length leave at once, and padding rows, of length 0, do nothing and write to the null page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import torch

from pagedkv.transformers.ragged_cache import LayerStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.backend import StepBatch
    from pagedkv.transformers.forward import RaggedForward
    from pagedkv.transformers.ragged_cache import LayerRoutes

    Capture: TypeAlias = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]

LARGEST = 256
"""Sequences of the largest captured step; beyond it the device is busy and launches are hidden."""
_STEP = 8


@runtime_checkable
class PaddingBackend(LayerStore, Protocol):
    """A cache backend whose decode steps can be padded, in memory that stays where it is."""

    def can_pad(self, batch: StepBatch) -> bool:
        """Whether `pad_step` takes the step: one token of each sequence, known by its id; layers on one device."""

    def pad_step(self, batch: StepBatch, rows: int) -> StepBatch:
        """Return the step in flight as one of ``rows`` rows; ``write`` and ``attend`` take it in the step's place."""


def padded_rows(rows: int) -> int:
    """Return the rows that a step of ``rows`` is padded to: 1, 2, 4, then multiples of 8."""
    return 1 << (rows - 1).bit_length() if rows <= _STEP else -(-rows // _STEP) * _STEP


class DecodeGraphs:
    """Captured decode steps by padded batch size.

    Args:
        forward: the model.
        backend: where K and V go; its padded steps must keep their addresses.
        routes: how each layer attends; none may be gathered.
        capture: makes a function that computes again what the given one computes, on the same memory; by default
            `capture_cuda`.
    """

    def __init__(
        self,
        forward: RaggedForward,
        backend: PaddingBackend,
        routes: LayerRoutes,
        capture: Capture | None = None,
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._routes = routes
        self._capture = capture_cuda if capture is None else capture
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}

    def serves(self, batch: StepBatch) -> bool:
        """Whether the step is pure decode that the backend can pad, and not too large."""
        return len(batch.q_lens) <= LARGEST and self._backend.can_pad(batch)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Return float32 logits ``[num_sequences, vocab]`` of a step that `serves`; they are the caller's to keep.

        Raises:
            RuntimeError: if the model cannot be captured (it waits for the device, say): pass ``cuda_graphs=False``.
        """
        rows = padded_rows(len(batch.q_lens))
        padded = self._backend.pad_step(batch, rows)
        if rows not in self._replays:

            def step() -> torch.Tensor:
                return self._forward(self._forward.cache(self._backend, padded, self._routes))

            try:
                self._replays[rows] = self._capture(step)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise RuntimeError(
                    f"the step cannot be captured as a CUDA graph, use cuda_graphs=False: {error}"
                ) from error
        return self._replays[rows]()[: len(batch.q_lens)].clone()


def capture_cuda(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture ``step`` as a CUDA graph, after running it once to compile kernels and fill library caches.

    Running it twice is harmless: a step writes the same K and V to the same slots.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay

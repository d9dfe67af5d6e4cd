"""The arguments of one call, bundled as they travel from the door through the choice to a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

    from .batch import AttentionBatch
    from .layer_spec import LayerSpec

    Scales: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class AttendCall(NamedTuple):
    """Arguments of `pagedkv.attention.paged_attention`; ``out`` None asks for a new contiguous tensor.

    ``kept`` is the backend's: what it puts there under a key of its own it finds again at each later call of the layer
    that has the same page tensors and otherwise tensors that look the same, whatever the step.
    """

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: AttentionBatch
    spec: LayerSpec
    kv_scales: Scales | None
    out: torch.Tensor | None
    kept: dict[str, Any]


class WriteCall(NamedTuple):
    """Arguments of `pagedkv.attention.write_kv`; ``kept`` as in `AttendCall`."""

    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    slot_mapping: torch.Tensor
    kv_scales: Scales | None
    kept: dict[str, Any]

"""What was proved of a layer's calls, so that later calls like them are not proved again.

Takes the arguments of a call and gives the proof that covers them, or None. A model calls the operator once per layer
and step, with the same page tensors and with queries that differ in nothing but their number; reading every shape,
stride, dtype and device anew would cost more than comparing them, which a short decode would feel.

A proof belongs to its page tensors: it names them by identity and address, and goes when they go. Everything of the
other tensors that a check or a choice may read is compared at every call; the number of query rows is not among it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from .batch import AttentionBatch

if TYPE_CHECKING:
    from .backends import Backend
    from .calls import AttendCall, Scales, WriteCall
    from .layer_spec import LayerSpec

_MOST_SPECS = 16
"""Layers that may share one pair of page tensors with their proofs kept; more start over."""


class AttendProof:
    """A call of `paged_attention` that passed the door, and the backend that serves it.

    Attributes:
        backend: what was chosen.
        kept: what the backend keeps for the calls that this proof covers.
        out_like_q: whether a new output has the shape and strides of the queries.
    """

    __slots__ = (
        "_batch_looks",
        "_device",
        "_dtype",
        "_name",
        "_on_cpu",
        "_out_strides",
        "_shape",
        "_spec",
        "_strides",
        "backend",
        "kept",
        "out_like_q",
    )

    def __init__(self, call: AttendCall, name: str | None, backend: Backend) -> None:
        q, out = call.q, call.out
        self._name, self._spec, self._batch_looks = name, call.spec, call.batch.looks
        self._shape, self._strides, self._dtype, self._device = q.shape, q.stride(), q.dtype, q.device
        self._on_cpu = q.device.type == "cpu"
        self._out_strides = None if out is None else out.stride()
        _, heads, k_dim = q.shape
        self.out_like_q = call.v_pages.shape[3] == k_dim and self._strides == (heads * k_dim, k_dim, 1)
        self.backend = backend
        self.kept = call.kept

    def covers(
        self, q: torch.Tensor, batch: AttentionBatch, spec: LayerSpec, out: torch.Tensor | None, name: str | None
    ) -> bool:
        """Whether a call is like this one in all that was checked, its page tensors being this one's.

        A given ``out`` has to be checked for its own: its shape follows the number of query rows.
        """
        return (
            type(q) is torch.Tensor
            and type(batch) is AttentionBatch
            and spec is self._spec
            and name == self._name
            and q.dtype is self._dtype
            and q.stride() == self._strides
            and (q.shape == self._shape or q.shape[1:] == self._shape[1:])
            and (q.is_cpu if self._on_cpu else q.device == self._device)
            and batch.looks == self._batch_looks
            and (None if out is None else out.stride()) == self._out_strides
        )


class WriteProof:
    """A call of `write_kv` that passed the door, and the backend that serves it; attributes as in `AttendProof`."""

    __slots__ = (
        "_device",
        "_dtypes",
        "_k_strides",
        "_name",
        "_on_cpu",
        "_shapes",
        "_slot_stride",
        "_v_strides",
        "backend",
        "kept",
    )

    def __init__(self, call: WriteCall, name: str | None, backend: Backend) -> None:
        k, v = call.k, call.v
        self._name, self._device, self._on_cpu = name, k.device, k.device.type == "cpu"
        self._shapes = k.shape, v.shape, call.slot_mapping.shape
        self._k_strides, self._v_strides = k.stride(), v.stride()
        self._dtypes = k.dtype, v.dtype, torch.int64
        self._slot_stride = call.slot_mapping.stride()
        self.backend = backend
        self.kept = call.kept

    def covers(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, name: str | None) -> bool:
        """Whether a call is like this one in all that was checked, its page tensors being this one's."""
        return (
            type(k) is torch.Tensor
            and type(v) is torch.Tensor
            and type(slot_mapping) is torch.Tensor
            and name == self._name
            and k.stride() == self._k_strides
            and v.stride() == self._v_strides
            and slot_mapping.stride() == self._slot_stride
            and (k.dtype, v.dtype, slot_mapping.dtype) == self._dtypes
            and self._are_shapes(k.shape, v.shape, slot_mapping.shape)
            and (
                k.is_cpu and v.is_cpu and slot_mapping.is_cpu
                if self._on_cpu
                else k.device == v.device == slot_mapping.device == self._device
            )
        )

    def _are_shapes(self, k: torch.Size, v: torch.Size, slots: torch.Size) -> bool:
        """Whether the shapes are those proved but for the number of tokens, which is the same in all."""
        return (k, v, slots) == self._shapes or (
            k[1:] == self._shapes[0][1:] and v[1:] == self._shapes[1][1:] and (k[0],) == (v[0],) == slots
        )


class LayerPages:
    """A layer's page tensors with the proofs that hold for them.

    Attributes:
        attends: proofs of attention, by the identity of the layer's spec.
        write: the proof of the last write.
    """

    __slots__ = ("_k_address", "_k_pages", "_kv_scales", "_v_address", "_v_pages", "attends", "write")

    def __init__(self, k_pages: torch.Tensor, v_pages: torch.Tensor, kv_scales: Scales | None) -> None:
        key = id(k_pages)
        self._k_pages = weakref.ref(k_pages, lambda _: _KNOWN.pop(key, None))
        self._v_pages = weakref.ref(v_pages)
        self._kv_scales = kv_scales
        self._k_address, self._v_address = k_pages.data_ptr(), v_pages.data_ptr()
        self.attends: dict[int, AttendProof] = {}
        self.write: WriteProof | None = None

    def are(self, k_pages: torch.Tensor, v_pages: torch.Tensor, kv_scales: Scales | None) -> bool:
        """Whether these are the very tensors, still at their places."""
        return (
            self._k_pages() is k_pages
            and self._v_pages() is v_pages
            and self._kv_scales is kv_scales
            and k_pages.data_ptr() == self._k_address
            and v_pages.data_ptr() == self._v_address
        )

    def remember(self, spec: LayerSpec, proof: AttendProof) -> None:
        """Keep the proof of a layer that has these pages."""
        if len(self.attends) >= _MOST_SPECS:
            self.attends.clear()
        self.attends[id(spec)] = proof


_KNOWN: dict[int, LayerPages] = {}
"""By the identity of K's page tensor; an entry goes when the tensor does."""


def known_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, kv_scales: Scales | None) -> LayerPages | None:
    """Return what is known of these page tensors, None if they were not met together before."""
    found = _KNOWN.get(id(k_pages))
    return found if found is not None and found.are(k_pages, v_pages, kv_scales) else None


def remember_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, kv_scales: Scales | None) -> LayerPages:
    """Return what is known of page tensors that have passed the door, made where there is nothing."""
    found = known_pages(k_pages, v_pages, kv_scales)
    if found is None:
        found = _KNOWN[id(k_pages)] = LayerPages(k_pages, v_pages, kv_scales)
    return found

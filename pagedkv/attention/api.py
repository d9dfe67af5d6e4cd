"""The public operator: read through block tables, write by slot, copy pages.

Takes tensors and says what is wrong with them, chooses a backend, makes one call. No arithmetic happens here, and no
backend is imported before it is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .backends import choose
from .batch import AttentionBatch
from .calls import AttendCall, WriteCall
from .checks import (
    check_attend,
    check_copies_contents,
    check_copy,
    check_out,
    check_slots_contents,
    check_write,
)
from .layer_spec import LayerSpec
from .proofs import AttendProof, WriteProof, known_pages, remember_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .calls import Scales


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    spec: LayerSpec,
    *,
    kv_scales: Scales | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    check: bool = False,
) -> torch.Tensor:
    """Attend from every query to what its sequence has stored, through the block tables.

    One call serves prefill, chunks, decode and any mix. Query ``i`` of a sequence stands at ``kv_len - q_len + i`` and
    sees what is not after it and inside the window, or among the first ``num_sink_tokens``. A query that sees nothing
    gives exactly 0. Query head ``h`` reads KV head ``h // (num_q_heads / num_kv_heads)``. K and V are read from the
    pages only, never from anything the step has not written. A row's output depends on its own sequence alone, bit
    for bit, whoever else is in the batch. No gradients.

    Args:
        q: ``[total_q, num_q_heads, k_dim]``, float32, bfloat16 or float16 (float64: reference only), any strides.
        k_pages: ``[num_pages, num_kv_heads, page_size, k_dim]`` in q's dtype, or int8 or float8_e4m3fn.
        v_pages: ``[num_pages, num_kv_heads, page_size, v_dim]`` in k_pages' dtype.
        batch: the step's tables and lengths.
        spec: the layer's arithmetic.
        kv_scales: ``(k_scales, v_scales)``, each float32 ``[num_pages, num_kv_heads, page_size]``, for quantised pages.
        out: ``[total_q, num_q_heads, v_dim]`` in q's dtype, any strides; written in full, nothing beside it. It must
            not share memory with the inputs. Made if None.
        backend: a name of `backend_names`, or None to choose. A named one that cannot serve the call raises.
        check: also prove the contents of ``batch`` (waits for the device).

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: an argument is wrong, or no backend can serve it; nothing was written.
    """
    pages = known_pages(k_pages, v_pages, kv_scales)
    proof = None if pages is None else pages.attends.get(id(spec))
    if proof is None or not proof.covers(q, batch, spec, out, backend):
        proof = _attend_proof(AttendCall(q, k_pages, v_pages, batch, spec, kv_scales, out, {}), backend)
    elif out is not None:
        check_out(out, q, v_pages)
    if check:
        batch.check_contents(num_pages=k_pages.shape[0], page_size=k_pages.shape[2], total_q=q.shape[0], spec=spec)
    # AttendCall(…), half a microsecond sooner.
    call = tuple.__new__(AttendCall, (q, k_pages, v_pages, batch, spec, kv_scales, out, proof.kept))
    if torch.is_grad_enabled():  # asked first: turning them off costs 5 us, also where they are off
        with torch.no_grad():
            return _attend(call, proof)
    return _attend(call, proof)


def _attend(call: AttendCall, proof: AttendProof) -> torch.Tensor:
    q, _, v_pages, _, _, _, out, _ = call
    if out is None:
        # The same memory either way; asked for like q it comes a microsecond sooner.
        out = torch.empty_like(q) if proof.out_like_q else q.new_empty(q.shape[0], q.shape[1], v_pages.shape[3])
    proof.backend.attend(call, out)
    return out


def _attend_proof(call: AttendCall, name: str | None) -> AttendProof:
    """Check the call and choose its backend; later calls like it find what this returns."""
    if not isinstance(call.batch, AttentionBatch):
        raise TypeError(f"batch must be an AttentionBatch, got {type(call.batch).__name__}")
    if not isinstance(call.spec, LayerSpec):
        raise TypeError(f"spec must be a LayerSpec, got {type(call.spec).__name__}")
    check_attend(call)
    chosen = choose(name, call.q.device.type, lambda backend: backend.cannot_attend(call))
    proof = AttendProof(call, name, chosen)
    remember_pages(call.k_pages, call.v_pages, call.kv_scales).remember(call.spec, proof)
    return proof


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scales: Scales | None = None,
    backend: str | None = None,
    check: bool = False,
) -> None:
    """Store a step's K and V in their slots; writes ``k_pages``, ``v_pages`` and, if quantised, ``kv_scales``.

    Args:
        k: ``[total_q, num_kv_heads, k_dim]``, in k_pages' dtype, or any float dtype for quantised pages; any strides.
        v: ``[total_q, num_kv_heads, v_dim]``, likewise.
        k_pages: as in `paged_attention`.
        v_pages: as in `paged_attention`.
        slot_mapping: int64 ``[total_q]``: ``page_id * page_size + offset`` of each token. Padding goes to the null
            page, slots 0 to ``page_size - 1``; every other slot is named at most once.
        kv_scales: as in `paged_attention`; each written slot gets its scales.
        backend: as in `paged_attention`.
        check: also prove the contents of ``slot_mapping`` (waits for the device).

    Raises:
        TypeError, ValueError: an argument is wrong, or no backend can serve it; nothing was written.
    """
    pages = known_pages(k_pages, v_pages, kv_scales)
    proof = None if pages is None else pages.write
    if proof is None or not proof.covers(k, v, slot_mapping, backend):
        proof = _write_proof(WriteCall(k, v, k_pages, v_pages, slot_mapping, kv_scales, {}), backend)
    if check:
        check_slots_contents(slot_mapping, k_pages.shape[0], k_pages.shape[2])
    call = tuple.__new__(WriteCall, (k, v, k_pages, v_pages, slot_mapping, kv_scales, proof.kept))
    if torch.is_grad_enabled():
        with torch.no_grad():
            proof.backend.write(call)
    else:
        proof.backend.write(call)


def _write_proof(call: WriteCall, name: str | None) -> WriteProof:
    """Check the call and choose its backend; later calls like it find what this returns."""
    check_write(call)
    chosen = choose(name, call.k_pages.device.type, lambda backend: backend.cannot_write(call))
    proof = WriteProof(call, name, chosen)
    remember_pages(call.k_pages, call.v_pages, call.kv_scales).write = proof
    return proof


def copy_pages(
    pages: torch.Tensor | Sequence[torch.Tensor],
    copies: torch.Tensor,
    *,
    backend: str | None = None,
    check: bool = False,
) -> None:
    """Copy whole pages within each tensor: all sources are read before any destination is written.

    Args:
        pages: a tensor or a sequence of tensors, ``[num_pages, …]``, any dtype: K, V and scales of every layer.
        copies: int32 or int64 ``[num_copies, 2]``: source and destination page ids; no destination twice.
        backend: as in `paged_attention`.
        check: also prove the contents of ``copies`` (waits for the device).

    Raises:
        TypeError, ValueError: an argument is wrong, or no backend can serve it; nothing was written.
    """
    tensors = (pages,) if isinstance(pages, torch.Tensor) else tuple(pages)
    check_copy(tensors, copies)
    chosen = choose(backend, copies.device.type, lambda candidate: candidate.cannot_copy(tensors, copies))
    if check:
        check_copies_contents(copies, tensors[0].shape[0])
    if copies.shape[0]:
        with torch.no_grad():
            chosen.copy(tensors, copies)

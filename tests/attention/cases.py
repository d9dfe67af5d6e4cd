"""Ragged batches over shuffled, poisoned pages, and how far from the exact answer a backend may be."""

from __future__ import annotations

from ctypes import c_char_p
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from pagedkv.attention import AttentionBatch, LayerSpec, paged_attention, write_kv
from pagedkv.attention.reference import attention
from pagedkv.native.library import LibraryUnavailableError, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.attention.calls import Scales

BACKENDS = ("cpu", "triton", "torch", "reference")
GARBAGE = (-1, 2**30)
"""What unused entries of a block table hold."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: ``rows`` are (q_len, kv_len) pairs; ``kv_dtype`` None means pages in ``dtype``."""

    rows: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    table_dtype: torch.dtype = torch.int32


@dataclass
class Case:
    """Everything that `paged_attention` takes but the layer, and the tokens that were stored."""

    shape: Shape
    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: AttentionBatch
    kv_scales: Scales | None
    stored: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def run(self, spec: LayerSpec, backend: str | None = "torch", **options: Any) -> torch.Tensor:
        """Run the operator, contents checked."""
        return paged_attention(
            self.q, self.k_pages, self.v_pages, self.batch, spec,
            kv_scales=self.kv_scales, backend=backend, check=True, **options,
        )  # fmt: skip

    def reference(self, spec: LayerSpec, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Run the specification in ``compute_dtype``."""
        return attention(
            self.q, self.k_pages, self.v_pages, self.batch, spec, kv_scales=self.kv_scales, compute_dtype=compute_dtype
        )

    def with_batch(self, batch: AttentionBatch, **changes: Any) -> Case:
        """Return the case with another batch (one batch describes one step) and other changes."""
        return replace(self, batch=batch, **changes)


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory that must not be read: NaN, or where the dtype has none, its largest value."""
    if dtype == torch.int8:
        return torch.full(tuple(shape), 127, dtype=dtype)
    return torch.full(tuple(shape), torch.nan).to(dtype)


def make_batch(
    rows: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], table_dtype: torch.dtype = torch.int32
) -> AttentionBatch:
    """Return the batch whose row ``r`` owns the pages ``tables[r]``; unused entries hold garbage."""
    width = max((len(table) for table in tables), default=0) + 2
    block_tables = torch.tensor([GARBAGE[i % 2] for i in range(width)]).repeat(len(rows), 1)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = torch.tensor(table, dtype=torch.int64)
    q_lens, kv_lens = [q for q, _ in rows], [kv for _, kv in rows]
    return AttentionBatch(
        block_tables.to(table_dtype),
        torch.tensor(kv_lens, dtype=table_dtype),
        torch.tensor([0, *q_lens]).cumsum(0).to(table_dtype),
        max(q_lens, default=0),
        max(kv_lens, default=0),
    )


def make_case(shape: Shape, seed: int = 0) -> Case:
    """Draw a case: shuffled pages, everything not stored poisoned, the null page too."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(shape.dtype)

    (num_q_heads, num_kv_heads), (k_dim, v_dim), page_size = shape.heads, shape.dims, shape.page_size
    needed = [-(-kv_len // page_size) for _, kv_len in shape.rows]
    num_pages = sum(needed) + 4
    ids = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in needed]
    kv_dtype = shape.kv_dtype or shape.dtype
    slots = (num_pages, num_kv_heads, page_size)
    k_pages, v_pages = poisoned((*slots, k_dim), kv_dtype), poisoned((*slots, v_dim), kv_dtype)
    scales = None
    if shape.kv_dtype is not None:
        scales = poisoned(slots, torch.float32), poisoned(slots, torch.float32)
    case = Case(
        shape, draw(sum(q for q, _ in shape.rows), num_q_heads, k_dim), k_pages, v_pages,
        make_batch(shape.rows, tables, shape.table_dtype), scales,
    )  # fmt: skip
    for (_, kv_len), table in zip(shape.rows, tables, strict=True):
        k, v = draw(kv_len, num_kv_heads, k_dim), draw(kv_len, num_kv_heads, v_dim)
        write_kv(k, v, k_pages, v_pages, slots_of(table, kv_len, page_size), kv_scales=scales, check=True)
        case.stored.append((k, v))
    return case


def slots_of(table: Sequence[int], length: int, page_size: int) -> torch.Tensor:
    """Return the slots of positions 0 to ``length - 1``."""
    slots = [table[position // page_size] * page_size + position % page_size for position in range(length)]
    return torch.tensor(slots, dtype=torch.int64)


def error_limit(case: Case, spec: LayerSpec, arithmetic: torch.dtype = torch.float32) -> torch.Tensor:
    """Return how far each output may be from the float64 reference.

    Four times the worst error that the reference itself makes when every operation is rounded to ``arithmetic`` (the
    dtype the backend computes in), one unit of that dtype at the size of V, and the rounding of the output's dtype.
    """
    exact = case.reference(spec)
    if exact.numel() == 0:
        return exact
    own_error = (case.reference(spec, arithmetic).double() - exact).abs().max()
    largest_v = max((float(v.abs().max()) for _, v in case.stored if v.numel()), default=0.0)
    rounding = torch.finfo(case.q.dtype)
    band = rounding.eps * exact.abs() + rounding.smallest_normal
    return 4 * own_error + torch.finfo(arithmetic).eps * largest_v + band


def assert_within_limit(
    case: Case, spec: LayerSpec, *results: torch.Tensor, operands: torch.dtype | None = None
) -> None:
    """Assert that each of ``results`` is as near to the float64 reference as its arithmetic and dtype allow.

    ``operands`` is the dtype that a matrix unit takes: weights, and dequantised V, are rounded to it, each to half a
    unit of their size, so that together they move the output by up to one unit of the largest V.
    """
    exact, limit = case.reference(spec), error_limit(case, spec)
    if operands is None and case.shape.kv_dtype is None and case.q.dtype == torch.bfloat16 and multiplies_pairs():
        operands = torch.bfloat16
    if operands is not None:
        largest_v = max((float(v.abs().max()) for _, v in case.stored if v.numel()), default=0.0)
        limit = limit + torch.finfo(operands).eps * largest_v
    for actual in results:
        excess = (actual.double() - exact).abs() - limit

        assert actual.isfinite().all()
        assert excess.numel() == 0 or excess.max() <= 0


@cache
def multiplies_pairs() -> bool:
    """Whether the CPU library rounds weights to bf16 to multiply them in pairs."""
    try:
        isa = load().functions.pagedkv_isa
    except LibraryUnavailableError:
        return False
    isa.restype = c_char_p
    return cast("bytes", isa()).endswith(b"+bf16")


def uniform_case(shape: Shape, values: torch.Tensor | None = None) -> Case:
    """Return a probe: q = 0, so each visible key weighs the same, and V holds its position (or ``values[kv_head]``)."""
    case = make_case(shape)
    case.q.zero_()
    (_, num_kv_heads), (_, v_dim) = shape.heads, shape.dims
    for row, (_, kv_len) in enumerate(shape.rows):
        positions = torch.arange(kv_len, dtype=torch.float32)[:, None, None].expand(-1, num_kv_heads, v_dim)
        v = positions if values is None else values.float()[None, :, None].expand(kv_len, num_kv_heads, v_dim)
        k, v = case.stored[row][0], v.to(shape.dtype)
        table = case.batch.block_tables[row].tolist()
        slots = slots_of(table, kv_len, shape.page_size)
        write_kv(k, v, case.k_pages, case.v_pages, slots, kv_scales=case.kv_scales, check=True)
        case.stored[row] = (k, v)
    return case

"""The "triton" backend: every feature and shape against the float64 reference, interpreted here, native on a GPU.

With PAGEDKV_TEST_DEVICE=cuda the same tests run on the device, in bf16 too, which the interpreter cannot multiply.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv.attention import AttentionBatch, LayerSpec, copy_pages, write_kv
from tests.attention.cases import Case, Shape, assert_within_limit, make_batch, make_case, poisoned, uniform_case
from tests.attention.test_matrix import FEATURES, spec_for

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE = os.environ.get("PAGEDKV_TEST_DEVICE", "cpu")
NATIVE = DEVICE != "cpu"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALVES = [FP16, BF16] if NATIVE else [FP16]
HALF = HALVES[-1]
INT8, FP8 = torch.int8, torch.float8_e4m3fn

# Long and short queries, decode, empty and unseeing rows: (40, 75) is prefill for every group size below.
MIXED = [(1, 70), (40, 75), (0, 7), (1, 0), (3, 37), (1, 1), (20, 20)]
SHORT = [(1, 21), (18, 30), (2, 9)]
SHAPES = {
    "page 1, d80, half": Shape(SHORT, dims=(80, 80), page_size=1, dtype=HALF),
    "page 2, d112, MHA": Shape(SHORT, heads=(4, 4), dims=(112, 112), page_size=2),
    "page 4, MQA of 7": Shape(SHORT, heads=(7, 1), page_size=4),
    "page 8, V narrower": Shape(SHORT, dims=(192, 128), page_size=8, dtype=HALF),
    "page 16, V wider": Shape(SHORT, dims=(32, 96), dtype=HALF),
    "page 32, d256": Shape(SHORT, heads=(4, 2), dims=(256, 256), page_size=32, dtype=HALF),
    "page 64, group 17": Shape(SHORT, heads=(34, 2), dims=(96, 96), page_size=64, dtype=HALF),
    "page 128, int64 tables": Shape(SHORT, heads=(9, 3), page_size=128, table_dtype=torch.int64),
    "page 256, d128": Shape(SHORT, heads=(15, 5), dims=(128, 128), page_size=256, dtype=HALF),
    "tiny heads": Shape(SHORT, heads=(3, 1), dims=(8, 24), page_size=4),
    "MQA of 71": Shape(SHORT, heads=(71, 1), dtype=HALF),
    "int8": Shape(SHORT, kv_dtype=INT8),
    "int8, half, d96": Shape(SHORT, kv_dtype=INT8, dtype=HALF, dims=(96, 128)),
    "fp8": Shape(SHORT, kv_dtype=FP8),
    "fp8, half, page 1": Shape(SHORT, kv_dtype=FP8, dtype=HALF, page_size=1, dims=(64, 32)),
}
SLOW_ROWS = [
    [(1, 33), (5, 5), (0, 7), (1, 0), (3, 40), (1, 1), (2, 100), (70, 90), (1, 130), (0, 0), (3, 0), (1, 32)],
    [(1, 513), (1, 1500), (3, 1025), (64, 700), (130, 130)],
]


def to_device(case: Case) -> Case:
    """Return the case on the device under test."""
    batch, scales = case.batch, case.kv_scales
    tensors = [tensor.to(DEVICE) for tensor in (batch.block_tables, batch.kv_lens, batch.cu_q_lens)]
    return replace(
        case,
        q=case.q.to(DEVICE),
        k_pages=case.k_pages.to(DEVICE),
        v_pages=case.v_pages.to(DEVICE),
        batch=AttentionBatch(tensors[0], tensors[1], tensors[2], batch.max_q_len, batch.max_kv_len),
        kv_scales=None if scales is None else (scales[0].to(DEVICE), scales[1].to(DEVICE)),
    )


def spec_on_device(feature: str, num_q_heads: int) -> LayerSpec:
    """Return the layer with its per-head values on the device under test."""
    spec = spec_for(feature, num_q_heads)
    sinks, slopes = (None if values is None else values.to(DEVICE) for values in (spec.sink_logits, spec.alibi_slopes))
    return replace(spec, sink_logits=sinks, alibi_slopes=slopes)


def check(shape: Shape, feature: str, seed: int = 0) -> None:
    """Assert that the backend's answer is within its dtype's limit of the reference's."""
    case = make_case(shape, seed)
    out = to_device(case).run(spec_on_device(feature, shape.heads[0]), "triton").cpu()

    assert out.dtype == shape.dtype
    operands = None if shape.dtype == FP32 else shape.dtype
    assert_within_limit(case, spec_for(feature, shape.heads[0]), out, operands=operands)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_on_a_mixed_batch(feature: str) -> None:
    """Prefill, chunks, decode, empty and unseeing rows in one call, fp32: as exact as fp32 allows."""
    check(Shape(MIXED, dims=(32, 32)), feature)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("feature", ["plain", "everything"])
def test_half_precision(dtype: torch.dtype, feature: str) -> None:
    """The same in the dtypes that matrix units take; bf16 on a device only."""
    check(Shape(MIXED, dims=(32, 32), dtype=dtype), feature)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_with_everything(shape: str) -> None:
    """Page sizes 1 to 256, head counts, head dims that are no power of two, K unlike V, int8 and fp8, all features."""
    check(SHAPES[shape], "everything")


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_several_splits(dtype: torch.dtype) -> None:
    """Sequences of one, two and several splits side by side, at the seams: merged as if there were none."""
    rows = [(1, 512), (1, 513), (2, 1100), (1, 1)]
    check(Shape(rows, heads=(2, 1), dims=(16, 16), page_size=64, dtype=dtype), "plain")


@pytest.mark.slow
@pytest.mark.parametrize("rows", SLOW_ROWS, ids=["short", "long"])
@pytest.mark.parametrize("dtype", [FP32, *HALVES])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_on_many_rows(feature: str, dtype: torch.dtype, rows: list[tuple[int, int]]) -> None:
    """Every feature with every dtype, on rows of every kind and of several splits."""
    check(Shape(rows, dtype=dtype, heads=(6, 2), dims=(64, 64)), feature, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_full_matrix(shape: str, feature: str) -> None:
    """Every feature on every shape, with other data."""
    check(SHAPES[shape], feature, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kv_dtype", [None, INT8, FP8])
@pytest.mark.parametrize("page_size", [1 << power for power in range(9)])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 128, 256])
def test_every_page_size_with_every_head_dim(
    head_dim: int, page_size: int, kv_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    """The page and tile sizes never divide wrongly, with quantised pages too."""
    check(Shape([(1, 300), (9, 40)], (8, 2), (head_dim, head_dim), page_size, dtype, kv_dtype), "plain", seed=3)


def run_rows(case: Case, order: Sequence[int], spec: LayerSpec) -> list[torch.Tensor]:
    """Run the rows of ``case`` in ``order`` and return each row's outputs."""
    lens, size = case.shape.rows, case.shape.page_size
    starts = [sum(q for q, _ in lens[:row]) for row in range(len(lens))]
    tables = [case.batch.block_tables[row, : -(-kv // size)].tolist() for row, (_, kv) in enumerate(lens)]
    batch = make_batch([lens[row] for row in order], [tables[row] for row in order])
    q = torch.cat([case.q[starts[row] : starts[row] + lens[row][0]] for row in order])
    out = to_device(case.with_batch(batch, q=q)).run(spec, "triton").cpu()
    return list(torch.split(out, [lens[row][0] for row in order]))


@pytest.mark.parametrize(("feature", "dtype"), [("plain", FP32), ("everything", HALVES[-1])])
def test_a_row_is_independent_of_its_neighbours(feature: str, dtype: torch.dtype) -> None:
    """A row alone, and in batches that make the grid larger, bring prefill along, or need splits: bit for bit."""
    case = make_case(Shape([(1, 100), (1, 33), (12, 40), (1, 600), (3, 20)], (4, 2), (16, 16), 16, dtype))
    spec = spec_on_device(feature, 4)
    alone = [run_rows(case, [row], spec)[0] for row in range(5)]
    for order in ([4, 3, 2, 1, 0], [1, 1, 0]):
        for row, result in zip(order, run_rows(case, order, spec), strict=True):
            assert torch.equal(result, alone[row]), f"row {row} in batch {order}"


def test_chunks_equal_one_shot_within_rounding() -> None:
    """One-shot prefill, chunks of 7 and token by token are different kernels and agree to fp32 rounding."""
    case = make_case(Shape([(40, 40)], heads=(2, 1), dims=(16, 16), page_size=4))
    table = case.batch.block_tables[0, :10].tolist()
    spec = LayerSpec(0.25, window=20)
    cold = to_device(case).run(spec, "triton").cpu()
    for chunk in (1, 7, 24):
        parts = []
        for start in range(0, 40, chunk):
            stop = min(40, start + chunk)
            part = case.with_batch(make_batch([(stop - start, stop)], [table]), q=case.q[start:stop])
            parts.append(to_device(part).run(spec, "triton").cpu())

        torch.testing.assert_close(torch.cat(parts), cold, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kv_dtype", [None, INT8])
def test_strided_tensors_equal_contiguous_ones(kv_dtype: torch.dtype | None) -> None:
    """Q a slice of a fused tensor, K and V of one buffer, a strided int64 table, out a transposed view: same bits."""
    shape = Shape([(1, 9), (9, 11), (1, 30)], (4, 2), (16, 16), 4, kv_dtype=kv_dtype, table_dtype=torch.int64)
    case = to_device(make_case(shape))
    spec = LayerSpec(0.125, window=12)
    expected = case.run(spec, "triton")
    fused = torch.randn(11, 4 + 4, 16, device=DEVICE)
    fused[:, 2:6] = case.q
    both = torch.stack([case.k_pages, case.v_pages], dim=1)
    wide = torch.stack([case.batch.block_tables, case.batch.block_tables + 1], dim=2)
    batch = AttentionBatch(wide[:, :, 0], case.batch.kv_lens, case.batch.cu_q_lens, 9, 30)
    strided = replace(case, q=fused[:, 2:6], k_pages=both[:, 0], v_pages=both[:, 1], batch=batch)
    guarded = torch.full((4, 11, 20), 7.0, device=DEVICE)
    out = guarded.transpose(0, 1)[:, :, 2:18]
    strided.run(spec, "triton", out=out)

    assert torch.equal(out, expected)
    assert (guarded[:, :, :2] == 7).all()
    assert (guarded[:, :, 18:] == 7).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, at inf / inf
@pytest.mark.parametrize("kv_dtype", [None, INT8, FP8])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_writes_the_bytes_of_the_torch_backend(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Values, codes and scales, zeros, subnormals, infinities and NaN, strided pages: equal to the other backend."""
    k = torch.randn(7, 3, 80) * torch.logspace(-8, 4, 7)[:, None, None]
    k[1, 0], k[2, 1, 3], k[3, 2, 5], k[4, 0] = 0, torch.inf, torch.nan, 1e-41
    k, v = k.to(dtype), torch.randn(7, 3, 24).to(dtype)
    slots = torch.tensor([5, 16, 39, 8, 0, 23, 12])
    written = {}
    for backend, device in (("torch", "cpu"), ("triton", DEVICE)):
        pages = torch.zeros(5, 2, 3, 8, 80).to(kv_dtype or dtype), torch.zeros(5, 3, 8, 24).to(kv_dtype or dtype)
        scales = poisoned((5, 3, 8), FP32), poisoned((5, 3, 8), FP32)
        moved = [tensor.to(device) for tensor in (k, v, *pages, slots, *scales)]
        write_kv(
            moved[0], moved[1], moved[2][:, 1], moved[3], moved[4],
            kv_scales=None if kv_dtype is None else (moved[5], moved[6]), backend=backend, check=True,
        )  # fmt: skip
        written[backend] = [tensor.cpu() for tensor in (moved[2], moved[3], moved[5], moved[6])]
    finite = written["torch"][2].isfinite() | (kv_dtype is None)
    finite[slots // 8, :, slots % 8] &= ~(k.isnan() | k.isinf()).any(-1)
    for theirs, ours in zip(written["torch"], written["triton"], strict=True):
        if theirs.dim() == 3:
            assert torch.equal(theirs.nan_to_num(-1.0, posinf=-2.0), ours.nan_to_num(-1.0, posinf=-2.0))
        else:
            # Beside a scale that is not finite a code means nothing.
            plain = (theirs[:, 1] if theirs.dim() == 5 else theirs).float()
            other = (ours[:, 1] if ours.dim() == 5 else ours).float()
            assert torch.equal(plain[finite], other[finite])
    assert written["triton"][0][:, 0].float().count_nonzero() == 0


def test_copies_of_all_tensors_at_once() -> None:
    """Chains, pages of different sizes and dtypes, odd sizes, strided pages: every byte as the other backend's."""

    def tensors() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        parts = [
            torch.randint(0, 100, (6, *size), generator=generator) for size in ((2, 4, 16), (2, 4, 3), (5,), (2, 3, 7))
        ]
        return [parts[0].to(BF16), parts[1].to(INT8), parts[2].float(), parts[3].to(FP16)[:, 1]]

    copies = torch.tensor([[1, 2], [2, 3], [5, 1]], dtype=torch.int32)
    expected, moved = tensors(), [tensor.to(DEVICE) for tensor in tensors()]
    copy_pages(expected, copies, backend="torch", check=True)
    copy_pages(moved, copies.to(DEVICE), backend="triton", check=True)
    for wanted, got in zip(expected, moved, strict=True):
        assert torch.equal(wanted, got.cpu())


def test_scattered_pages_are_refused_by_name_only() -> None:
    """Pages whose own elements are strided: the named backend says so, the choice finds another."""
    pages = torch.zeros(4, 3, 8).transpose(1, 2)
    copies = torch.tensor([[1, 2]])
    with pytest.raises(
        ValueError, match=r"'triton' cannot serve this call: pages\[0\] must hold each page in one piece"
    ):
        copy_pages(pages, copies, backend="triton")
    copy_pages(pages, copies)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(SHORT, dims=(272, 16)), "k_pages must have a head dim of at most 256, got 272"),
        (Shape(SHORT, dims=(16, 272)), "v_pages must have a head dim of at most 256, got 272"),
        (Shape(SHORT, page_size=24), "page_size that is a power of two from 1 to 256, got 24"),
        (Shape(SHORT, page_size=512), "page_size that is a power of two from 1 to 256, got 512"),
        (Shape(SHORT, dtype=torch.float64), "q must be float32, bfloat16 or float16, got torch.float64"),
    ],
)
def test_what_no_kernel_serves_is_refused(shape: Shape, message: str) -> None:
    """By name the backend refuses before any launch and says why; nothing is written."""
    case = make_case(shape)
    out = torch.full((len(case.q), 6, shape.dims[1]), 7.0, dtype=shape.dtype)
    with pytest.raises(ValueError, match=f"backend 'triton' cannot serve this call: .*{message}"):
        case.run(LayerSpec(1.0), "triton", out=out)

    assert (out == 7).all()


@pytest.mark.skipif(NATIVE, reason="speaks of the interpreter")
def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without TRITON_INTERPRET=1, and in bf16 with it, the backend refuses and says why."""
    with pytest.raises(
        ValueError, match=r"q must be float32 or float16 under Triton's interpreter, got torch.bfloat16"
    ):
        make_case(Shape(SHORT, dtype=BF16)).run(LayerSpec(1.0), "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"q must be on a GPU, or on a CPU with TRITON_INTERPRET=1 .*, got cpu"):
        make_case(Shape(SHORT)).run(LayerSpec(1.0), "triton")


def test_accumulates_in_fp32() -> None:
    """triton#11584, aiter#705: sums kept in half precision stall. 4,096 keys, V = 1 for the first half: 0.5."""
    shape = Shape([(1, 4096)], heads=(1, 1), dims=(16, 16), page_size=256, dtype=HALVES[-1])
    case = uniform_case(shape)
    ones = (torch.arange(4096) < 2048).to(shape.dtype)
    pages = case.batch.block_tables[0, :16].long()
    case.v_pages[pages, 0] = ones.view(16, 256)[:, :, None].expand(16, 256, 16)
    out = to_device(case).run(LayerSpec(1.0), "triton").cpu()

    assert torch.equal(out, torch.full((1, 1, 16), 0.5, dtype=shape.dtype))

"""What only compiled kernels could get wrong: far addresses, splits, register tails, threads, what is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv.attention import AttentionBatch, LayerSpec, paged_attention, write_kv
from tests.attention.cases import Shape, assert_within_limit, make_batch, make_case, slots_of
from tests.attention.test_matrix import FEATURES, spec_for

if TYPE_CHECKING:
    from tests.attention.cases import Case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTS = [None, torch.int8, torch.float8_e4m3fn]


def _run_with_threads(case: Case, spec: LayerSpec, threads: int) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return case.run(spec, "cpu")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kv_dtype", QUANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Decode and chunks, in each dtype of q and of the pages, with channels that fill no whole pair of vectors."""
    case = make_case(Shape([(1, 70), (5, 70), (1, 3)], (6, 2), (80, 112), 16, dtype, kv_dtype))
    spec = spec_for("everything", 6)

    assert_within_limit(case, spec, case.run(spec, "cpu"))


@pytest.mark.parametrize("group", range(1, 10))
def test_every_group_size(group: int) -> None:
    """Query heads are taken by fours, threes and twos, above eight by lanes: none is lost or taken twice."""
    case = make_case(Shape([(1, 67), (2, 66)], (2 * group, 2), (32, 32), 4))
    spec = spec_for("alibi", 2 * group)

    assert_within_limit(case, spec, case.run(spec, "cpu"))


@pytest.mark.parametrize("dim", [1, 5, 8, 16, 24, 31, 40, 48, 63, 72])
def test_any_head_dim(dim: int) -> None:
    """Channels past the last whole vector are neither dropped nor read beyond."""
    case = make_case(Shape([(1, 9), (3, 20)], (3, 1), (dim, 73 - dim), 4, torch.bfloat16))
    spec = LayerSpec(0.3)

    assert_within_limit(case, spec, case.run(spec, "cpu"))


@pytest.mark.parametrize("q_len", [7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 64])
def test_rows_around_the_blocks_seams(q_len: int) -> None:
    """Query rows one more and one less than the kernel's vectors, blocks and items hold."""
    case = make_case(Shape([(q_len, q_len + 61)], (3, 1), (16, 16), 4))
    spec = spec_for("window", 3)

    assert_within_limit(case, spec, case.run(spec, "cpu"))


@pytest.mark.parametrize("heads", [(3, 1), (10, 1), (6, 2)])
def test_splits_are_joined_rightly(heads: tuple[int, int]) -> None:
    """Contexts around the split sizes, decode and few queries: every part counts once, a sink logit once in all."""
    lengths = [127, 128, 129, 1000, 1025, 3000, 9000]
    case = make_case(Shape([(1, length) for length in lengths] + [(2, 2500)], heads, (16, 16), 16))
    spec = spec_for("sink logits", heads[0])

    assert_within_limit(case, spec, *(_run_with_threads(case, spec, threads) for threads in (1, 2)))


@pytest.mark.parametrize("kv_dtype", QUANTS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_keys_around_the_tiles_seams(page_size: int, group: int, kv_dtype: torch.dtype | None) -> None:
    """One key more and less than a tile of decode and than a split hold, and than keys are taken together."""
    lengths = [1, 2, 3, 4, 5, 7, 46, 47, 48, 49, 50, 95, 97, 143, 144, 145, 193]
    case = make_case(Shape([(1, length) for length in lengths], (2 * group, 2), (48, 24), page_size, kv_dtype=kv_dtype))
    spec = spec_for("everything", 2 * group)

    assert_within_limit(case, spec, *(_run_with_threads(case, spec, threads) for threads in (1, 2)))


def test_tasks_look_ahead_over_rows_of_every_kind() -> None:
    """A decode row before one with nothing to see, before a prompt, and at the end: each asks for what comes next."""
    rows = [(1, 100), (0, 0), (1, 1), (40, 60), (1, 300), (0, 7), (2, 2), (1, 48)]
    case = make_case(Shape(rows, (4, 1), (64, 64), 16))
    spec = LayerSpec(0.125)

    assert_within_limit(case, spec, *(_run_with_threads(case, spec, threads) for threads in (1, 2)))


def test_bits_are_the_same_for_any_number_of_threads() -> None:
    """Splits, items and blocks follow from the row's own lengths: threads only share them out."""
    rows = [(1, 5000), (1, 300), (40, 200), (3, 700), (130, 130), (1, 64)]
    case = make_case(Shape(rows, (9, 3), (64, 64), 16, torch.bfloat16))
    spec = spec_for("everything", 9)
    expected = _run_with_threads(case, spec, 1)
    for threads in (2, 3, 7):
        assert torch.equal(_run_with_threads(case, spec, threads), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_offsets_beyond_two_to_the_31(dtype: torch.dtype) -> None:
    """Page ids whose elements lie past 2^31 are reached by 64-bit addresses; the memory is committed where touched."""
    page_size, head_dim = 16, 64
    num_pages = 2**31 // (page_size * head_dim) + 100
    k_pages, v_pages = (torch.empty(num_pages, 1, page_size, head_dim, dtype=dtype) for _ in range(2))
    quantised = dtype == torch.int8
    scales = (torch.empty(num_pages, 1, page_size), torch.empty(num_pages, 1, page_size)) if quantised else None
    shape = Shape(
        [(1, 40), (30, 40)], (2, 1), (head_dim, head_dim), page_size, torch.bfloat16, dtype if quantised else None
    )
    near = make_case(shape)
    tables = [[num_pages - 1, 3, num_pages - 50], [2, num_pages - 7, num_pages - 90]]
    for (k, v), table in zip(near.stored, tables, strict=True):
        write_kv(k, v, k_pages, v_pages, slots_of(table, 40, page_size), kv_scales=scales, backend="cpu", check=True)
    batch = make_batch(shape.rows, tables)
    out = paged_attention(near.q, k_pages, v_pages, batch, LayerSpec(0.1), kv_scales=scales, backend="cpu", check=True)

    assert torch.equal(out, near.run(LayerSpec(0.1), "cpu"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", [12, 13])
@pytest.mark.parametrize("window", [None, 5])
def test_what_a_row_does_not_see_does_not_reach_it(
    bad: float, dtype: torch.dtype, key: int, window: int | None
) -> None:
    """A token of the same sequence that is not finite: weight 0 times NaN would be NaN. Both keys of a pair of bf16."""
    case = make_case(Shape([(21, 21)], (3, 1), (64, 64), 4, dtype))
    spec = LayerSpec(0.25, window=window)
    clean = case.run(spec, "cpu")
    table = case.batch.block_tables[0].tolist()
    k, v = (torch.full((1, 1, 64), bad, dtype=dtype) for _ in range(2))
    write_kv(k, v, case.k_pages, case.v_pages, slots_of(table, 21, 4)[key : key + 1], backend="cpu")
    out = case.run(spec, "cpu")
    positions = torch.arange(21)
    seen = (positions >= key) & (positions < key + (window or 21))

    rtol, atol = (0, 1e-6) if dtype == torch.float32 else (2**-8, 2**-8)
    torch.testing.assert_close(out[~seen], clean[~seen], rtol=rtol, atol=atol)
    assert not out[seen].isfinite().any()


@pytest.mark.parametrize("q_len", [1, 3])
def test_what_is_not_finite_stays_visible(q_len: int) -> None:
    """NaN in a visible key or query gives NaN, as softmax does; it is not passed over by the largest score."""
    for side in ("k", "q"):
        case = make_case(Shape([(q_len, 20)], (2, 1), (16, 16), 4))
        if side == "q":
            case.q[0, 0, 3] = torch.nan
        else:
            case.k_pages[case.batch.block_tables[0, 1]] = torch.nan
        out = case.run(LayerSpec(0.25), "cpu")

        assert out[0, 0].isnan().all()
        assert out[0, 1].isfinite().all() == (side == "q")


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("bits", [0x7FC00001, -1])
def test_a_nan_with_a_payload_stays_one(bits: int, q_len: int) -> None:
    """2 to the power of a NaN is a NaN, whatever its lower bits."""
    case = make_case(Shape([(q_len, 30)], (4, 1)))
    page = int(case.batch.block_tables[0, 0])
    case.k_pages[page, 0, 3].view(torch.int32)[3] = bits

    assert case.run(LayerSpec(0.125), "cpu").isnan().all()


def test_lengths_that_do_not_fit_are_refused() -> None:
    """Without ``check=True`` the kernel itself keeps to the table and to q: nothing is written."""
    case = make_case(Shape([(1, 20)], (2, 1), (16, 16), 4))
    out = torch.full_like(case.q, 7.0)
    tables, kv_lens = case.batch.block_tables, torch.tensor([4 * case.batch.block_tables.shape[1] + 1])
    batch = AttentionBatch(tables, kv_lens, case.batch.cu_q_lens, 1, 100)
    with pytest.raises(ValueError, match="kv_lens and cu_q_lens must stay within the block tables"):
        paged_attention(case.q, case.k_pages, case.v_pages, batch, LayerSpec(1.0), backend="cpu", out=out)

    assert (out == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_no_bits(dtype: torch.dtype) -> None:
    """Channels of q and out far apart, pages one of two in a buffer, lengths one of two columns."""
    case = make_case(Shape([(1, 30), (9, 50)], (6, 2), (64, 80), 8, dtype))
    spec = spec_for("sink tokens", 6)
    expected = case.run(spec, "cpu")
    lengths = torch.stack([case.batch.kv_lens, case.batch.kv_lens + 1], dim=1)[:, 0]
    batch = AttentionBatch(case.batch.block_tables, lengths, case.batch.cu_q_lens, 9, 50)
    out = torch.full((80, 6, 10), torch.nan, dtype=dtype).permute(2, 1, 0)
    turned = case.q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    wide = torch.stack([case.k_pages, case.k_pages], dim=1)[:, 1]
    case.with_batch(batch, q=turned, k_pages=wide).run(spec, "cpu", out=out)

    assert torch.equal(out, expected)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kv_dtype", QUANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dims", "page_size"),
    [
        ((9, 3), (64, 64), 16),
        ((8, 2), (128, 128), 64),
        ((5, 1), (80, 96), 1),
        ((14, 2), (112, 112), 256),
        ((4, 4), (256, 32), 7),
        ((17, 1), (96, 192), 32),
    ],
)
def test_full_grid(
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    feature: str,
) -> None:
    """Every feature, dtype, head count, head dim and page size on decode, chunks and prefill at once."""
    rows = [(1, 150), (1, 0), (2, 33), (40, 90), (0, 5), (1, 1), (1, 600)]
    case = make_case(Shape(rows, heads, dims, page_size, dtype, kv_dtype), seed=2)
    spec = spec_for(feature, heads[0])

    assert_within_limit(case, spec, case.run(spec, "cpu"))

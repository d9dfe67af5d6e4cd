"""How kernels like ours have failed in public, one test for each kind of fault."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv.attention import AttentionBatch, LayerSpec, copy_pages, paged_attention, write_kv
from tests.attention.cases import BACKENDS, Shape, assert_within_limit, make_batch, make_case, uniform_case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.attention.cases import Case


def _every_value_of(out: torch.Tensor, expected: Sequence[float]) -> bool:
    """Whether every head and channel of row ``i`` is ``expected[i]``, to fp32 rounding."""
    wanted = torch.tensor(expected, dtype=torch.float64)[:, None, None].expand(out.shape)
    return torch.allclose(out.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_window_counts_the_token_itself_on_every_path(backend: str) -> None:
    """transformers#39408, tokenspeed#578, LightLLM#1311: a window one key too wide or narrow, or prefill ≠ decode."""
    for rows in ([(10, 10)], [(3, 10)], [(1, 10)]):
        out = uniform_case(Shape(rows, page_size=4)).run(LayerSpec(1.0, window=4), backend)

        assert _every_value_of(out[-1:], [7.5])
    whole = uniform_case(Shape([(10, 10)], page_size=4))

    assert _every_value_of(whole.run(LayerSpec(1.0, window=1), backend), range(10))
    for wide in (10, 11, 1000):
        assert _every_value_of(whole.run(LayerSpec(1.0, window=wide), backend), [i / 2 for i in range(10)])
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        LayerSpec(1.0, window=0)


@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 24, 48, 64, 96, 192, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_page_size_skips_a_tail(page_size: int, backend: str) -> None:
    """TileOPs#1787, flashinfer#4347, flash-attention#2367: tiles per page floored, so each page's tail was skipped."""
    case = uniform_case(Shape([(1, 200), (2, 200)], heads=(2, 1), dims=(16, 16), page_size=page_size))
    if backend == "triton" and page_size & (page_size - 1):
        with pytest.raises(ValueError, match=f"page_size that is a power of two from 1 to 256, got {page_size}"):
            case.run(LayerSpec(1.0), backend)
        return

    assert _every_value_of(case.run(LayerSpec(1.0), backend), [99.5, 99.0, 99.5])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_last_channel_counts_and_guards_survive(head_dim: int, backend: str) -> None:
    """Triton-distributed#200, sglang#1281, mlc-llm#1889: head dims that are no power of two lost channels."""
    case = make_case(Shape([(1, 2)], heads=(1, 1), dims=(head_dim, head_dim), page_size=4))
    k, v = torch.zeros(2, 1, head_dim), torch.zeros(2, 1, head_dim)
    case.q.zero_()
    case.q[0, 0, -1] = k[0, 0, -1] = math.sqrt(math.log(3) * math.sqrt(head_dim))
    v[0] = 1
    slots = case.batch.block_tables[0, 0].long() * 4 + torch.arange(2)
    write_kv(k, v, case.k_pages, case.v_pages, slots, check=True)
    guarded = torch.full((1, 1, head_dim + 8), 7.0)
    case.run(LayerSpec(head_dim**-0.5), backend, out=guarded[:, :, 4:-4])

    assert _every_value_of(guarded[:, :, 4:-4], [0.75])
    assert (guarded[:, :, :4] == 7).all()
    assert (guarded[:, :, -4:] == 7).all()


@pytest.mark.parametrize("heads", [(9, 3), (14, 2), (15, 5), (40, 8), (34, 2), (8, 1), (6, 6)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_read_their_own_kv_head(heads: tuple[int, int], backend: str) -> None:
    """vllm-triton-backend#14, llm-scaler#498: group sizes other than those padded for were mis-mapped."""
    shape = Shape([(1, 7), (4, 9)], heads, dims=(16, 16), page_size=4)
    case = uniform_case(shape, values=torch.arange(heads[1]))
    expected = (torch.arange(heads[0]) // (heads[0] // heads[1])).float()[None, :, None].expand(5, -1, 16)

    torch.testing.assert_close(case.run(LayerSpec(1.0), backend), expected, rtol=1e-6, atol=1e-6)


def test_heads_that_do_not_divide_are_refused() -> None:
    """The other half of the same fault: 10 query heads over 4 KV heads mean nothing."""
    case = make_case(Shape([(1, 3)], heads=(4, 4)))
    with pytest.raises(ValueError, match="q must have a multiple of the 4 num_kv_heads, got 10 heads"):
        paged_attention(torch.zeros(1, 10, 64), case.k_pages, case.v_pages, case.batch, LayerSpec(1.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_rows_give_zero_and_poison_stays_out(backend: str) -> None:
    """pytorch#103749, sglang#1779, flash-attention#2568, flashinfer#4450: NaN from masked rows and masked slots."""
    case = make_case(Shape([(1, 0), (1, 1), (3, 5), (0, 0)], page_size=4))
    spec = LayerSpec(0.125)
    out = case.run(spec, backend, out=torch.full_like(case.q, torch.nan))

    assert (out[0] == 0).all()
    assert_within_limit(case, spec, out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_very_negative_scores_are_no_mask(backend: str) -> None:
    """The same reports: a finite number stood for -inf, so real scores below it gave zeros."""
    case = uniform_case(Shape([(1, 5), (5, 5)], dims=(16, 16), page_size=4))
    case.q.fill_(1.0)
    for row in range(2):
        table = case.batch.block_tables[row].tolist()
        slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(5)])
        write_kv(torch.full((5, 2, 16), -3750.0), case.stored[row][1], case.k_pages, case.v_pages, slots, check=True)

    assert _every_value_of(case.run(LayerSpec(1.0), backend), [2.0, 0.0, 0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_softcap_comes_before_the_mask(backend: str) -> None:
    """flash-attention#1025: a cap on -inf made the future visible; sglang#33915: the cap was accepted and dropped."""
    case = uniform_case(Shape([(2, 2)], heads=(1, 1), page_size=4))
    out = case.run(LayerSpec(1.0, softcap=1.0), backend)

    assert (out[0] == 0).all()
    assert _every_value_of(out, [0.0, 0.5])

    case = make_case(Shape([(1, 2)], heads=(1, 1), dims=(16, 16), page_size=4))
    case.q.zero_()
    case.q[..., 0] = 10.0
    k, v = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    k[0, 0, 0] = v[0] = 1
    slots = case.batch.block_tables[0, 0].long() * 4 + torch.arange(2)
    write_kv(k, v, case.k_pages, case.v_pages, slots, check=True)
    capped = 1 / (1 + math.exp(-5 * math.tanh(2)))

    assert round(capped, 4) == 0.9920
    assert _every_value_of(case.run(LayerSpec(1.0, softcap=5.0), backend), [capped])


@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_strided_tensors_equal_contiguous_ones(
    table_dtype: torch.dtype, kv_dtype: torch.dtype | None, backend: str
) -> None:
    """aiter#4531, flashinfer#1865, vllm#33572: slices of fused tensors were read as if they were contiguous."""
    case = make_case(Shape([(1, 9), (4, 11), (1, 30)], page_size=4, kv_dtype=kv_dtype, table_dtype=table_dtype))
    spec = LayerSpec(0.125, window=12)
    expected = case.run(spec, backend)
    fused = torch.randn(6, 6 + 2, 64)
    fused[:, :6] = case.q
    both = torch.stack([case.k_pages, case.v_pages], dim=1)
    wide = torch.stack([case.batch.block_tables, case.batch.block_tables + 1], dim=2)
    batch = AttentionBatch(wide[:, :, 0], case.batch.kv_lens, case.batch.cu_q_lens, 4, 30)
    scales = None
    if case.kv_scales is not None:
        pair = torch.stack(case.kv_scales, dim=1)
        scales = pair[:, 0], pair[:, 1]
    out = torch.full((64, 6, 6), torch.nan).permute(1, 2, 0)
    views = case.with_batch(batch, q=fused[:, :6], k_pages=both[:, 0], v_pages=both[:, 1], kv_scales=scales)
    result = views.run(spec, backend, out=out)

    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)


def test_pages_may_have_any_strides() -> None:
    """The same fault, strides at their worst: head dim outermost, one page, one head."""
    for shape in (Shape([(1, 9), (4, 11)], page_size=4), Shape([(2, 3)], heads=(2, 1), page_size=4)):
        case = make_case(shape)
        spec = LayerSpec(0.125)
        turned = [pages.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for pages in (case.k_pages, case.v_pages)]

        assert torch.equal(
            case.with_batch(make_batch(shape.rows, _tables(case)), k_pages=turned[0], v_pages=turned[1]).run(spec),
            case.run(spec),
        )


def _tables(case: Case) -> list[list[int]]:
    size = case.shape.page_size
    return [
        case.batch.block_tables[row, : -(-kv_len // size)].tolist() for row, (_, kv_len) in enumerate(case.shape.rows)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_old_page_ids_in_the_tail_change_nothing(backend: str) -> None:
    """tt-plugin#103, vllm#42494: stale entries past a sequence's own pages reached another's."""
    shape = Shape([(1, 9), (3, 7), (1, 0)], page_size=4)
    case = make_case(shape)
    spec = LayerSpec(0.125)
    expected = case.run(spec, backend)
    for garbage in (0, -1, 2**30, 1):
        batch = make_batch(shape.rows, _tables(case))
        for row, table in enumerate(_tables(case)):
            batch.block_tables[row, len(table) :] = garbage

        assert torch.equal(case.with_batch(batch).run(spec, backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_that_left_the_window_are_never_read(backend: str) -> None:
    """A window group gives pages back while the sequence runs: their entries name the null page, which is poisoned."""
    shape = Shape([(1, 41), (3, 38)], page_size=4)
    case = make_case(shape)
    spec = LayerSpec(0.125, window=9, num_sink_tokens=3)
    expected = case.run(spec, backend)
    batch = make_batch(shape.rows, _tables(case))
    batch.block_tables[0, 1:8] = 0
    batch.block_tables[1, 1:6] = -1

    assert torch.equal(case.with_batch(batch).run(spec, backend), expected)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_sums_do_not_stall_in_low_precision(backend: str) -> None:
    """triton#11584, aiter#705: running sums kept in bf16 stall; 65,536 keys, half of them with value 1, mean 0.5."""
    length, page_size = 65536, 256
    num_pages = length // page_size + 1
    k_pages = torch.zeros(num_pages, 1, page_size, 16, dtype=torch.bfloat16)
    v_pages = torch.zeros_like(k_pages)
    v_pages[1 : num_pages // 2 + 1] = 1
    batch = make_batch([(1, length)], [list(range(1, num_pages))])
    q = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    out = paged_attention(q, k_pages, v_pages, batch, LayerSpec(1.0), backend=backend, check=True)

    assert torch.equal(out, torch.full((1, 1, 16), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_copy_moves_its_bytes_and_no_others(dtype: torch.dtype, backend: str) -> None:
    """TensorRT-LLM#4943, llama.cpp#12253 and #9319: copies of wrong extent, or wrong once KV is quantised."""
    layers = [torch.randint(0, 100, (8, 2, 4, dim)).float().to(dtype) for dim in (16, 8, 16, 8)]
    scales = [torch.rand(8, 2, 4) for _ in range(4)]
    tensors = [*layers, *scales]
    before = [tensor.clone() for tensor in tensors]
    copy_pages(tensors, torch.tensor([[2, 5], [7, 1]], dtype=torch.int32), backend=backend, check=True)
    for tensor, old in zip(tensors, before, strict=True):
        wanted = old[torch.tensor([0, 7, 2, 3, 4, 2, 6, 7])]

        assert torch.equal(tensor.float(), wanted.float())

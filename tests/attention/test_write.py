"""Writing K and V by slot and copying pages: every byte where it belongs, no other byte touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.attention import copy_pages, dequantise, quantise, write_kv
from tests.attention.cases import BACKENDS, poisoned

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTS = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_puts_each_token_in_its_slot(backend: str, dtype: torch.dtype) -> None:
    """Token ``i``'s K and V stand at ``slot_mapping[i]``, head by head; all other memory is as before."""
    k_pages, v_pages = torch.randn(5, 3, 4, 16).to(dtype), torch.randn(5, 3, 4, 8).to(dtype)
    k, v = torch.randn(4, 3, 16).to(dtype), torch.randn(4, 3, 8).to(dtype)
    slots = torch.tensor([7, 4, 19, 0])
    expected = k_pages.clone(), v_pages.clone()
    for token, slot in enumerate(slots.tolist()):
        for side, values in zip(expected, (k, v), strict=True):
            side[slot // 4, :, slot % 4] = values[token]
    write_kv(k, v, k_pages, v_pages, slots, backend=backend, check=True)

    assert torch.equal(k_pages, expected[0])
    assert torch.equal(v_pages, expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", QUANTS)
def test_write_quantises_and_stores_the_scales(backend: str, dtype: torch.dtype) -> None:
    """Quantised pages get `quantise`'s values and scales in the token's slot, and nothing elsewhere."""
    k_pages, v_pages = torch.zeros(4, 2, 4, 16).to(dtype), torch.zeros(4, 2, 4, 8).to(dtype)
    scales = poisoned((4, 2, 4), torch.float32), poisoned((4, 2, 4), torch.float32)
    k, v = torch.randn(3, 2, 16, dtype=torch.bfloat16), torch.randn(3, 2, 8, dtype=torch.bfloat16)
    slots = torch.tensor([5, 15, 8])
    write_kv(k, v, k_pages, v_pages, slots, kv_scales=scales, backend=backend, check=True)
    for values, pages, side in ((k, k_pages, scales[0]), (v, v_pages, scales[1])):
        stored, expected = quantise(values, dtype)

        assert torch.equal(pages.float()[slots // 4, :, slots % 4], stored.float())
        assert torch.equal(side[slots // 4, :, slots % 4], expected)
        assert int(side.isnan().sum()) == 4 * 2 * 4 - 3 * 2


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dtype", QUANTS)
def test_kernels_quantise_bit_for_bit(dtype: torch.dtype, source: torch.dtype) -> None:
    """Over the whole range of each dtype, subnormal and non-finite rows too, the kernel's bytes are `quantise`'s."""
    exponents = torch.linspace(-44, 38, 300) if source != torch.float16 else torch.linspace(-8, 4, 300)
    values = (torch.randn(300, 2, 40) * 10 ** exponents[:, None, None]).to(source)
    values[0] = 0
    values[1, 0, 3], values[2, 1, 5], values[3, 0, 39] = torch.inf, -torch.inf, torch.nan
    pages, scales = torch.zeros(20, 2, 16, 40).to(dtype), (torch.zeros(20, 2, 16), torch.zeros(20, 2, 16))
    slots = torch.randperm(19 * 16)[:300] + 16
    write_kv(values, values, pages, pages, slots, kv_scales=scales, backend="cpu")
    stored, expected = quantise(values, dtype)
    codes, wanted = pages.view(torch.uint8)[slots // 16, :, slots % 16], stored.view(torch.uint8)
    finite = expected.isfinite()

    for side in scales:
        torch.testing.assert_close(side[slots // 16, :, slots % 16], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codes[finite], wanted[finite])
    assert not finite[1, 0]
    assert not finite[3, 0]


def test_kernels_refuse_slots_and_pages_that_are_not_there() -> None:
    """Also without ``check=True`` a slot or page outside the pool raises, and nothing is written."""
    pages, rows = torch.zeros(4, 1, 2, 8), torch.ones(3, 1, 8)
    for slots in ([2, 3, 8], [2, -1, 3], [2**62, 2, 3]):
        with pytest.raises(ValueError, match="slot_mapping must be from 0 to 7, got"):
            write_kv(rows, rows, pages, pages, torch.tensor(slots), backend="cpu")
    for copies in ([[1, 2], [3, 4]], [[-1, 2]]):
        with pytest.raises(ValueError, match="copies must hold page ids from 0 to 3, got"):
            copy_pages(pages, torch.tensor(copies), backend="cpu")

    assert pages.count_nonzero() == 0


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_large_writes_and_copies_use_all_threads_rightly(backend: str) -> None:
    """Enough to be cut over threads: every token and page is where it belongs."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pages, rows = torch.zeros(130, 4, 16, 64), torch.randn(2000, 4, 64)
        slots = torch.randperm(129 * 16)[:2000] + 16
        write_kv(rows, rows, pages, pages, slots, backend=backend)
        assert torch.equal(pages[slots // 16, :, slots % 16], rows)
        moves = torch.stack([torch.arange(1, 130), torch.randperm(129) + 1], dim=1)
        expected = pages.clone()
        expected[moves[:, 1]] = pages[moves[:, 0]]
        copy_pages([pages], moves, backend=backend)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(pages, expected)


@pytest.mark.parametrize("quantised", [False, True])
def test_strided_write_equals_contiguous_write(quantised: bool) -> None:
    """K and V as slices of one fused tensor, pages as views of one buffer: the same bytes as contiguous copies."""
    dtype = torch.int8 if quantised else torch.float32
    fused = torch.randn(6, 7, 16)
    k, v = fused[:, 2:4], fused[:, 5:7]
    slots = torch.tensor([9, 10, 11, 20, 4, 5])
    both, plain = torch.zeros(6, 2, 2, 4, 16, dtype=dtype), torch.zeros(2, 6, 2, 4, 16, dtype=dtype)
    pair, scales = torch.zeros(6, 2, 2, 4), torch.zeros(2, 6, 2, 4)
    write_kv(k, v, both[:, 0], both[:, 1], slots, kv_scales=(pair[:, 0], pair[:, 1]) if quantised else None, check=True)
    write_kv(
        k.contiguous(), v.contiguous(), plain[0], plain[1], slots,
        kv_scales=(scales[0], scales[1]) if quantised else None, check=True,
    )  # fmt: skip

    assert torch.equal(both.transpose(0, 1), plain)
    assert torch.equal(pair.transpose(0, 1), scales)
    assert plain.count_nonzero() > 100


def test_empty_write_and_empty_copy_do_nothing() -> None:
    """A step without tokens and a list without copies are legal."""
    pages = torch.randn(3, 2, 4, 8)
    before = pages.clone()
    nothing = torch.zeros(0, 2, 8)
    write_kv(nothing, nothing, pages, pages, torch.zeros(0, dtype=torch.int64), check=True)
    copy_pages(pages, torch.zeros(0, 2, dtype=torch.int32), check=True)

    assert torch.equal(pages, before)


@given(
    moves=st.permutations(range(1, 9)).flatmap(
        lambda order: st.lists(st.sampled_from(range(9)), min_size=0, max_size=8).map(
            lambda sources: list(zip(sources, order, strict=False))
        )
    ),
    backend=st.sampled_from(BACKENDS),
)
@settings(max_examples=60)
def test_copies_read_all_sources_first(moves: list[tuple[int, int]], backend: str) -> None:
    """Any list of copies with distinct destinations acts as if all were run at once, chains included."""
    pages = torch.arange(9 * 6).view(9, 1, 2, 3).float()
    wanted = pages.clone()
    for source, destination in moves:
        wanted[destination] = pages[source]
    copy_pages([pages], torch.tensor(moves, dtype=torch.int64).view(-1, 2), backend=backend, check=True)

    assert torch.equal(pages, wanted)


def test_copy_serves_strided_pages() -> None:
    """Pages that are a view of a larger buffer are copied in place."""
    both = torch.randn(5, 2, 3, 4, 8)
    wanted = both.clone()
    wanted[4, 1] = both[2, 1]
    copy_pages(both[:, 1], torch.tensor([[2, 4]]), check=True)

    assert torch.equal(both, wanted)


@pytest.mark.parametrize("dtype", QUANTS)
def test_quantise_rounds_to_the_nearest_step(dtype: torch.dtype) -> None:
    """The largest magnitude is exact, every other within half a step; zeros stay zeros with scale 0."""
    values = torch.randn(50, 3, 64) * torch.logspace(-6, 6, 50)[:, None, None]
    values[7] = 0
    stored, scales = quantise(values, dtype)
    read = dequantise(stored, scales)
    largest = values.abs().amax(-1, keepdim=True)
    # int8 steps are even, 1/127 of the largest; an fp8 step is at most 1/8 of its value, or 2**-9 of a scale.
    half_step = largest / 254 if dtype == torch.int8 else torch.maximum(values.abs() / 16, largest / 448 / 1024)

    assert stored.dtype == dtype
    assert scales.dtype == torch.float32
    assert scales.shape == (50, 3)
    assert ((read - values).abs() <= half_step * (1 + 1e-5)).all()
    assert (read[7] == 0).all()
    assert (scales[7] == 0).all()


def test_quantise_survives_extreme_values() -> None:
    """Subnormal input overflows nothing; infinite input stays visibly non-finite."""
    tiny = torch.full((1, 4), 1e-44)
    stored, scales = quantise(tiny, torch.int8)

    assert (dequantise(stored, scales) <= 1e-43).all()
    assert not quantise(torch.tensor([[1.0, torch.inf]]), torch.float8_e4m3fn)[1].isfinite().any()


def test_quantise_refuses_other_dtypes() -> None:
    """Only the dtypes that have a scale."""
    with pytest.raises(ValueError, match=r"dtype must be one of .*int8.*got torch.float16"):
        quantise(torch.zeros(1, 4), torch.float16)

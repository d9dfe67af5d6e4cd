"""The choice of a backend, what may be imported for it, and what stays the same in a step."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pagedkv.attention import AttentionBatch, LayerSpec, backend_names
from pagedkv.attention.backends import Backend, choose, load
from pagedkv.attention.gather_plan import padded_length
from tests.attention.cases import Case, Shape, make_batch, make_case


def test_import_loads_no_backend_and_no_triton() -> None:
    """A fresh process that imports the package has loaded neither a backend, nor triton, nor the allocator."""
    script = (
        "import sys, pagedkv.attention as a; "
        "print(*[m for m in sys.modules if m in "
        "('pagedkv.attention.gather', 'pagedkv.attention.reference', 'triton', 'pagedkv.allocator')])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == ""


@pytest.mark.parametrize("name", backend_names())
def test_every_named_backend_is_whole(name: str) -> None:
    """Each name loads a module that has every function of the protocol, and keeps it."""
    backend = load(name)
    wanted = {member for member in vars(Backend) if not member.startswith("_")}

    assert wanted == {"attend", "cannot_attend", "write", "cannot_write", "copy", "cannot_copy"}
    assert wanted <= set(dir(backend))
    assert load(name) is backend


def test_no_choice_takes_the_first_that_can() -> None:
    """None takes the first of the device's backends without a reason against it; else all reasons are told."""
    first, second = (name for name in backend_names() if name != "triton")

    assert choose(None, "cpu", lambda _: None) is load(first)
    assert choose(None, "cpu", lambda backend: "no" if backend is load(first) else None) is load(second)
    assert choose(None, "cuda", lambda _: None) is load("triton")
    assert choose(None, "cuda", lambda backend: "no" if backend is load("triton") else None) is load(first)
    with pytest.raises(ValueError, match=f"'{first}' cannot serve this call: no; .*'{second}' cannot .*: no") as told:
        choose(None, "cpu", lambda _: "no")
    assert "triton" not in str(told.value)


def test_out_is_written_in_place_and_returned() -> None:
    """``out`` itself comes back, holding what a call without it returns."""
    case = make_case(Shape([(1, 9), (3, 5), (1, 20)], dtype=torch.bfloat16))
    expected = case.run(LayerSpec(0.125))
    out = torch.empty_like(expected)

    assert case.run(LayerSpec(0.125), out=out) is out
    assert torch.equal(out, expected)


def test_inputs_stay_as_they_were() -> None:
    """Reading changes neither queries nor pages nor scales."""
    case = make_case(Shape([(1, 9), (3, 5)], kv_dtype=torch.int8))
    assert case.kv_scales is not None
    inputs = [case.q, case.k_pages, case.v_pages, *case.kv_scales]
    before = [tensor.clone() for tensor in inputs]
    case.run(LayerSpec(0.125, softcap=2.0))

    for tensor, old in zip(inputs, before, strict=True):
        assert torch.equal(tensor.nan_to_num(9.0), old.nan_to_num(9.0))


def test_layers_of_a_step_share_a_batch() -> None:
    """Layers with other windows, features, head counts, widths and dtypes in one step do not disturb each other."""
    rows = [(1, 40), (5, 30), (1, 7)]
    specs = [LayerSpec(0.125), LayerSpec(0.125, window=6), LayerSpec(0.2, softcap=1.0)]
    shapes = [
        Shape(rows), Shape(rows, heads=(4, 4), dims=(32, 48)), Shape(rows, dtype=torch.bfloat16),
        Shape(rows, kv_dtype=torch.int8),
    ]  # fmt: skip
    cases = [make_case(shape) for shape in shapes]
    expected = [[case.with_batch(_again(cases[0])).run(spec) for spec in specs] for case in cases]
    shared = _again(cases[0])
    for _ in range(2):
        for case, outputs in zip(cases, expected, strict=True):
            for spec, wanted in zip(specs, outputs, strict=True):
                assert torch.equal(case.with_batch(shared).run(spec), wanted)


def _again(case: Case) -> AttentionBatch:
    """Return a fresh batch with the tables of ``case``; every case of one seed and rows has the same."""
    size = case.shape.page_size
    tables = [
        case.batch.block_tables[row, : -(-kv_len // size)].tolist() for row, (_, kv_len) in enumerate(case.shape.rows)
    ]
    return make_batch(case.shape.rows, tables)


def test_gradients_do_not_flow() -> None:
    """Queries that require gradients are read as plain numbers, whether or not gradients are on."""
    case = make_case(Shape([(1, 9), (3, 5)]))
    expected = case.run(LayerSpec(0.125))
    case.q.requires_grad_()
    out = case.run(LayerSpec(0.125))

    assert not out.requires_grad
    assert torch.equal(out, expected)


def test_padding_is_small_and_aligned() -> None:
    """A decode row is padded to a multiple of 32 columns, by at most 31 or an eighth, and longer rows never to less."""
    lengths = [padded_length(columns) for columns in range(1, 5000)]

    assert lengths == sorted(lengths)
    for columns, length in enumerate(lengths, start=1):
        assert length % 32 == 0
        assert columns <= length <= columns + max(31, columns // 8)


def test_empty_batch() -> None:
    """A step without sequences, and one whose sequences bring no query, give an empty output."""
    case = make_case(Shape([(0, 5)]))
    nothing = case.with_batch(make_batch([], []))

    assert case.run(LayerSpec(1.0)).shape == (0, 6, 64)
    assert nothing.run(LayerSpec(1.0)).shape == (0, 6, 64)

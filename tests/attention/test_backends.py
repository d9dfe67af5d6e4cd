"""The choice of a backend, what may be imported for it, and what stays the same in a step."""

from __future__ import annotations

import subprocess
import sys
from ctypes import sizeof
from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv.attention import (
    AttentionBatch,
    LayerSpec,
    backend_names,
    copy_pages,
    cpu,
    paged_attention,
    proofs,
    write_kv,
)
from pagedkv.attention.backends import Backend, choose, load
from pagedkv.attention.gather_plan import padded_length
from pagedkv.native.library import LibraryUnavailableError
from pagedkv.native.library import load as load_library
from tests.attention.cases import Case, Shape, assert_within_limit, make_batch, make_case

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_import_loads_no_backend_and_no_triton() -> None:
    """A fresh process that imports the package has loaded neither a backend, nor triton, nor the allocator."""
    script = (
        "import sys, pagedkv.attention as a; "
        "print(*[m for m in sys.modules if m in "
        "('pagedkv.attention.cpu', 'pagedkv.attention.triton', 'pagedkv.attention.gather', "
        "'pagedkv.attention.reference', 'triton', 'pagedkv.allocator')])"
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
    """None takes the first of the device's backends without a reason against it; else all their reasons are told."""
    assert backend_names() == ("cpu", "triton", "torch", "reference")
    for device, first in (("cpu", "cpu"), ("cuda", "triton")):
        assert choose(None, device, lambda _: None) is load(first)
        without: Backend = choose(None, device, lambda backend, first=first: "no" if backend is load(first) else None)  # type: ignore[misc]
        assert without is load("torch")
        with pytest.raises(ValueError, match=f"'{first}' cannot serve this call: no; .*'torch' cannot .*: no"):
            choose(None, device, lambda _: "no")


def test_no_choice_leaves_out_backends_of_another_device() -> None:
    """Tensors elsewhere never ask a device's own kernels, not even whether they could; by name they are asked."""
    asked: list[Backend] = []

    def ask(backend: Backend) -> str:
        asked.append(backend)
        return "no"

    with pytest.raises(ValueError, match="'torch' cannot serve"):
        choose(None, "meta", ask)

    assert load("cpu") not in asked
    assert load("triton") not in asked
    with pytest.raises(ValueError, match="'cpu' cannot serve this call: no"):
        choose("cpu", "meta", ask)


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


@pytest.fixture
def _no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse() -> None:
        raise LibraryUnavailableError("x86-64-v3: no compiler that day")

    cpu.why_unavailable.cache_clear()
    monkeypatch.setattr(cpu.structs, "functions", refuse)
    yield
    cpu.why_unavailable.cache_clear()


@pytest.mark.usefixtures("_no_library")
def test_without_a_library_torch_serves_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """No choice takes the torch path, for reads, writes and copies, and the log has the reason one time."""
    case = make_case(Shape([(1, 9), (3, 5)]))

    assert torch.equal(case.run(LayerSpec(0.125), None), case.run(LayerSpec(0.125), "torch"))
    copy_pages(case.k_pages, torch.tensor([[1, 2]]))
    assert 1 == sum("no compiler that day" in record.message for record in caplog.records)


@pytest.mark.usefixtures("_no_library")
def test_without_a_library_the_name_is_refused() -> None:
    """Asked for by name, each of the three calls is refused with the reason."""
    case = make_case(Shape([(1, 9)]))
    refusal = "backend 'cpu' cannot serve this call: there is no compiled CPU library .*no compiler that day"
    with pytest.raises(ValueError, match=refusal):
        case.run(LayerSpec(0.125), "cpu")
    with pytest.raises(ValueError, match=refusal):
        copy_pages(case.k_pages, torch.tensor([[1, 2]]), backend="cpu")
    with pytest.raises(ValueError, match=refusal):
        write_kv(*case.stored[0], case.k_pages, case.v_pages, torch.arange(16, 25), backend="cpu")


def test_structs_are_those_of_the_library() -> None:
    """The Python twins of the C structs have their sizes."""
    sizes = load_library().functions.pagedkv_struct_bytes
    twins = (cpu.structs.Step, cpu.structs.BoundLayer, cpu.structs.BoundWrite)

    assert [sizes(which) for which in range(3)] == [sizeof(twin) for twin in twins]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_proof_covers_only_calls_like_it(backend: str) -> None:
    """The same page tensors with other queries, layers, scales or places are judged anew, and served rightly."""
    case = make_case(Shape([(1, 9), (3, 5)], heads=(4, 2)))
    spec, windowed = LayerSpec(0.125), LayerSpec(0.125, window=3)
    turned = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat([case.q, case.q], dim=1)
    for _ in range(2):
        expected = case.run(spec, backend)
        assert_within_limit(case, windowed, case.run(windowed, backend))
        assert torch.equal(case.with_batch(case.batch, q=turned).run(spec, backend), expected)
        assert_within_limit(pair := case.with_batch(case.batch, q=wide), spec, pair.run(spec, backend))
        with pytest.raises(ValueError, match="q must have the k_dim"):
            case.with_batch(case.batch, q=case.q[..., :32]).run(spec, backend)
        with pytest.raises(TypeError, match=r"k_pages must be torch.bfloat16 like q"):
            case.with_batch(case.batch, q=case.q.bfloat16()).run(spec, backend)
        with pytest.raises(ValueError, match=r"q must have cu_q_lens\[-1\] = 4 rows"):
            paged_attention(case.q[:3], case.k_pages, case.v_pages, case.batch, spec, backend=backend)
    case.k_pages.data = torch.full_like(case.k_pages, torch.nan)  # the same tensor object over other memory

    assert torch.isnan(case.run(spec, backend)).all()


def test_proofs_go_with_their_pages() -> None:
    """What is remembered of page tensors does not outlive them."""
    before = len(proofs._KNOWN)
    case = make_case(Shape([(1, 9)]))
    case.run(LayerSpec(1.0))
    assert len(proofs._KNOWN) == before + 1
    del case

    assert len(proofs._KNOWN) == before

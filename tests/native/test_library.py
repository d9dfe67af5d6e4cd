"""Loading: the best build that this processor runs, one thread pool, and a reason wherever there is no library."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.native import library as library_module
from pagedkv.native.build import OUTPUT, Manifest
from pagedkv.native.library import LibraryUnavailableError, find_library, load, mapped_openmp
from pagedkv.native.variants import VARIANTS, machine_name, missing_features, processor_features
from tests.house.source_tree import ROOT

MINE = [v for v in VARIANTS if missing_features(v, machine_name(), processor_features()) is None]
"""Variants that this processor runs, the best first."""


def run(program: str, **environment: str) -> str:
    """Return what a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout.strip()


def test_the_best_variant_is_loaded() -> None:
    """Without a wish it is the first that the processor runs."""
    if "PAGEDKV_CPU_VARIANT" in os.environ:
        pytest.skip("the environment asks for a variant")

    assert MINE[0].name == load().variant


@pytest.mark.parametrize("variant", MINE, ids=lambda v: v.name)
def test_each_variant_of_this_machine_attends(variant: object) -> None:
    """Asked for by name, each variant serves a mixed batch as exactly as the reference's arithmetic allows."""
    name = variant.name  # type: ignore[attr-defined]
    program = (
        "from pagedkv.native.library import load\n"
        "from tests.attention.test_matrix import SHAPES, spec_for\n"
        "from tests.attention.cases import assert_within_limit, make_case\n"
        "for shape in ('mixed fp32', 'mixed bf16', 'int8', 'fp8'):\n"
        "    case = make_case(SHAPES[shape])\n"
        "    for feature in ('plain', 'everything'):\n"
        "        spec = spec_for(feature, case.shape.heads[0])\n"
        "        assert_within_limit(case, spec, case.run(spec, 'cpu'))\n"
        "print(load().variant)"
    )

    assert name == run(program, PAGEDKV_CPU_VARIANT=name)


def test_one_openmp_runtime_whoever_comes_first() -> None:
    """The library brings no runtime of its own and runs on torch's, also where it is loaded before torch is."""
    for first in ("import torch", "pass"):
        program = (
            f"{first}\nfrom pagedkv.native.library import load, mapped_openmp\n"
            "library = load()\nimport torch\nprint(mapped_openmp() == [library.openmp])"
        )

        assert "True" == run(program)


def test_runs_on_as_many_threads_as_torch_is_told() -> None:
    """`torch.set_num_threads` holds here too: no kernel adds a thread to those that torch has made."""
    program = (
        "import torch, os\nfrom pagedkv.native import step_ops\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "torch.set_num_threads(2)\nx = torch.randn(300, 576)\n"
        "before = count()\nfor _ in range(3): step_ops.silu_mul(x, x)\nours = count()\n"
        "for _ in range(3): x @ x.T\nprint(ours - before <= 1 and count() == ours)"
    )

    assert "True" == run(program, OMP_NUM_THREADS="2", MKL_NUM_THREADS="2")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("none", "^PAGEDKV_CPU_VARIANT is none$"),
        ("avx9", "^PAGEDKV_CPU_VARIANT must be none or one of x86-64-v4-bf16, .*, arm64, was avx9$"),
    ],
)
def test_wishes_that_no_build_fulfils(asked: str, message: str) -> None:
    """``none`` means none, and an unknown name is told what there is."""
    with pytest.raises(LibraryUnavailableError, match=message):
        find_library(OUTPUT, asked)


def test_a_variant_that_the_processor_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that lacks features is offered less, and told what it lacks; another machine's build is refused."""
    monkeypatch.setattr(library_module, "processor_features", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(library_module, "machine_name", lambda: "x86_64")
    with pytest.raises(LibraryUnavailableError, match="x86-64-v3: the processor lacks abm, avx, bmi1"):
        find_library(OUTPUT)
    with pytest.raises(LibraryUnavailableError, match=r"^arm64: it is for aarch64, this machine is x86_64$"):
        find_library(OUTPUT, "arm64")
    monkeypatch.setattr(library_module, "machine_name", lambda: "riscv64")
    with pytest.raises(LibraryUnavailableError, match=r"^there is no build for riscv64$"):
        find_library(OUTPUT)


def test_nothing_was_built(tmp_path: Path) -> None:
    """An empty folder, and one whose manifest gives a reason: the reason is passed on."""
    with pytest.raises(
        LibraryUnavailableError, match=f"{MINE[-1].name}: it was not built .python -m pagedkv.native.build"
    ):
        find_library(tmp_path)
    Manifest("", "", (), {"": "no compiler today"}).save(tmp_path)
    with pytest.raises(LibraryUnavailableError, match=f"{MINE[-1].name}: no compiler today"):
        find_library(tmp_path)


def _damaged(content: bytes) -> bytes:
    return b"not a library".ljust(len(content))


def _of_another_machine(content: bytes) -> bytes:
    machine = b"\xb7\x00" if machine_name() == "x86_64" else b"\x3e\x00"  # e_machine: AArch64, x86-64
    return content[:18] + machine + content[20:]


def _of_somebody_else(content: bytes) -> bytes:
    return Path(_ctypes.__file__).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_damaged, "it does not load .*invalid ELF header"),
        (_of_another_machine, "it does not load .*cannot open shared object file|it does not load .*wrong ELF"),
        (_of_somebody_else, "it is not a library of pagedkv .*undefined symbol: pagedkv_sources"),
    ],
)  # fmt: skip
def test_files_that_are_no_library_for_us(change: object, message: str, tmp_path: Path) -> None:
    """A damaged file, another architecture's and another project's are refused with the system's own words."""
    content = load().path.read_bytes()
    (tmp_path / MINE[0].file_name).write_bytes(change(content))  # type: ignore[operator]
    with pytest.raises(LibraryUnavailableError, match=f"{MINE[0].name}: .*{message}"):
        find_library(tmp_path, MINE[0].name)


def test_a_library_of_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library from before the last edit has another interface, perhaps: it is refused, and what to do is said."""
    shutil.copy(load().path, tmp_path / MINE[0].file_name)
    monkeypatch.setattr(library_module, "sources_digest", lambda: "0" * 64)
    with pytest.raises(LibraryUnavailableError, match=r"built from other sources .*python -m pagedkv.native.build"):
        find_library(tmp_path, MINE[0].name)


def test_a_worse_variant_serves_where_the_best_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad file does not cost the others: the next variant is loaded."""
    name = load().variant
    twin = type(MINE[0])("better", machine_name(), (), frozenset())
    monkeypatch.setattr(library_module, "VARIANTS", (twin, *VARIANTS))
    shutil.copy(load().path, tmp_path)
    (tmp_path / twin.file_name).write_bytes(_damaged(load().path.read_bytes()))

    assert name == find_library(tmp_path).variant


def test_no_openmp_in_the_process() -> None:
    """Without a runtime to bind to the library does not load, and the missing symbol is named."""
    program = (
        "from pagedkv.native import library\nlibrary._share_torch_openmp = lambda: None\n"
        "try: library.load()\nexcept library.LibraryUnavailableError as error: print(error)"
    )

    assert "undefined symbol: " in run(program)


def test_a_second_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is bound to other threads than torch's is not used."""
    monkeypatch.setattr(library_module, "_share_torch_openmp", lambda: str(load().path))
    with pytest.raises(LibraryUnavailableError, match=r"it runs on the threads of .*, torch on those of "):
        find_library(OUTPUT, load().variant)


def test_processor_features_are_read_in_either_spelling(tmp_path: Path) -> None:
    """x86 says ``flags``, Arm ``Features``; a file that is not there or says nothing gives none."""
    file = tmp_path / "cpuinfo"
    for text, expected in (
        ("flags\t\t: fpu avx2\nflags : other\n", {"fpu", "avx2"}),
        ("Features : asimd fp\n", {"asimd", "fp"}),
        ("x", set()),
    ):
        file.write_text(text, encoding="utf-8")
        assert expected == processor_features(file)

    assert frozenset() == processor_features(tmp_path / "missing")


def test_openmp_is_found_among_what_is_mapped() -> None:
    """The process has exactly the runtime that the library says it runs on."""
    load()

    assert [load().openmp] == mapped_openmp()

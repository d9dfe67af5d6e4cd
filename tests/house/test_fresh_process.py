"""What a fresh interpreter loads: the allocator without torch, the operator without triton."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.source_tree import ROOT


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh process holds after ``statement``."""
    program = f"{statement}\nimport sys\nprint('\\n'.join({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (0, "") == (result.returncode, result.stderr)
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["pagedkv", "pagedkv.allocator", "pagedkv.cli"])
def test_loads_without_torch(module: str) -> None:
    """Importing the package, the allocator or the command line brings in none of the heavy libraries."""
    assert set() == modules_after(f"import {module}") & {"torch", "triton", "transformers"}


def test_attention_loads_without_triton_and_allocator() -> None:
    """The operator imports Triton only when a Triton kernel is asked for, and transformers never."""
    assert {"torch"} == modules_after("import pagedkv.attention") & {"torch", "triton", "transformers"}


@pytest.mark.parametrize("statement", ["import pagedkv.allocator", "import pagedkv.attention"])
def test_no_twin_modules(statement: str) -> None:
    """Nothing is loaded under the short name of a root link, even from the root itself."""
    assert set() == modules_after(statement) & {"allocator", "attention"}


def test_allocator_and_attention_are_strangers() -> None:
    """Neither half loads the other: only the cache knows both."""
    names = "sorted(m for m in sys.modules if m.startswith('pagedkv.'))"
    for ours, other in (("allocator", "attention"), ("attention", "allocator")):
        program = f"import sys, pagedkv.{ours}; print([m for m in {names} if m.startswith('pagedkv.{other}')])"
        result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

        assert "[]" == result.stdout.strip()

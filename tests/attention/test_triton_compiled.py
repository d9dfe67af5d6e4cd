"""What the kernels become on GPUs that are not there: registers, spills, shared memory, matrix instructions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.attention.compiled import MAIN, SHARED_MEMORY, TARGETS, VARIANTS, compile_elsewhere

MATRIX = {"sm_80": {"mma.sync"}, "sm_90": {"wgmma.mma_async"}, "sm_100": {"tcgen05.mma"}}
"""What prefill must use in 16 bits; decode's sixteen rows are mma.sync's on every NVIDIA target, the 64 and more of a
large group may be prefill's."""


def check(target: str, name: str, kernels: dict[str, dict[str, Any]]) -> None:
    """Assert what must hold of a variant's kernels on a target."""
    assert set(kernels) == {"prefill", "decode", "merge", "write", "copy"}
    for kernel, found in kernels.items():
        assert found["shared"] <= SHARED_MEMORY[target], f"{target} {name} {kernel}: {found}"
        assert found["registers"] <= (512 if target == "gfx942" else 255)
        if name in MAIN:
            assert found["spills"] == 0, f"{target} {name} {kernel}: {found}"
    if VARIANTS[name].dtype == "float32" and target != "gfx942":
        return
    for kernel in ("prefill", "decode"):
        instructions = set(kernels[kernel]["matrix"])
        if target == "gfx942":
            assert instructions
            assert all(one.startswith("v_mfma") for one in instructions)
        elif kernel == "prefill":
            assert instructions >= MATRIX[target]
        else:
            num_q_heads, num_kv_heads = VARIANTS[name].heads
            large = MATRIX[target] if num_q_heads // num_kv_heads > 32 else set()
            assert instructions
            assert instructions <= {"mma.sync"} | large


def test_main_variant_on_every_target() -> None:
    """bf16, 32/8 heads of 128, page 16: matrix instructions, no spills, within shared memory, on all four targets."""
    name = MAIN[0]
    for target, variants in compile_elsewhere(list(TARGETS), [name]).items():
        check(target, name, variants[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant(target: str) -> None:
    """All variants of docs/kernels.md compile, fit and use matrix units; the main ones do not spill."""
    compiled = compile_elsewhere([target], list(VARIANTS))[target]
    for name, kernels in compiled.items():
        check(target, name, kernels)

"""The instruction sets that the library is compiled for, and which of them this processor runs.

Takes the processor's own list of features and gives the builds that it can run, the best first. One source serves all;
only compiler flags differ. It compiles and loads nothing.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

_V3 = frozenset({"avx", "avx2", "abm", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True)
class Variant:
    """One build of the library.

    Attributes:
        name: what ``PAGEDKV_CPU_VARIANT`` and file names call it.
        machine: the `platform.machine` it is for.
        flags: what the compiler is told beyond the common flags.
        features: what the processor must have, in the words of Linux's ``/proc/cpuinfo``.
        like: a variant that it equals but where a source names ``macro``: other sources are compiled once for both.
        macro: what the compiler defines for this variant and not for ``like``.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]
    like: str | None = None
    macro: str = ""

    @property
    def file_name(self) -> str:
        """Name of its shared library."""
        return f"libpagedkv-{self.name}.so"


VARIANTS = (
    Variant(
        "x86-64-v4-bf16",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
        _V4 | {"avx512_bf16"},
        like="x86-64-v4",
        macro="__AVX512BF16__",
    ),
    Variant("x86-64-v4", "x86_64", ("-march=x86-64-v4", "-mprefer-vector-width=512"), _V4),
    Variant("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Variant("arm64", "aarch64", ("-march=armv8-a",), frozenset()),
)
"""All builds, the best of each machine first. Every 64-bit Arm processor has NEON, so that one asks for nothing."""


def machine_name() -> str:
    """Return this machine's architecture under the one name that `Variant.machine` uses."""
    found = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(found, found)


def processor_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return what the processor says it has; nothing where the system does not tell."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(line[1].split()) if line else frozenset()


def missing_features(variant: Variant, machine: str, features: frozenset[str]) -> str | None:
    """Say why a processor cannot run ``variant``, or None if it can."""
    if variant.machine != machine:
        return f"it is for {variant.machine}, this machine is {machine}"
    lacking = variant.features - features
    return f"the processor lacks {', '.join(sorted(lacking))}" if lacking else None

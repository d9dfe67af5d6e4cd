"""Load the compiled library once: the best build this processor runs, bound to torch's thread pool.

Gives the library's handle, or the reason why there is none; what the functions in it do is their callers' business.
``PAGEDKV_CPU_VARIANT`` asks for one build by name, or for ``none``.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .build import OUTPUT, Manifest, sources_digest
from .variants import VARIANTS, Variant, machine_name, missing_features, processor_features

VARIABLE = "PAGEDKV_CPU_VARIANT"

_OPENMP_NAMES = ("libgomp", "libomp", "libiomp")


class LibraryUnavailableError(RuntimeError):
    """There is no compiled library for this process; the message says why, build by build."""


@dataclass(frozen=True)
class Library:
    """A loaded library.

    Attributes:
        variant: which build it is.
        path: its file.
        functions: its exported functions.
        openmp: path of the OpenMP runtime it runs on.
    """

    variant: str
    path: Path
    functions: ctypes.CDLL
    openmp: str


@cache
def load() -> Library:
    """Return the library, loaded on the first call.

    Raises:
        LibraryUnavailableError: none could be loaded.
    """
    return find_library(OUTPUT, os.environ.get(VARIABLE, ""))


def find_library(folder: Path, asked: str = "") -> Library:
    """Load the first build in ``folder`` that this processor and process can run.

    Args:
        folder: where the build put the libraries and their manifest.
        asked: the name of the only build to try, ``"none"`` for none, empty to choose.

    Raises:
        LibraryUnavailableError: none could be loaded.
    """
    machine, features = machine_name(), processor_features()
    if asked == "none":
        raise LibraryUnavailableError(f"{VARIABLE} is none")
    candidates = [v for v in VARIANTS if (v.name == asked if asked else v.machine == machine)]
    if not candidates:
        known = ", ".join(variant.name for variant in VARIANTS)
        raise LibraryUnavailableError(
            f"{VARIABLE} must be none or one of {known}, was {asked}" if asked else f"there is no build for {machine}"
        )
    manifest = Manifest.load(folder)
    reasons = []
    for variant in candidates:
        reason = missing_features(variant, machine, features) or _why_not_built(variant, folder, manifest)
        if reason is None:
            try:
                return open_library(variant, folder / variant.file_name)
            except LibraryUnavailableError as error:
                reason = str(error)
        reasons.append(f"{variant.name}: {reason}")
    raise LibraryUnavailableError("; ".join(reasons))


def _why_not_built(variant: Variant, folder: Path, manifest: Manifest | None) -> str | None:
    if (folder / variant.file_name).exists():
        return None
    if manifest is None:
        return "it was not built (python -m pagedkv.native.build builds it)"
    return manifest.reasons.get(variant.name) or manifest.reasons.get("") or "it was not built"


def open_library(variant: Variant, path: Path) -> Library:
    """Load one file and check that it is what the code beside it expects.

    Raises:
        LibraryUnavailableError: the system cannot load it, it was made from other sources, or it would bring a second
            thread pool.
    """
    own_runtime = _share_torch_openmp()
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        # Another architecture, a damaged file, or no OpenMP in the process to bind to: the system's words name it.
        raise LibraryUnavailableError(f"it does not load ({error})") from error
    try:
        functions.pagedkv_sources.restype = functions.pagedkv_openmp.restype = ctypes.c_char_p
        sources, openmp = functions.pagedkv_sources().decode(), functions.pagedkv_openmp().decode()
    except AttributeError as error:
        raise LibraryUnavailableError(f"it is not a library of pagedkv ({error})") from error
    if sources != sources_digest():
        raise LibraryUnavailableError(
            "it was built from other sources than those beside it (python -m pagedkv.native.build builds it anew)"
        )
    if own_runtime and not os.path.samefile(openmp, own_runtime):
        raise LibraryUnavailableError(f"it runs on the threads of {openmp}, torch on those of {own_runtime}")
    return Library(variant.name, path, functions, openmp)


def _share_torch_openmp() -> str | None:
    """Make the symbols of torch's OpenMP runtime findable and return its path; None where torch has none.

    torch's wheels carry a runtime of their own, under a name of their own in some releases. Loading torch first and
    binding to what it has loaded is what keeps the process at one pool: idle threads of a second one spin beside it.
    """
    import torch

    mapped = mapped_openmp()
    home = str(Path(torch.__file__).resolve().parents[1])
    own = next((path for path in mapped if path.startswith(home)), mapped[0] if mapped else None)
    if own is not None:
        ctypes.CDLL(own, mode=ctypes.RTLD_GLOBAL)
    return own


def mapped_openmp() -> list[str]:
    """Return the OpenMP runtimes that the process has loaded, by path; empty where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    return [path for path in paths if Path(path).name.startswith(_OPENMP_NAMES)]

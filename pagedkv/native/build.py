"""Compile the library: every source for every instruction set of this machine, in parallel.

Takes the package's ``*.cpp`` files and a C++ compiler, gives shared libraries in ``pagedkv/native/lib`` and a manifest
that says what was built from which sources, or why nothing was. It needs the standard library only, never torch, and
it never fails for want of a compiler: the operator then takes another way and repeats the reason.

    python -m pagedkv.native.build [--force] [--variant NAME ...]

Objects are compiled for OpenMP but linked without a runtime: the calls are left to be found among what torch has
loaded, so that there is one thread pool in the process, torch's own, whatever its wheel calls the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from .variants import VARIANTS, Variant, machine_name

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = (PACKAGE / "attention" / "cpu", PACKAGE / "native")
OUTPUT = PACKAGE / "native" / "lib"

COMPILERS = ("g++", "c++", "clang++")
"""Tried in this order where ``CXX`` is not set."""

COMMON_FLAGS: tuple[str, ...] = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
    # Neither changes a result: errno is not read, and no trap handler is installed.
    "-fno-math-errno",
    "-fno-trapping-math",
)
LINK_FLAGS: tuple[str, ...] = ("-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
"""The C++ runtime comes along and stays inside: nothing is asked of the one that torch has loaded."""

_SECONDS = 600
"""After this long a compiler is given up."""


@dataclass(frozen=True)
class Manifest:
    """What a build left behind.

    Attributes:
        sources: digest of the sources and flags it was made from.
        compiler: the compiler's own first line, empty where there is none.
        variants: names of the builds that are there.
        reasons: why others are not, by name; ``""`` for all.
    """

    sources: str
    compiler: str
    variants: tuple[str, ...]
    reasons: dict[str, str]

    def save(self, folder: Path) -> None:
        """Write it into ``folder``."""
        (folder / "manifest.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """Return the manifest in ``folder``, or None where nothing was built or it cannot be read."""
        try:
            content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            return cls(content["sources"], content["compiler"], tuple(content["variants"]), dict(content["reasons"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def source_files() -> list[Path]:
    """Return every file that the library is made from, headers too, in order."""
    return sorted(path for folder in SOURCE_FOLDERS for pattern in ("*.cpp", "*.h") for path in folder.glob(pattern))


def sources_digest() -> str:
    """Return the digest of all sources and flags: a library with another one was made from something else."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((COMMON_FLAGS, LINK_FLAGS, [(variant.name, variant.flags) for variant in VARIANTS])).encode())
    return digest.hexdigest()


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler, ``CXX`` before all others, or None."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        return asked if shutil.which(asked[0]) else None
    return next(([name] for name in COMPILERS if shutil.which(name)), None)


def build(
    *, output: Path = OUTPUT, machine: str | None = None, only: tuple[str, ...] = (), force: bool = False
) -> Manifest:
    """Compile what is missing or stale in ``output`` and return what is there now.

    Args:
        output: folder of the libraries and their manifest; made if it is not there.
        machine: architecture to build for (the compiler must be one for it); None is this machine's.
        only: names of the variants to build; empty builds all of the machine's.
        force: compile also what is up to date.
    """
    digest = sources_digest()
    machine = machine or machine_name()
    wanted = [variant for variant in VARIANTS if variant.machine == machine and (not only or variant.name in only)]
    before = Manifest.load(output)
    if force or before is None or before.sources != digest:
        before = Manifest(digest, "", (), {})
    kept = {v.name for v in VARIANTS if v.name in before.variants and (output / v.file_name).exists()}
    missing = [variant for variant in wanted if variant.name not in kept and variant.name not in before.reasons]
    if wanted and not missing:
        return before
    output.mkdir(parents=True, exist_ok=True)
    compiler = find_compiler()
    if not wanted:
        manifest = Manifest(digest, "", (), {"": f"the library has no build for {machine}"})
    elif compiler is None:
        asked = os.environ.get("CXX") or ", ".join(COMPILERS)
        manifest = Manifest(digest, "", (), {"": f"no C++ compiler was found when pagedkv was built (tried {asked})"})
    else:
        reasons = _compile_all(compiler, missing, output)
        there = kept | {variant.name for variant in missing} - set(reasons)
        names = tuple(variant.name for variant in VARIANTS if variant.name in there)
        manifest = Manifest(digest, _first_line([*compiler, "--version"]), names, before.reasons | reasons)
        manifest.reasons.pop("", None)
    for path in output.glob("libpagedkv-*"):
        if path.name not in {f"libpagedkv-{name}.so" for name in manifest.variants}:
            path.unlink()
    manifest.save(output)
    return manifest


def _compile_all(compiler: list[str], variants: list[Variant], output: Path) -> dict[str, str]:
    """Compile and link ``variants`` and return why some could not be, by name."""
    sources = sorted(source_files(), key=lambda path: -path.stat().st_size)  # the longest to compile first
    common = [*COMMON_FLAGS, *(f"-I{folder}" for folder in SOURCE_FOLDERS), f'-DPAGEDKV_SOURCES="{sources_digest()}"']
    asked_for = {variant.name for variant in variants}
    reasons: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs: dict[Path, Future[str | None]] = {}
        objects: dict[str, list[Path]] = {variant.name: [] for variant in variants}
        for source in (path for path in sources if path.suffix == ".cpp"):
            for variant in variants:
                shared = variant.like in asked_for and not _names(source, sources, variant.macro)
                target = Path(scratch) / f"{variant.like if shared else variant.name}-{source.stem}.o"
                objects[variant.name].append(target)
                if not shared:
                    command = [*compiler, *common, *variant.flags, "-c", str(source), "-o", str(target)]
                    jobs[target] = pool.submit(_run, command)
        for variant in variants:
            problem = next((said for target in objects[variant.name] if (said := jobs[target].result())), None)
            if problem is None:
                problem = _link(compiler, objects[variant.name], output / variant.file_name)
            if problem is not None:
                reasons[variant.name] = problem
    return reasons


def _names(source: Path, files: list[Path], macro: str) -> bool:
    """Whether a source or a header it includes says ``macro``: then it may read differently where that is defined."""
    headers = {path.name: path for path in files if path.suffix == ".h"}
    found, unread = {source}, [source]
    while unread:
        text = unread.pop().read_text(encoding="utf-8")
        if macro in text:
            return True
        included = {headers[name] for name in re.findall(r'#include "(.+)"', text) if name in headers}
        unread += included - found
        found |= included
    return False


def _link(compiler: list[str], objects: list[Path], library: Path) -> str | None:
    """Link a library; return None, or what the compiler said. A process that has the old file mapped keeps it whole."""
    finished = library.with_name(f"{library.name}.new")
    problem = _run([*compiler, *LINK_FLAGS, *map(str, objects), "-o", str(finished)])
    if problem is None:
        finished.replace(library)
    return problem


def _run(command: list[str]) -> str | None:
    """Run a compiler; return None, or what it said when it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if done.returncode:
        return f"{command[0]} failed: {done.stderr.strip()[-2000:]}"
    if done.stderr:
        sys.stderr.write(done.stderr)
    return None


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [""])[0]


def main() -> int:
    """Build from the command line; the exit status says whether a library is there."""
    parser = argparse.ArgumentParser(prog="python -m pagedkv.native.build", description=__doc__.splitlines()[0])
    parser.add_argument("--force", action="store_true", help="compile also what is up to date")
    parser.add_argument("--variant", action="append", default=[], choices=[v.name for v in VARIANTS])
    parser.add_argument("--machine", choices=sorted({v.machine for v in VARIANTS}), help="cross-compile, by CXX")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the libraries")
    args = parser.parse_args()
    start = time.monotonic()
    manifest = build(output=args.output, machine=args.machine, only=tuple(args.variant), force=args.force)
    for name in manifest.variants:
        sys.stdout.write(f"{args.output / f'libpagedkv-{name}.so'}\n")
    for name, reason in manifest.reasons.items():
        sys.stderr.write(f"{name or 'no library'}: {reason}\n")
    sys.stdout.write(f"{len(manifest.variants)} built or up to date, {time.monotonic() - start:.1f} s\n")
    return 0 if manifest.variants else 1


if __name__ == "__main__":
    sys.exit(main())

"""Run the kernels' tests on a library that was built in another way.

    python -m tests.attention.rebuilt sanitised|pairs [pytest arguments, by default the tests of the "cpu" backend]

``sanitised`` has AddressSanitizer and UndefinedBehaviorSanitizer: a bad read, a data-dependent undefined operation or
a write beside a tensor ends the run with the sanitiser's report. ``pairs`` takes the ways of processors that multiply
bf16 in pairs, with plain arithmetic in place of their instruction. Both take minutes: no part of ``make test``. Builds
into a temporary folder and starts pytest with this file as a plugin, which points the loader there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pagedkv.native import build, library
from pagedkv.native.variants import VARIANTS, machine_name, missing_features, processor_features

FLAGS = {
    "sanitised": "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer",
    "pairs": "-DPAGEDKV_PLAIN_PAIRS",
}
FOLDER, WAY = "PAGEDKV_REBUILT_FOLDER", "PAGEDKV_REBUILT_WAY"
TESTS = ("tests/attention", "-k", "cpu", "-m", "not slow")


def prepare(way: str) -> None:
    """Optimise less where sanitisers slow the compiler: flags are in the digest, so builder and loader do the same."""
    if way == "sanitised":
        build.COMMON_FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build.COMMON_FLAGS)


def pytest_configure() -> None:
    """Load the library from the folder that `main` built (pytest calls this in the process that it starts)."""
    prepare(os.environ[WAY])
    setattr(library, "OUTPUT", Path(os.environ[FOLDER]))  # noqa: B010 (an import of the loader's, not its export)


def main() -> int:
    """Build, test, and return pytest's exit status."""
    way, arguments = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    compiler = build.find_compiler()
    if compiler is None or way not in FLAGS:
        sys.stderr.write(f"{__doc__}\n" if compiler else "there is no C++ compiler\n")
        return 2
    prepare(way)
    os.environ["CXX"] = " ".join([*compiler, FLAGS[way]])
    machine, features = machine_name(), processor_features()
    best = next(v.name for v in VARIANTS if not missing_features(v, machine, features))
    with tempfile.TemporaryDirectory() as folder:
        manifest = build.build(output=Path(folder), only=(best,))
        if not manifest.variants:
            sys.stderr.write(f"{manifest.reasons}\n")
            return 1
        environment = os.environ | {FOLDER: folder, WAY: way}
        if way == "sanitised":
            environment |= _sanitisers(compiler)
        command = [sys.executable, "-m", "pytest", "-p", "tests.attention.rebuilt", "-q", "-x"]
        return subprocess.run([*command, *(arguments or TESTS)], env=environment, check=False).returncode


def _sanitisers(compiler: list[str]) -> dict[str, str]:
    """Return the environment that loads the runtime first. Python keeps much to its end, so leaks are not reported."""
    found = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return {
        "LD_PRELOAD": found.stdout.strip(),
        # Link order: the interpreter is not built with the sanitiser.
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


if __name__ == "__main__":
    sys.exit(main())

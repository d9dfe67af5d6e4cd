"""Run the kernels' tests on a library built with AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.attention.sanitised [pytest arguments, by default the attention tests that take the "cpu" backend]

Takes minutes, so it is no part of ``make test``. Builds into a temporary folder and starts pytest with the sanitiser's
runtime loaded first and this file as a plugin, which points the loader there. A bad read, a data-dependent undefined
operation or a write beside a tensor ends the run with the sanitiser's report.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pagedkv.native import build, library
from pagedkv.native.variants import VARIANTS, machine_name, missing_features, processor_features

FLAGS = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
FOLDER = "PAGEDKV_SANITISED_FOLDER"
TESTS = ("tests/attention", "-k", "cpu", "-m", "not slow")


def compile_lightly() -> None:
    """Optimise less, for the sanitisers slow the compiler. Flags are in the digest: builder and loader do the same."""
    build.COMMON_FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build.COMMON_FLAGS)


def pytest_configure() -> None:
    """Load the library from the folder that `main` built (pytest calls this in the process that it starts)."""
    compile_lightly()
    setattr(library, "OUTPUT", Path(os.environ[FOLDER]))  # noqa: B010 (an import of the loader's, not its export)


def main() -> int:
    """Build, test, and return pytest's exit status."""
    compiler = build.find_compiler()
    if compiler is None:
        sys.stderr.write("there is no C++ compiler\n")
        return 1
    compile_lightly()
    os.environ["CXX"] = " ".join([*compiler, FLAGS])
    machine, features = machine_name(), processor_features()
    best = next(v.name for v in VARIANTS if not missing_features(v, machine, features))
    with tempfile.TemporaryDirectory() as folder:
        manifest = build.build(output=Path(folder), only=(best,))
        if not manifest.variants:
            sys.stderr.write(f"{manifest.reasons}\n")
            return 1
        found = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        # Leaks: Python keeps much to its end. Link order: the interpreter is not built with the sanitiser.
        environment = os.environ | {
            FOLDER: folder,
            "LD_PRELOAD": found.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        command = [sys.executable, "-m", "pytest", "-p", "tests.attention.sanitised", "-q", "-x"]
        return subprocess.run([*command, *(sys.argv[1:] or TESTS)], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

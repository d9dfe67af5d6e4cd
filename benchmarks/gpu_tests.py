"""The kernel tests on a device, for `benchmarks/gpu.py`: figures of kernels that are wrong are worth nothing.

Takes a device and a time; gives what pytest said. The tests run in processes side by side, since most of their time is
compiling, and without the project's pytest settings, whose plugins an image may not have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
FILES = ("tests/attention/test_triton.py", "tests/attention/test_shared_prefix.py")
GROUPS = (
    "mixed_batch or half",
    "every_shape",
    "splits or independent or chunks or accumulates",
    "strided or writes or copies or refused or cascade or members",
)


def kernel_tests(device: str, limit: float) -> dict[str, str]:
    """Run the tests on ``device`` for at most ``limit`` seconds, 150 at most; return each group's last line."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PAGEDKV_TEST_DEVICE": device}
    options = [
        "-q",
        "-x",
        "-c",
        os.devnull,
        "--rootdir",
        str(ROOT),
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    ]
    groups = ("accumulates",) if device == "cpu" else GROUPS
    deadline = time.monotonic() + min(150.0, limit)
    found = {}
    with TemporaryDirectory() as folder:
        running = []
        for index, group in enumerate(groups):
            command = [sys.executable, "-m", "pytest", *options, "-m", "not slow", "-k", group, *FILES]
            output = Path(folder) / str(index)
            with output.open("w") as file:
                running.append((group, output, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file)))
        for group, output, process in running:
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            lines = output.read_text().strip().splitlines() or ["nothing"]
            found[group] = lines[-1] if process.returncode in {0, 1} else f"not finished: {lines[-1]}"
            if process.returncode:
                print("\n".join(lines[-25:]), flush=True)
            print(f"tests {group!r}: {found[group]}", flush=True)
    return found

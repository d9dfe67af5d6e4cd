"""What is shipped: the import package, its licence and its papers, and nothing from the links."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

import pagedkv
from tests.house.source_tree import ROOT, python_files

if TYPE_CHECKING:
    from pathlib import Path

PAPERS = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "hatch_build.py", "pyproject.toml", ".gitignore"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built with no network and no environment of its own."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, capture_output=True, check=True
    )
    return folder


def test_wheel_holds_only_the_package(built: Path) -> None:
    """The wheel installs the one import package `pagedkv`, whole, and typed."""
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    assert {"pagedkv", f"pagedkv-{pagedkv.__version__}.dist-info"} == {name.split("/")[0] for name in names}
    assert "pagedkv/py.typed" in names
    assert f"pagedkv-{pagedkv.__version__}.dist-info/licenses/LICENSE" in names
    modules = {name for name in names if name.endswith(".py")}
    assert {path.relative_to(ROOT).as_posix() for path in python_files("pagedkv")} == modules


def test_sdist_holds_only_the_package_and_its_papers(built: Path) -> None:
    """The source archive has no twin of the package under the links' names, no caches and no tests."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]

    assert PAPERS | {"pagedkv"} == {name.split("/")[0] for name in names}
    assert [] == [name for name in names if "__pycache__" in name]

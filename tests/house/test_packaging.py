"""What is shipped: the import package, its licence and its papers, and nothing from the links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

import pagedkv
from pagedkv.native.variants import VARIANTS, machine_name
from tests.house.source_tree import ROOT, python_files
from tests.native.fake_compiler import FakeCompiler

if TYPE_CHECKING:
    from pathlib import Path

PAPERS = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "hatch_build.py", "pyproject.toml", ".gitignore"}


def hatch(root: Path, folder: Path, compiler: str, *options: str) -> Path:
    """Build what ``root`` gives into ``folder``, with no network and no environment of its own."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *options, "-d", str(folder)],
        cwd=root,
        env=os.environ | {"CXX": compiler},
        capture_output=True,
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it, by a compiler that is quick and compiles nothing."""
    folder = tmp_path_factory.mktemp("dist")
    compiler = FakeCompiler(folder / "bin").command
    hatch(ROOT, folder, compiler, "-t", "sdist")
    return hatch(unpacked(folder), folder, compiler, "-t", "wheel")


def unpacked(folder: Path) -> Path:
    """Unpack the sdist in ``folder`` and return its root."""
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    return next((folder / "source").iterdir())


def test_wheel_holds_the_library_of_its_platform(built: Path) -> None:
    """The wheel made from the sdist has every variant of this machine, and a tag that keeps it from other platforms."""
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    variants = [variant for variant in VARIANTS if variant.machine == machine_name()]

    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    assert {"manifest.json", *(variant.file_name for variant in variants)} == {
        name.rpartition("/")[2] for name in names if name.startswith("pagedkv/native/lib/")
    }


def test_without_a_compiler_the_wheel_is_a_plain_one(built: Path, tmp_path: Path) -> None:
    """No compiler: the build still succeeds, for any platform, and the wheel carries the reason."""
    (wheel,) = hatch(unpacked_again(built, tmp_path), tmp_path, "no-such-compiler", "-t", "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("pagedkv/native/lib/")]
        manifest = archive.read("pagedkv/native/lib/manifest.json").decode()

    assert wheel.name.endswith("-py3-none-any.whl")
    assert ["pagedkv/native/lib/manifest.json"] == names
    assert "no C++ compiler was found when pagedkv was built (tried no-such-compiler)" in manifest


def unpacked_again(built: Path, folder: Path) -> Path:
    """Unpack the same sdist elsewhere, where nothing was compiled."""
    (sdist,) = built.glob("*.tar.gz")
    shutil.copy(sdist, folder)
    return unpacked(folder)


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
    assert [] == [name for name in names if name.startswith("pagedkv/native/lib/")]
    assert [] == [name for name in names if "__pycache__" in name]

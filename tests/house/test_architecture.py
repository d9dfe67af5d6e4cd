"""The house: arrows point one way, names are long, files are short."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib

import pytest

import pagedkv
from tests.house.source_tree import LINKS, ROOT, Import, imports_in, imports_of, python_files

# What each part of the package may import of it. A new part takes its place here first.
ARROWS = {
    "allocator": set[str](),
    "native": set[str](),
    "attention": {"native"},
    "backend": {"allocator", "attention"},
    "spec": {"allocator"},
    "layer_groups": {"allocator", "spec"},
    "sizing": {"allocator"},
    "page_tensors": {"allocator", "attention", "layer_groups", "sizing", "spec"},
    "step": {"allocator", "attention", "backend"},
    "cache": {"allocator", "attention", "backend", "page_tensors", "sizing", "spec", "step"},
    "strategy": {"attention", "sizing", "spec"},
    "sliding": {"attention", "cache", "sizing", "spec"},
    "swap_space": {"allocator", "cache", "sizing"},
    "transformers": {"allocator", "attention", "backend", "cache", "sizing", "spec", "step"},
    "recompute": {"allocator", "attention", "backend", "cache", "sizing", "spec", "step", "transformers"},
    "engine": {
        "allocator",
        "attention",
        "backend",
        "cache",
        "native",
        "recompute",
        "sizing",
        "sliding",
        "spec",
        "step",
        "strategy",
        "swap_space",
        "transformers",
    },
    "server": {"engine"},
    "cli": {"allocator", "attention", "backend", "cache", "engine", "server", "sizing", "spec", "transformers"},
    "testing": {"allocator", "attention", "backend", "spec"},
    "__main__": {"cli"},
}
ALLOCATOR_MAY_IMPORT = {"numpy"} | sys.stdlib_module_names
CHECKS_FOR_ADOPTERS = "testing.py"  # needs Hypothesis, and nothing imports it
LONGEST_FILE = 350
LONGEST_TEST_FILE = 500
KERNELS = re.compile(r"pagedkv/attention/(kernels/|triton|cpu)")


def part_of(target: str) -> str | None:
    """Return the part of the package that an import reaches, or None where it reaches none."""
    first, _, rest = target.partition(".")
    if first != "pagedkv":
        return None
    name = rest.partition(".")[0]
    if name in pagedkv._HOME:
        return pagedkv._HOME[name].split(".")[1]
    return None if name == "__version__" else name


def short_forms(imports: list[Import]) -> list[str]:
    """Return the imports that go through a root link and so would load a twin of the module."""
    return [f"{i.path.name}:{i.line}: {i.target}" for i in imports if i.target.split(".")[0] in LINKS]


def test_arrows_point_one_way() -> None:
    """Every import inside the package follows the table of arrows; nothing imports a part above it."""
    wrong = []
    for path in python_files("pagedkv"):
        relative = path.relative_to(ROOT / "pagedkv")
        part = relative.parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        assert part in ARROWS, f"{relative} is a new part of the package: give it a place in ARROWS"
        for found in imports_of(path):
            target = part_of(found.target)
            if target not in {None, part} and target not in ARROWS[part]:
                wrong.append(f"{relative}:{found.line} imports {found.target}")

    assert [] == wrong


def test_arrows_have_no_cycle() -> None:
    """The table of arrows itself is acyclic: parts can be ordered so that each imports only earlier ones."""
    placed: set[str] = set()
    while ready := {part for part, below in ARROWS.items() if part not in placed and below <= placed}:
        placed |= ready

    assert set(ARROWS) == placed


def test_allocator_imports_only_numpy_and_the_standard_library() -> None:
    """The allocator's files name no module outside numpy and the standard library, lazily or otherwise."""
    wrong = [
        f"{found.path.name}:{found.line} imports {found.target}"
        for path in python_files("pagedkv/allocator")
        if path.name != CHECKS_FOR_ADOPTERS
        for found in imports_of(path)
        if not found.relative and found.target.split(".")[0] not in ALLOCATOR_MAY_IMPORT
    ]

    assert [] == wrong


def test_nothing_in_the_package_needs_hypothesis() -> None:
    """The checks for adopters are imported by nobody in the package, so that Hypothesis stays optional."""
    wrong = [
        f"{found.path.name}:{found.line} imports {found.target}"
        for path in python_files("pagedkv")
        if path.name != CHECKS_FOR_ADOPTERS
        for found in imports_of(path)
        if {"testing", "hypothesis"} & set(found.target.split("."))
    ]

    assert [] == wrong


@pytest.mark.parametrize("folder", LINKS)
def test_imports_inside_a_linked_folder_are_relative(folder: str) -> None:
    """A linked folder names its own package relatively, so that it reads the same through the link."""
    wrong = [
        f"{found.path.name}:{found.line} imports {found.target}"
        for path in python_files(f"pagedkv/{folder}")
        for found in imports_of(path)
        if not found.relative and found.target.split(".")[0] == "pagedkv"
    ]

    assert [] == wrong


def test_nothing_imports_by_a_links_short_form() -> None:
    """No file imports ``allocator`` or ``attention`` from the root: that would be a twin of the module."""
    files = python_files("pagedkv", "tests", "benchmarks")

    assert [] == [line for path in files for line in short_forms(imports_of(path))]


def test_short_form_detector_fires() -> None:
    """The detector of short forms sees every way of writing one, and leaves the long form alone."""
    path = ROOT / "tests" / "example.py"
    lines = [
        "import allocator",
        "import attention.api as a",
        "from allocator import x",
        "def f():\n from attention import y",
    ]

    assert [1, 1, 1, 1] == [len(short_forms(imports_in(line, path))) for line in lines]
    assert [] == short_forms(imports_in("from pagedkv.allocator import x\nfrom .attention import y", path))


@pytest.mark.parametrize("name", LINKS)
def test_links_are_links(name: str) -> None:
    """The rooms at the root are relative links into the package, not copies."""
    link = ROOT / name

    assert link.is_symlink()
    assert f"pagedkv/{name}" == str(link.readlink())


def test_files_are_short() -> None:
    """A file holds one idea: 350 lines in the package and the benchmarks, 500 in tests; kernels are free."""
    too_long = {}
    for folder, longest in (("pagedkv", LONGEST_FILE), ("benchmarks", LONGEST_FILE), ("tests", LONGEST_TEST_FILE)):
        for path in python_files(folder):
            name = path.relative_to(ROOT).as_posix()
            length = path.read_text(encoding="utf-8").count("\n")
            if length > longest and not KERNELS.match(name):
                too_long[name] = length

    assert {} == too_long


def test_linter_sees_every_file_once() -> None:
    """The linter's file list is the project's: nothing inside a linked folder is left out or met twice."""
    command = [sys.executable, "-m", "ruff", "check", "--show-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    seen = sorted(name for name in listed if name.endswith(".py"))

    files = [ROOT / "hatch_build.py", *python_files("pagedkv", "tests", "benchmarks")]

    assert sorted(map(str, files)) == seen


def test_version_is_the_same_everywhere() -> None:
    """``pyproject.toml``, ``pagedkv.__version__`` and the changelog's newest release agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    releases = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert project["version"] == pagedkv.__version__
    assert project["version"] == releases[0]


def test_constraints_pin_every_direct_dependency() -> None:
    """``make install`` is repeatable: each dependency that the project names has one pinned version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["demo"], *extras["serve"], *extras["dev"]]
    pins = re.findall(r"^([\w-]+)==[\w.]+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)

    assert set() == {re.split(r"[><=; [,]", name)[0] for name in wanted} - set(pins)


@pytest.mark.parametrize(
    "module",
    [
        "pagedkv",
        "pagedkv.allocator",
        "pagedkv.attention",
        "pagedkv.transformers",
        "pagedkv.engine",
        "pagedkv.server",
        "pagedkv.cli",
    ],
)
def test_public_names_resolve(module: str) -> None:
    """Every name in ``__all__`` is there, and ``dir()`` shows it."""
    loaded = importlib.import_module(module)

    assert loaded.__all__
    assert [] == [name for name in loaded.__all__ if not hasattr(loaded, name)]
    assert set(loaded.__all__) <= set(dir(loaded))


def test_unknown_names_are_attribute_errors() -> None:
    """A name the package does not have is an AttributeError that names it, not an import that half works."""
    with pytest.raises(AttributeError, match="'Engin'"):
        getattr(pagedkv, "Engin")  # noqa: B009

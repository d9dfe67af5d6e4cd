"""The source tree as the house tests see it: files, modules and every import, read without running anything."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("allocator", "attention")


class Import(NamedTuple):
    """One import statement: where it stands, its line, the absolute module (with the name, for ``from``)."""

    path: Path
    line: int
    target: str
    relative: bool


def python_files(*folders: str) -> list[Path]:
    """Return every Python file under the root's ``folders``, in order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports_of(path: Path) -> list[Import]:
    """Return all imports of a file, those inside functions and under TYPE_CHECKING too."""
    return imports_in(path.read_text(encoding="utf-8"), path)


def imports_in(source: str, path: Path) -> list[Import]:
    """Return all imports of ``source``; relative ones are resolved as a file at ``path`` would."""
    found = []
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            found += [Import(path, node.lineno, alias.name, relative=False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node.level, node.module)
            found += [Import(path, node.lineno, f"{module}.{a.name}", relative=node.level > 0) for a in node.names]
    return found


def _absolute(path: Path, level: int, module: str | None) -> str:
    if not level:
        return module or ""
    package = path.relative_to(ROOT).parent.parts
    base = package[: len(package) - (level - 1)]
    return ".".join((*base, module) if module else base)

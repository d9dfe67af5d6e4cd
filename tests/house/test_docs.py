"""What the documents promise: every Python block runs, in order, one namespace per file, without a network.

The working folder of a document holds a tiny random model under the names that the documents use for real ones, so
that ``Engine.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")`` is what a reader would type and still takes a
second.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.cli.tiny_chat import save_tiny_chat_model
from tests.house.source_tree import ROOT, imports_in
from tests.house.test_architecture import short_forms

if TYPE_CHECKING:
    from pathlib import Path

MODEL_NAMES = ("HuggingFaceTB/SmolLM2-135M-Instruct", "my-model")
FENCE = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Snippet(NamedTuple):
    """One Python block: the line it starts on, its code, and whether it runs or is only compiled."""

    line: int
    code: str
    runs: bool


def snippets_of(text: str) -> list[Snippet]:
    """Return the Python blocks of a Markdown text; ``no-run`` in the info string keeps one from running."""
    return [
        Snippet(text.count("\n", 0, match.start("code")) + 1, match["code"], "no-run" not in match["info"].split())
        for match in FENCE.finditer(text)
    ]


def run_snippets(snippets: list[Snippet], path: Path) -> None:
    """Compile every block, and run those that run; a failure's traceback names the document and its line."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for snippet in snippets:
        code = compile("\n" * (snippet.line - 1) + snippet.code, str(path), "exec", dont_inherit=True)
        if snippet.runs:
            exec(code, namespace)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random chat model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_chat_model(folder)
    return folder


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_blocks_run(path: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of the document does what the text around it says it does: it runs to its end."""
    for name in MODEL_NAMES:
        shutil.copytree(tiny_model, tmp_path / name)
    monkeypatch.chdir(tmp_path)

    run_snippets(snippets_of(path.read_text(encoding="utf-8")), path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of the document names a file of the project."""
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))

    assert [] == [target for target in targets if not (path.parent / target).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_blocks_use_long_names(path: Path) -> None:
    """No Python block teaches a reader to import by the short form of a root link."""
    blocks = snippets_of(path.read_text(encoding="utf-8"))

    assert [] == [line for block in blocks for line in short_forms(imports_in(block.code, ROOT / "example.py"))]


def test_runner_reports_the_documents_own_line(tmp_path: Path) -> None:
    """A block that fails is reported at its line of the document; earlier blocks' names are known in it."""
    text = "# Title\n\n```python\nx = 1\n```\n\n```python no-run\nundefined()\n```\n\n```python\nx += 1\nx / 0\n```\n"
    path = tmp_path / "example.md"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ZeroDivisionError) as caught:
        run_snippets(snippets_of(text), path)
    assert (str(path), 13) == (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1)


def test_runner_compiles_blocks_that_do_not_run(tmp_path: Path) -> None:
    """A ``no-run`` block still has to be Python."""
    with pytest.raises(SyntaxError):
        run_snippets(snippets_of("```python no-run\ndef (:\n```\n"), tmp_path / "example.md")

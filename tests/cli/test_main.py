"""The front door: help without torch, one line for bad input, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import pagedkv
from pagedkv.cli import main
from pagedkv.cli.commands import demo, generate
from pagedkv.cli.errors import CommandError, first_line
from tests.house.source_tree import ROOT, python_files

if TYPE_CHECKING:
    import argparse

COMMANDS = sorted(path.stem for path in python_files("pagedkv/cli/commands") if path.stem != "__init__")


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m pagedkv`` in a process of its own."""
    command = [sys.executable, "-m", "pagedkv", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_help_names_every_command() -> None:
    """``pagedkv --help`` runs and lists one command per file, with its line of help."""
    result = run_cli("--help")

    assert (0, "") == (result.returncode, result.stderr)
    assert [] == [name for name in COMMANDS if name not in result.stdout]
    assert demo.HELP in result.stdout
    assert generate.HELP in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``pagedkv COMMAND --help`` runs and describes the command."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: pagedkv {command}" in capsys.readouterr().out


def test_help_needs_no_torch() -> None:
    """Asking for help loads no heavy library, so that it answers at once."""
    program = "import sys\nfrom pagedkv.cli.main import build_parser\nbuild_parser()\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "False"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``pagedkv --version`` prints the package's version."""
    with pytest.raises(SystemExit):
        main(["--version"])
    assert f"pagedkv {pagedkv.__version__}" == capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--prompts", "0"], "at least 1, was '0'"),
        (["demo", "--max-new-tokens", "many"], "at least 1, was 'many'"),
        (["generate", "--temperature", "-1", "x"], "at least 0, was '-1'"),
        (["generate", "--temperature", "nan", "x"], "at least 0, was 'nan'"),
        (["generate", "--top-p", "1.5", "x"], "from 0 to 1, was '1.5'"),
        (["generate", "--seed", "-3", "x"], "at least 0, was '-3'"),
        (["demo", "--quick", "--prompts", "3"], "not allowed with"),
        ([], "required"),
        (["dance"], "invalid choice"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad option ends with code 2 and says what it must be and what it was."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def with_run(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make ``pagedkv demo`` raise ``error``."""

    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(demo, "run", run)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CommandError("there is no cake"), 2, "pagedkv: error: there is no cake\n"),
        (KeyboardInterrupt(), 130, "pagedkv: interrupted\n"),
    ],
    ids=["bad input", "Ctrl-C"],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a person can put right is one line on stderr and an exit code, with no traceback."""
    with_run(monkeypatch, error)

    assert code == main(["demo"])
    assert said == capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody raised on purpose is not dressed up as bad input."""
    with_run(monkeypatch, ZeroDivisionError("ours"))

    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["demo"])


def test_closed_pipe_is_quiet() -> None:
    """A reader that has gone (``pagedkv … | head``) ends the command with 141 and says nothing."""
    program = (
        "import sys, pagedkv.cli.commands.demo as demo\n"
        "from pagedkv.cli import main\n"
        "demo.run = lambda args: [sys.stdout.write('x' * 70000) and sys.stdout.flush() for _ in range(9)] and 0\n"
        "sys.exit(main(['demo']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()

    assert (141, b"") == (process.wait(timeout=60), errors)


def test_first_line_of_an_error() -> None:
    """A long message is cut to its first line that says something; an empty one to its class."""
    assert first_line(ValueError("\n\n one thing \nand more")) == "one thing"
    assert first_line(OSError()) == "OSError"

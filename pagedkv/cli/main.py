"""The command line's front door: takes the arguments, finds the command, gives its exit code.

A command is a module in `pagedkv.cli.commands`; its name is the file's. It offers ``HELP`` (one line),
``add_arguments(parser)`` and ``run(args) -> exit code``, and imports torch and the models only inside ``run``, so that
``--help`` answers at once. Adding a command is adding a file: this module knows none by name.
"""

from __future__ import annotations

import argparse
import io
import os
import pkgutil
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from pagedkv import __version__
from pagedkv.cli import commands
from pagedkv.cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class Command(Protocol):
    """What a module in `pagedkv.cli.commands` offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit code."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with one sub-parser per command file."""
    parser = argparse.ArgumentParser(
        prog="pagedkv", description="A paged KV-cache memory manager for LLM inference that stands alone."
    )
    parser.add_argument("--version", action="version", version=f"pagedkv {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in pkgutil.iter_modules(commands.__path__):
        command = cast("Command", import_module(f"{commands.__name__}.{module.name}"))
        subparser = subparsers.add_parser(
            module.name.replace("_", "-"), help=command.HELP, description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    Bad input is one line on stderr and exit code 2 (argparse's own code for a bad option); Ctrl-C is 130, a closed
    pipe 141.
    """
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A model writes any character; on a terminal or pipe that cannot, it is escaped, and the stream goes on.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return int(args.run(args))
    except CommandError as error:
        sys.stderr.write(f"pagedkv: error: {error}\n")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("pagedkv: interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE

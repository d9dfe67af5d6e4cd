"""The command line: ``pagedkv COMMAND``. One command a file, in `pagedkv.cli.commands`."""

from pagedkv.cli.main import main

__all__ = ["main"]

"""A C++ compiler for tests of the build: it writes what it was asked to do into its output, in a millisecond."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = """#!/bin/sh
[ "$1" = --version ] && {{ echo "fake 1.0"; exit 0; }}
echo "$@" >> "{log}"
case "$*" in *{refuses}*) echo "no such flag" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


class FakeCompiler:
    """Its ``command`` goes into ``CXX``; ``calls`` are the command lines it got; it fails on ``refuses``."""

    def __init__(self, folder: Path, refuses: str = "nothing at all") -> None:
        folder.mkdir(exist_ok=True)
        self._log = folder / "calls"
        self.command = str(folder / "fake-c++")
        path = folder / "fake-c++"
        path.write_text(_SCRIPT.format(log=self._log, refuses=refuses.replace(" ", "\\ ")), encoding="utf-8")
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """Return the command lines so far."""
        return self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else []

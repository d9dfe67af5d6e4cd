"""Worker processes of which one runs at a time.

Takes commands to start and JSON objects to ask, gives JSON answers, and keeps every worker that is not asked stopped
(SIGSTOP), since the idle thread pools of a peer would spin beside what is measured.
"""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class WorkerPool:
    """One process per subject; a context manager that ends them."""

    def __init__(self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> None:
        """Start every command; its first answer may take as long as its imports do."""
        self._errors = {name: TemporaryFile("w+", encoding="utf-8") for name in commands}  # noqa: SIM115
        self._processes = {
            name: subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors[name],
                text=True,
                env=dict(environment),
                cwd=Path(__file__).parents[1],
            )
            for name, command in commands.items()
        }
        for process in self._processes.values():
            process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # an order that a dead worker did not read
                        pipe.close()
        for file in self._errors.values():
            file.close()

    def ask(self, name: str, order: Mapping[str, Any]) -> dict[str, Any]:
        """Let one worker run until it has answered.

        Raises:
            RuntimeError: it ended instead; has the end of what it said.
        """
        process = self._processes[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.send_signal(signal.SIGCONT)
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors[name].seek(0)
            raise RuntimeError(f"the worker of {name} ended: {self._errors[name].read()[-2000:]}")
        process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

"""The one error a command raises on purpose.

Everything a person at the terminal can put right (a folder that is not there, an extra that is not installed, no
network) becomes a `CommandError` and so one line on stderr and exit code 2. What is left is a bug of ours, and keeps
its traceback.
"""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot do what was asked; the message is one line and says what to do about it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says anything, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)

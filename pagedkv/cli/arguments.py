"""Options that several commands share, and the types that refuse bad numbers at the door."""

from __future__ import annotations

import argparse
import math
import os


def add_model_arguments(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Declare ``--model`` and ``--threads``."""
    parser.add_argument("--model", metavar="NAME", help=f"a local folder or a hub name (default: {default})")
    parser.add_argument("--threads", type=thread_count, metavar="N", help="threads of torch (default: its own choice)")


def at_least_one(text: str) -> int:
    """Parse an int of at least 1."""
    return _int_from(text, 1)


def not_negative(text: str) -> int:
    """Parse an int of at least 0."""
    return _int_from(text, 0)


def thread_count(text: str) -> int:
    """Parse a number of threads: at least 1, at most four per core (the system would run out long before many)."""
    value, most = at_least_one(text), 4 * (os.cpu_count() or 1)
    if value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most}, four per core, was {text!r}")
    return value


def port(text: str) -> int:
    """Parse a TCP port; 0 stands for any free one."""
    value = not_negative(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"must be at most 65535, was {text!r}")
    return value


def seconds(text: str) -> float:
    """Parse a finite number of seconds, at least 0."""
    return _number_from(text, 0.0, math.inf)


def temperature(text: str) -> float:
    """Parse a finite number of at least 0."""
    return _number_from(text, 0.0, math.inf)


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    return _number_from(text, 0.0, 1.0)


def _int_from(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, was {text!r}")
    return value


def _number_from(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (least <= value <= most and math.isfinite(value)):
        limit = "at least 0" if most == math.inf else f"from {least:g} to {most:g}"
        raise argparse.ArgumentTypeError(f"must be a number {limit}, was {text!r}")
    return value

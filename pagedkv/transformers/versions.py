"""Which transformers versions are supported, and a clear refusal of all others.

The tests run on the oldest and on the newest of constraints.txt. A later 5.x is let in: what a model hands over is
learned and compared with its own answer each time an object is made, so that a change of the library is a refusal with
a reason and not a wrong answer. A new major version is not: there the interface itself may go.
"""

from __future__ import annotations

import re
import warnings

import transformers

OLDEST = (5, 17)
BEFORE = (6, 0)


def require_supported(version: str | None = None) -> None:
    """Raise unless ``version``, by default the installed one, is in the supported range.

    Raises:
        ImportError: naming the range and the version.
    """
    found = transformers.__version__ if version is None else version
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not OLDEST <= numbers < BEFORE:
        wanted = f">={OLDEST[0]}.{OLDEST[1]},<{BEFORE[0]}"
        raise ImportError(f"pagedkv.transformers needs transformers {wanted}, found {found}")


def hide_renaming_warning() -> None:
    """Let people write ``past_key_values=cache``, which works from 5.17 to 6, without being told its newer name."""
    warnings.filterwarnings("ignore", r"`past_key_values` is deprecated", FutureWarning)

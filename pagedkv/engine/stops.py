"""Where a text ends by its own words: stop strings, found across token boundaries, with nothing shown too early.

Takes pieces of certain text, gives what may be shown, and refuses to know tokens. Of several stop strings the one that
is complete first ends the text, of those the longest; so the answer does not depend on how the text was cut into
tokens. What might be the beginning of a stop string is held back until it is certain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.engine.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine.text import Tokenizer


class StopStrings:
    """The end of one text, by ``stops``."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Start with no text."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> tuple[str, bool]:
        """Take certain text; return what may be shown, and whether a stop string ended the text.

        Not ``armed``, a stop string that this piece completes is text like any other.
        """
        fresh = len(self._held)
        text = self._held + piece
        end = self._first_end(text, fresh) if armed else None
        if end is not None:
            start = min(end - len(stop) for stop in self._stops if text.endswith(stop, 0, end))
            self._held = ""
            return text[:start], True
        held = max((n for stop in self._stops for n in _overlaps(text, stop)), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def _first_end(self, text: str, fresh: int) -> int | None:
        """Return where the stop string ends that is complete first; what was held has been looked at."""
        ends = []
        for stop in self._stops:
            place = text.find(stop, max(0, fresh - len(stop) + 1))
            if place >= 0:
                ends.append(place + len(stop))
        return min(ends, default=None)

    def finish(self) -> str:
        """Return what is held back: the text has ended otherwise."""
        held, self._held = self._held, ""
        return held


def _overlaps(text: str, stop: str) -> list[int]:
    """Return the lengths at which the end of ``text`` is a true beginning of ``stop``."""
    return [n for n in range(1, min(len(stop) - 1, len(text)) + 1) if text.endswith(stop[:n])]


class OutputText:
    """One answer's text: tokens in, what may be shown out."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        """Start with no tokens."""
        self._stream = TextStream(tokenizer)
        self._stops = StopStrings(stops) if stops else None
        self._shown: list[str] = []
        self._stopped = False

    def push(self, token: int, *, armed: bool = True) -> bool:
        """Take a token; return whether the text has ended by a stop string. Not ``armed``, none ends it."""
        piece = self._stream.push([token])
        if self._stops is not None:
            piece, self._stopped = self._stops.push(piece, armed=armed)
        self._shown.append(piece)
        return self._stopped

    def take(self) -> str:
        """Return what has become certain since the last call."""
        text = "".join(self._shown)
        self._shown.clear()
        return text

    def finish(self) -> str:
        """Return that and what is still held back: the answer has ended."""
        text = self.take()
        if self._stopped:
            return text
        held = "" if self._stops is None else self._stops.finish()
        return text + held + self._stream.finish()

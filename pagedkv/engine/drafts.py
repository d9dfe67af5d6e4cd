"""Prompt lookup: guess a text's next tokens from what followed the same words earlier in it.

Takes one text as it grows, gives drafts, and refuses to judge them: the model's own choice does, token by token. It
pays where answers quote: summaries, code edits, extraction.

Source: Saxena, "Prompt lookup decoding", 2023; the check is that of Leviathan et al., "Fast inference from transformers
via speculative decoding", ICML 2023, where here a draw is a function of (seed, position) and so only compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST: Final = 4
SHORTEST: Final = 2


class PromptLookup:
    """Where each run of 2 to 4 tokens last stood in one text. Each token costs three dictionary writes, once."""

    def __init__(self) -> None:
        """Know no text yet."""
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that followed the text's last ones before; the longest run of them wins.

        ``tokens`` is the text of the last call, grown. A draft that reaches the text's end goes on with itself, so
        that a loop is drafted in full.
        """
        if most < 1:
            return []
        # A run that ends the text has no token after it yet.
        for end in range(max(self._known, 1), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(tokens[end - length : end])] = end
        self._known = len(tokens)
        for length in range(LONGEST, SHORTEST - 1, -1):
            place = self._after.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if place is not None:
                draft: list[int] = []
                for index in range(place, place + most):
                    draft.append(tokens[index] if index < len(tokens) else draft[index - len(tokens)])
                return draft
        return []

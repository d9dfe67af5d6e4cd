"""From tokens to text as they come, without ever showing half a character.

Takes a tokenizer and one request's generated tokens; gives pieces of text; refuses to know the prompt, so that a prompt
that ends inside a character cannot leak into the output.

The pieces joined are what ``tokenizer.decode`` makes of all the tokens. Bytes that may still become a character are
held back; what is still incomplete when the request ends comes out then, as the tokenizer shows it (U+FFFD), the same
whether the text was streamed or not.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_MISSING = 3  # bytes, so tokens, that may be missing of a character whose first byte is there
_WINDOW = 24
_CONTEXT = 8


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; every transformers tokenizer has it."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of token ids."""


class TextStream:
    """One request's text so far.

    Each token costs one decode of a window of the last tokens, not of the whole text; earlier tokens leave the window
    only where the rest decodes to the end of the same text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with no tokens."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._emitted = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Take new tokens and return the text that has become certain by them."""
        return "".join([self._push_one(token) for token in tokens])

    def finish(self) -> str:
        """Return what is still held back: the request has ended."""
        return self._decode(self._tokens)[len(self._emitted) :]

    def _push_one(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        certain = self._certain(text)
        # A tokenizer that decodes runs of bytes as one may take a whole run back while it is incomplete.
        if not certain.startswith(self._emitted):
            return ""
        piece = certain[len(self._emitted) :]
        self._emitted = certain
        if len(self._tokens) >= _WINDOW and certain == text:
            self._slide(text)
        return piece

    def _certain(self, text: str) -> str:
        """Return the part of ``text`` that no further token can change.

        Marks at its end may be an incomplete character, unless the text had them too before the last three tokens:
        a character has at most four bytes, so those would have completed it.
        """
        base = text.rstrip(REPLACEMENT)
        if len(base) == len(text):
            return text
        before = self._decode(self._tokens[:-_MAX_MISSING])
        settled = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, before, strict=False)))
        return text[: max(len(base), settled)]

    def _slide(self, text: str) -> None:
        context = self._decode(self._tokens[-_CONTEXT:])
        if context and text.endswith(context):
            del self._tokens[:-_CONTEXT]
            self._emitted = context

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

"""Single tokens as clients see them beside log-probabilities: a text, and the bytes behind it.

Takes a tokenizer and token ids. A token that is only a part of a character has no text of its own, but bytes: those
are found by the two ways in which vocabularies write them, GPT-2's alphabet and ``<0xF0>``.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from pagedkv.engine.text import REPLACEMENT

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText:
    """What a tokenizer's tokens say; each is looked up once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int] | None]:
        r"""Return a token's text and its bytes.

        Of a part of a character the text is ``bytes:\xf0\x9f``; bytes that cannot be found out are None.
        """
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def _look_up(self, token_id: int) -> tuple[str, list[int] | None]:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if REPLACEMENT not in text:
            return text, list(text.encode())
        raw = self._raw(token_id)
        if raw is None:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)

    def _raw(self, token_id: int) -> bytes | None:
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        name = None if convert is None else convert(token_id)
        if not isinstance(name, str):
            return None
        if (match := _BYTE.fullmatch(name)) is not None:
            return bytes([int(match[1], 16)])
        alphabet = _gpt2_alphabet()
        return bytes(alphabet[char] for char in name) if all(char in alphabet for char in name) else None


@cache
def _gpt2_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes stand for themselves; the others follow from U+0100 on, in order (Radford et al. 2019).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}

"""The prompt of a sequence: its tokens and all that decides what of them may be found or indexed.

Takes what the caller of `open` says, gives it checked and in the index's own form, and refuses to know pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .namespace import Media, first_unnamed, media_keys, media_spans, namespace_key
from .tokens import TokenArray, token_array

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping


class Prompt(NamedTuple):
    """A checked prompt.

    ``namespace`` is the tagged key, ``media`` the key of each block that media overlap, ``opaque_from`` the first
    position whose KV may not be indexed (None: all may).
    """

    tokens: TokenArray
    namespace: Hashable
    spans: tuple[Media, ...]
    media: Mapping[int, bytes]
    opaque_from: int | None

    @property
    def limit(self) -> int:
        """How many leading tokens may be found: never all, since one must be left to compute."""
        longest = max(len(self.tokens) - 1, 0)
        return longest if self.opaque_from is None else min(longest, self.opaque_from)

    def cut(self, num_tokens: int, page_size: int) -> Prompt:
        """Return the prompt as if it had been opened with its first ``num_tokens`` tokens."""
        if num_tokens >= len(self.tokens):
            return self
        spans = tuple(span for span in self.spans if span.start < num_tokens)
        return self._replace(
            tokens=self.tokens[:num_tokens],
            spans=spans,
            media=media_keys(spans, page_size),
            opaque_from=first_unnamed(spans),
        )


def read_prompt(
    tokens: Any, namespace: Hashable, media: Iterable[tuple[int, int, bytes | str | None]], page_size: int
) -> Prompt:
    """Check the arguments of `open` and `room`; raises TypeError or ValueError that names the argument."""
    ids = token_array(tokens)
    spans = media_spans(media, len(ids))
    return Prompt(ids, namespace_key(namespace), spans, media_keys(spans, page_size), first_unnamed(spans))

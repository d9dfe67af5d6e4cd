"""Content hashes: a name for what a page holds that outlives the page and the process.

Takes tokens, a namespace and media, gives a 128-bit digest per full page, and refuses to know pages. A digest covers
everything the page's KV depends on: its own tokens and media, and through its parent's digest all that came before,
back to the namespace. The same content has the same digest on every machine and in every run (BLAKE2b, RFC 7693).

Hits inside the allocator never trust a digest: the prefix index compares tokens. Digests are for those who cannot:
eviction policies that remember what is gone, events, and tiers outside the process.
"""

from __future__ import annotations

import math
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from .namespace import Namespace, first_unnamed, media_keys, media_spans
from .tokens import count_of, token_array

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

DIGEST_BYTES = 16


def content_hashes(
    tokens: Any,
    page_size: int,
    *,
    namespace: Hashable = None,
    media: Iterable[tuple[int, int, bytes | str | None]] = (),
) -> list[bytes]:
    """Return the digest of each full page of a prompt, first page first.

    The list ends before the first page that a media span without a digest reaches: from there on nothing is named.

    Raises:
        TypeError: ``tokens`` are no ids, or the namespace is not made of plain values.
        ValueError: a number is out of range.
    """
    ids = token_array(tokens)
    page_size = count_of(page_size, "page_size", 1)
    spans = media_spans(media, len(ids))
    unnamed = first_unnamed(spans)
    whole = (len(ids) if unnamed is None else unnamed) // page_size
    raw = ids[: whole * page_size].tobytes()
    return chain(namespace_digest(namespace), raw, whole, media_keys(spans, page_size))


def chain(parent: bytes, tokens: bytes, num_pages: int, media: Mapping[int, bytes], first: int = 0) -> list[bytes]:
    """Return the digests of ``num_pages`` consecutive pages, the first of which follows the page of digest ``parent``.

    Args:
        parent: digest of the page before, or of the namespace where there is none.
        tokens: uint32 ids of all pages, in this machine's byte order.
        num_pages: pages; they divide the tokens evenly.
        media: key of each block that media overlap, blocks counted from the sequence's start.
        first: the block of the first page.
    """
    size = len(tokens) // num_pages if num_pages else 0
    data = np.frombuffer(tokens, np.uint32).astype("<u4").tobytes()
    digests, empty = [], blake2b(digest_size=DIGEST_BYTES, person=b"pagedkv page")
    for at in range(num_pages):
        seen = media.get(first + at, b"") if media else b""  # never empty where there is some
        state = empty.copy()  # half the price of making one
        state.update(parent + len(seen).to_bytes(8, "little") + seen + data[at * size : (at + 1) * size])
        parent = state.digest()
        digests.append(parent)
    return digests


def namespace_digest(namespace: Hashable) -> bytes:
    """Return the digest that a namespace's first pages follow; different namespaces have different ones.

    Raises:
        TypeError: it holds something else than None, bool, int, float, str, bytes, tuples and `Namespace`: only these
            mean the same in another process.
        ValueError: it holds a NaN, which is not even the same as itself.
    """
    return blake2b(_plain(namespace), digest_size=DIGEST_BYTES, person=b"pagedkv space").digest()


def _plain(value: Hashable) -> bytes:
    """Return bytes that no other value has: a letter for the type, the length, the content."""
    # The exact type, as in `namespace_key`: a subclass is another namespace, and what it means is its own affair.
    kind = type(value)
    if kind is tuple or kind is Namespace:
        parts = (value.tenant, value.adapter) if isinstance(value, Namespace) else value
        assert isinstance(parts, tuple)
        return _framed(b"t" if kind is tuple else b"n", b"".join(_plain(part) for part in parts))
    if value is None:
        return _framed(b"0", b"")
    if isinstance(value, int) and (kind is bool or kind is int):
        return _framed(b"b" if kind is bool else b"i", b"%d" % value)
    if isinstance(value, str) and kind is str:
        return _framed(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes) and kind is bytes:
        return _framed(b"y", value)
    if isinstance(value, float) and kind is float:
        if math.isnan(value):
            raise ValueError("namespace must not hold a NaN")
        return _framed(b"f", struct.pack("<d", value + 0.0))  # + 0.0: -0.0 equals 0.0
    raise TypeError(
        "namespace must be made of None, bool, int, float, str, bytes, tuples and Namespace to have a stable hash, "
        f"had {kind.__name__}"
    )


def _framed(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(8, "little") + content


class Identities:
    """The digest of each page that the index names, made as pages are stored.

    Takes pages as they become findable, each after its parent. A page's entry is stale once it has left the index;
    nobody reads it then, since the parent of a page that is stored is findable.
    """

    def __init__(self, num_pages: int) -> None:
        """Start with no page named."""
        self._of_page: list[bytes] = [b""] * num_pages

    def store(
        self, parent: bytes | int, tokens: bytes, pages: Sequence[int], media: Mapping[int, bytes], first: int
    ) -> list[bytes]:
        """Name ``pages``, which stand at block ``first`` and after; return their digests.

        ``parent`` is the page before, or the namespace's digest; ``tokens`` and ``media`` are as in `chain`.
        """
        before = self._of_page[parent] if isinstance(parent, int) else parent
        digests = chain(before, tokens, len(pages), media, first)
        for page, digest in zip(pages, digests, strict=True):
            self._of_page[page] = digest
        return digests

    def __getitem__(self, page: int) -> bytes:
        return self._of_page[page]

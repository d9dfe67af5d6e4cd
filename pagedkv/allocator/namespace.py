"""Namespaces and media: what besides the tokens decides whether two prefixes are the same.

Takes what a caller says of a prompt, gives keys that can be compared exactly, and refuses to know what a tenant, an
adapter or a picture is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .tokens import count_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose prefix it is: sequences of different namespaces share nothing.

    The fields are tagged, so a tenant named like an adapter is not that adapter; give an adapter with its version,
    as ``("lora-3", 2)``, so that reloading it under the same name does not find old KV.
    """

    tenant: Hashable = None
    adapter: Hashable = None


def namespace_key(namespace: Hashable) -> Hashable:
    """Return a key under which only the same namespace is found: 1, True and 1.0 are three namespaces.

    Raises:
        TypeError: ``namespace`` is not hashable.
    """
    try:
        hash(namespace)
    except TypeError as error:
        raise TypeError(f"namespace must be hashable, was {type(namespace).__name__}") from error
    return _tagged(namespace)


def _tagged(value: Hashable) -> Hashable:
    if isinstance(value, Namespace):
        return Namespace, _tagged(value.tenant), _tagged(value.adapter)
    if isinstance(value, tuple):
        return type(value), tuple(_tagged(item) for item in value)
    return type(value), value


class Media(NamedTuple):
    """A span of placeholder tokens whose KV depends on a picture, a sound or the like.

    ``digest`` names the content exactly (bytes or str); None means unknown, and nothing from ``start`` on is indexed.
    """

    start: int
    length: int
    digest: bytes | str | None


def media_spans(media: object, num_tokens: int) -> tuple[Media, ...]:
    """Check the spans against a prompt of ``num_tokens`` tokens and return them by position.

    Raises:
        TypeError: it is no list, a span is not ``(start, length, digest)``, or a digest is neither bytes, str nor None.
        ValueError: a span is empty or leaves the prompt.
    """
    if not isinstance(media, Iterable) or isinstance(media, str | bytes):
        raise TypeError(f"media must be a list of (start, length, digest) tuples, was {media!r}")
    spans = []
    for item in media:
        if not isinstance(item, tuple) or len(item) != 3:
            raise TypeError(f"media must hold (start, length, digest) tuples, had {item!r}")
        start, length, digest = item
        start, length = count_of(start, "media start"), count_of(length, "media length")
        if not (digest is None or isinstance(digest, bytes | str)):
            raise TypeError(f"media digest must be bytes, str or None, was {type(digest).__name__}")
        if length == 0 or start + length > num_tokens:
            raise ValueError(f"media span ({start}, {length}) must lie within the {num_tokens} tokens and not be empty")
        spans.append(Media(start, length, digest))
    return tuple(sorted(spans, key=lambda span: (span.start, span.length)))


def first_unnamed(spans: Iterable[Media]) -> int | None:
    """Return where the first span without a digest starts, or None."""
    return min((span.start for span in spans if span.digest is None), default=None)


def media_keys(spans: Iterable[Media], page_size: int) -> Mapping[int, bytes]:
    """Return ``{block: key}`` for every block that a span overlaps; equal keys mean equal media at equal places."""
    keys: dict[int, bytes] = {}
    for span in spans:
        if span.digest is None:
            continue
        kind, raw = (b"s", span.digest.encode()) if isinstance(span.digest, str) else (b"b", span.digest)
        for block in range(span.start // page_size, (span.start + span.length - 1) // page_size + 1):
            place = f"{span.start - block * page_size},{span.length},{len(raw)}".encode()
            keys[block] = keys.get(block, b"") + place + kind + raw
    return keys

"""What the prefix index is made of: nodes, and what is asked of and answered by it.

Plain data with no behaviour of its own; `prefix_index` links nodes and keeps them right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from .children import Children

_PLAIN = b"\0"
_MEDIA = b"\1"


def page_key(tokens: bytes, media: bytes | None) -> bytes:
    """Return the key of a page: all that its KV depends on besides its parents. Media keys sort apart."""
    return _PLAIN + tokens if media is None else _MEDIA + len(media).to_bytes(4) + media + tokens


class Node:
    """A run of pages under one parent.

    ``start`` counts the pages above the run; ``tokens`` are its pages' ids as uint32, one after the other; ``media``
    has the key of each block (counted from the root) that media overlap. ``sheets`` has, for each layer group beside
    the one of ``pages``, the page of each block that still has one; see `GroupIndex`.
    """

    __slots__ = ("children", "key", "media", "pages", "parent", "sheets", "start", "tokens")

    def __init__(self, parent: Node | None, key: bytes, start: int, tokens: bytes, pages: list[int]) -> None:
        """Make a node; linking it into the parent's children is the index's work."""
        self.parent = parent
        self.key = key
        self.start = start
        self.tokens = bytearray(tokens)
        self.pages = pages
        self.media: dict[int, bytes] = {}
        self.sheets: list[dict[int, int]] = []
        self.children: Children | None = None

    @property
    def end(self) -> int:
        """Pages from the root to the end of the run."""
        return self.start + len(self.pages)


class Root(Node):
    """The top of one namespace's tree: a run of no pages.

    ``serial`` numbers the namespaces as they come; ``users`` counts the sequences that are open in this one.
    """

    __slots__ = ("namespace", "serial", "users")

    def __init__(self, namespace: Hashable, serial: int) -> None:
        """Make an empty tree."""
        super().__init__(None, b"", 0, b"", [])
        self.namespace = namespace
        self.serial = serial
        self.users = 0


class Blocks(NamedTuple):
    """Tokens to find or to add: uint32 ids as bytes, beginning at block ``first``; ``media`` by block."""

    tokens: bytes
    media: Mapping[int, bytes]
    first: int = 0


class Match(NamedTuple):
    """What of a prompt is stored: whole ``pages``, then ``tail_tokens`` tokens of ``tail_page`` (0: none).

    ``tail_node`` is the node of that page; ``sheets`` has, for each layer group beside the one of ``pages``, the page
    of each block that the group needs, the tail's included.
    """

    node: Node | None
    pages: list[int]
    tail_page: int
    tail_tokens: int
    tail_node: Node | None = None
    sheets: tuple[dict[int, int], ...] = ()

"""A naive allocator, and memory to go with it: dictionaries, lists and full scans, right by being plain.

It follows the rules of the design for one full-attention group, with the page ids that the real allocator gives, and
says what every query must answer. `Memory` stands for the tensors: each slot holds a number that only the same tokens
after the same tokens under the same weights have, so reading a sequence back shows any page lost or overwritten.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy as np

    from pagedkv.allocator import BlockAllocator
    from pagedkv.allocator.index_node import Node

Prefix = tuple["Hashable", tuple[int, ...]]
FAR = 10**9


class Memory:
    """Slots of all pages; poison where nothing was written."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.size = page_size
        self.pages: list[list[int]] = [[-1] * page_size for _ in range(num_pages)]
        self._names: dict[object, int] = {}
        self._unique = 0

    def name(self, before: int, token: int, epoch: int) -> int:
        """Return the number of a token's KV after the KV ``before``, under the weights ``epoch``."""
        return self._names.setdefault((before, token, epoch), len(self._names) + 1)

    def nameless(self) -> int:
        """Return a number that is never given again."""
        self._unique += 1
        return -1 - self._unique

    def origin(self, namespace: object) -> int:
        """Return the number that stands before a namespace's first token."""
        return self._names.setdefault(("namespace", namespace), len(self._names) + 1)

    def chain(self, namespace: object, tokens: list[int], epoch: int) -> list[int]:
        """Return the numbers of a whole prompt's KV, computed now."""
        names, before = [], self.origin(namespace)
        for token in tokens:
            before = self.name(before, token, epoch)
            names.append(before)
        return names

    def run_copies(self, copies: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> None:
        """Copy all at once: read everything, then write."""
        read = [list(self.pages[source]) for source, _ in copies.tolist()]
        for page, (_, destination) in zip(read, copies.tolist(), strict=True):
            self.pages[destination] = page

    def write(self, slot: int, value: int) -> None:
        """Write one slot."""
        self.pages[slot // self.size][slot % self.size] = value

    def read(self, slot: int) -> int:
        """Read one slot."""
        return self.pages[slot // self.size][slot % self.size]

    def poison(self, pages: list[int]) -> None:
        """Overwrite whole pages."""
        for page in pages:
            self.pages[page] = [-1] * self.size


@dataclass(eq=False)
class Page:
    """A page that is not free: ``prefix`` is what it can be found by."""

    page_id: int
    prefix: Prefix | None = None
    tables: int = 0
    pins: int = 0

    @property
    def refs(self) -> int:
        """Table entries and pins."""
        return self.tables + self.pins


@dataclass(eq=False)
class Seq:
    """What a sequence should be."""

    namespace: Hashable
    prompt: list[int]
    tokens: list[int]
    kv: list[int]
    table: list[Page] = field(default_factory=list)
    reserved: int = 0
    opaque: int = FAR
    borrowed: bool = False


class Model:
    """The rules, counted naively."""

    def __init__(self, usable: int, page_size: int, *, prefix_cache: bool) -> None:
        self.usable = usable
        self.size = page_size
        self.prefix_cache = prefix_cache
        self.index: dict[Prefix, Page] = {}
        self.idle: list[Page] = []
        self.seqs: list[Seq] = []
        self.copies: dict[int, Page] = {}
        self.taken: dict[int, Page] = {}

    # Counting.

    def pages(self) -> set[Page]:
        """Return all pages that are not free."""
        held = {page for seq in self.seqs for page in seq.table}
        return held | set(self.index.values()) | set(self.copies.values())

    @property
    def available(self) -> int:
        """Usable pages that nobody holds."""
        return self.usable - sum(1 for page in self.pages() if page.refs)

    def blocks(self, tokens: int) -> int:
        """Return how many pages so many tokens take."""
        return (tokens + self.size - 1) // self.size

    def stored_tokens(self) -> int:
        """Count the tokens in referenced pages, each page once: the most that anybody has in it."""
        fill: dict[Page, int] = {page: 0 for page in self.pages() if page.refs}
        for page in fill:
            if page.prefix is not None:
                fill[page] = self.size
        for seq in self.seqs:
            for block, page in enumerate(seq.table):
                fill[page] = max(fill[page], min(len(seq.tokens) - block * self.size, self.size))
        return sum(fill.values())

    # Prefixes.

    def whole_hits(self, namespace: Hashable, tokens: list[int]) -> list[Page]:
        """Return the full pages that a prompt finds."""
        found: list[Page] = []
        while (end := (len(found) + 1) * self.size) < len(tokens):
            page = self.index.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def tail_hits(self, namespace: Hashable, tokens: list[int], whole: int) -> tuple[int, list[Page]]:
        """Return how many tokens the best page shares after ``whole`` pages, and every page that shares so many."""
        start = whole * self.size
        wanted, best, pages = tokens[start:-1], 0, list[Page]()
        for (space, prefix), page in self.index.items():
            if space == namespace and len(prefix) == start + self.size and list(prefix[:start]) == tokens[:start]:
                common = 0
                while common < min(len(wanted), self.size) and prefix[start + common] == wanted[common]:
                    common += 1
                if common > best:
                    best, pages = common, []
                if common and common == best:
                    pages.append(page)
        return best, pages

    def room(self, namespace: Hashable, tokens: list[int], growth: int) -> tuple[int, int]:
        """Return needed and available pages."""
        hits = self.whole_hits(namespace, tokens)
        idle = sum(1 for page in hits if not page.refs)
        return self.blocks(len(tokens) + growth) - len(hits), self.available - idle

    # Holding.

    def hold(self, page: Page) -> None:
        """Add a table entry."""
        if page in self.idle:
            self.idle.remove(page)
        page.tables += 1

    def let_go(self, page: Page) -> None:
        """Take a table entry away."""
        page.tables -= 1
        if not page.refs:
            source = self.copies.pop(page.page_id, None)
            self.taken.pop(page.page_id, None)
            if source is not None:
                self.unpin(source)
            if page.prefix is not None:
                self.idle.append(page)

    def unpin(self, page: Page) -> None:
        """Take a pin away."""
        page.pins -= 1
        if not page.refs and page.prefix is not None:
            self.idle.append(page)

    def drop_blocks(self, seq: Seq, keep: int) -> None:
        """Cut a table, last block first."""
        going = seq.table[: keep - 1 if keep else None : -1]
        # Copies whose destination goes are dropped before anything is released.
        for page in going:
            if page.refs == 1 and page.page_id in self.copies:
                self.taken.pop(page.page_id, None)
                self.unpin(self.copies.pop(page.page_id))
        del seq.table[keep:]
        for page in going:
            self.let_go(page)

    def unindex(self, page: Page) -> None:
        """Make a page and all that follows it unfindable."""
        assert page.prefix is not None
        space, prefix = page.prefix
        for other_space, other in list(self.index):
            if other_space == space and other[: len(prefix)] == prefix:
                gone = self.index.pop((other_space, other))
                gone.prefix = None
                if gone in self.idle:
                    self.idle.remove(gone)

    def evict_for(self, count: int) -> None:
        """Evict so that ``count`` pages are free."""
        free = self.usable - len(self.pages())
        for page in self.idle[: max(count - free, 0)]:
            assert page.prefix is not None
            del self.index[page.prefix]
        del self.idle[: max(count - free, 0)]

    # Steps.

    def tails(self, wanted: list[tuple[Seq, int]]) -> tuple[int, list[str]]:
        """Return the pages that a reserve takes, and what happens to each partial last page."""
        actions, leaving = [], list[Page]()
        needed = 0
        for seq, count in wanted:
            needed += self.blocks(len(seq.tokens) + count) - self.blocks(len(seq.tokens))
            action = "write"
            if count and len(seq.tokens) % self.size:
                page = seq.table[len(seq.tokens) // self.size]
                if page.prefix is not None:
                    space, prefix = page.prefix
                    followed = any(s == space and p != prefix and p[: len(prefix)] == prefix for s, p in self.index)
                    action = "unindex" if page.refs == 1 else "copy"
                    if page.refs == 1 and (seq.borrowed or followed):
                        action = "spare"
                elif page.tables - leaving.count(page) > 1:
                    action = "copy"
                    leaving.append(page)
            actions.append(action)
        short = max(needed + actions.count("copy") + actions.count("spare") - self.available, 0)
        for at in reversed(range(len(actions))):
            if actions[at] == "spare":
                actions[at] = "unindex" if short else "copy"
                short = max(short - 1, 0)
        return needed + actions.count("copy"), actions

    def reserve(self, wanted: list[tuple[Seq, int]], tables: list[list[int]]) -> None:
        """Carry a reserve out; ``tables`` are the real block tables after it, for the ids of new pages."""
        needed, actions = self.tails(wanted)
        for (seq, _), action in zip(wanted, actions, strict=True):
            if action == "unindex":
                self.unindex(seq.table[len(seq.tokens) // self.size])
        self.evict_for(needed)
        used = {page.page_id for page in self.pages()}
        for (seq, count), action, table in zip(wanted, actions, tables, strict=True):
            if not count:
                continue
            seq.reserved, seq.borrowed = count, False
            fresh = table[len(seq.table) :]
            if action == "copy":
                block = len(seq.tokens) // self.size
                old, new = seq.table[block], Page(table[block], tables=1)
                source = self.copies.get(old.page_id, old)
                source.pins += 1
                self.let_go(old)
                self.copies[new.page_id] = source
                seq.table[block] = new
                fresh = [table[block], *fresh]
                seq.table += [Page(page_id, tables=1) for page_id in fresh[1:]]
            else:
                seq.table += [Page(page_id, tables=1) for page_id in fresh]
            assert used.isdisjoint(fresh)
            assert len(set(fresh)) == len(fresh)
            used.update(fresh)

    def commit(self, seq: Seq, tokens: list[int], kv: list[int], *, named: bool) -> None:
        """Carry a commit out."""
        start = len(seq.tokens)
        if not named and tokens:
            seq.opaque = min(seq.opaque, start)
        seq.tokens += tokens
        seq.kv += kv
        seq.reserved = 0
        known = min(len(seq.tokens), seq.opaque) if self.prefix_cache else 0
        for block in range(start // self.size, known // self.size):
            prefix = (seq.namespace, tuple(seq.tokens[: (block + 1) * self.size]))
            twin, page = self.index.get(prefix), seq.table[block]
            if twin is None:
                page.prefix = prefix
                self.index[prefix] = page
            elif twin is not page:
                self.hold(twin)
                seq.table[block] = twin
                self.let_go(page)
        self.drop_blocks(seq, self.blocks(len(seq.tokens)))

    def truncate(self, seq: Seq, num_tokens: int) -> None:
        """Carry a truncate out."""
        before = len(seq.tokens)
        if num_tokens == before:
            return
        block, offset = divmod(num_tokens, self.size)
        same_tail = block == before // self.size
        if offset and not same_tail and seq.table[block].prefix is None:
            seq.opaque = min(seq.opaque, block * self.size)
        elif num_tokens <= seq.opaque:
            seq.opaque = FAR
        del seq.tokens[num_tokens:], seq.kv[num_tokens:], seq.prompt[num_tokens:]
        self.drop_blocks(seq, self.blocks(num_tokens))
        seq.borrowed = bool(offset) and same_tail and seq.borrowed

    def take_copies(self) -> list[tuple[int, int]]:
        """Return (source, destination) ids."""
        self.taken = dict(self.copies)
        return sorted((source.page_id, page) for page, source in self.copies.items())

    def acknowledge(self) -> None:
        """Let the sources go."""
        for page in self.taken:
            self.unpin(self.copies.pop(page))
        self.taken = {}

    def reset(self) -> tuple[int, int]:
        """Make everything unfindable; return pages freed and pages held on."""
        dropped = len(self.idle)
        for page in self.index.values():
            page.prefix = None
        self.index, self.idle = {}, []
        for seq in self.seqs:
            if seq.tokens or seq.reserved:
                seq.opaque = 0
        return dropped, len(self.pages())


def findable(allocator: BlockAllocator) -> dict[Prefix, int]:
    """Return every prefix that the real index names, with its page, read from the top down."""
    found: dict[Prefix, int] = {}
    for root in allocator.ledger.index.roots.values():
        space = root.namespace[1] if isinstance(root.namespace, tuple) else None
        todo: list[tuple[Node, tuple[int, ...]]] = [(root, ())]
        while todo:
            node, prefix = todo.pop()
            tokens = array("I", bytes(node.tokens)).tolist()
            for at, page in enumerate(node.pages):
                prefix += tuple(tokens[at * allocator.page_size : (at + 1) * allocator.page_size])
                found[space, prefix] = page
            if node.children is not None:
                todo += [(child, prefix) for child in node.children.nodes.values()]
    return found


def assert_agree(allocator: BlockAllocator, model: Model) -> None:
    """Compare every number that the allocator reports with the model's."""
    stats = allocator.stats()
    pages = model.pages()
    held = sum(1 for page in pages if page.refs)

    assert (held, len(model.idle), model.usable - len(pages)) == (stats.referenced, stats.idle, stats.free)
    assert {page.page_id for page in pages}.isdisjoint(allocator.ledger.pool.free_pages.tolist())
    assert model.stored_tokens() == stats.stored_tokens
    assert held * model.size == stats.held_slots
    assert len(model.seqs) == stats.sequences
    assert {prefix: page.page_id for prefix, page in model.index.items()} == findable(allocator)

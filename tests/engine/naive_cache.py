"""A paged cache of plain lists for engine tests: pages hold (position, token) marks that a runner can read back.

It shares full pages by exact prefix, evicts idle ones in order of last use, is atomic, and refuses whatever the
protocol forbids, so that an engine's mistake shows as an exception or as a wrong mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pagedkv.allocator import OutOfPages, Room
from pagedkv.backend import CacheUsage, StepBatch

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from pagedkv.attention import LayerSpec

Mark = tuple[int, int]


class Page:
    """One page: its marks, how many tables name it, and the text it stands for once it is findable."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.references = 0
        self.key: tuple[int, ...] | None = None
        self.used_at = 0


class NaiveSequence:
    """A handle on one text's pages."""

    def __init__(self, cache: NaiveCache, tokens: list[int], pages: list[Page]) -> None:
        self.cache = cache
        self.text = tokens
        self.pages = pages
        self.num_tokens = self.num_cached_tokens = len(pages) * cache.page_size
        self.closed = False

    def require_open(self) -> None:
        """Raise if the handle was closed."""
        assert not self.closed, "a closed sequence was used"

    def room(self, num_tokens: int, *, chunk: int | None = None) -> Room:
        """Return pages for ``num_tokens`` more tokens, and those available."""
        self.require_open()
        needed = -(-(self.num_tokens + num_tokens) // self.cache.page_size) - len(self.pages)
        return Room(needed + (self.shares_tail and num_tokens > 0), self.cache.available())

    @property
    def shares_tail(self) -> bool:
        """Whether the page that the next token goes to is half full and not its own."""
        return self.num_tokens % self.cache.page_size > 0 and self.pages[-1].references > 1

    def marks(self) -> list[Mark]:
        """Return everything stored, read through the pages."""
        return [mark for page in self.pages for mark in page.marks]

    def fork(self) -> NaiveSequence:
        """Return a second sequence on the same pages; a shared tail is copied when either is next written."""
        self.require_open()
        assert self.cache.in_flight is None, "a sequence was forked inside a step"
        twin = NaiveSequence(self.cache, list(self.text), list(self.pages))
        twin.num_tokens, twin.num_cached_tokens = self.num_tokens, 0
        for page in twin.pages:
            page.references += 1
        self.cache.sequences.append(twin)
        return twin

    def truncate(self, num_tokens: int) -> None:
        """Forget tokens; pages that hold none of the rest go back, and a page cut in two must be nobody else's."""
        self.require_open()
        assert num_tokens <= self.num_tokens
        self.num_tokens = num_tokens
        del self.text[num_tokens:]
        self.cache.cut(self)

    def close(self) -> None:
        """Give every page back."""
        self.require_open()
        assert self.cache.in_flight is None, "a sequence was closed inside a step"
        for page in self.pages:
            self.cache.release(page)
        self.closed = True
        self.cache.sequences.remove(self)


class NaiveCache:
    """A `CacheBackend` over ``num_pages`` usable pages."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.free = [Page() for _ in range(num_pages)]
        self.index: dict[tuple[int, ...], Page] = {}
        self.sequences: list[NaiveSequence] = []
        self.in_flight: StepBatch | None = None
        self.clock = 0
        self.num_opened = 0

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """There are no layers."""

    def open(self, tokens: Sequence[int], *, namespace: Hashable = None) -> NaiveSequence:
        """Open a sequence with whatever full pages of ``tokens`` are findable, never all tokens."""
        pages = self._hits(list(tokens))
        for page in pages:
            page.references += 1
        self.num_opened += 1
        sequence = NaiveSequence(self, list(tokens), pages)
        self.sequences.append(sequence)
        return sequence

    def room(
        self, tokens: Sequence[int], *, growth: int = 0, chunk: int | None = None, namespace: Hashable = None
    ) -> Room:
        """Return pages needed beyond the hits, and those available beside them."""
        hits = self._hits(list(tokens))
        needed = -(-(len(tokens) + growth) // self.page_size) - len(hits)
        return Room(needed, self.available() - sum(page.references == 0 for page in hits))

    def available(self) -> int:
        """Return free and idle pages."""
        return self.num_pages - len({id(page) for sequence in self.sequences for page in sequence.pages})

    def begin_step(self, inputs: Mapping[Any, Sequence[int]]) -> StepBatch:
        """Take pages for the whole step, or none."""
        assert self.in_flight is None, "a step is in flight"
        assert inputs, "an empty step"
        assert all(inputs.values()), "a sequence without tokens"
        needed = sum(sequence.room(len(row)).needed for sequence, row in inputs.items())
        if needed > self.available():
            raise OutOfPages(needed=needed, available=self.available())
        for sequence, row in inputs.items():
            known = sequence.text[sequence.num_tokens : sequence.num_tokens + len(row)]
            assert list(row)[: len(known)] == known, "a step's tokens differ from the opened text"
            if sequence.shares_tail:
                self._copy_tail(sequence)
            for _ in range(sequence.room(len(row)).needed):
                sequence.pages.append(self._take())
        starts = [sequence.num_tokens for sequence in inputs]
        self.in_flight = StepBatch(list(inputs), list(inputs.values()), starts, torch.device("cpu"))
        return self.in_flight

    def store(self, batch: StepBatch) -> None:
        """Write the step's marks: what a runner does instead of K and V."""
        row = 0
        for sequence, count in zip(batch.sequences, batch.q_lens, strict=True):
            for _ in range(count):
                position = int(batch.position_ids[row])
                page = sequence.pages[position // self.page_size]
                assert page.key is None, "a findable page was written"
                del page.marks[position % self.page_size :]
                page.marks.append((position, int(batch.input_ids[row])))
                row += 1

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Nothing: the scripted runner stores marks."""

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Nothing to attend to."""
        return q

    def gather(self, layer: int, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing is stored."""
        return torch.empty(0), torch.empty(0)

    def held_positions(self, layer: int, batch: StepBatch) -> list[Any]:
        """Nothing is held."""
        return []

    def end_step(self, batch: StepBatch, *, keep: Mapping[Any, int] | None = None) -> None:
        """Commit; full pages become findable."""
        assert batch is self.in_flight, "another step is in flight"
        self.in_flight = None
        for sequence, count in zip(batch.sequences, batch.q_lens, strict=True):
            kept = count if keep is None else keep.get(sequence, count)
            assert 1 <= kept <= count, "a step must keep something, and no more than it fed"
            sequence.num_tokens += kept
            self.cut(sequence)
            if self.prefix_cache:
                self._publish(sequence)

    def abandon_step(self, batch: StepBatch) -> None:
        """Give back what the step took."""
        assert batch is self.in_flight, "another step is in flight"
        self.in_flight = None
        for sequence in batch.sequences:
            self.cut(sequence)

    def cut(self, sequence: NaiveSequence) -> None:
        """Drop what stands behind a sequence's last token: whole pages, and marks in a page of its own."""
        kept = -(-sequence.num_tokens // self.page_size)
        for page in sequence.pages[kept:]:
            self.release(page)
        del sequence.pages[kept:]
        if sequence.pages and sequence.pages[-1].references == 1 and sequence.pages[-1].key is None:
            del sequence.pages[-1].marks[sequence.num_tokens - (kept - 1) * self.page_size :]

    def _copy_tail(self, sequence: NaiveSequence) -> None:
        old, new = sequence.pages[-1], self._take()
        new.marks = list(old.marks)
        sequence.pages[-1] = new
        self.release(old)

    def usage(self) -> CacheUsage:
        """Return what live sequences hold."""
        held = self.num_pages - self.available()
        stored = sum(len(page.marks) for page in {id(p): p for s in self.sequences for p in s.pages}.values())
        return CacheUsage(stored, held * self.page_size, 0, 0, held)

    def release(self, page: Page) -> None:
        """Drop one reference; an unfindable page is free again."""
        page.references -= 1
        assert page.references >= 0
        self.clock += 1
        page.used_at = self.clock
        if page.references == 0 and page.key is None:
            page.marks = []
            self.free.append(page)

    def check(self) -> None:
        """Prove that every page is free, findable or referenced, and references are what tables say."""
        counted: dict[int, int] = {}
        for sequence in self.sequences:
            for page in sequence.pages:
                counted[id(page)] = counted.get(id(page), 0) + 1
        known = {id(page): page for page in [*self.free, *self.index.values()]}
        known |= {id(page): page for sequence in self.sequences for page in sequence.pages}
        assert len(known) == self.num_pages
        for identity, page in known.items():
            assert page.references == counted.get(identity, 0)

    def _hits(self, tokens: list[int]) -> list[Page]:
        pages = []
        for end in range(self.page_size, len(tokens), self.page_size):
            page = self.index.get(tuple(tokens[:end]))
            if page is None:
                break
            pages.append(page)
        return pages

    def _take(self) -> Page:
        if not self.free:
            idle = [page for page in self.index.values() if page.references == 0]
            oldest = min(idle, key=lambda page: (page.used_at, -len(page.key or ())))
            assert oldest.key is not None
            del self.index[oldest.key]
            oldest.key = None
            oldest.marks = []
            self.free.append(oldest)
        page = self.free.pop()
        page.references = 1
        return page

    def _publish(self, sequence: NaiveSequence) -> None:
        text = tuple(token for _, token in sequence.marks())
        for number in range(sequence.num_tokens // self.page_size):
            key = text[: (number + 1) * self.page_size]
            page = sequence.pages[number]
            found = self.index.setdefault(key, page)
            if found is page:
                page.key = key
            elif page.key is None:
                found.references += 1
                sequence.pages[number] = found
                self.release(page)

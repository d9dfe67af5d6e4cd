"""Tagged memory: an allocator driven at random over slots that say whose KV they hold.

Every slot carries the number of the text up to its token (namespace, weights, all tokens), so that any slot that is
lost, stale, foreign or handed out too early shows. Free pages are poisoned after every operation, and the copies of a
swap run at the last moment, so that a page given back too early is caught.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.allocator import BlockAllocator, CopiesPending, HostPool, OutOfPages

if TYPE_CHECKING:
    import numpy.typing as npt

    from pagedkv.allocator import Pin, Sequence, StepInFlight, SwapPlan

POISON = -1
Tags = list[int]


class Text:
    """What a sequence should hold: its prompt, its tokens and their tags."""

    def __init__(self, namespace: str | None, prompt: list[int], tokens: list[int], tags: Tags) -> None:
        self.namespace = namespace
        self.prompt = prompt
        self.tokens = tokens
        self.tags = tags


class Tagged:
    """An allocator, a host pool, their memory, and what must be in it."""

    VERBS = ("open", "open", "grow", "grow", "grow", "decode", "fork", "truncate", "close")
    HOLDS = ("pin", "unpin", "begin_step", "end_step", "reset")
    SWAPS = ("swap_out", "swap_out", "swap_in", "swap_in", "settle", "settle", "settle")

    def __init__(
        self, seed: int, *, num_pages: int = 20, page_size: int = 3, host_pages: int = 12, **options: Any
    ) -> None:
        self.random = random.Random(seed)
        self.size = page_size
        self.allocator = BlockAllocator(num_pages, page_size, prefix_cache=seed % 5 > 0, **options)
        self.host_pool = HostPool(host_pages)
        self.device = np.full((num_pages, page_size), POISON, np.int64)
        self.host = np.full((host_pages, page_size), POISON, np.int64)
        self.texts: dict[Sequence, Text] = {}
        self.plans: list[SwapPlan] = []
        self.pins: list[tuple[Pin, npt.NDArray[np.int64]]] = []
        self.steps: dict[StepInFlight, dict[int, int]] = {}
        self.seen = dict.fromkeys((*self.VERBS, *self.HOLDS, *self.SWAPS, "full", "host full", "hit on the way in"), 0)
        self._names: dict[object, int] = {}
        self._epoch = 0

    # Tags.

    def name(self, before: int, token: int) -> int:
        """Return the number of a token's KV after the KV ``before``, under the present weights."""
        return self._names.setdefault((before, token, self._epoch), len(self._names) + 1)

    def continued(self, text: Text, tokens: list[int]) -> Tags:
        """Return the tags of ``tokens`` after a text."""
        before = text.tags[-1] if text.tags else self._names.setdefault(text.namespace, len(self._names) + 1)
        tags = []
        for token in tokens:
            before = self.name(before, token)
            tags.append(before)
        return tags

    # Verbs.

    def do(self, verb: str) -> None:
        """Run one verb, then poison what is free and verify everything."""
        self.seen[verb] += 1
        getattr(self, verb)()
        self.device[self.allocator.ledger.pool.free_pages] = POISON
        self.host[self.host_pool.free_pages] = POISON
        self.verify()

    def open(self) -> None:
        """Open a prompt that often begins as another text does."""
        if len(self.texts) >= 8:
            return
        old = self.random.choice([text.tokens for text in self.texts.values()] or [[]])
        tokens = old[: self.random.randint(0, len(old))] + self.random.choices([0, 1], k=self.random.randint(0, 8))
        namespace = self.random.choice([None, None, "other"])
        sequence = self.allocator.open(tokens, namespace=namespace)
        text = self.texts[sequence] = Text(namespace, tokens, [], [])
        text.tags = self.continued(text, tokens[: sequence.num_tokens])
        text.tokens = tokens[: sequence.num_tokens]

    def resting(self) -> Sequence | None:
        """Draw a sequence that is on the device."""
        return self.draw([sequence for sequence in self.texts if not sequence.swapped])

    def draw(self, sequences: list[Sequence]) -> Sequence | None:
        """Draw one, if there is one."""
        return self.random.choice(sequences) if sequences else None

    def run_copies(self) -> None:
        """Copy all at once, as a cache does before it writes."""
        copies = self.allocator.take_copies()
        self.device[copies[:, 1]] = self.device[copies[:, 0]]
        self.allocator.acknowledge_copies()

    def grow(self) -> None:
        """Reserve, write and commit some tokens of one sequence; at times fewer than were reserved and written."""
        sequence = self.resting()
        if sequence is None:
            return
        text = self.texts[sequence]
        rest = text.prompt[len(text.tokens) :]
        tokens = (rest + self.random.choices([0, 1], k=4))[: self.random.randint(1, 7)]
        try:
            sequence.reserve(len(tokens))
        except OutOfPages:
            self.seen["full"] += 1
            return
        if self.random.random() < 0.9:
            self.run_copies()
            self.write(sequence, tokens)
            kept = self.random.choice([len(tokens), len(tokens), self.random.randint(0, len(tokens))])
            self.store(sequence, tokens[:kept])
        else:
            sequence.commit([])  # given up before anything was written; a copy may stay pending

    def write(self, sequence: Sequence, tokens: list[int]) -> None:
        """Write the reserved slots."""
        start = len(self.texts[sequence].tokens)
        slots = sequence.slots(start, start + len(tokens))
        self.device.reshape(-1)[slots] = self.continued(self.texts[sequence], tokens)

    def store(self, sequence: Sequence, tokens: list[int]) -> None:
        """Commit."""
        text = self.texts[sequence]
        sequence.commit(tokens)
        text.tags += self.continued(text, tokens)
        text.tokens = text.tokens + tokens

    def decode(self) -> None:
        """Take one step of every sequence that has stored its prompt."""
        batch = [s for s, text in self.texts.items() if not s.swapped and len(text.tokens) >= len(text.prompt)]
        for _ in range(self.random.randint(1, 4)):
            try:
                self.allocator.reserve_batch(batch, 1)
            except OutOfPages:
                self.seen["full"] += 1
                return
            self.run_copies()
            tokens = [self.random.randint(0, 1) for _ in batch]
            for sequence, token in zip(batch, tokens, strict=True):
                self.write(sequence, [token])
            self.allocator.commit_batch(batch, tokens)
            for sequence, token in zip(batch, tokens, strict=True):
                text = self.texts[sequence]
                text.tags += self.continued(text, [token])
                text.tokens = [*text.tokens, token]

    def fork(self) -> None:
        """Share everything of a sequence."""
        sequence = self.resting()
        if sequence is not None and len(self.texts) < 8:
            text = self.texts[sequence]
            self.texts[sequence.fork()] = Text(text.namespace, text.prompt, text.tokens, list(text.tags))

    def truncate(self) -> None:
        """Cut a sequence."""
        sequence = self.resting()
        if sequence is not None:
            text, length = self.texts[sequence], self.random.randint(0, sequence.num_tokens)
            self.freeze(sequence, length)
            sequence.truncate(length)
            if length < len(text.tokens):
                text.prompt, text.tokens, text.tags = text.prompt[:length], text.tokens[:length], text.tags[:length]

    def freeze(self, sequence: Sequence, length: int = 0) -> None:
        """Note that steps in flight may read the pages that a sequence gives back until they end.

        A page whose copy is still to run is read by nobody yet.
        """
        if not sequence.swapped:
            start = min(-(-length // self.size) * self.size, sequence.num_tokens)
            slots = sequence.slots(start, sequence.num_tokens).tolist()
            content = zip(slots, self.texts[sequence].tags[start:], strict=True)
            pending = self.allocator.ledger.copies.source_of
            ready = {slot: tag for slot, tag in content if slot // self.size not in pending}
            for frozen in self.steps.values():
                frozen.update(ready)

    def close(self) -> None:
        """Let a sequence go, wherever it lies, unless a plan is open."""
        busy = {plan.sequence for plan in self.plans}
        sequence = self.draw([sequence for sequence in self.texts if sequence not in busy])
        if sequence is not None:
            self.freeze(sequence)
            sequence.close()
            del self.texts[sequence]

    def pin(self) -> None:
        """Pin what is stored of some text."""
        if len(self.pins) < 2 and self.texts:
            text = self.random.choice(list(self.texts.values()))
            pin = self.allocator.pin(text.tokens, namespace=text.namespace)
            self.pins.append((pin, self.device[pin.pages()].copy()))

    def unpin(self) -> None:
        """Let a pin go."""
        if self.pins:
            self.pins.pop(self.random.randrange(len(self.pins)))[0].unpin()

    def begin_step(self) -> None:
        """Begin a step; at most three overlap."""
        if len(self.steps) < 3:
            self.steps[self.allocator.begin_step()] = {}

    def end_step(self) -> None:
        """End any step."""
        if self.steps:
            step = self.random.choice(list(self.steps))
            del self.steps[step]
            step.end()

    def reset(self) -> None:
        """Change the weights, now and then; what is open goes on."""
        if self.random.random() < 0.1:
            self.allocator.reset_prefix_cache()
            self._epoch += 1

    # Swap.

    def swap_out(self) -> None:
        """Plan a way out."""
        sequence = self.resting()
        if sequence is None:
            return
        try:
            self.plans.append(self.allocator.swap_out(sequence, self.host_pool))
        except OutOfPages as refused:
            self.seen["host full"] += 1
            assert self.host_pool.num_free == refused.available
        except CopiesPending:
            self.run_copies()

    def swap_in(self) -> None:
        """Plan a way in."""
        busy = {plan.sequence for plan in self.plans}
        sequence = self.draw([sequence for sequence in self.texts if sequence.swapped and sequence not in busy])
        if sequence is None:
            return
        try:
            plan = self.allocator.swap_in(sequence)
        except OutOfPages:
            self.seen["full"] += 1
            return
        self.seen["hit on the way in"] += len(plan.copies) < -(-sequence.num_tokens // self.size)
        self.plans.append(plan)

    def settle(self) -> None:
        """Run a plan's copies, only now, and finish it; or cancel it."""
        if not self.plans:
            return
        plan = self.plans.pop(self.random.randrange(len(self.plans)))
        if self.random.random() < 0.3:
            if not plan.to_host:
                self.device[plan.copies[:, 0]] = POISON  # half of a copy may have run
            plan.cancel()
            return
        device, host = plan.copies[:, 0], plan.copies[:, 1]
        if plan.to_host:
            self.host[host] = self.device[device]
        else:
            self.device[device] = self.host[host]
        plan.finish()

    # What must hold.

    def verify(self) -> None:
        """Compare every slot that anybody may read with what it must hold."""
        self.allocator.check()
        flat, host = self.device.reshape(-1), self.host
        for sequence, text in self.texts.items():
            assert len(text.tokens) == sequence.num_tokens
            if not sequence.swapped:
                pending = self.allocator.ledger.copies.source_of
                table = [pending.get(page, page) for page in sequence.block_table().tolist()]
                assert text.tags == self.device[table].reshape(-1)[: len(text.tags)].tolist()
            elif sequence not in {plan.sequence for plan in self.plans if plan.to_host}:
                swap = sequence._swap
                assert swap is not None
                assert text.tags == host[swap.host_pages].reshape(-1)[: len(text.tags)].tolist()
        for pin, content in self.pins:
            assert content.tolist() == self.device[pin.pages()].tolist()
        for frozen in self.steps.values():
            assert list(frozen.values()) == flat[list(frozen)].tolist()

    def finish(self) -> None:
        """Let everything go; nothing is held in either tier."""
        while self.plans:
            self.do("settle")
        while self.pins:
            self.do("unpin")
        while self.steps:
            self.do("end_step")
        while self.texts:
            self.do("close")
        stats = self.allocator.stats()
        assert (0, 0, 0) == (stats.referenced, stats.sequences, stats.swapped)
        assert (0, self.host_pool.num_pages) == (self.host_pool.num_used, self.host_pool.num_free)
        assert () == self.allocator.leaks()
        assert {} == self.allocator.ledger.pool.pins

"""Known failures of other systems, one test each, as far as they are an allocator's.

Two threads that are given one page (sglang-omni#1704) are in `test_threads`.
"""

from __future__ import annotations

import random

import pytest

from pagedkv.allocator import BlockAllocator, Namespace, OutOfPages, SequenceClosed
from tests.allocator.helpers import books, extend, fill, hit, run_copies, store


def test_double_free() -> None:
    """A page freed twice was handed to two owners (LMCache#5005): the second close raises and frees nothing."""
    allocator = BlockAllocator(5, 4, prefix_cache=False)
    sequence = fill(allocator, [1, 2, 3])
    sequence.close()
    with pytest.raises(SequenceClosed):
        sequence.close()

    assert 4 == allocator.stats().free
    assert [1, 2, 3, 4] == sorted(int(fill(allocator, [n]).block_table()[0]) for n in range(4))

    with pytest.raises(OutOfPages):
        allocator.open([9]).reserve(1)
    allocator.check()


def test_eviction_leaves_live_pages() -> None:
    """Evicting a cache entry set the count of a live page to zero (atlas#373)."""
    allocator = BlockAllocator(6, 4)
    live = fill(allocator, range(12))
    pages = live.block_table().tolist()
    store(allocator, range(100, 108))
    filler = fill(allocator, range(200, 208))

    assert (0, 2) == (allocator.stats().free, allocator.stats().evictions)
    assert pages == live.block_table().tolist()
    assert set(pages).isdisjoint(filler.block_table().tolist())

    refs = allocator.ledger.pool.refs.copy()
    with allocator.open([*range(12), 5, 6, 7]) as second:
        before = books(allocator)
        with pytest.raises(OutOfPages):
            second.reserve(3)

        assert before == books(allocator)

    assert refs.tolist() == allocator.ledger.pool.refs.tolist()
    allocator.check()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_every_page_comes_back(prefix_cache: bool) -> None:
    """One page per request never came back, unseen in short tests (imp#1115): 500 requests leave nothing in use."""
    rng = random.Random(1)
    allocator = BlockAllocator(64, 16, prefix_cache=prefix_cache)
    for n in range(500):
        prompt = [rng.randrange(3) for _ in range(rng.choice([16, 32, 64, rng.randint(1, 70)]))]
        with fill(allocator, prompt) as sequence:
            for _ in range(rng.choice([16, 32, rng.randint(1, 40)])):
                extend(allocator, sequence, [rng.randrange(3)])

        assert 0 == allocator.stats().in_use, f"after request {n}"

    stats = allocator.stats()
    allocator.check()

    assert 63 == stats.free + stats.idle
    assert prefix_cache or stats.free == 63


def test_books_balance() -> None:
    """Usage over 100 %, negative usage and pages counted twice (xllm#828, sglang#35270, TensorRT-LLM#12834)."""
    rng = random.Random(2)
    allocator = BlockAllocator(24, 4)
    sequences = [allocator.open([])]
    for _ in range(1500):
        sequence = rng.choice(sequences)
        verb = rng.choice(["open", "append", "append", "fork", "close"])
        if verb == "open":
            sequences.append(allocator.open([rng.randrange(2) for _ in range(rng.randrange(12))]))
        elif verb == "fork":
            sequences.append(sequence.fork())
        elif verb == "close" and len(sequences) > 1:
            sequences.remove(sequence)
            sequence.close()
        else:
            rest = sequence.prompt.tokens[sequence.num_tokens :].tolist() or [rng.randrange(2)]
            if sequence.room(len(rest)).fits:
                extend(allocator, sequence, rest)
        stats = allocator.stats()
        held = {page for each in sequences for page in each.block_table().tolist()}

        assert (23, len(held)) == (stats.free + stats.idle + stats.referenced, stats.referenced)
        assert 0 <= stats.usage <= 1
        assert 0 <= stats.waste <= 1
    allocator.check()


def test_distinct_prompts_never_hit() -> None:
    """A 30 % hit rate on random prompts (vllm#25780): prompts that share no token find nothing."""
    allocator = BlockAllocator(64, 4)
    for n in range(50):
        store(allocator, range(100 * n, 100 * n + 30))

    assert (1500, 0) == (allocator.stats().prompt_tokens, allocator.stats().hit_tokens)


PROMPT = list(range(1000, 1150))


@pytest.mark.parametrize("chunk", [150, 70, 16, 7, 1])
def test_chunks_make_the_same_prefixes(chunk: int) -> None:
    """Keys taken from the chunk instead of the sequence (inference-sim#196): any chunks make the same nine pages."""
    allocator = BlockAllocator(64, 16)
    with allocator.open(PROMPT) as sequence:
        for start in range(0, 150, chunk):
            extend(allocator, sequence, PROMPT[start : start + chunk])

    assert (9, 144, 149) == (
        allocator.stats().idle,
        hit(allocator, [*PROMPT[:144], 7, 8]),
        hit(allocator, PROMPT[:149] + PROMPT[:1]) + 5,
    )


@pytest.mark.parametrize("changed", range(32))
def test_every_token_counts(changed: int) -> None:
    """A key that ignores a page's last token passed a whole suite (imp#1301): each token of two pages decides."""
    allocator = BlockAllocator(64, 16)
    store(allocator, PROMPT)
    other = list(PROMPT)
    other[changed] = 7

    assert changed == hit(allocator, other)

    with fill(allocator, other) as sequence:
        shared = sequence.block_table()[: changed // 16].tolist()

        assert list(range(1, 10))[: changed // 16] == shared
        assert set(sequence.block_table()[changed // 16 :].tolist()).isdisjoint(range(1, 10))


def test_no_hash_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collision served another prompt's KV (openvino.genai#3722, vllm#12621): keys may all hash alike."""

    class Colliding(bytes):
        def __hash__(self) -> int:
            return 7

    key = "pagedkv.allocator.prefix_index.page_key"
    monkeypatch.setattr(key, lambda tokens, media: Colliding(b"\0" + tokens))
    allocator = BlockAllocator(256, 16)
    prompts = [[n // 7, n % 7] * 16 for n in range(50)]
    for prompt in prompts:
        assert hit(allocator, prompt) < 32
        store(allocator, prompt)

    assert [32] * 50 == [hit(allocator, [*prompt, 0]) for prompt in prompts]
    allocator.check()


def test_adapter_version() -> None:
    """An adapter loaded again under its name found old KV (vllm#42125): another version is another namespace."""
    allocator = BlockAllocator(16, 4)
    store(allocator, range(8), namespace=Namespace(adapter=("a", 1)))

    assert (0, 7) == (
        hit(allocator, range(8), namespace=Namespace(adapter=("a", 2))),
        hit(allocator, range(8), namespace=Namespace(adapter=("a", 1))),
    )


@pytest.mark.parametrize("digest", ["ffffffff" + "0" * 56, "0" * 56 + "ffffffff"])
def test_whole_digest_counts(digest: str) -> None:
    """Two pictures with one question shared KV, digests cut short (LMCache#690, #4086): every digit counts."""
    allocator = BlockAllocator(32, 4)
    prompt = [*range(8), *[500] * 6, *range(8)]
    store(allocator, prompt, media=[(8, 6, "0" * 64)])

    assert (20, 8) == (
        hit(allocator, prompt, media=[(8, 6, "0" * 64)]),
        hit(allocator, prompt, media=[(8, 6, digest)]),
    )


def test_media_without_a_digest() -> None:
    """Media that nobody can name are never cached (LMCache#4783), what stands before them is."""
    allocator = BlockAllocator(32, 4)
    prompt = [*range(8), *[500] * 6, *range(8)]
    store(allocator, prompt, media=[(8, 6, None)])

    assert 2 == allocator.stats().idle
    assert (8, 8) == (hit(allocator, prompt, media=[(8, 6, None)]), hit(allocator, prompt))


def test_hits_do_not_go_stale() -> None:
    """Hits counted at queue time were gone at admission (vllm#17305): `open` finds anew, and what it finds it holds."""
    allocator = BlockAllocator(6, 4)
    store(allocator, range(8))
    queued = [*range(8), 50, 51]

    assert 1 == allocator.room(queued).needed

    traffic = fill(allocator, range(100, 116))

    assert 2 == allocator.room(queued).needed

    traffic.close()
    with allocator.open(queued) as sequence:
        found = sequence.num_tokens
        extend(allocator, sequence, queued[found:])

        assert 10 == sequence.num_tokens
    later = [*range(100, 116), 7]

    assert allocator.room(later).needed < 5

    with fill(allocator, later) as sequence:
        assert 17 == sequence.num_tokens
    allocator.check()


def test_reset_tells_the_truth() -> None:
    """A reset reported success and did nothing while requests ran (lmdeploy#4917, vllm#12284)."""
    allocator = BlockAllocator(32, 4)
    live = fill(allocator, range(10))
    store(allocator, range(100, 108))
    report = allocator.reset_prefix_cache()

    assert (2, 3, False) == (report.dropped, report.still_held, bool(report))

    extend(allocator, live, list(range(10, 20)))
    fork = live.fork()
    extend(allocator, fork, list(range(20, 30)))

    assert (0, 0) == (hit(allocator, range(30)), hit(allocator, range(100, 108)))

    fork.close()
    live.close()

    assert bool(allocator.reset_prefix_cache())
    assert 0 == hit(allocator, range(10))
    allocator.check()


@pytest.mark.parametrize("orders", [[[1, 1, 3, 0], [2, 2, 2, 2], [0, 1, 2, 3]]])
def test_beam_reorder(orders: list[list[int]]) -> None:
    """Beams were not reordered, without an error (transformers#46612): fork and close move, share and free rows."""
    allocator = BlockAllocator(64, 4)
    prompts = [[n] * length for n, length in enumerate([5, 9, 9, 12])]
    beams = [fill(allocator, prompt) for prompt in prompts]
    tables = [beam.block_table().tolist() for beam in beams]
    for order in orders:
        forks = [beams[at].fork() for at in order]
        for beam in beams:
            beam.close()
        beams, tables = forks, [tables[at] for at in order]

        assert tables == [beam.block_table().tolist() for beam in beams]
        assert len({page for table in tables for page in table}) == allocator.stats().in_use
        allocator.check()

    allocator.reserve_batch(beams, 1)
    run_copies(allocator)
    allocator.commit_batch(beams, [1, 2, 3, 4])
    tails = [int(beam.block_table()[-1]) for beam in beams]

    assert 4 == len(set(tails))
    allocator.check()

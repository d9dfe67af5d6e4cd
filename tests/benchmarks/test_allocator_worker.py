"""The allocator benchmark's workers: what they count is right, and their end is noticed."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.allocator_subjects import SUBJECTS
from benchmarks.allocator_worker import grow, load, serve, weigh
from benchmarks.bench_allocator import ROOT, check, possible_hits, write_workload
from benchmarks.generated_trace import chats, conversations
from benchmarks.worker_pool import WorkerPool

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["pagedkv", "transformers"])
def test_subjects_find_what_can_be_found(name: str, tmp_path: Path) -> None:
    """In a pool without pressure every subject hits exactly the whole pages that were stored, and gives all back."""
    requests = conversations(6, seed=3)
    write_workload(tmp_path / "workload.npz", requests)
    workload = [(prompt[:2000], output[:5]) for prompt, output in load(str(tmp_path / "workload.npz"))]
    answer = serve(SUBJECTS[name](2000, 16, prefix_cache=True), workload, running=2)
    expected = [min(hits, 1999 // 16 * 16) for hits in possible_hits(requests)]

    check(name, answer, expected)
    assert expected == [hits // 16 * 16 for hits in answer["hits"]]
    assert sum(expected) > 0


def test_a_wrong_answer_is_noticed() -> None:
    """Pages that were not given back, and hits on what was never stored, stop the benchmark."""
    with pytest.raises(RuntimeError, match="3 pages were not given back"):
        check("peer", {"in_use": 3, "hits": []}, None)
    with pytest.raises(RuntimeError, match="request 1 hit 32 tokens, at most 16"):
        check("peer", {"in_use": 0, "hits": [0, 35]}, [16, 16])


def test_a_workload_keeps_equal_tokens_equal(tmp_path: Path) -> None:
    """Ids are renumbered from 0 without joining or parting any two of them."""
    requests = chats(3)
    write_workload(tmp_path / "workload.npz", requests)
    before = np.concatenate([ids for r in requests for ids in (r.prompt.array(), r.output.array())])
    after = [token for prompt, output in load(str(tmp_path / "workload.npz")) for token in prompt + output]

    assert len(before) == len(after)
    assert len(set(before.tolist())) == len(set(after)) == len(set(zip(before.tolist(), after, strict=True)))
    assert max(after) < len(after)


def test_growth_and_weight_are_measured() -> None:
    """A full pool takes new sequences by evicting, and a page's books have a weight."""
    answer = grow(SUBJECTS["pagedkv"](300, 16, prefix_cache=True), 300, 16, sequences=4, prompt=64, steps=40)

    assert 0 == answer["in_use"]
    assert answer["decode_us"] > 0
    weight = weigh("pagedkv", 300, 16)
    assert 0 < weight["empty_bytes"] < weight["full_bytes"]


def test_workers_answer_and_their_end_is_noticed() -> None:
    """A worker answers while the others are stopped; one that ends raises with the end of what it said."""
    command = [sys.executable, "-m", "benchmarks.allocator_worker"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with WorkerPool({"pagedkv": [*command, "pagedkv"], "nobody": [*command, "nobody"]}, environment) as pool:
        order = {"do": "weigh", "num_pages": 64, "page_size": 16}
        assert 0 == pool.ask("pagedkv", order)["in_use"]
        with pytest.raises(RuntimeError, match=r"worker of nobody ended(.|\n)*KeyError: 'nobody'"):
            pool.ask("nobody", order)
        assert 0 == pool.ask("pagedkv", order)["in_use"]

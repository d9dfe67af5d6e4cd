"""The engine benchmark: workloads are what their names say, and the worker's loop counts tokens and times rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.bench_engine import OURS, Runs
from benchmarks.engine_cases import Case, cases
from benchmarks.engine_worker import serve
from benchmarks.harness import Report

if TYPE_CHECKING:
    from pathlib import Path


class Scripted:
    """A subject that gives each request one token a step, its index; ``short`` of them get one too few."""

    def __init__(self, *, short: bool = False) -> None:
        self.left: dict[int, int] = {}
        self.running_at_once = 0
        self._short = short

    def start(self, num_pages: int | None) -> None:
        """Begin anew."""
        self.left = {}

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """Take a request."""
        self.left[index] = new_tokens

    def step(self) -> dict[int, list[int]]:
        """Give everybody a token."""
        running = [index for index, left in self.left.items() if left]
        self.running_at_once = max(self.running_at_once, len(running))
        for index in running:
            self.left[index] -= 1
        return {index: [index, index] if self._short and self.left[index] else [index] for index in running}

    def close(self) -> dict[str, float]:
        """Cost nothing."""
        return {"preemptions": 0}


def test_serve_counts_tokens_and_gaps() -> None:
    """Each request gets its tokens; there is one time to first token for each, and a gap for every further one."""
    answer = serve(Scripted(), [[1], [2, 3]], [3, 1], None, None)

    assert [[0, 0, 0], [1]] == answer["tokens"]
    assert (2, 2) == (len(answer["first"]), len(answer["gaps"]))
    assert 0 < sum(answer["gaps"]) + min(answer["first"]) <= answer["seconds"]


def test_serve_waits_for_arrivals() -> None:
    """A request comes no sooner than its arrival, and its time to first token begins there."""
    subject = Scripted()
    answer = serve(subject, [[1], [2]], [2, 2], [0.0, 0.05], None)

    assert 1 == subject.running_at_once
    assert answer["seconds"] >= 0.05
    assert max(answer["first"]) < 0.05


def test_serve_refuses_wrong_counts() -> None:
    """A subject that gives other than the wanted tokens has no figures."""
    with pytest.raises(RuntimeError, match=r"wanted \[3\] tokens, got \[4\]"):
        serve(Scripted(short=True), [[1]], [3], None, None)


def test_workloads_are_what_they_are_called(tmp_path: Path) -> None:
    """Counts and lengths are those of the names, and a trace's lengths and order of arrival are kept."""
    rows = [f"2023-11-16 18:{minute:02}:00.0000000,{320 * (minute + 1)},{32 + minute}" for minute in range(30)]
    trace = tmp_path / "azure.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    found = {case.name: case for case in cases(97, quick=False, trace=trace, span=10.0)}
    arriving = next(case for case in found.values() if case.arrivals is not None)

    assert {(128, 128)} == {(len(p), n) for p, n in zip(*pair(found["64 x (128 + 128)"]), strict=True)}
    assert {(1024, 32)} == {(len(p), n) for p, n in zip(*pair(found["4 x (1024 + 32)"]), strict=True)}
    assert [20 * (index + 1) for index in range(30)] == [len(prompt) for prompt in arriving.prompts]
    assert arriving.arrivals is not None
    assert (0.0, 10.0) == (arriving.arrivals[0], arriving.arrivals[-1])
    assert all(0 <= token < 97 for case in found.values() for prompt in case.prompts for token in prompt)


def pair(case: Case) -> tuple[list[list[int]], list[int]]:
    """Return a case's prompts and counts."""
    return case.prompts, case.new_tokens


def test_agreement_ends_at_the_first_difference() -> None:
    """What follows a difference is another text, and its tokens do not agree even where they are the same."""
    runs = Runs(Case("c", [[1], [2]], [4, 4]), [OURS, "other"])
    answer = {"seconds": 1.0, "load": 0.5, "costs": {}}
    runs.answers[OURS] = [{**answer, "tokens": [[1, 2, 3, 4], [5, 6, 7, 8]]}]
    runs.answers["other"] = [{**answer, "seconds": 2.0, "tokens": [[1, 2, 9, 4], [5, 6, 7, 8]]}]
    report = Report("r")
    runs.report(report, ties=0)
    values = {(row.case, row.subject): row.value for row in report.rows}

    assert values["c: tokens as ours", "other"] == 75.0
    assert (8.0, 4.0, 2.0) == (values["c", OURS], values["c", "other"], values["c: pagedkv against", "other"])

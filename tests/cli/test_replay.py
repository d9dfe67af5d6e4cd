"""``pagedkv replay``: tables, JSON, a picture, and errors that say what to do."""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.allocator.traces import EventLog
from pagedkv.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Write thirty requests that share their first blocks in turn."""
    path = tmp_path / "mooncake.jsonl"
    lines = [{"timestamp": i, "input_length": 600, "output_length": 5, "hash_ids": [i % 3, 100 + i]} for i in range(30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    """Write three rows of lengths."""
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:4{i}.0,{100 + i},7" for i in range(3)]
    path.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    return path


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """Run the command with ``--json`` and return what it printed."""
    assert 0 == main(["replay", *argv, "--json"])
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_json_has_a_result_per_policy_and_pool(mooncake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object with every policy at every size; the reference's regret is 0, and it hits at least as often."""
    record = run_json(capsys, str(mooncake), "--policy", "lru,belady", "--pages", "60,5000", "--running", "1")
    results = record["results"]

    assert [("lru", 60), ("belady", 60), ("lru", 5000), ("belady", 5000)] == [
        (r["policy"], r["num_pages"]) for r in results
    ]
    assert [0, 0] == [results[1]["regret"], results[3]["regret"]]
    assert results[0]["regret"] > 0
    assert 27 * 512 / (30 * 600) == results[2]["hit_rate"]


def test_table_fits_eighty_columns(
    mooncake: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal of 80 columns no line is longer and no heading is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(mooncake.parent)

    assert 0 == main(["replay", mooncake.name, "--pages", "60"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    for heading in ("policy", "hits", "regret", "recomputed", "evicted", "preempted", "used", "peak", "waste"):
        assert heading in printed


def test_lengths_alone_say_that_hits_cannot_be_known(azure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An Azure trace gives no hit rate: a dash, null in JSON, and a sentence that says why."""
    assert 0 == main(["replay", str(azure), "--pages", "50", "--policy", "lru"])
    assert "hits cannot be known" in capsys.readouterr().out
    (result,) = run_json(capsys, str(azure), "--pages", "50", "--policy", "lru")["results"]
    assert (None, None) == (result["hit_rate"], result["regret"])


def test_an_event_log_is_replayed_beside_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our own logs replay like any trace, and the recorded hit rate is shown."""
    import numpy as np

    with EventLog(tmp_path / "log") as log:
        log.attached(100, 4)
        for number in (1, 2):
            prompt = np.arange(10, dtype=np.uint32)
            log.opened(number, prompt, 8 * (number - 1), namespace=None, media=(), at=number)
            log.closed(number)

    assert 0 == main(["replay", str(tmp_path / "log"), "--pages", "50"])
    assert "when it was recorded: 40.00%" in capsys.readouterr().out


def test_limit_reads_the_first_requests(mooncake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--limit 3`` replays three."""
    assert 3 == run_json(capsys, str(mooncake), "--pages", "200", "--limit", "3")["requests"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pages", "10", "--policy", "best"], "--policy must name policies among lru, slru, "),
        (["--pages", "10", "--policy", "lru,"], "named ''\n"),
    ],
)
def test_unknown_policies_are_refused_before_reading(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy that nobody has is named, with those there are and belady."""
    assert 2 == main(["replay", str(tmp_path / "not-there"), *argv])
    error = capsys.readouterr().err
    assert words in error
    assert "belady" in error


@pytest.mark.parametrize("argv", [["--pages", "0"], ["--pages", "10,x"], [], ["--pages", "5", "--running", "0"]])
def test_bad_numbers_are_refused(argv: list[str], mooncake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes must be whole numbers of at least 1, and --pages must be given."""
    with pytest.raises(SystemExit) as caught:
        main(["replay", str(mooncake), *argv])
    assert 2 == caught.value.code
    assert "--pages" in capsys.readouterr().err or "--running" in argv


def test_a_malformed_line_is_one_line_on_stderr(mooncake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace cut off in its last line is refused with file and line."""
    mooncake.write_text(mooncake.read_text(encoding="utf-8")[:-9], encoding="utf-8")

    assert 2 == main(["replay", str(mooncake), "--pages", "100"])
    assert f"{mooncake}:30: " in capsys.readouterr().err


def test_a_missing_file_is_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is not there is named."""
    assert 2 == main(["replay", str(tmp_path / "nothing"), "--pages", "100"])
    assert "nothing" in capsys.readouterr().err


def test_plot_says_what_is_missing(
    mooncake: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without matplotlib ``--plot`` is refused before the work, and says how to get it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert 2 == main(["replay", str(mooncake), "--pages", "100", "--plot", str(mooncake.parent / "out.png")])
    assert "pip install 'pagedkv[plot]'" in capsys.readouterr().err


def test_plot_draws_a_line_per_policy(mooncake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With matplotlib the picture is written; a folder that is not there is an error of one line."""
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    importlib.import_module("matplotlib").use("Agg")
    path = mooncake.parent / "out.png"
    argv = ["replay", str(mooncake), "--pages", "60,200", "--running", "1", "--plot"]

    assert 0 == main([*argv, str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/folder.png", "there is no folder"),
        (".", "it is a folder"),
        ("picture.docx", "--plot must end in one of"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_reading(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that no picture can have is refused at the door: the trace, which is not there, is not looked for."""
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    argv = ["replay", str(tmp_path / "not-there"), "--pages", "60", "--plot", str(tmp_path / name)]

    assert 2 == main(argv)
    assert words in capsys.readouterr().err


def test_all_policies_are_replayed_by_default(azure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--policy`` every policy that has a name is there, and the reference last."""
    results = run_json(capsys, str(azure), "--pages", "50")["results"]

    assert ["lru", "slru", "lfu", "arc", "s3fifo", "priority", "belady"] == [r["policy"] for r in results]


def test_one_request_is_one(azure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A count of one has its noun in the singular, in the heading and among the refused."""
    assert 0 == main(["replay", str(azure), "--pages", "50", "--policy", "lru", "--limit", "1"])
    assert "1 request, 100 prompt tokens" in capsys.readouterr().out
    assert 0 == main(["replay", str(azure), "--pages", "5", "--policy", "lru", "--limit", "1"])
    assert "1 request is longer than the pool and was refused" in capsys.readouterr().out


def test_a_pool_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More pages than there are page ids, and larger ones, are refused in one line, before the trace is read."""
    nothing = str(tmp_path / "not-there")
    assert 2 == main(["replay", nothing, "--pages", "5,99999999999"])
    assert "--pages must be at most 2147483646, was 99999999999" in capsys.readouterr().err
    assert 2 == main(["replay", nothing, "--pages", "5", "--page-size", "99999999999"])
    assert "--page-size must be at most 2147483647, was 99999999999" in capsys.readouterr().err

"""Traces: what readers make of public formats, and that no malformed line passes."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.allocator.traces import Runs, TraceError, read_trace
from pagedkv.allocator.traces.request import NewIds

if TYPE_CHECKING:
    from pathlib import Path

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_ROWS = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,0"]


def mooncake(length: int, ids: list[int], new: int = 3, timestamp: float = 0) -> str:
    """Return a line of a Mooncake trace."""
    return json.dumps({"timestamp": timestamp, "input_length": length, "output_length": new, "hash_ids": ids})


def write(folder: Path, *lines: str, end: str = "\n") -> Path:
    """Write a trace file of these lines."""
    path = folder / "trace"
    path.write_bytes(end.join([*lines, ""]).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azure_requests_have_their_lengths_and_share_nothing(tmp_path: Path, end: str) -> None:
    """Each row of an Azure CSV is a request of its lengths, with tokens that no other request has."""
    trace = read_trace(write(tmp_path, AZURE, *AZURE_ROWS, end=end))

    assert "azure" == trace.kind
    assert not trace.hits_known
    assert [(374, 44), (396, 0)] == [(len(r.prompt), len(r.output)) for r in trace.requests]
    assert pytest.approx([0, 4.314579]) == [r.arrival for r in trace.requests]
    ids = np.concatenate([part.array() for r in trace.requests for part in (r.prompt, r.output)])
    assert 374 + 44 + 396 == len(set(ids.tolist()))


def test_a_file_without_a_last_line_end_is_whole(tmp_path: Path) -> None:
    """Azure's own file ends without a line end; its last row counts."""
    path = tmp_path / "trace"
    path.write_text("\n".join([AZURE, *AZURE_ROWS]), encoding="utf-8")

    assert 2 == len(read_trace(path).requests)


def test_mooncake_prompts_begin_alike_where_block_ids_do(tmp_path: Path) -> None:
    """A block id stands for the same 512 tokens everywhere and for no other block's; the last block is cut."""
    trace = read_trace(write(tmp_path, mooncake(1300, [7, 8, 9]), mooncake(1100, [7, 8, 5]), mooncake(20, [9])))
    first, second, third = (request.prompt.array() for request in trace.requests)

    assert [1300, 1100, 20] == [len(first), len(second), len(third)]
    assert first[:1024].tolist() == second[:1024].tolist()
    assert not set(first.tolist()) & set(second[1024:].tolist())
    assert first[1024:1044].tolist() == third.tolist()
    assert 1300 == len(set(first.tolist()))
    assert trace.hits_known


def test_mooncake_outputs_occur_nowhere_else(tmp_path: Path) -> None:
    """Every output token is new: no prompt and no other output has it."""
    trace = read_trace(write(tmp_path, mooncake(600, [1, 2], new=500), mooncake(600, [1, 2], new=400)))
    outputs = [token for request in trace.requests for token in request.output.array().tolist()]

    assert 900 == len(set(outputs))
    assert not set(outputs) & {t for request in trace.requests for t in request.prompt.array().tolist()}


def test_block_ids_may_be_any_64_bit_number(tmp_path: Path) -> None:
    """A block id is a name, not a size: the largest is read like any other."""
    trace = read_trace(write(tmp_path, mooncake(3, [2**64 - 1])))

    assert 3 == len(trace.requests[0].prompt.array())


def test_limit_reads_the_first_requests_and_looks_no_further(tmp_path: Path) -> None:
    """With a limit of n the first n requests are read, and what stands behind them is not looked at."""
    path = write(tmp_path, mooncake(5, [1]), mooncake(6, [2]), "{broken")

    assert [5, 6] == [len(r.prompt) for r in read_trace(path, limit=2).requests]
    with pytest.raises(TraceError):
        read_trace(path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2023-11-16 18:15:46.6805900,374", "3 fields, had 2"),
        ("2023-11-16 18:15:46.6805900,374,", "GeneratedTokens"),
        ("2023-11-16 18:15:46.6805900,374,44,5", "3 fields, had 4"),
        ("2023-11-16 18:15:46.6805900,-374,44", "ContextTokens"),
        ("2023-11-16 18:15:46.6805900,0,44", "ContextTokens"),
        ("2023-11-16 18:15:46.6805900,3_4,44", "ContextTokens"),
        ("2023-11-16 18:15:46.6805900, 374,44", "ContextTokens"),
        ("2023-11-16 18:15:46.6805900,٣,44", "ContextTokens"),
        ("2023-11-16 18:15:46.6805900,1e3,44", "ContextTokens"),
        ("2023-11-16 18:15:46.6805900,99999999999999999999999,44", "ContextTokens"),
        ("2023-11-16 18:15:46.6805900,374,2147483648", "GeneratedTokens"),
        ("yesterday,374,44", "TIMESTAMP"),
        ("", "empty line"),
        ("2024-05-10 00:00:00+00:00,374,44", "offset"),
        ("__import__('os').system('true'),1,1", "TIMESTAMP"),
    ],
)
def test_a_malformed_azure_row_is_named(tmp_path: Path, row: str, words: str) -> None:
    """A row that is cut off or is not three numbers is an error with file, line and field, never skipped."""
    path = write(tmp_path, AZURE, AZURE_ROWS[0], row, AZURE_ROWS[1])

    with pytest.raises(TraceError, match=words) as caught:
        read_trace(path)
    assert (str(path), 3) == (str(caught.value.path), caught.value.line)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (mooncake(600, [1, 2])[:-4], "cut off"),
        ("[1, 2]", "must be a JSON object, was list"),
        ("[" * 100_000, "nested too deeply"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}', "'hash_ids' is missing"),
        (mooncake(600, [1]), "one id per 512 of 600 tokens, had 1"),
        (mooncake(600, [1, 2, 3]), "one id per 512 of 600 tokens, had 3"),
        (mooncake(600, [1, -2]), "hash_ids"),
        (mooncake(600, [1, 2**64]), "hash_ids"),
        (mooncake(0, []), "input_length"),
        (mooncake(5, [1], new=-1), "output_length"),
        (mooncake(5, [1], timestamp=float("nan")), "timestamp"),
        (mooncake(5, [1]).replace("5,", "5.0,"), "input_length"),
        (mooncake(5, [1]).replace("[1]", "[true]"), "hash_ids"),
        (mooncake(5, [1]).replace("[1]", '"1"'), "hash_ids"),
        (mooncake(5, [1]).replace("5,", "9" * 5000 + ","), "cut off or malformed"),
        (mooncake(5, [1]).replace('"timestamp": 0', '"timestamp": ' + "9" * 400), "timestamp"),
        ("   ", "empty line"),
    ],
)
def test_a_malformed_mooncake_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    """A line that is cut off or lacks a field is an error with file and line, never skipped."""
    path = write(tmp_path, mooncake(600, [1, 2]), line)

    with pytest.raises(TraceError, match=words) as caught:
        read_trace(path)
    assert 2 == caught.value.line


@pytest.mark.parametrize(
    ("lines", "line"), [([], 1), (["what is this"], 1), ([AZURE], 1), (["TIMESTAMP,Context"], 1), (["{"], 1)]
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, lines: list[str], line: int) -> None:
    """An empty file, one without requests and one of another kind are errors, not empty traces."""
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, *lines, end="\n" if lines else ""))
    assert line == caught.value.line


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A line that is not UTF-8 is named."""
    path = write(tmp_path, mooncake(5, [1]))
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")

    with pytest.raises(TraceError, match="UTF-8") as caught:
        read_trace(path)
    assert 2 == caught.value.line


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(tmp_path: Path, limit: int) -> None:
    """No request is no trace."""
    with pytest.raises(ValueError, match="limit must be at least 1"):
        read_trace(write(tmp_path, AZURE, *AZURE_ROWS), limit=limit)


def test_a_trace_error_survives_pickling() -> None:
    """The error can come out of a worker process as a ValueError with its message."""
    error = pickle.loads(pickle.dumps(TraceError("file", 3, "cut off")))

    assert isinstance(error, ValueError)
    assert "file:3: cut off" == str(error)


@given(cut=st.integers(1, 200), line=st.integers(0, 2))
def test_a_mooncake_file_cut_anywhere_is_never_misread(
    cut: int, line: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cutting bytes off the end of a line is always an error at that line."""
    lines = [mooncake(700, [1, 2], new=9), mooncake(900, [1, 3], new=8), mooncake(30, [4], new=7)]
    kept = [*lines[:line], lines[line][: max(len(lines[line]) - cut, 0)]]
    path = write(tmp_path_factory.mktemp("cut"), *kept)

    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert line + 1 == caught.value.line


@given(firsts=st.lists(st.integers(0, 2**20), max_size=5), run=st.integers(1, 7), data=st.data())
def test_runs_are_consecutive_ids_cut_to_length(firsts: list[int], run: int, data: st.DataObject) -> None:
    """Runs give, for each first id, the ids that follow it, and end at their length."""
    most = len(firsts) * run
    length = data.draw(st.integers(most - run + 1 if firsts else 0, most))
    expected = [first + offset for first in firsts for offset in range(run)][:length]

    assert expected == Runs(firsts, run, length).array().tolist()


@pytest.mark.parametrize(("firsts", "length"), [([1], 5), ([1], 0), ([1, 9], 4), ([], 1)])
def test_runs_refuse_a_length_that_ends_elsewhere(firsts: list[int], length: int) -> None:
    """The length must end inside the last run."""
    with pytest.raises(ValueError, match="length must end"):
        Runs(firsts, 4, length)


def test_new_ids_end() -> None:
    """Ids are given out once, and running out of them is an error that says what to do."""
    ids = NewIds(10, 15)

    assert ([10, 11, 12], [], [13, 14]) == tuple(ids.take(n).array().tolist() for n in (3, 0, 2))
    with pytest.raises(ValueError, match="with a limit"):
        ids.take(1)

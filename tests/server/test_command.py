"""``pagedkv serve``: what it says, where its key comes from, and how a signal ends it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pagedkv.cli import main
from pagedkv.cli.commands.serve import KEY_VARIABLE, read_key
from pagedkv.cli.errors import CommandError
from tests.cli.tiny_chat import save_tiny_chat_model
from tests.house.source_tree import ROOT
from tests.server.running import request

if TYPE_CHECKING:
    from pathlib import Path

KEY = "a-key-of-ours"


def test_it_serves_until_a_signal_comes(tmp_path: Path) -> None:
    """It says where it is; on SIGTERM the running stream ends whole, the port is closed and the exit code is 0."""
    save_tiny_chat_model(tmp_path)
    command = [
        sys.executable,
        "-m",
        "pagedkv",
        "serve",
        "--model",
        str(tmp_path),
        "--model-name",
        "tiny",
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        [*command, "--memory", "4MiB", "--max-requests", "7"],
        cwd=ROOT,
        env={**os.environ, KEY_VARIABLE: KEY, "COLUMNS": "200"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("pagedkv serve: http://127.0.0.1:")
        port = int(first.rpartition(":")[2].removesuffix("/v1\n"))
        said = "".join(process.stderr.readline() for _ in range(5))
        assert "tiny, 4,096 tokens of context" in said
        assert "7 unfinished requests" in said
        assert "Authorization: Bearer" in said
        assert KEY not in said
        assert 401 == request(port, "GET", "/v1/models").status

        body = json.dumps({"prompt": "one", "max_tokens": 60, "stream": True, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            connection.sendall(head.encode() + body)
            answer = connection.recv(100)
            process.send_signal(signal.SIGTERM)
            while piece := connection.recv(65536):
                answer += piece
        assert b'"finish_reason":"length"' in answer
        assert b"data: [DONE]" in answer
        assert 0 == process.wait(timeout=120)
        assert "pagedkv serve: ended\n" == process.stderr.read()
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the packages of the extra the command says how to get them, before it loads anything."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name))

    assert 2 == main(["serve"])
    assert "pagedkv: error: serving over HTTP needs fastapi: pip install 'pagedkv[serve]'\n" == capsys.readouterr().err


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file comes first; without either there is no key; an empty one is refused, never taken for none."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, "of-the-environment")
    assert "of-the-environment" == read_key(None)
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n", encoding="utf-8")
    assert KEY == read_key(path)
    for text in ("", "\n", "two words", "schlüssel"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(CommandError, match="must hold a key of printable ASCII"):
            read_key(path)
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(CommandError, match=f"\\${KEY_VARIABLE} must hold a key"):
        read_key(None)
    with pytest.raises(CommandError, match="--api-key-file must be a readable text file"):
        read_key(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "65536"], "must be at most 65535, was '65536'"),
        (["--port", "-1"], "must be a whole number of at least 0, was '-1'"),
        (["--grace", "nan"], "must be a number at least 0, was 'nan'"),
        (["--max-body", "0"], "must be a whole number of at least 1, was '0'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_bad_options_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with what it must be and what it was."""
    with pytest.raises(SystemExit):
        main(["serve", *options])
    assert said in capsys.readouterr().err


def test_a_taken_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A port that somebody has is refused before a model is loaded; so is a host that is not here."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert 2 == main(["serve", "--model", "/nowhere", "--port", str(number)])
    assert f"--host and --port must be free, were '127.0.0.1' and {number}: " in capsys.readouterr().err
    assert 2 == main(["serve", "--model", "/nowhere", "--host", "203.0.113.1", "--port", "0"])
    assert "--host and --port must be free, were '203.0.113.1' and 0: " in capsys.readouterr().err

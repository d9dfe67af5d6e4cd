"""``pagedkv generate``: prompts from everywhere, answers in order, refusals in one line."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from pagedkv.cli import main
from pagedkv.cli.commands.generate import read_prompts
from pagedkv.cli.errors import CommandError
from pagedkv.cli.models import chat_token_ids, load_model
from pagedkv.engine import Engine, SamplingParams
from tests.cli.tiny_chat import save_tiny_chat_model

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = ["one day", "two birds", "three trees in a row"]


def answers(tiny_chat: Path, prompts: list[str], params: SamplingParams) -> list[str]:
    """Return what the engine answers to each prompt alone."""
    _, model, tokenizer = load_model(str(tiny_chat), lambda _: None)
    return [Engine(model, tokenizer, num_pages=300).generate([prompt], params)[0].text for prompt in prompts]


def test_one_prompt_streams(tiny_chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt's answer is all there is on stdout, and nothing is on stderr."""
    assert 0 == main(["generate", "--model", str(tiny_chat), "--max-new-tokens", "9", PROMPTS[0]])

    (expected,) = answers(tiny_chat, PROMPTS[:1], SamplingParams(max_new_tokens=9))
    captured = capsys.readouterr()
    assert expected + "\n" == captured.out
    assert "" == captured.err


def test_several_prompts_come_in_order(
    tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments, stdin and a file are served as one batch; each answer is what the prompt gets alone."""
    (tmp_path / "prompts.txt").write_text(f"\n{PROMPTS[2]}\n\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPTS[1]}\n"))
    options = ["--model", str(tiny_chat), "--max-new-tokens", "9", "--json", "--file", str(tmp_path / "prompts.txt")]

    assert 0 == main(["generate", *options, PROMPTS[0], "-"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert PROMPTS == [record["prompt"] for record in records]
    assert answers(tiny_chat, PROMPTS, SamplingParams(max_new_tokens=9)) == [record["text"] for record in records]
    assert [{"prompt", "text", "finish_reason", "new_tokens"}] * 3 == [set(record) for record in records]


def test_several_prompts_as_text(tiny_chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json every answer stands under its prompt."""
    assert 0 == main(["generate", "--model", str(tiny_chat), "--max-new-tokens", "4", *PROMPTS])
    out = capsys.readouterr().out

    assert [f"[{index + 1}] {prompt}" for index, prompt in enumerate(PROMPTS)] == [
        line for line in out.splitlines() if line.startswith("[") and line[4:] in PROMPTS
    ]


def test_sampling_options_reach_the_engine(tiny_chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Temperature, top-p and seed draw what the engine draws with them, and the same again."""
    options = ["--temperature", "0.9", "--top-p", "0.8", "--seed", "5", "--max-new-tokens", "12"]
    runs = []
    for _ in range(2):
        assert 0 == main(["generate", "--model", str(tiny_chat), *options, PROMPTS[0]])
        runs.append(capsys.readouterr().out)

    params = SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_new_tokens=12)
    assert [text + "\n" for text in answers(tiny_chat, PROMPTS[:1] * 2, params)] == runs


def test_chat_uses_the_template(tiny_chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --chat the prompt is a user's message in the model's own template."""
    _, model, tokenizer = load_model(str(tiny_chat), lambda _: None)
    token_ids = chat_token_ids(tokenizer, [{"role": "user", "content": PROMPTS[0]}])
    expected = Engine(model, tokenizer, num_pages=300).generate([token_ids], SamplingParams(max_new_tokens=9))

    assert 0 == main(["generate", "--model", str(tiny_chat), "--chat", "--max-new-tokens", "9", PROMPTS[0]])
    assert expected[0].text + "\n" == capsys.readouterr().out


def test_chat_without_a_template_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--chat with a model that has no chat template is one line, not a guess."""
    save_tiny_chat_model(tmp_path, chat_template=None)

    assert 2 == main(["generate", "--model", str(tmp_path), "--chat", "hello"])
    assert "--chat needs a model with a chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "said"),
    [(["fine", ""], "prompt 2: "), (["x" * 5000], "prompt 1: ")],
    ids=["empty", "longer than the context"],
)
def test_a_prompt_that_cannot_be_served_is_named(
    prompts: list[str], said: str, tiny_chat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt that the engine refuses is named by its number, with the engine's reason, in one line."""
    assert 2 == main(["generate", "--model", str(tiny_chat), *prompts])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"pagedkv: error: {said}")


def test_prompts_from_arguments_file_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are prompts whole; stdin and files hold one per line, blank lines do not count."""
    path = tmp_path / "prompts.txt"
    path.write_text("c\n\n  \nd\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("x\ny\n"))

    assert ["a\nb", "x", "y", "c", "d"] == read_prompts(["a\nb", "-"], path)
    assert ["c", "d"] == read_prompts([], path)


def test_stdin_is_read_when_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without prompts and without a file, stdin is the prompt; an empty one is refused."""
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    assert ["x"] == read_prompts([], None)

    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(CommandError, match="there is no prompt"):
        read_prompts([], None)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"], ids=["missing", "no text"])
def test_unreadable_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    """A prompt file that is not there or is no UTF-8 text is named, with the reason."""
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(CommandError, match=r"--file must be a readable UTF-8 file, '.*prompts\.txt': "):
        read_prompts([], path)


def test_only_a_newline_ends_a_prompt(tmp_path: Path) -> None:
    """Other separators stay inside their prompt; a byte order mark and carriage returns are no part of it."""
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\u2028same\r\ntwo\x0csame\n".encode())

    assert ["one\u2028same", "two\x0csame"] == read_prompts([], path)


def test_text_that_is_no_text_is_refused() -> None:
    """Bytes that were no UTF-8 reach us as lone surrogates, which no tokenizer can read."""
    with pytest.raises(CommandError, match="prompt 1 must be UTF-8 text, was "):
        read_prompts(["\udcff"], None)


def test_more_threads_than_the_system_has_are_refused(tiny_chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number of threads that would take the system down is refused before anything starts."""
    with pytest.raises(SystemExit):
        main(["generate", "--model", str(tiny_chat), "--threads", "100000", "x"])
    assert "four per core, was '100000'" in capsys.readouterr().err


def test_a_broken_weights_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model folder whose weights were cut short is refused with the name of the folder."""
    save_tiny_chat_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])

    assert 2 == main(["generate", "--model", str(tmp_path), "x"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("pagedkv: error: --model must be a folder with a decoder-only model")


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_stream_that_knows_no_unicode_goes_on(
    tiny_chat: Path, monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    """On an ASCII stdout (PYTHONIOENCODING=ascii) what it cannot hold is escaped; JSON stays JSON."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", errors="strict"))
    options = ["--model", str(tiny_chat), "--max-new-tokens", "3", *extra]

    assert 0 == main(["generate", *options, "née 🦊", "two"])
    first = written.getvalue().decode("ascii").splitlines()[0]
    assert (json.loads(first)["prompt"] if extra else first) == ("née 🦊" if extra else r"[1] n\xe9e \U0001f98a")

"""Models by name: what is refused and how, and how text becomes token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagedkv.cli import main
from pagedkv.cli.errors import CommandError
from pagedkv.cli.models import chat_token_ids, load_model, text_token_ids
from tests.cli.tiny_chat import save_tiny_chat_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("command", [["demo"], ["generate", "hello"]], ids=["demo", "generate"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "no folder"),
        ("/no/such/folder", "no folder"),
        (".", "a folder without config.json"),
    ],
)
def test_unknown_folder_is_one_line(
    command: list[str],
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder that is not there, or holds no model, is one line on stderr and exit code 2."""
    monkeypatch.chdir(tmp_path)

    assert 2 == main([*command, "--model", name])
    assert (
        f"pagedkv: error: --model must be a folder with a model or a hub name, was '{name}': {said}\n"
        == capsys.readouterr().err
    )


def test_unknown_hub_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A hub name that cannot be had is one line that names it."""
    assert 2 == main(["demo", "--model", "nobody/nothing"])
    error = capsys.readouterr().err
    assert error.startswith(
        "pagedkv: error: --model must be a folder with a decoder-only model or a hub name, was 'nobody/nothing': "
    )
    assert 1 == error.count("\n")


def test_broken_folder_is_refused(tmp_path: Path) -> None:
    """A folder whose config is not a model's is refused by name, with the library's reason."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")

    with pytest.raises(CommandError, match=f"^--model must be .*, was '{tmp_path}': "):
        load_model(str(tmp_path), lambda _: None)


def test_model_comes_ready_to_serve(tiny_chat: Path) -> None:
    """A loaded model is in eval mode and float32, and has its name and tokenizer."""
    loaded = load_model(str(tiny_chat), lambda _: None)

    assert str(tiny_chat) == loaded.name
    assert not loaded.model.training
    assert loaded.tokenizer.chat_template
    assert "torch.float32" == str(loaded.model.dtype)


def test_chat_goes_through_the_models_template(tiny_chat: Path) -> None:
    """A chat becomes what the template makes of it, up to the assistant's turn."""
    tokenizer = load_model(str(tiny_chat), lambda _: None).tokenizer
    ids = chat_token_ids(tokenizer, [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}])

    text = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text == tokenizer.decode(ids)


def test_chat_without_a_template_is_paragraphs(tmp_path: Path) -> None:
    """A model without a chat template gets the messages as paragraphs of plain text."""
    save_tiny_chat_model(tmp_path, chat_template=None)
    tokenizer = load_model(str(tmp_path), lambda _: None).tokenizer
    ids = chat_token_ids(tokenizer, [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}])

    assert text_token_ids(tokenizer, "be kind\n\nhi\n\n") == ids
    assert "be kind\n\nhi\n\n" == tokenizer.decode(ids)

"""What the command line's tests share: one tiny chat model's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.tiny_chat import save_tiny_chat_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random chat model, shared by all tests that only read it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_chat_model(folder)
    return folder

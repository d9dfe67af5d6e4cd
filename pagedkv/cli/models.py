"""Models by name: a folder, a hub name, or nothing for the demo's own.

Takes what a person typed, gives a model ready to serve with its tokenizer, and refuses with one line that says what is
wrong with the name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedkv.cli.demo_model import NAME, demo_model
from pagedkv.cli.errors import CommandError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class LoadedModel(NamedTuple):
    """A causal language model in eval mode, its tokenizer, and a name to show."""

    name: str
    model: Any
    tokenizer: Any


def load_model(name: str | None, say: Callable[[str], None], dtype: str = "float32") -> LoadedModel:
    """Load the folder or hub model ``name``, onto the GPU where there is one; the demo's model for None.

    ``say`` hears of what the demo's model needs to be made first. ``dtype`` is a float type's name, or ``"auto"`` for
    the one that the weights are stored in.

    Raises:
        CommandError: the folder is not there or holds no model, or the hub has none of that name to give.
    """
    source = str(demo_model(say)) if name is None else name
    shown = NAME if name is None else name
    import torch
    from transformers.utils import logging as transformers_logging

    from pagedkv.engine.build import load_pretrained

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        model, tokenizer = load_pretrained(source, dtype, "cuda" if torch.cuda.is_available() else None)
    except (ValueError, ImportError) as error:
        raise CommandError(first_line(error).replace("name_or_path", "--model", 1)) from error
    return LoadedModel(shown, model, tokenizer)


def chat_token_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the token ids of a chat up to where the assistant speaks, by the model's own template.

    A model without a template gets the messages as paragraphs.
    """
    if tokenizer.chat_template is None:
        return text_token_ids(tokenizer, "\n\n".join(message["content"] for message in messages) + "\n\n")
    encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def text_token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of plain text, with the special tokens that the tokenizer adds by itself."""
    return list(tokenizer(text)["input_ids"])


def set_threads(num_threads: int | None) -> None:
    """Let torch use ``num_threads`` threads; None leaves its own choice."""
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)

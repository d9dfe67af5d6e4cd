"""From what a caller wrote to token ids: text, token ids, or a chat by the model's own template.

Takes a prompt or messages, gives token ids, and refuses with the argument's name what a tokenizer would stumble over.
Ids themselves are checked by the step loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagedkv.engine.checks import require_token_ids

if TYPE_CHECKING:
    from pagedkv.engine.text import Tokenizer

    Message = Mapping[str, Any]


def require_tokenizer(tokenizer: Any) -> None:
    """Refuse what can neither encode nor decode."""
    if tokenizer is not None and not (
        callable(getattr(tokenizer, "encode", None)) and callable(getattr(tokenizer, "decode", None))
    ):
        raise TypeError(f"tokenizer must be None or have encode and decode, was {type(tokenizer).__name__}")


def require_list(name: str, value: Any) -> Sequence[Any]:
    """Return ``value``, a list or tuple of prompts or chats; one prompt and one-shot iterators are refused."""
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} must be a list of {name}, was one prompt: {value!r:.60}")
    if not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of {name}, was {type(value).__name__}")
    if any(isinstance(one, int) for one in value):
        raise TypeError(f"{name} must be a list of {name}, was one prompt: {value!r:.60}")
    if any(isinstance(one, Mapping) for one in value):
        raise TypeError(f"{name} must be a list of {name}, was one chat: {value!r:.60}")
    return value


def prompts_or_chats(prompts: Any, messages: Any) -> list[tuple[Any, Any]]:
    """Return what `to_token_ids` takes, for each of ``prompts`` or each of the chats ``messages``."""
    if messages is not None and prompts is None:
        return [(None, chat) for chat in require_list("messages", messages)]
    if messages is None:
        return [(prompt, None) for prompt in require_list("prompts", prompts)]
    raise TypeError("prompts or messages must be given, and not both, was both")


def to_token_ids(tokenizer: Tokenizer | None, prompt: Any, messages: Sequence[Message] | None) -> list[int]:
    """Return the token ids of ``prompt`` (text or ids), or of a chat up to where the assistant speaks.

    Raises:
        ValueError, TypeError: for both or neither, text or a chat without a tokenizer, a chat that the model has no
            template for, or one whose template does not take it.
    """
    if (prompt is None) == (messages is None):
        given = "neither" if prompt is None else "both"
        raise TypeError(f"prompt or messages must be given, and not both, was {given}")
    if messages is not None:
        return _chat_ids(tokenizer, messages)
    if not isinstance(prompt, str):
        return require_token_ids("prompt", prompt, None)
    if tokenizer is None:
        raise ValueError(f"prompt must be token ids for an engine without a tokenizer, was text: {prompt!r:.60}")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt must be text that UTF-8 can hold, was {prompt!r:.60}") from error
    return list(tokenizer.encode(prompt))


def _chat_ids(tokenizer: Any, messages: Any) -> list[int]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"messages must be a list of messages, was {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must hold at least one message, was empty")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"messages[{index}] must be a mapping with a role and a content, was {message!r:.60}")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("messages must go to an engine whose tokenizer has a chat template; this one has none")
    from jinja2 import TemplateError

    try:
        encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    except TemplateError as error:
        raise ValueError(f"messages must suit the model's chat template, which says: {error}") from error
    return list(encoded["input_ids"])

"""What clients may send: the fields of OpenAI's requests that mean something here, and what the engine adds to them.

Takes a JSON object and gives typed fields and `SamplingParams`; refuses a field that it would not honour, by name,
unless its value asks for nothing. Ranges are the engine's to check.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from pagedkv.engine import SamplingParams

# Fields that other servers honour and this one does not, with the values that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
}
TokenIds = list[StrictInt]


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False


class GenerationFields(BaseModel):
    """What both kinds of request have.

    ``user`` names the client's own user and changes nothing. From ``top_k`` on the fields are the engine's own, which
    other servers of open models have under the same names.
    """

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    max_tokens: StrictInt | None = None
    temperature: StrictFloat = 1.0
    top_p: StrictFloat = 1.0
    n: StrictInt = 1
    stop: StrictStr | list[StrictStr] = []
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    seed: StrictInt | None = None
    presence_penalty: StrictFloat = 0.0
    frequency_penalty: StrictFloat = 0.0
    logit_bias: dict[int, StrictFloat] = {}
    user: StrictStr | None = None
    top_k: StrictInt = 0
    min_p: StrictFloat = 0.0
    repetition_penalty: StrictFloat = 1.0
    min_tokens: StrictInt = 0
    stop_token_ids: TokenIds = []
    ignore_eos: StrictBool = False
    priority: StrictInt = 0

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        """Drop what stands for "not given": null anywhere, and what asks an unknown field for nothing."""
        if not isinstance(data, dict):
            return data
        return {
            name: value for name, value in data.items() if value is not None and value not in _NOTHING.get(name, ())
        }

    @model_validator(mode="after")
    def _stream_options_go_with_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options must be left out where stream is not true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream's last event tells what it cost."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def _unsigned_seed(self) -> int | None:
        """The seed; clients may send signed 64-bit integers too."""
        return self.seed if self.seed is None or not -(2**63) <= self.seed < 0 else self.seed + 2**64

    def sampling_params(self, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return the engine's params.

        Raises:
            ValueError, TypeError: for values out of range, by the engine's names for them.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self._unsigned_seed,
            n=self.n,
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


def _prompts(given: Any) -> list[str] | list[list[int]]:
    """Return a list of prompts, of which a single one may have been sent bare."""
    prompts = [given] if isinstance(given, str) or _is_token_ids(given) else given
    if not isinstance(prompts, list) or not all(isinstance(one, str) or _is_token_ids(one) for one in prompts):
        raise ValueError(f"prompt must be text or a list of token ids, or a list of either, was {given!r:.60}")
    if not prompts:
        raise ValueError("prompt must hold at least one prompt, was []")
    return prompts


def _is_token_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int for token in given)


class CompletionFields(GenerationFields):
    """The body of ``POST /v1/completions``; ``logprobs`` is how many likely tokens are told beside each token.

    ``prompt`` is a list here, however it was sent.
    """

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: StrictInt | None = None


def _text(content: Any) -> str:
    """Return a message's text, which may have been sent in parts; this server has no eyes and ears."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content must be text, or a list of parts of type text, held {part!r:.60}")
    return "".join(part["text"] for part in parts)


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)]
    name: StrictStr | None = None

    def for_template(self) -> dict[str, str]:
        """Return it as chat templates know it: ``developer`` is OpenAI's newer word for ``system``."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class ChatFields(GenerationFields):
    """The body of ``POST /v1/chat/completions``; ``max_tokens`` is the older name of ``max_completion_tokens``."""

    messages: list[Message]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = None

    @model_validator(mode="after")
    def _names_agree(self) -> ChatFields:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens must be left out where max_completion_tokens is given")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs must be left out where logprobs is not true")
        return self

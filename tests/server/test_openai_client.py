"""The official client against a real tiny model: what it gets is what the engine gives, whole and streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from pagedkv import Engine, SamplingParams
from pagedkv.engine.build import load_pretrained
from tests.cli.tiny_chat import save_tiny_chat_model
from tests.server.running import NAME, Running, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = "one day three birds"
CHAT: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "two trees"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model."""
    path = tmp_path_factory.mktemp("served") / "tiny"
    save_tiny_chat_model(path, max_len=256)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """An engine of its own, for what the server should say."""
    return Engine(*load_pretrained(folder, None, None), num_pages=200)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    """The model, served."""
    with running(Engine(*load_pretrained(folder, None, None), num_pages=200)) as here:
        yield here


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_completion(client: openai.OpenAI, engine: Engine) -> None:
    """Text goes on as the engine lets it, sixteen tokens by default, and usage counts tokens."""
    (expected,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=16))
    found = client.completions.create(model=NAME, prompt=PROMPT, temperature=0)

    assert (expected.text, expected.finish_reason) == (found.choices[0].text, found.choices[0].finish_reason)
    assert found.usage is not None
    prompt, new = len(expected.prompt_token_ids), len(expected.token_ids)
    assert (prompt, new, prompt + new) == (
        found.usage.prompt_tokens,
        found.usage.completion_tokens,
        found.usage.total_tokens,
    )
    assert ("text_completion", NAME) == (found.object, found.model)
    assert found.id.startswith("cmpl-")


def test_chat(client: openai.OpenAI, engine: Engine) -> None:
    """A chat goes through the model's template; both names of the limit work; a second time the prefix is cached."""
    (expected,) = engine.generate(messages=[CHAT], params=SamplingParams(max_new_tokens=20))
    for limit in ({"max_tokens": 20}, {"max_completion_tokens": 20}):
        found = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, **limit)  # type: ignore[call-overload]
        assert ("assistant", expected.text) == (found.choices[0].message.role, found.choices[0].message.content)
    assert found.usage.prompt_tokens_details.cached_tokens > 0


def test_an_answer_without_a_limit_fills_the_context(client: openai.OpenAI, server: Running) -> None:
    """A chat without a limit runs until the model ends it or the context is full, which is no error."""
    found = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, extra_body={"ignore_eos": True})

    assert found.usage is not None
    assert ("length", server.served.max_len) == (found.choices[0].finish_reason, found.usage.total_tokens)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.2, "top_p": 0.9, "seed": 11, "n": 3}])
def test_streams_are_the_whole_in_pieces(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """Joined choice by choice, a stream has the text, the reasons and the usage of the same answer sent whole."""
    options = {"model": NAME, "max_tokens": 24, **options}
    told: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    whole = client.chat.completions.create(messages=CHAT, **options)
    texts, reasons, usage = ["" for _ in whole.choices], ["" for _ in whole.choices], None
    for chunk in client.chat.completions.create(messages=CHAT, **options, **told):
        assert usage is None, "usage must come last"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.finish_reason for choice in whole.choices] == reasons
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens

    plain = client.completions.create(prompt=PROMPT, **options)
    pieces = ["" for _ in plain.choices]
    for chunk in client.completions.create(prompt=PROMPT, stream=True, **options):
        assert chunk.usage is None
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert [choice.text for choice in plain.choices] == pieces


def test_several_prompts_are_numbered(client: openai.OpenAI, engine: Engine) -> None:
    """Texts and token ids come in the order of the prompts, each with its n samples."""
    prompts: list[Any] = ["one", "two birds", "three"]
    expected = engine.generate(prompts, SamplingParams(max_new_tokens=6, n=2))
    texts = [sample.text for completion in expected for sample in completion.samples]
    for given in (prompts, [engine.tokenizer.encode(prompt) for prompt in prompts]):  # type: ignore[union-attr]
        found = client.completions.create(model=NAME, prompt=given, max_tokens=6, n=2, temperature=0)
        assert texts == [choice.text for choice in found.choices]
        assert list(range(6)) == [choice.index for choice in found.choices]


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    """Seeds, penalties, biases and the engine's own fields draw what the engine draws with them."""
    own = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 5, "stop_token_ids": [9]}
    shared: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    params = SamplingParams(
        **shared,
        top_k=40,
        min_p=0.01,
        repetition_penalty=1.1,
        min_new_tokens=5,
        stop_token_ids=[9],
        seed=2**64 - 3,
        logit_bias={20: 3},
        max_new_tokens=20,
    )
    (expected,) = engine.generate([PROMPT], params)
    found = client.completions.create(
        model=NAME, prompt=PROMPT, seed=-3, logit_bias={"20": 3}, max_tokens=20, extra_body=own, **shared
    )

    assert expected.text == found.choices[0].text


def test_stop_strings(client: openai.OpenAI, engine: Engine) -> None:
    """A stop string ends the text before it, and none of it is streamed."""
    (whole,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=30))
    stop = whole.text[8:11]
    expected = whole.text[: whole.text.index(stop)]
    options: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": [stop]}
    found = client.completions.create(**options)

    assert (expected, "stop") == (found.choices[0].text, found.choices[0].finish_reason)
    streamed = client.completions.create(stream=True, **options)
    assert expected == "".join(choice.text for chunk in streamed for choice in chunk.choices)


def test_logprobs(client: openai.OpenAI, engine: Engine) -> None:
    """Each token comes with its bytes, its log-probability and the likeliest others, in both shapes."""
    (expected,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=6, logprobs=3))
    plain = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3)
    told = plain.choices[0].logprobs
    assert told is not None
    assert [one.logprob for one in expected.logprobs] == pytest.approx(told.token_logprobs, abs=1e-4)
    assert told.tokens is not None
    assert [3] * 6 == [len(top) for top in told.top_logprobs or []]
    lengths = [len(token) for token in told.tokens]
    assert [sum(lengths[:place]) for place in range(6)] == told.text_offset

    options: dict[str, Any] = {"model": NAME, "messages": CHAT, "max_tokens": 6, "temperature": 0}
    options |= {"logprobs": True, "top_logprobs": 2}
    chat = client.chat.completions.create(**options)
    content = chat.choices[0].logprobs.content
    assert [2] * 6 == [len(one.top_logprobs) for one in content]
    assert [one.logprob for one in content] == pytest.approx([one.top_logprobs[0].logprob for one in content])
    raw = bytes(byte for one in content for byte in one.bytes)
    assert chat.choices[0].message.content == raw.decode(errors="replace")
    pieces = client.chat.completions.create(stream=True, **options)
    streamed = [
        one for chunk in pieces for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content
    ]
    assert [one.bytes for one in content] == [one.bytes for one in streamed]


def test_models(client: openai.OpenAI, server: Running) -> None:
    """The one model is listed and described, with its context; another is not found."""
    (card,) = client.models.list().data
    assert (NAME, server.served.max_len) == (card.id, card.max_model_len)  # type: ignore[attr-defined]
    assert card.id == client.models.retrieve(NAME).id
    with pytest.raises(openai.NotFoundError, match="model must be 'tiny', was 'gpt-4'"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="model must be 'tiny', was 'gpt-4'"):
        client.completions.create(model="gpt-4", prompt="x")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -1}, "temperature must be finite and at least 0, was -1"),
        ({"top_p": 2}, "top_p must be 0 to 1, was 2"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, was 0"),
        ({"n": 0}, "n must be at least 1, was 0"),
        ({"n": 99}, r"n must be at most max_batch = \d+, was 99"),
        ({"presence_penalty": 3}, "presence_penalty must be -2 to 2, was 3"),
        ({"logit_bias": {"100000": 1}}, "logit_bias's token id must be 0 to 511, was 100000"),
        ({"logprobs": 21}, "logprobs must be 0 to 20, was 21"),
        ({"max_tokens": 300}, "the prompt and max_tokens must together be at most 256 tokens, were "),
        ({"prompt": "day " * 400, "max_tokens": 1}, "the prompt and max_tokens must together be at most 256 tokens"),
        ({"prompt": []}, "prompt must hold at least one prompt"),
        ({"prompt": ""}, "prompt must hold at least one token"),
        ({"prompt": [600]}, r"prompt\[0\] must be 0 to 511, was 600"),
        ({"prompt": ["x"] * 300}, "prompt must be at most 256 prompts, was 300"),
        ({"stop": ["x"] * 65}, "stop must hold at most 64 entries, held 65"),
        ({"best_of": 2}, "best_of is not supported by this server"),
        ({"echo": True}, "echo is not supported by this server"),
        ({"suffix": "end"}, "suffix is not supported by this server"),
        ({"extra_body": {"min_tokens": 9, "max_tokens": 5}}, "min_tokens must be 0 to 5, was 9"),
        ({"extra_body": {"guided_json": {}}}, "guided_json is not supported by this server"),
        ({"extra_body": {"priority": 1}}, "priority must be 0 with scheduling 'fcfs', was 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options must be left out where stream is not true"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_fields_are_refused_by_name(client: openai.OpenAI, options: dict[str, Any], said: str) -> None:
    """Each bad value is a 400 that names the client's own field, what it must be and what it was."""
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        client.completions.create(**{"model": NAME, "prompt": PROMPT, **options})
    assert caught.value.param is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported by this server"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported by this server"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens must be left out where max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs must be left out where logprobs is not true"),
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages.0.role: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content must be text, or a list of"),
        ({"max_completion_tokens": 999}, "messages and max_completion_tokens|max_completion_tokens must together"),
    ],
)
def test_bad_chats_are_refused_by_name(client: openai.OpenAI, options: dict[str, Any], said: str) -> None:
    """The same for chats, whose pictures, tools and formats this server does not know."""
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(**{"model": NAME, "messages": CHAT, **options})


def test_what_asks_for_nothing_is_no_reason_to_refuse(client: openai.OpenAI) -> None:
    """Fields that clients send by habit pass where they ask for nothing: null, empty tools, text as format."""
    habit = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "user": "me"}
    parts = [{"role": "developer", "content": [{"type": "text", "text": "be kind"}]}, CHAT[1]]
    found = client.chat.completions.create(
        model=NAME, messages=parts, max_tokens=4, temperature=0, extra_body={**habit, "logit_bias": None}
    )
    plain = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=4, temperature=0)

    assert plain.choices[0].message.content == found.choices[0].message.content

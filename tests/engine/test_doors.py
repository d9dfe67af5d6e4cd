"""What callers get wrong: refused where it is said, by the argument's name, with nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv import PagedKVCache
from pagedkv.engine import Engine, SamplingParams
from pagedkv.engine.params import MAX_BIASES, MAX_STOP_TOKENS
from tests.engine.scripted import make_core
from tests.engine.test_engine import scripted_engine
from tests.engine.test_text import ByteTokenizer
from tests.tiny_models import tiny

BEAMS = {"num_beams": 2}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"top_k": -2}, ValueError, "top_k must be at least -1, was -2"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer, was 1.5"),
        ({"min_p": -0.1}, ValueError, "min_p must be 0 to 1, was -0.1"),
        ({"min_p": 1.1}, ValueError, "min_p must be 0 to 1, was 1.1"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be 0.01 to 100, was 0.0"),
        ({"repetition_penalty": float("inf")}, ValueError, "repetition_penalty must be 0.01 to 100, was inf"),
        ({"presence_penalty": 2.1}, ValueError, "presence_penalty must be -2 to 2, was 2.1"),
        ({"frequency_penalty": "a"}, TypeError, "frequency_penalty must be a number, was 'a'"),
        ({"logit_bias": {1: 101}}, ValueError, r"logit_bias\[1\] must be -100 to 100, was 101"),
        ({"logit_bias": {-1: 1}}, ValueError, "logit_bias's token id must be at least 0, was -1"),
        ({"logit_bias": {"x": 1}}, TypeError, "logit_bias's token id must be an integer, was 'x'"),
        ({"logit_bias": [1, 2]}, TypeError, "logit_bias must map token ids to numbers, held 1"),
        ({"logit_bias": 5}, TypeError, "logit_bias must map token ids to numbers, was int"),
        ({"logit_bias": [(1, 1), (1, 2)]}, ValueError, "logit_bias must name each token once, named 1 twice"),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1)}, ValueError, "logit_bias must hold at most 1,024"),
        ({"n": 0}, ValueError, "n must be at least 1, was 0"),
        ({"n": True}, TypeError, "n must be an integer, was True"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, ValueError, "min_new_tokens must be 0 to 8, was 9"),
        ({"stop": ["a"] * 65}, ValueError, "stop must hold at most 64 entries, held 65"),
        ({"stop": ""}, ValueError, r"stop\[0\] must have 1 to 256 characters, had 0"),
        ({"stop": "x" * 257}, ValueError, r"stop\[0\] must have 1 to 256 characters, had 257"),
        ({"stop": ["a", 3]}, TypeError, r"stop\[1\] must be a text, was 3"),
        ({"stop": b"a"}, TypeError, "stop must be a text or a list of texts, was bytes"),
        ({"stop_token_ids": range(MAX_STOP_TOKENS + 1)}, ValueError, "stop_token_ids must hold at most 1,024"),
        ({"logprobs": 21}, ValueError, "logprobs must be 0 to 20, was 21"),
        ({"logprobs": True}, TypeError, "logprobs must be an integer, was True"),
        ({"prompt_logprobs": -1}, ValueError, "prompt_logprobs must be 0 to 20, was -1"),
        ({"draft_tokens": 65}, ValueError, "draft_tokens must be 0 to 64, was 65"),
        ({"num_beams": 0}, ValueError, "num_beams must be at least 1, was 0"),
        ({"early_stopping": "now"}, TypeError, "early_stopping must be True, False or 'never', was 'now'"),
        ({"early_stopping": True}, ValueError, "early_stopping must be False without beams"),
        ({"length_penalty": 2.0}, ValueError, "length_penalty must be 1.0 without beams"),
        ({**BEAMS, "length_penalty": 11}, ValueError, "length_penalty must be -10 to 10, was 11"),
        ({**BEAMS, "n": 3}, ValueError, "n must be at most num_beams = 2, was 3"),
        ({**BEAMS, "temperature": 0.5}, ValueError, "temperature must be 0.0 with num_beams = 2.*was 0.5"),
        ({**BEAMS, "stop": "x"}, ValueError, r"stop must be \(\) with num_beams = 2"),
        ({**BEAMS, "logprobs": 0}, ValueError, "logprobs must be None with num_beams = 2"),
        ({**BEAMS, "draft_tokens": 2}, ValueError, "draft_tokens must be 0 with num_beams = 2"),
    ],
)
def test_params_out_of_range_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    """Every parameter's range and every pair that does not go together, at construction."""
    with pytest.raises(error, match=message):
        SamplingParams(**given)


def test_params_of_another_vocabulary_are_refused_at_submit() -> None:
    """A bias for what is no token of the model never reaches a step."""
    core, _, _ = make_core()
    with pytest.raises(ValueError, match="logit_bias's token id must be 0 to 49, was 50"):
        core.add_request("a", [1], SamplingParams(logit_bias={50: 1}))
    assert not core.has_unfinished


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.generate(None), "prompts must be a list of prompts, was NoneType"),
        (lambda engine: engine.generate(iter([[3]])), "prompts must be a list of prompts, was list_iterator"),
        (lambda engine: engine.generate([iter([3])]), "prompt must be a list of token ids, was list_iterator"),
        (lambda engine: engine.generate([[3]], 5), "params must be SamplingParams or a list of them, was int"),
        (lambda engine: engine.generate([[3]], [5]), "params must be SamplingParams, was int"),
        (lambda engine: engine.generate([[3]], messages=[[]]), "prompts or messages must be given, and not both"),
        (
            lambda engine: engine.generate(messages=[{"role": "user"}]),
            "messages must be a list of messages, was one chat",
        ),
        (lambda engine: engine.stream(), "prompt or messages must be given, and not both, was neither"),
        (lambda engine: engine.stream(messages="hi"), "messages must be a list of messages, was str"),
        (lambda engine: engine.stream(messages=["hi"]), r"messages\[0\] must be a mapping with a role"),
        (lambda engine: engine.add_request({"a"}, [1]), "request_id must be hashable, was {'a'}"),
        (lambda engine: engine.add_request("a", None), "prompt or messages must be given"),
    ],
)
def test_calls_with_the_wrong_things_are_refused(call: Any, message: str) -> None:
    """The engine's own calls name the argument, what it must be and what it was; nothing runs."""
    engine = scripted_engine(b"hi", 1)
    with pytest.raises(TypeError, match=message):
        call(engine)
    engine.step()
    assert engine.stats.steps == 0


def test_chats_need_a_template() -> None:
    """A tokenizer without a chat template, and no tokenizer, refuse messages; an empty chat is refused too."""
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="messages must go to an engine whose tokenizer has a chat template"):
        scripted_engine(b"hi", 1).stream(messages=messages)
    with pytest.raises(ValueError, match="messages must go to an engine whose tokenizer has a chat template"):
        Engine.from_core(make_core()[0]).stream(messages=messages)
    with pytest.raises(ValueError, match="messages must hold at least one message"):
        scripted_engine(b"hi", 1).stream(messages=[])


class TemplateTokenizer(ByteTokenizer):
    """A byte tokenizer with a chat template."""

    chat_template = "stands for one"

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, list[int]]:
        """Return the contents, each after its role's first letter, up to where the assistant speaks."""
        from jinja2 import TemplateError

        assert options == {"add_generation_prompt": True, "return_dict": True}
        if messages[0]["role"] == "assistant":
            raise TemplateError("a chat must not begin with the assistant")
        text = "".join(message["role"][0] + message["content"] for message in messages) + "a"
        return {"input_ids": self.encode(text)}


def test_chats_go_through_the_models_template() -> None:
    """`generate`, `stream` and `add_request` take messages; what the template refuses is refused by name."""
    core, _, _ = make_core(rule=lambda text: 256, vocab_size=300, eos_token_ids=[256])
    core.runner.vocab = 300  # type: ignore[attr-defined]
    engine = Engine.from_core(core, TemplateTokenizer())
    chat = [{"role": "user", "content": "hi"}]

    assert [bytes(c.prompt_token_ids) for c in engine.generate(messages=[chat, chat * 2])] == [b"uhia", b"uhiuhia"]
    assert bytes(engine.stream(messages=chat).prompt_token_ids) == b"uhia"
    engine.add_request("a", messages=chat)
    with pytest.raises(ValueError, match="chat template, which says: a chat must not begin"):
        engine.stream(messages=[{"role": "assistant", "content": "hi"}])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": "x"}, TypeError, "seed must be an integer, was 'x'"),
        ({"seed": -1}, ValueError, "seed must be 0 to 18446744073709551615, was -1"),
        ({"prefix_cache": "no"}, TypeError, "prefix_cache must be True or False, was 'no'"),
        ({"tokenizer": 3}, TypeError, "tokenizer must be None or have encode and decode, was int"),
    ],
)
def test_engine_options_of_the_wrong_kind_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """An engine that would fail later is not built."""
    with pytest.raises(error, match=message):
        Engine(tiny("llama"), num_pages=8, **options)


def test_a_name_of_the_wrong_kind_is_refused() -> None:
    """`from_pretrained` names its argument."""
    with pytest.raises(TypeError, match="name_or_path must be a folder or a hub name, was 3"):
        Engine.from_pretrained(3)  # type: ignore[arg-type]


def test_another_models_cache_is_refused() -> None:
    """A cache of other layers or of another dtype than the model's is noticed when the engine is built."""
    model = tiny("llama")
    other = PagedKVCache.from_config(tiny("qwen3").config, num_pages=8)
    half = PagedKVCache.from_config(model.config, num_pages=8, dtype=torch.bfloat16)

    with pytest.raises(ValueError, match=r"backend must be made for .*k_dim=8.* was made for 2, .*k_dim=16"):
        Engine(model, backend=other)
    with pytest.raises(ValueError, match=r"dtype, torch\.float32, was torch\.bfloat16"):
        Engine(model, backend=half)

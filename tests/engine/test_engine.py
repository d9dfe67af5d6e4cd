"""The engine whole: real tiny models, text, streams, and errors at the door."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import PagedKVCache
from pagedkv.engine import Engine, SamplingParams, StepOutput
from pagedkv.engine.build import find_eos_token_ids
from pagedkv.engine.equality import all_token_equal, compare_tokens
from pagedkv.spec import UnsupportedModel
from tests.engine.scripted import cold, make_core
from tests.engine.test_text import ByteTokenizer
from tests.tiny_models import VOCAB, build, stock_greedy, stock_logits, tiny, tiny_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LENGTH = SamplingParams(max_new_tokens=8, ignore_eos=True)


def random_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of 1 to ``longest`` random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def comparison(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
    """Compare greedy tokens with the model alone, by the project's rule for ties."""
    text = list(prompt)

    def logits_at(index: int) -> torch.Tensor:
        return stock_logits(model, text + expected[:index])[-1]

    expected = stock_greedy(model, text, len(tokens))
    return compare_tokens(tokens, expected, logits_at)


@pytest.mark.parametrize("backend", ["paged", "concat", "static", "none"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_greedy_tokens_are_the_models_own(name: str, backend: str) -> None:
    """On every backend a ragged, chunked batch gives each prompt what the model gives it alone."""
    model = tiny(name)
    prompts = random_prompts(6, 30)
    options: dict[str, Any] = {"num_pages": 33, "page_size": 4} if backend == "paged" else {}
    engine = Engine(model, backend=backend, max_batch=4, max_step_tokens=16, **options)
    completions = engine.generate(prompts, LENGTH)

    assert all_token_equal(
        comparison(model, prompt, completion.token_ids) for prompt, completion in zip(prompts, completions, strict=True)
    )
    assert [completion.finish_reason for completion in completions] == ["length"] * 6
    assert engine.backend.usage().in_use == 0


def test_greedy_tokens_under_preemption_are_the_models_own() -> None:
    """Random prompts through a pool so small that many are preempted: still what the model gives each alone."""
    model = tiny("llama")
    prompts = random_prompts(24, 30, seed=1)
    engine = Engine(model, num_pages=30, page_size=2, max_batch=16, max_step_tokens=48, watermark=0.0)
    params = SamplingParams(max_new_tokens=28, ignore_eos=True)
    completions = engine.generate(prompts, params)

    assert all_token_equal(
        comparison(model, prompt, completion.token_ids) for prompt, completion in zip(prompts, completions, strict=True)
    )
    assert engine.stats.preemptions >= 3
    assert max(completion.metrics.preemptions for completion in completions) == 1
    assert engine.backend.usage().in_use == 0


def test_a_shared_prompt_is_reused() -> None:
    """Chats with a common beginning arriving together share its pages and say so."""
    system = random_prompts(1, 1)[0] * 32
    prompts = [[*system, token] for token in range(3, 9)]
    engine = Engine(tiny("llama"), num_pages=65, page_size=4, max_step_tokens=64)
    without = Engine(tiny("llama"), num_pages=65, page_size=4, max_step_tokens=64, prefix_cache=False)
    completions = engine.generate(prompts, LENGTH)

    assert engine.stats.cached_tokens == 5 * 32
    assert without.stats.cached_tokens == 0
    assert [c.token_ids for c in completions] == [c.token_ids for c in without.generate(prompts, LENGTH)]


def test_a_cache_of_ones_own() -> None:
    """Any `CacheBackend` can be given; its batch and length are bounds of the engine."""
    model = tiny("llama")
    cache = PagedKVCache.from_config(model.config, num_pages=65, page_size=4, max_batch=3, max_len=40)
    engine = Engine(model, backend=cache)
    prompts = random_prompts(5, 30)

    assert engine.backend is cache
    assert [c.token_ids for c in engine.generate(prompts, LENGTH)] == [
        tuple(stock_greedy(model, prompt, 8)) for prompt in prompts
    ]
    with pytest.raises(ValueError, match="at most 40 tokens"):
        engine.add_request("long", [1] * 39, SamplingParams(max_new_tokens=2))
    with pytest.raises(ValueError, match="max_batch must be at most the cache's 3, was 4"):
        Engine(model, backend=cache, max_batch=4)
    with pytest.raises(ValueError, match="memory and num_pages must be None"):
        Engine(model, backend=cache, num_pages=5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "pagged"}, ValueError, "backend must be one of paged, concat, static, none .* was 'pagged'"),
        ({"backend": "concat", "num_pages": 4}, ValueError, "num_pages must be None for backend 'concat'"),
        ({"backend": "none", "memory": "1MiB"}, ValueError, "memory must be None for backend 'none'"),
        ({"backend": "static", "memory": 100}, ValueError, "memory must hold one slab of max_len = 256"),
        ({"memory": "1MiB", "num_pages": 4}, ValueError, "memory and num_pages exclude each other"),
        ({"memory": "much"}, ValueError, "memory must be"),
        ({"page_size": 3}, ValueError, "page_size must be a power of two"),
        ({"max_batch": 0}, ValueError, "max_batch must be at least 1, was 0"),
        ({"max_len": 257}, ValueError, "max_len must be 1 to 256, was 257"),
        ({"watermark": 1.0}, ValueError, "watermark must be at least 0 and below 1"),
        ({"max_batch": 32, "max_step_tokens": 8}, ValueError, "max_step_tokens must be at least max_batch = 32"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """What an engine cannot be built from is refused by the argument's name."""
    with pytest.raises(error, match=message):
        Engine(tiny("llama"), **options)


@pytest.mark.parametrize("backend", ["concat", "static"])
def test_memory_bounds_the_baselines(backend: str) -> None:
    """Baselines keep within ``memory`` too: what can never fit is refused, the rest waits its turn."""
    model = tiny("llama")
    engine = Engine(model, backend=backend, memory=64 * 256, max_len=32, max_batch=8)  # a token's K and V: 256 bytes
    prompts = random_prompts(6, 20)

    assert [c.token_ids for c in engine.generate(prompts, LENGTH)] == [
        tuple(stock_greedy(model, prompt, 8)) for prompt in prompts
    ]
    with pytest.raises(ValueError, match="at most 32 tokens"):
        engine.add_request("long", [1] * 30, LENGTH)


def test_what_is_no_model_or_no_cache_is_refused() -> None:
    """A model, a backend and a prompt of another kind are named at the door."""
    model = tiny("llama")

    with pytest.raises(TypeError, match="model must be a transformers model, was NoneType"):
        Engine(None)
    with pytest.raises(TypeError, match="backend must be a name or a CacheBackend, was int"):
        Engine(model, backend=3)  # type: ignore[arg-type]
    engine = Engine(model, ByteTokenizer(), num_pages=40)
    with pytest.raises(ValueError, match="prompt must be text that UTF-8 can hold"):
        engine.add_request("a", "\udcff")
    assert not engine.has_unfinished


def test_few_step_tokens_allow_few_at_a_time() -> None:
    """A small token budget bounds the batch by itself; only a batch that was asked for can contradict it."""
    engine = Engine(tiny("llama"), num_pages=40, max_step_tokens=5)
    answers = engine.generate([[1, 2, 3]] * 7, LENGTH)

    assert 1 == len({answer.token_ids for answer in answers})
    with pytest.raises(ValueError, match="max_step_tokens must be at least max_batch = 8, was 5"):
        Engine(tiny("llama"), num_pages=40, max_batch=8, max_step_tokens=5)


def test_an_unknown_folder_and_an_unusable_model_are_refused(tmp_path: Path) -> None:
    """Each says which argument, what it must be and what it was."""
    (tmp_path / "empty").mkdir()
    tiny_config("mamba").save_pretrained(tmp_path / "mamba")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no such model"}')

    with pytest.raises(ValueError, match=r"name_or_path must be .*nowhere'.*no folder"):
        Engine.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"name_or_path must be .*empty'.*without config.json"):
        Engine.from_pretrained(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"name_or_path must be .*no-such-model"):
        Engine.from_pretrained("no-such-model")
    with pytest.raises(ValueError, match=r"name_or_path must be .*broken'"):
        Engine.from_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match=r"name_or_path must be .*mamba'"):
        Engine.from_pretrained(tmp_path / "mamba")
    with pytest.raises(UnsupportedModel):
        Engine(build(tiny_config("gpt_neo")), num_pages=8)


def byte_folder(path: Path) -> Path:
    """Save a tiny Llama over byte tokens, with its tokenizer, as transformers would."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({"</s>": 0} | {char: i + 1 for i, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(path)
    build(tiny_config("llama", vocab_size=257, eos_token_id=0, bos_token_id=0)).save_pretrained(path)
    return path


def test_from_pretrained_serves_text(tmp_path: Path) -> None:
    """A folder becomes an engine: text in, text out, the same as ids in; streamed pieces join to the whole text."""
    engine = Engine.from_pretrained(byte_folder(tmp_path), dtype=torch.float32, num_pages=65, page_size=4)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    (whole,) = engine.generate(["Hello"], params)
    streamed = list(engine.stream("Hello", params))
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("Hello")
    (by_ids,) = engine.generate([ids], params)

    assert whole.prompt_token_ids == tuple(ids)
    assert by_ids.token_ids == whole.token_ids == tuple(token for output in streamed for token in output.token_ids)
    assert by_ids.text == whole.text == "".join(output.text for output in streamed)
    assert whole.text == engine.tokenizer.decode(
        list(whole.token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def scripted_engine(answer: bytes, prompt_length: int, **options: Any) -> Engine:
    """Return an engine over byte tokens whose model says ``answer``, then token 256, whatever the prompt."""

    def rule(text: Sequence[int]) -> int:
        said = len(text) - prompt_length
        return answer[said] if said < len(answer) else 256

    core, _, runner = make_core(rule=rule, vocab_size=300, eos_token_ids=[256], **options)
    runner.vocab = 300
    return Engine.from_core(core, ByteTokenizer())


def test_characters_stream_whole() -> None:
    """Four bytes as four tokens: nothing, nothing, nothing, then the character; EOS adds nothing (vllm#48853)."""
    pieces = [output.text for output in scripted_engine("🦊".encode(), 2).stream("ab")]

    assert pieces == ["", "", "", "🦊", ""]


@pytest.mark.parametrize("stop", ["length", "abort"])
def test_a_cut_character_is_shown_at_the_end(stop: str) -> None:
    """Ended after 3 of 4 bytes the text ends in one mark, streamed or not (mlx-vlm#1778)."""
    params = SamplingParams(max_new_tokens=4 if stop == "length" else 30)
    engine = scripted_engine(b"x" + "🦊".encode(), 1)
    pieces = []
    for output in (stream := engine.stream("a", params)):
        pieces.append(output.text)
        if len(pieces) == 4 and stop == "abort":
            engine.abort(stream.request_id)

    assert "".join(pieces) == "x\ufffd"
    assert set(pieces[1:3]) == {""}
    if stop == "length":
        assert engine.generate(["a"], params)[0].text == "x\ufffd"


def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    """Prompt of "ab" and 2 of 4 bytes: the output holds no prompt text, only its own bytes' (vllm-mlx#109)."""
    prompt = [*b"ab", *"🦊".encode()[:2]]
    engine = scripted_engine("🦊".encode()[2:] + b"c", len(prompt))

    assert engine.generate([prompt])[0].text == "\ufffd\ufffdc"


def test_a_first_token_that_stops_gives_empty_text() -> None:
    """EOS first: empty text, reason stop; EOS is in the ids and never in the text (ScaleLLM#304)."""
    (empty,) = scripted_engine(b"", 1).generate(["a"])
    (some,) = scripted_engine(b"hi", 1).generate(["a"])

    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", (256,), "stop")
    assert (some.text, some.token_ids, some.finish_reason) == ("hi", (*b"hi", 256), "stop")


def test_a_stop_tokens_text_is_not_shown() -> None:
    """A stop token that has text of its own ends the request and is left out of the text."""
    engine = scripted_engine(b"one.two", 1)
    (completion,) = engine.generate(["a"], SamplingParams(stop_token_ids=[ord(".")]))

    assert (completion.text, completion.finish_reason) == ("one", "stop")


def test_text_needs_a_tokenizer() -> None:
    """Text for an engine of ids is refused; with a tokenizer an empty text is an empty prompt."""
    core, _, _ = make_core()
    with pytest.raises(ValueError, match="prompt must be token ids for an engine without a tokenizer, was text: 'hi'"):
        Engine.from_core(core).add_request("a", "hi")
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        scripted_engine(b"", 0).add_request("a", "")
    assert not core.has_unfinished


@pytest.mark.parametrize("prompts", ["text", [1, 2, 3]])
def test_generate_wants_a_list_of_prompts(prompts: Any) -> None:
    """One prompt where a list of them belongs is refused, not served letter by letter."""
    with pytest.raises(TypeError, match="prompts must be a list of prompts, was one prompt"):
        Engine.from_core(make_core()[0]).generate(prompts)


def test_params_are_one_or_one_each() -> None:
    """A list of params goes with the prompts; another length is refused before anything runs."""
    core, _, _ = make_core()
    engine = Engine.from_core(core)
    each = [SamplingParams(max_new_tokens=count) for count in (1, 3)]

    assert [len(c.token_ids) for c in engine.generate([[1], [2]], each)] == [1, 3]
    with pytest.raises(ValueError, match="one for each of 3 prompts, were 2"):
        engine.generate([[1], [2], [3]], each)
    assert engine.generate([]) == []


def test_an_engine_may_be_built_in_one_thread_and_step_in_another() -> None:
    """The cache belongs to the thread that steps first, not to the one that built the engine."""
    engine = Engine(tiny("llama"), num_pages=33, page_size=4)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(engine.generate([[5, 6, 7]], LENGTH)))
    thread.start()
    thread.join()

    assert [list(answer.token_ids) for answer in answers] == [stock_greedy(tiny("llama"), [5, 6, 7], 8)]


def test_calls_share_the_engine() -> None:
    """Requests, a stream and a generate call at once: each gets its own outputs, none is lost."""
    core, cache, _ = make_core()
    engine = Engine.from_core(core)
    params = SamplingParams(max_new_tokens=6)
    engine.add_request("own", [1, 2], params)
    stream = engine.stream([3], params)
    first = next(stream)
    (completion,) = engine.generate([[4]], params)
    outputs: list[StepOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()

    assert completion.token_ids == tuple(cold([4], params))
    assert [token for output in outputs for token in output.token_ids] == cold([1, 2], params)
    assert {output.request_id for output in outputs} == {"own"}
    assert [token for output in [first, *stream] for token in output.token_ids] == cold([3], params)
    assert cache.usage().in_use == 0


def test_an_abandoned_stream_is_aborted() -> None:
    """Leaving a stream early ends its request at the next step; nobody else sees its outputs; pages come back."""
    core, cache, _ = make_core()
    engine = Engine.from_core(core, ByteTokenizer())
    with engine.stream([3], SamplingParams(max_new_tokens=50)) as stream:
        next(stream)
    engine.stream([4], SamplingParams(max_new_tokens=50))  # dropped at once

    assert [engine.has_unfinished, engine.step(), engine.has_unfinished, list(stream)] == [True, [], False, []]
    assert cache.usage().in_use == 0
    assert engine.stats.finished["abort"] == 2


def test_a_failing_model_ends_generate_cleanly() -> None:
    """The exception comes through, the call's requests are given up, others go on, and so does the engine."""
    core, cache, runner = make_core()
    engine = Engine.from_core(core)
    params = SamplingParams(max_new_tokens=5)
    engine.add_request("own", [1], params)
    runner.fail_next = 1
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.generate([[2], [3]], params)
    outputs: list[StepOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()

    assert [token for output in outputs for token in output.token_ids] == cold([1], params)
    assert {output.request_id for output in outputs} == {"own"}
    assert engine.generate([[2]], params)[0].token_ids == tuple(cold([2], params))
    assert cache.usage().in_use == 0


def test_a_bad_prompt_gives_the_whole_call_up() -> None:
    """One bad prompt of a `generate` call: the error names it, and nothing of the call goes on running."""
    core, cache, _ = make_core()
    engine = Engine.from_core(core)
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        engine.generate([[1, 2], []])
    engine.step()

    assert not engine.has_unfinished
    assert cache.num_opened == 0


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (5, 6, 7, [5]),
        ([5, 8], 6, 7, [5, 8]),
        (None, 6, 7, [6]),
        (None, None, 7, [7]),
        (None, None, None, []),
        (0, 6, 7, [0]),
    ],
)
def test_eos_ids_come_from_where_generate_takes_them(
    generation: Any, config: int | None, tokenizer: int | None, expected: list[int]
) -> None:
    """The generation config first, then the model's config, then the tokenizer; lists and id 0 are legal."""
    model = build(tiny_config("llama", eos_token_id=config))
    model.generation_config.eos_token_id = generation

    class Named(ByteTokenizer):
        eos_token_id = tokenizer

    assert find_eos_token_ids(model, Named()) == expected


def test_an_engine_stops_at_the_models_eos() -> None:
    """The engine ends a text where the model's generation config says, and frees its pages."""
    model = build(tiny_config("llama"))
    prompt = [5, 6, 7, 8]
    expected = stock_greedy(model, prompt, 12)
    stop = next(token for token in expected if token != expected[0])
    model.generation_config.eos_token_id = [96, stop]
    engine = Engine(model, num_pages=33, page_size=4)
    (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=12))
    cut = expected[: expected.index(stop) + 1]

    assert (list(completion.token_ids), completion.finish_reason) == (cut, "stop")
    assert engine.backend.usage().in_use == 0

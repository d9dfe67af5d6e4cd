"""Parallel samples, log-probabilities and metrics: shared pages, seeds by number, the model's own figures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.engine import Engine, SamplingParams, StepOutput
from tests.engine.scripted import cold, drain, make_core
from tests.engine.test_engine import scripted_engine
from tests.tiny_models import stock_logits, tiny

if TYPE_CHECKING:
    import torch

    from pagedkv.engine.logprobs import Logprob

WARM = SamplingParams(temperature=2.0, seed=7, n=4, max_new_tokens=9)


def samples_of(outputs: list[StepOutput]) -> dict[int, list[int]]:
    """Return each sample's tokens."""
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.index, []).extend(output.token_ids)
    return found


@pytest.mark.parametrize(("num_pages", "max_batch"), [(64, 8), (64, 4), (12, 4), (9, 8)])
def test_sample_i_is_the_request_with_seed_plus_i(num_pages: int, max_batch: int) -> None:
    """In a wide pool, with places missing and with pages missing: each sample is what its own seed gives alone."""
    prompt = [3, 1, 4, 1, 5, 9, 2]
    core, cache, _ = make_core(num_pages, 4, max_batch=max_batch, max_step_tokens=8, growth=0)
    core.add_request("other", [8, 8], SamplingParams(max_new_tokens=12))
    core.add_request("a", prompt, WARM)
    outputs = drain(core)

    assert samples_of(outputs["a"]) == {index: cold(prompt, replace(WARM, n=1, seed=7 + index)) for index in range(4)}
    assert samples_of(outputs["other"]) == {0: cold([8, 8], SamplingParams(max_new_tokens=12))}
    assert [output.ends_request for output in outputs["a"]] == [False] * (len(outputs["a"]) - 1) + [True]
    assert cache.usage().in_use == 0
    cache.check()


def test_samples_share_the_prompts_pages() -> None:
    """Four samples of 33 tokens on pages of 4: the prompt is computed and held once, tails apart."""
    engine = Engine(tiny("llama"), num_pages=65, page_size=4)
    stream = engine.stream(list(range(33)), SamplingParams(temperature=1.0, seed=1, n=4, max_new_tokens=5))
    for output in stream:
        if output.index == 3:
            break
    next(stream)

    assert engine.stats.prefill_tokens == 33
    assert engine.backend.usage().in_use == 8 + 4
    completion = stream.completion()
    assert len(completion.samples) == 4
    assert engine.backend.usage().in_use == 0


def test_samples_of_a_completion() -> None:
    """`generate` gives all samples in order, each with its own text; the completion's own are the first one's."""
    engine = scripted_engine(b"hi", 1)
    (completion,) = engine.generate(["a"], SamplingParams(n=3, stop_token_ids=[ord("i")]))

    assert [sample.text for sample in completion.samples] == ["h"] * 3
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("h", (*b"hi",), "stop")
    assert engine.stats.finished["stop"] == 3


def test_an_abort_ends_every_sample() -> None:
    """Before the samples part with one output, afterwards with one for each that goes on."""
    core, cache, _ = make_core(max_batch=8, max_step_tokens=8)
    core.add_request("early", [1] * 20, replace(WARM, n=3))
    core.step()
    core.abort("early")
    assert [(o.finish_reason, o.ends_request) for o in core.step()] == [("abort", True)]
    core.add_request("late", [1] * 3, replace(WARM, n=3))
    core.step()
    core.abort("late")

    assert [(o.index, o.ends_request) for o in core.step()] == [(0, False), (1, False), (2, True)]
    assert cache.usage().in_use == 0
    assert not core.has_unfinished


def expected_logprob(logits: torch.Tensor, token: int, count: int) -> Any:
    """Return what a plain log-softmax says of one place."""
    scores = logits.double().log_softmax(-1)
    ids = sorted(range(len(scores)), key=lambda one: (-float(scores[one]), one))[:count]
    return pytest.approx(float(scores[token]), abs=1e-4), [
        (one, pytest.approx(float(scores[one]), abs=1e-4)) for one in ids
    ]


def flat(found: Logprob) -> Any:
    """Return a log-probability in comparable form."""
    return found.logprob, list(found.top)


@pytest.mark.parametrize("chunk", [3, 64])
def test_logprobs_are_the_models_own(chunk: int) -> None:
    """Of prompt and answer, chunked or not, after a cached twin: the log-softmax of the model's raw logits."""
    model = tiny("llama")
    engine = Engine(model, num_pages=65, page_size=4, max_batch=2, max_step_tokens=chunk)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    params = SamplingParams(temperature=3.0, top_k=5, seed=4, max_new_tokens=6, ignore_eos=True)
    engine.generate([prompt], params)
    (completion,) = engine.generate([prompt], replace(params, logprobs=3, prompt_logprobs=2))
    text = [*prompt, *completion.token_ids]
    logits = stock_logits(model, text)
    told = completion.prompt_logprobs

    assert completion.metrics.cached_tokens == 0
    assert told is not None
    assert told[0] is None
    assert [found.token_id for found in told if found] == prompt[1:]
    assert [flat(found) for found in told if found] == [
        expected_logprob(logits[place], text[place + 1], 2) for place in range(len(prompt) - 1)
    ]
    assert [flat(found) for found in completion.logprobs] == [
        expected_logprob(logits[place], text[place + 1], 3) for place in range(len(prompt) - 1, len(text) - 1)
    ]


def test_prompt_logprobs_through_preemption() -> None:
    """A request that is called back amid its prompt still tells each prompt token's figure once."""
    params = SamplingParams(max_new_tokens=4, prompt_logprobs=0)
    alone, _, _ = make_core()
    alone.add_request("a", list(range(30)), params)
    expected = drain(alone)["a"][0].prompt_logprobs
    core, cache, _ = make_core(10, 4, growth=0, max_step_tokens=5, max_batch=4)
    core.add_request("elder", [7], SamplingParams(max_new_tokens=40))
    core.step()
    core.add_request("a", list(range(30)), params)
    outputs = drain(core)

    assert core.stats.preemptions > 0
    assert [output.prompt_logprobs for output in outputs["a"]] == [expected, None, None, None]
    assert expected is not None
    assert len(expected) == 30
    assert cache.usage().in_use == 0


def test_metrics_by_the_engines_clock() -> None:
    """Queue time, time to first token and gaps are differences of the injected clock, which nothing else reads."""
    now = [0.0]
    core, _, runner = make_core(max_batch=1, max_step_tokens=4, clock=lambda: now[0])
    forward = runner.forward

    def slow(*args: Any) -> torch.Tensor:
        now[0] += 2.0
        return forward(*args)

    runner.forward = slow  # type: ignore[method-assign,assignment]
    core.add_request("first", [1, 2], SamplingParams(max_new_tokens=2))
    core.add_request("second", [1] * 6, SamplingParams(max_new_tokens=3))
    outputs = drain(core)
    first, second = outputs["first"][-1].metrics, outputs["second"][-1].metrics

    assert first is not None
    assert second is not None
    assert (first.queue_time, first.time_to_first_token, first.between_tokens) == (0.0, 2.0, (2.0,))
    assert (second.queue_time, second.time_to_first_token, second.between_tokens) == (4.0, 8.0, (2.0, 2.0))
    assert (second.finished_at, second.cached_tokens, second.preemptions, second.acceptance) == (12.0, 0, 0, None)

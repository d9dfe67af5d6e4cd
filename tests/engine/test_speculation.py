"""Prompt lookup: the same text in fewer steps, drafts that cost nobody anything, and none of them left in the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine import Engine, SamplingParams
from pagedkv.engine.drafts import LONGEST, SHORTEST, PromptLookup
from tests.engine.scripted import cold, drain, hashed, make_core, tokens_of
from tests.engine.test_engine import comparison, scripted_engine
from tests.tiny_models import tiny

if TYPE_CHECKING:
    from collections.abc import Sequence


def cycling(text: Sequence[int]) -> int:
    """Return a next token that a look into the text often guesses: a loop of ten, broken now and then."""
    return hashed(text) if len(text) % 17 == 0 else (text[-1] * 3 + 1) % 10


def naive_draft(tokens: list[int], most: int) -> list[int]:
    """Look the text's end up by scanning it."""
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                text = list(tokens)
                for _ in range(most):
                    text.append(text[end + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(0, 5), st.data())
@settings(max_examples=100)
def test_a_draft_is_what_followed_last_time(tokens: list[int], most: int, data: st.DataObject) -> None:
    """The index gives what a scan for the latest, longest run gives, however the text has grown between calls."""
    lookup = PromptLookup()
    for end in sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=4))):
        assert lookup.draft(tokens[:end], most) == naive_draft(tokens[:end], most)


@pytest.mark.parametrize("temperature", [0.0, 0.05])
@pytest.mark.parametrize("budget", [4, 9, 64])
def test_drafts_change_no_token(temperature: float, budget: int) -> None:
    """Greedy and sampled, with penalties and stops, in any budget: the tokens without drafts, in fewer steps."""
    params = {
        "plain": SamplingParams(temperature=temperature, seed=1, max_new_tokens=40),
        "penalised": SamplingParams(temperature=temperature, seed=2, max_new_tokens=30, frequency_penalty=0.02),
        "late": SamplingParams(
            temperature=temperature, seed=3, max_new_tokens=40, stop_token_ids=[4], min_new_tokens=9
        ),
    }
    prompts = {name: [*range(10)] * 2 + [index] for index, name in enumerate(params)}
    expected = {name: cold(prompts[name], params[name], rule=cycling) for name in params}
    core, cache, _ = make_core(64, 4, rule=cycling, max_batch=4, max_step_tokens=budget)
    for name, own in params.items():
        core.add_request(name, prompts[name], replace(own, draft_tokens=6))
    outputs = drain(core)

    assert tokens_of(outputs) == expected
    assert cache.usage().in_use == 0
    cache.check()
    if budget == 64:
        metrics = outputs["plain"][-1].metrics
        assert metrics is not None
        assert metrics.acceptance is not None
        assert 0 < metrics.accepted_tokens < metrics.drafted_tokens
        assert len(outputs["plain"]) == 40 - metrics.accepted_tokens
        assert core.stats.drafted_tokens >= metrics.drafted_tokens


def test_a_wrong_draft_leaves_nothing_findable() -> None:
    """Draft tokens that were not drawn are in no page of the index: the cache keeps what the text has, and no more."""
    core, cache, _ = make_core(64, 2, rule=lambda text: hashed(text) % 3)
    prompt = [1, 2, 0, 1] * 3
    core.add_request("a", prompt, SamplingParams(max_new_tokens=20, draft_tokens=8))
    outputs = drain(core)
    text = (*prompt, *tokens_of(outputs)["a"])

    assert core.stats.drafted_tokens > core.stats.accepted_tokens
    assert all(key == text[: len(key)] for key in cache.index)


def test_drafts_preempt_nobody() -> None:
    """Where the pool has no room for a draft the step goes without it."""
    params = SamplingParams(max_new_tokens=20, draft_tokens=16)
    core, cache, _ = make_core(14, 2, rule=cycling, max_batch=2, prefix_cache=False)
    prompts = {name: [*range(10)][: 4 + name] for name in range(2)}
    for name, prompt in prompts.items():
        core.add_request(name, prompt, replace(params, max_new_tokens=10))

    assert tokens_of(drain(core)) == {
        name: cold(prompt, SamplingParams(max_new_tokens=10), rule=cycling) for name, prompt in prompts.items()
    }
    assert core.stats.preemptions == 0
    assert cache.usage().in_use == 0


def test_a_stop_string_inside_a_draft() -> None:
    """An answer that ends amid accepted tokens ends there: text and tokens are those without drafts."""
    params = SamplingParams(stop="b!", max_new_tokens=40)
    for repeats in (3, 7):
        answer = b"abcde" * repeats + b"ab!cde" * 3
        (plain,) = scripted_engine(answer, 1).generate(["a"], params)
        (drafted,) = scripted_engine(answer, 1).generate(["a"], replace(params, draft_tokens=12))

        assert (drafted.token_ids, drafted.text, drafted.finish_reason) == (plain.token_ids, plain.text, "stop")
        assert drafted.metrics.accepted_tokens > 0


def test_logprobs_with_drafts() -> None:
    """Each accepted token has the log-probability that it has without drafts."""
    params = SamplingParams(max_new_tokens=25, logprobs=2)
    answers = []
    for drafted in (0, 6):
        core, _, _ = make_core(rule=cycling)
        core.add_request("a", [*range(10)] * 2, replace(params, draft_tokens=drafted))
        answers.append([found for output in drain(core)["a"] for found in output.logprobs])

    assert answers[0] == answers[1]
    assert len(answers[0]) == 25


@pytest.mark.parametrize(
    ("name", "backend"), [("llama", "paged"), ("mistral", "paged"), ("llama", "concat"), ("llama", "none")]
)
def test_drafts_on_a_real_model(name: str, backend: str) -> None:
    """Greedy on tiny models, past a sliding window too: token-equal to the model alone, rollback within its hold."""
    options: dict[str, Any] = {"num_pages": 65, "page_size": 4} if backend == "paged" else {}
    engine = Engine(tiny(name), backend=backend, **options)
    prompts = [[3, 1, 4, 1, 5], [7, 8, 9] * 4]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=30, ignore_eos=True, draft_tokens=5))

    assert all(comparison(tiny(name), p, c.token_ids).equal for p, c in zip(prompts, completions, strict=True))
    assert engine.backend.usage().in_use == 0
    if backend != "none":  # which is fed whole texts, so that nothing is left to draft for
        assert engine.stats.drafted_tokens > engine.stats.accepted_tokens

"""Models with layer groups in the engine: the model's own tokens, whatever windows, sharing and pressure do."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pagedkv.allocator import FullAttention
from pagedkv.cache import PagedKVCache
from pagedkv.engine import Engine, SamplingParams
from tests.tiny_models import tiny, tiny_config

NEW = 12
SHARED = [5, 9, 33, 7, 60, 21, 8, 14, 3, 77]
PROMPTS = tuple((*SHARED, *range(11, 11 + 3 * n)) for n in range(1, 5))
HYBRIDS = ("mistral", "gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gemma3")))


@cache
def own_tokens(name: str, prompts: tuple[tuple[int, ...], ...], count: int) -> list[list[int]]:
    """Return what ``model.generate`` says after each prompt, greedily, without any stop."""
    model = tiny(name)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=[10**6]
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def make(name: str, **options: Any) -> tuple[Engine, PagedKVCache]:
    """Return an engine on a poisoned cache that checks what it reads."""
    cache_options = {"num_pages": 200, "page_size": 4, "check": True, "max_batch": 8}
    own = {key: options.pop(key) for key in list(options) if key in {"num_pages", "page_size", "kv_dtype"}}
    backend = PagedKVCache.from_config(tiny_config(name), **{**cache_options, **own})
    for tensor in backend.page_tensors:
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 127)
    return Engine(tiny(name), backend=backend, **options), backend


PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_tokens_are_the_models_own(name: str) -> None:
    """In chunks, in a batch and again from the prefix cache: token-equal to `generate`; nothing is left behind."""
    engine, backend = make(name, max_step_tokens=9, max_batch=4)
    for _ in range(2):
        assert own_tokens(name, PROMPTS, NEW) == [list(done.token_ids) for done in engine.generate(PROMPTS, PARAMS)]

    assert any(not isinstance(group, FullAttention) for group in backend.allocator.groups)
    assert engine.stats.cached_tokens > 4 * 8
    backend.allocator.check()
    assert backend.usage().in_use == 0


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_preempted_requests_say_the_same(name: str) -> None:
    """On a pool for hardly three of four requests one is preempted, comes back and ends with the model's own tokens."""
    prompts = tuple((*SHARED[:3], 40 + n) for n in range(4))
    engine, backend = make(name, max_step_tokens=16, max_batch=4, num_pages=41, watermark=0.0)
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=44, ignore_eos=True))

    assert own_tokens(name, prompts, 44) == [list(done.token_ids) for done in completions]
    assert max(done.metrics.preemptions for done in completions) == 1
    backend.allocator.check()
    assert backend.usage().in_use == 0


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_quantised_hybrids_answer(name: str) -> None:
    """int8 pages of several groups give nearly the same tokens: the first of each answer agrees."""
    engine, backend = make(name, kv_dtype="int8", max_step_tokens=16, max_batch=4)
    completions = engine.generate(PROMPTS, PARAMS)

    same = sum(
        list(done.token_ids)[:1] == own[:1]
        for done, own in zip(completions, own_tokens(name, PROMPTS, NEW), strict=True)
    )
    assert same >= 3
    assert {torch.int8} == {pages.dtype for pages in backend.k_pages}


def test_a_long_text_needs_no_more_pages_than_its_window() -> None:
    """Where all layers have windows, a text many times the pool is admitted, in chunks, and finishes."""
    engine, backend = make("mistral", num_pages=6, page_size=4, max_step_tokens=8, max_batch=1)
    prompt = [3 + n % 90 for n in range(150)]
    (done,) = engine.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True))

    assert len(done.token_ids) == 40
    assert engine.stats.preemptions == 0
    (alone,) = make("mistral", num_pages=60, page_size=4, max_step_tokens=512, max_batch=1)[0].generate(
        [prompt], SamplingParams(max_new_tokens=40, ignore_eos=True)
    )
    assert done.token_ids == alone.token_ids
    assert backend.usage().in_use == 0


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    """A full-attention group bounds a text by the pool, and the door knows where."""
    engine, _ = make("gpt_oss", num_pages=16, page_size=4, max_step_tokens=8, max_batch=1)
    # 15 pages: 4 for the window of 5 and a chunk of 8, 11 for full attention.
    longest = 11 * 4
    with pytest.raises(ValueError, match=f"at most {longest + 1} tokens"):
        engine.generate([[1] * longest], SamplingParams(max_new_tokens=2))
    (done,) = engine.generate([[1] * (longest - 1)], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert len(done.token_ids) == 2

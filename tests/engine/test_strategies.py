"""Memory strategies in the engine: full, sliding, recompute and auto; and sizes that nobody has to tune."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.cache import PagedKVCache
from pagedkv.engine import Engine, SamplingParams
from pagedkv.engine.baselines import ConcatCache
from pagedkv.engine.defaults import activation_bytes, default_max_batch, default_max_step_tokens
from pagedkv.recompute import RecomputeCache, layers_to_recompute
from pagedkv.sliding import SlidingCache
from pagedkv.spec import KVSpec, UnsupportedModel
from tests.engine.test_engine import comparison
from tests.tiny_models import build, stock_greedy, tiny, tiny_config

SHARED = [5, 9, 33, 7, 60, 21, 8, 14, 3, 77]
PROMPTS = [[*SHARED, *range(11, 11 + 3 * n)] for n in range(1, 5)]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"page_size": 4, "max_batch": 4, "max_step_tokens": 9}


# Sliding.


@torch.no_grad()
def masked_logits(model: Any, tokens: list[int], window: int, sinks: int) -> torch.Tensor:
    """Return the last logits ``[vocab]`` of the model's own eager attention under a window with sink tokens."""
    at = torch.arange(len(tokens))
    seen = (at <= at[:, None]) & ((at > at[:, None] - window) | (at < sinks))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    config, before = model.config, model.config._attn_implementation
    try:
        config._attn_implementation = "eager"
        logits: torch.Tensor = model(torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0, -1]
    finally:
        config._attn_implementation = before
    return logits


@pytest.mark.parametrize(("name", "window", "sinks"), [("llama", 6, 2), ("llama_mha", 7, 0), ("gpt_neox", 5, 4)])
def test_sliding_is_eager_attention_under_the_same_mask(name: str, window: int, sinks: int) -> None:
    """In chunks, batched, and from the prefix cache: the tokens of eager attention under window and sink tokens."""
    model = tiny(name)
    engine = Engine(model, strategy="sliding", sliding_window=window, num_sink_tokens=sinks, num_pages=120, **OPTIONS)
    assert isinstance(engine.backend, SlidingCache)
    for prompts in (PROMPTS[1:], PROMPTS[:2]):
        for prompt, done in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
            text = list(prompt)
            for token in done.token_ids:
                logits = masked_logits(model, text, window, sinks)
                assert float(logits.max() - logits[token]) < 2e-4
                text.append(token)
    assert engine.strategy is not None
    assert engine.strategy.name == "sliding"
    assert engine.backend.usage().in_use == 0


def test_sliding_gives_pages_back() -> None:
    """A text many times the window takes no more pages than window, sinks and chunk do, so small pools serve it."""
    engine = Engine(
        tiny("llama"), strategy="sliding", sliding_window=8, num_sink_tokens=4, num_pages=8, page_size=4, max_batch=1,
        max_step_tokens=8,
    )  # fmt: skip
    most = 0
    engine.add_request("long", [3 + n % 90 for n in range(150)], SamplingParams(max_new_tokens=40, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        most = max(most, engine.backend.usage().in_use)

    assert most <= 1 + -(-(8 - 1 + 8) // 4) + 1
    assert engine.stats.new_tokens == 40


@pytest.mark.parametrize(("window", "sinks"), [(0, 1), (-3, 1), (4, -1), (True, 1), (4, 1.5)])
def test_bad_windows(window: Any, sinks: Any) -> None:
    """Windows and sink tokens are whole numbers in range."""
    with pytest.raises((ValueError, TypeError), match=r"window|num_sink_tokens"):
        Engine(tiny("llama"), strategy="sliding", sliding_window=window, num_sink_tokens=sinks, num_pages=30)


# Recompute.


@pytest.mark.parametrize(
    "name",
    ["llama_mha", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neox", "phi", "qwen3"))],
)
def test_recompute_says_the_same_in_half_the_bytes(name: str) -> None:
    """Every layer keeps input states: token-equal in chunks, batched, from the prefix cache and after preemption."""
    model = tiny(name)
    engine = Engine(model, strategy="recompute", num_pages=24, watermark=0.0, **OPTIONS)
    cache = engine.backend
    assert isinstance(cache, RecomputeCache)
    for tensor in cache.page_tensors:
        tensor.fill_(float("nan"))
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    for prompts in (PROMPTS, PROMPTS[:1]):
        answers = engine.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
        for prompt, done in zip(prompts, answers, strict=True):
            assert comparison(model, prompt, done.token_ids).equal

    assert set(cache.recovered) == {0, 1}
    assert 2 * cache.bytes_per_token == cache.model_spec.bytes_per_token(torch.float32)
    assert engine.stats.preemptions > 0
    assert engine.stats.cached_tokens > 0
    assert hooks == sum(len(module._forward_pre_hooks) for module in model.modules())
    cache.allocator.check()
    assert cache.usage().in_use == 0


def test_recompute_with_samples_drafts_and_swap() -> None:
    """Forks, rolled back drafts and pages in host memory hold input states like any K and V."""
    options = {**OPTIONS, "max_batch": 8, "max_step_tokens": 24, "num_pages": 36, "watermark": 0.0}
    params = [
        SamplingParams(max_new_tokens=16, ignore_eos=True, draft_tokens=4),
        SamplingParams(max_new_tokens=16, ignore_eos=True, n=3, temperature=1.0, seed=5),
    ] * 2
    engine = Engine(tiny("llama_mha"), strategy="recompute", swap_memory="1MiB", preemption="swap", **options)
    answers = engine.generate(PROMPTS, params)
    expected = Engine(tiny("llama_mha"), **{**options, "num_pages": 300}).generate(PROMPTS, params)

    for one, other in zip(answers, expected, strict=True):
        assert [sample.token_ids for sample in one.samples] == [sample.token_ids for sample in other.samples]
    assert engine.stats.swapped_in > 0
    assert engine.backend.usage().in_use == 0


def test_only_as_many_layers_as_it_takes() -> None:
    """What is declared decides how many layers are computed again: the fewest that fit, at least one, at most all."""
    spec = KVSpec.from_config(tiny_config("llama_mha"))
    width, tokens = 32, 100
    whole, saved = tokens * spec.bytes_per_token(torch.float32), tokens * width * 4
    limits = {whole: 1, whole - saved: 1, whole - saved - 1: 2, 1: 2}
    assert {limit: layers_to_recompute(spec, width, tokens, torch.float32, limit) for limit in limits} == limits
    engine = Engine(tiny("llama_mha"), strategy="recompute", memory=4 * 64 * 400, max_len=64, **OPTIONS)
    assert isinstance(engine.backend, RecomputeCache)
    assert list(engine.backend.recovered) == [0]
    (done,) = engine.generate(PROMPTS[:1], PARAMS)
    assert comparison(tiny("llama_mha"), PROMPTS[0], done.token_ids).equal


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_models_that_save_nothing_are_refused(name: str) -> None:
    """With few KV heads K and V are narrower than input states already, and windows are bounded: the reason is told."""
    with pytest.raises(UnsupportedModel, match="saves nothing by strategy 'recompute': no layer of full attention"):
        Engine(tiny(name), strategy="recompute", num_pages=30)


def test_a_layer_that_cannot_run_again_is_refused() -> None:
    """An attention module whose K and V depend on more than its input states is found out at construction."""
    model = build(tiny_config("llama_mha"))
    module = model.model.layers[1].self_attn
    inner, calls = module.k_proj.forward, [0]

    def drifting(states: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        out: torch.Tensor = inner(states) * (1 + 0.1 * (calls[0] > 2))  # the third run is the second one again
        return out

    module.k_proj.forward = drifting
    with pytest.raises(UnsupportedModel, match="layer 1 must give the same K from the same input states, differs by"):
        RecomputeCache.of(model, num_pages=20)


def test_a_stand_in_for_the_attention_module_is_refused() -> None:
    """Where the chosen module does not run in a step, the step fails by name and is taken back."""
    model = build(tiny_config("llama_mha"))
    cache = RecomputeCache.of(model, num_pages=20, page_size=4)
    sequence = cache.open([1, 2, 3])
    batch = cache.begin_step({sequence: [1, 2, 3]})
    k = torch.zeros(3, 4, 8)
    with pytest.raises(UnsupportedModel, match="layer 0 must run its own attention module"):
        cache.write(0, k, k, batch)
    cache.abandon_step(batch)

    assert all(not module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="kv_dtype must be None for strategy 'recompute', was 'int8'"):
        RecomputeCache.of(model, num_pages=20, kv_dtype="int8")


# Auto.


@pytest.mark.parametrize(
    ("name", "share", "expected"),
    [
        ("llama_mha", 0.4, "full"),
        ("llama_mha", 0.6, "sliding"),
        ("llama_mha", 1.2, "recompute"),
        ("llama", 1.2, "full"),
    ],
)
def test_auto_decides_once_and_says_so(
    name: str, share: float, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From declared batch and length; where the model cannot recompute everything is kept, and the reason is told."""
    spec = KVSpec.from_config(tiny_config(name))
    needed = 4 * 64 * spec.bytes_per_token(torch.float32)
    with caplog.at_level("INFO", logger="pagedkv"):
        engine = Engine(tiny(name), strategy="auto", memory=int(needed / share), max_len=64, **OPTIONS)

    assert engine.strategy is not None
    assert engine.strategy.name == expected
    assert f"4 texts of 64 tokens take {needed:,} bytes" in engine.strategy.reason
    assert ("saves nothing" in engine.strategy.reason) == (name == "llama")
    assert expected == "recompute" or expected in caplog.text
    (done,) = engine.generate([SHARED], PARAMS)
    assert expected == "sliding" or list(done.token_ids) == stock_greedy(tiny(name), SHARED, 12)


def test_strategies_at_the_door() -> None:
    """Unknown names, and strategies for caches that have none, are refused."""
    with pytest.raises(ValueError, match="strategy must be one of full, sliding, recompute, auto, was 'half'"):
        Engine(tiny("llama"), strategy="half")
    with pytest.raises(ValueError, match="strategy must be 'full' for any backend but 'paged', was 'sliding'"):
        Engine(tiny("llama"), backend="concat", strategy="sliding")
    plain = Engine(tiny("llama"), num_pages=30)
    assert plain.strategy == ("full", "as asked")
    assert Engine(tiny("llama"), backend="concat").strategy is None


# Sizes that nobody tunes.


def test_the_default_batch_follows_the_pool() -> None:
    """64 tokens of pages each, 8 to 256 where each has a page, and within the cache's and the budget's own bounds."""
    spec = KVSpec.from_config(tiny_config("llama"))

    def batch(num_pages: int, budget: int | None = None, **options: Any) -> int:
        return default_max_batch(PagedKVCache(spec, num_pages=num_pages, page_size=16, **options), budget)

    sizes = [batch(3), batch(20), batch(41), batch(4097), batch(41, 7), batch(4097, max_batch=9)]
    assert sizes == [2, 8, 10, 256, 7, 9]
    assert default_max_batch(ConcatCache(spec), None) == 32


def test_the_default_budget_follows_the_memory() -> None:
    """1,024 tokens where an eighth of free memory bears their activations, less where not, never below the batch."""
    config = tiny_config("llama")
    token = activation_bytes(config, torch.float32)
    budgets = [default_max_step_tokens(config, torch.float32, 8 * token * count, 16) for count in (10**6, 100, 3)]

    assert budgets == [1024, 100, 16]
    assert activation_bytes(config, torch.bfloat16) * 2 == token


def test_an_engine_that_nobody_tuned_never_runs_out() -> None:
    """Far more requests than a small default engine has pages for: all end with the model's own tokens."""
    engine = Engine(tiny("llama"), memory=6 * 16 * 256)
    prompts = [[*SHARED[: 1 + n % 9], n] for n in range(10)]
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=14, ignore_eos=True))

    assert all(comparison(tiny("llama"), p, a.token_ids).equal for p, a in zip(prompts, answers, strict=True))
    assert engine.backend.usage().in_use == 0

"""Beam search: transformers' own answers, on pages that are shared, copied and given back."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.engine import Engine, SamplingParams
from tests.engine.scripted import hashed, make_core
from tests.tiny_models import tiny

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine import Completion

STOPS = (5, 9, 33, 60, 61, 62)


def stock_beams(model: Any, prompt: list[int], new: int, stops: Sequence[int], **options: Any) -> list[Any]:
    """Return what ``model.generate`` finds: tokens without padding, and the score, best first."""
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=list(stops) or None, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(row) if token in stops), new)
        found.append((row[:end], pytest.approx(score, abs=1e-4)))
    return found


def own_beams(engine: Engine, prompt: list[int], **params: Any) -> tuple[Completion, list[Any]]:
    """Return the engine's completion, and its samples in the same form."""
    (completion,) = engine.generate([prompt], SamplingParams(ignore_eos=True, **params))
    return completion, [(list(sample.token_ids), sample.score) for sample in completion.samples]


def compare(name: str, prompt: list[int], num_beams: int, penalty: float, early: Any, n: int, stops: Any) -> None:
    """Hold one search against the library's, and the pool against leaks."""
    engine = Engine(tiny(name), num_pages=65, page_size=4)
    options = {"num_beams": num_beams, "length_penalty": penalty, "early_stopping": early}
    _, own = own_beams(engine, prompt, n=n, max_new_tokens=10, stop_token_ids=stops, **options)

    assert own == stock_beams(tiny(name), prompt, 10, stops, num_return_sequences=n, **options)
    assert engine.backend.usage().in_use == 0
    engine.backend.allocator.check()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "num_beams", "penalty", "early", "n", "stops"),
    [
        ("llama", 4, 1.0, False, 4, STOPS),
        ("llama", 2, 2.0, True, 1, STOPS),
        ("llama", 3, 1.0, "never", 2, STOPS),
        ("llama", 4, -1.0, "never", 2, STOPS),
        ("mistral", 4, 0.5, False, 2, ()),
    ],
)
def test_beams_are_the_librarys(name: str, num_beams: int, penalty: float, early: Any, n: int, stops: Any) -> None:
    """Tokens and scores of the best n beams, with and without ends, also past a sliding window."""
    compare(name, [3, 1, 4, 1, 5, 9, 2, 6], num_beams, penalty, early, n, stops)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral", "gemma2"])
def test_beams_are_the_librarys_whatever_the_options(name: str) -> None:
    """The whole matrix of beams, penalties, ways to stop, results and ends."""
    options = itertools.product([2, 4], [1.0, 0.0, -1.0, 2.0], [False, True, "never"], [1, 2], [(), STOPS])
    for num_beams, penalty, early, n, stops in options:
        compare(name, [3, 1, 4, 1, 5], num_beams, penalty, early, n, stops)


def test_beams_beside_others_and_through_preemption() -> None:
    """A search among other requests in a pool too small for all: the same beams, and nothing is left."""
    model = tiny("llama")
    beams = SamplingParams(num_beams=3, n=2, max_new_tokens=12, ignore_eos=True)
    plain = SamplingParams(max_new_tokens=24, ignore_eos=True)
    prompts = [[7, 8, 9], [3, 1, 4, 1, 5], [4, 4], [11] * 5]
    params = [plain, beams, plain, beams]
    roomy = Engine(model, num_pages=129, page_size=2)
    alone = [roomy.generate([prompt], own)[0].samples for prompt, own in zip(prompts, params, strict=True)]
    small = Engine(model, num_pages=33, page_size=2, max_batch=8, watermark=0.0)
    together = small.generate(prompts, params)

    assert [[sample.token_ids for sample in one.samples] for one in together] == [
        [sample.token_ids for sample in samples] for samples in alone
    ]
    assert small.stats.preemptions > 0
    assert small.backend.usage().in_use == 0


@pytest.mark.parametrize("num_pages", [9, 10, 12, 20])
@pytest.mark.parametrize("max_batch", [4, 6])
def test_searches_that_wait_for_each_other_come_to_an_end(num_pages: int, max_batch: int) -> None:
    """Several searches in a pool that holds little more than one: each ends as it does alone, none waits for ever."""
    params = SamplingParams(num_beams=3, n=3, max_new_tokens=4)

    def beams(core: Any) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {}
        for _ in range(500):
            if not core.has_unfinished:
                return found
            for output in core.step():
                found.setdefault(output.request_id, []).append((output.index, output.token_ids, output.score))
        raise AssertionError("the searches do not come to an end")

    expected: dict[Any, list[Any]] = {}
    for name in range(4):
        core, _, _ = make_core(256, 4, rule=hashed)
        core.add_request(name, [name + 1, 2, 3], params)
        expected |= beams(core)
    core, cache, _ = make_core(num_pages, 4, rule=hashed, max_batch=max_batch, max_step_tokens=8, growth=0)
    for name in range(4):
        core.add_request(name, [name + 1, 2, 3], params)

    assert beams(core) == expected
    assert cache.usage().in_use == 0
    cache.check()


def test_an_aborted_search_gives_every_page_back() -> None:
    """One output ends it; its beams' pages are free."""
    core, cache, _ = make_core()
    core.add_request("a", [1, 2, 3], SamplingParams(num_beams=4, max_new_tokens=30))
    for _ in range(5):
        assert core.step() == []
    core.abort("a")
    (output,) = core.step()

    assert (output.finish_reason, output.token_ids, output.ends_request) == ("abort", (), True)
    assert cache.usage().in_use == 0
    assert not core.has_unfinished


def test_what_beams_can_never_do_is_refused() -> None:
    """More beams than the batch, the pool or the vocabulary has room for: refused with both numbers."""
    core, _, _ = make_core(12, 4, max_batch=4, max_step_tokens=8)
    for given, message in (
        ({"num_beams": 5}, "num_beams must be at most max_batch = 4, was 5"),
        ({"num_beams": 4, "max_new_tokens": 9}, "at most 9 tokens, .* of 4 beams at once, were 1 \\+ 9 = 10"),
        ({"num_beams": 2, "stop_token_ids": range(40)}, "num_beams must leave its 82 candidates .* of 50, was 2"),
        ({"n": 5}, "n must be at most max_batch = 4, was 5"),
    ):
        with pytest.raises(ValueError, match=message):
            core.add_request("a", [1], SamplingParams(**given))
    core.add_request("a", [1], SamplingParams(num_beams=4, max_new_tokens=8))
    while core.has_unfinished:
        core.step()

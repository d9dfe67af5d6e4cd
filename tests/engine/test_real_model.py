"""The engine with a real model under a pool that is too small: preempted, and still token-equal."""

from __future__ import annotations

import random
from functools import partial

import pytest

from pagedkv import Engine, SamplingParams
from pagedkv.cli.models import load_model
from pagedkv.cli.subjects import generate, reference_logits
from pagedkv.engine.equality import all_token_equal, compare_tokens

NEW_TOKENS = 24


class Silent:
    """A watcher that shows nothing."""

    def step(self, *_: object) -> None:
        """Hear of a step."""


@pytest.mark.slow
def test_sixty_four_random_prompts_in_too_few_pages_equal_generate() -> None:
    """Prompts of 1 to 300 random tokens, pages for a quarter of them: preemptions happen, answers are generate's."""
    model = load_model(None, lambda _: None).model
    draw = random.Random(64)
    vocab = model.config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(draw.randint(1, 300))] for _ in range(64)]
    engine = Engine(model, num_pages=180, page_size=16, max_batch=64, max_step_tokens=512)

    answers = engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))

    stock = generate(model, (), prompts, NEW_TOKENS, Silent())
    comparisons = [
        compare_tokens(answer.token_ids, expected, partial(reference_logits, model, prompt, expected))
        for answer, expected, prompt in zip(answers, stock.tokens, prompts, strict=True)
    ]
    print(f"{engine.stats.preemptions} preemptions, {sum(c.tie for c in comparisons)} ties")  # noqa: T201
    assert all_token_equal(comparisons)
    assert engine.stats.preemptions > 0
    assert all(answer.metrics.preemptions <= 1 for answer in answers)
    assert engine.backend.usage().in_use == 0
    engine.backend.allocator.check()  # type: ignore[attr-defined]

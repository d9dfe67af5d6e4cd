"""PagedCache with the demo model: token-equal to the stock cache in every mode, ties counted."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import PagedCache
from pagedkv.cli.models import load_model
from pagedkv.cli.subjects import reference_logits
from pagedkv.engine.equality import all_token_equal, compare_tokens
from tests.transformers.generating import generate

if TYPE_CHECKING:
    from pagedkv.cli.models import LoadedModel

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a land far away, there lived a",
    "A page table maps virtual addresses to",
)
# Modes whose first difference can be held against the logits of greedy decoding.
GREEDY: dict[str, dict[str, Any]] = {
    "greedy": {},
    "chunks": {"prefill_chunk_size": 4},
}
# Modes that are one search or one draw: equal or not.
WHOLE: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": {"num_beams": 4},
    "beam sampling": {"num_beams": 3, "do_sample": True},
}


@cache
def demo() -> LoadedModel:
    """Return the demo model, loaded once."""
    return load_model(None, lambda _: None)


def padded_batch() -> dict[str, torch.Tensor]:
    """Return the texts as one batch, padded on the left."""
    tokenizer = demo().tokenizer
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return dict(tokenizer(list(TEXTS), return_tensors="pt", padding=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", GREEDY)
def test_greedy_modes(mode: str) -> None:
    """Every row of a padded batch is token-equal to the stock cache's."""
    model, inputs = demo().model, padded_batch()
    expected = generate(model, inputs, max_new_tokens=24, **GREEDY[mode])
    with PagedCache(model, num_pages=200, check=True) as paged:
        got = generate(model, inputs, past_key_values=paged, max_new_tokens=24, **GREEDY[mode])

    width = inputs["input_ids"].shape[1]
    comparisons = []
    for ids, mask, mine, theirs in zip(inputs["input_ids"], inputs["attention_mask"], got, expected, strict=True):
        prompt, reference = ids[mask.bool()].tolist(), theirs[width:].tolist()
        logits_at = partial(reference_logits, model, prompt, reference)
        comparisons.append(compare_tokens(mine[width:].tolist(), reference, logits_at))
    assert all_token_equal(comparisons)


@pytest.mark.slow
@pytest.mark.parametrize("mode", WHOLE)
def test_searched_and_sampled_modes(mode: str) -> None:
    """Beams and samples from one seed are the stock cache's."""
    model, inputs = demo().model, padded_batch()
    expected = generate(model, inputs, max_new_tokens=16, **WHOLE[mode])
    with PagedCache(model, num_pages=200, check=True) as paged:
        got = generate(model, inputs, past_key_values=paged, max_new_tokens=16, **WHOLE[mode])

    assert expected.tolist() == got.tolist()


@pytest.mark.slow
def test_prompt_lookup_and_a_chat() -> None:
    """Prompt lookup, and a second turn on a cache that holds the first, are the stock cache's."""
    model, tokenizer = demo().model, demo().tokenizer
    ids = tokenizer("one two three four one two three four one two", return_tensors="pt")["input_ids"]
    more = tokenizer(" And then they said that", return_tensors="pt")["input_ids"]
    outcomes = []
    for paged in (None, PagedCache(model, num_pages=200)):
        first = generate(model, {"input_ids": ids}, past_key_values=paged, prompt_lookup_num_tokens=4)
        text = torch.cat([first, more], 1)
        outcomes.append(generate(model, {"input_ids": text}, past_key_values=paged, max_new_tokens=16).tolist())

    assert outcomes[0] == outcomes[1]

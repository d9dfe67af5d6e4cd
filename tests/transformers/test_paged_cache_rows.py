"""PagedCache's rows: beams share pages, forks go their own way, prompts that were here before are found."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.tiny_models import tiny
from tests.transformers.generating import NEW_TOKENS, generate, left_padded, paged, prompts

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("llama", "gemma3")


def state(cache: Any) -> list[torch.Tensor]:
    """Return every layer's K and V, gathered."""
    return [side.clone() for layer in cache.layers for side in (layer.keys, layer.values)]


def filled(model: Any, cache: Any, ids: torch.Tensor) -> Any:
    """Run ``ids`` through ``model`` on ``cache``."""
    with torch.no_grad():
        return model(ids, past_key_values=cache)


def test_beams_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """While beams run, what they have in common is held once: far fewer pages than beams times length."""
    model, most = tiny("llama"), []
    with paged(model, page_size=4) as cache:
        reorder = cache.reorder_cache

        def spying(beam_idx: torch.Tensor) -> None:
            reorder(beam_idx)
            cache.store.allocator.check()
            most.append((cache.usage().in_use, len(set(beam_idx.tolist()))))

        monkeypatch.setattr(cache, "reorder_cache", spying)
        generate(model, {"input_ids": prompts(1, 40)}, past_key_values=cache, num_beams=4)

        assert NEW_TOKENS == len(most)
        # The prompts were computed apart, so they are shared as far as beams have died out.
        shared = [in_use for in_use, parents in most if parents < 4]
        assert min(shared) < 4 * 10


def test_reorder_permutes_tables_and_moves_nothing() -> None:
    """A permutation of rows keeps every page where it is; a row taken twice costs nothing until it is written."""
    model = tiny("llama")
    with paged(model) as cache:
        filled(model, cache, prompts(3, 10))
        before, pages = state(cache), cache.usage().in_use
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        assert pages == cache.usage().in_use
        cache.reorder_cache(torch.tensor([1, 1, 0]))

        assert pages - 3 == cache.usage().in_use
        for one, other in zip(before, state(cache), strict=True):
            assert torch.equal(one[[0, 0, 2]], other)
        filled(model, cache, prompts(3, 1))
        cache.store.allocator.check()
        assert pages - 3 + 1 == cache.usage().in_use  # the shared tail was copied for one of its two holders


@pytest.mark.parametrize("name", KINDS)
def test_select_and_repeat(name: str, stock_cache: Callable[[Any], Any]) -> None:
    """Selecting and repeating rows does what the stock cache does, and rows go on from there."""
    model = tiny(name)
    stock = stock_cache(model)
    with paged(model) as cache:
        for one in (stock, cache):
            filled(model, one, prompts(3, 4))
            one.batch_select_indices(torch.tensor([2, 0]))
            one.batch_repeat_interleave(2)
        expected = filled(model, stock, prompts(4, 3, seed=1)).logits
        got = filled(model, cache, prompts(4, 3, seed=1)).logits

        assert 4 == cache.batch_size
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        cache.batch_select_indices(torch.tensor([True, False, False, True]))
        assert 2 == cache.batch_size


def test_keys_and_values_are_the_stock_ones(stock_cache: Callable[[Any], Any]) -> None:
    """``layers[i].keys`` and ``values`` gather what is stored; padding is 0."""
    model, inputs = tiny("qwen3"), left_padded()
    stock = stock_cache(model)
    with paged(model) as cache, torch.no_grad():
        assert cache.layers[0].keys is None
        model(**inputs, past_key_values=stock)
        model(**inputs, past_key_values=cache)
        hidden = inputs["attention_mask"][:, None, :, None] == 0
        for theirs, ours in zip(stock.layers, cache.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys.masked_fill(hidden, 0), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(ours.values, theirs.values.masked_fill(hidden, 0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_deepcopy_is_a_fork(name: str, stock_cache: Callable[[Any], Any]) -> None:
    """A copy of a filled cache shares its pages, and both give the stock tokens of their own continuation."""
    model, system = tiny(name), prompts(1, 10)
    stock = stock_cache(model)
    filled(model, stock, system)
    with paged(model) as cache:
        filled(model, cache, system)
        pages = cache.usage().in_use
        questions = [torch.cat([system, prompts(1, 4, seed=seed)], 1) for seed in (1, 2)]
        forks = [copy.deepcopy(cache) for _ in questions]
        assert pages == cache.usage().in_use
        for fork, question in zip(forks, questions, strict=True):
            expected = generate(model, {"input_ids": question}, past_key_values=copy.deepcopy(stock))
            got = generate(model, {"input_ids": question}, past_key_values=fork)
            assert expected.tolist() == got.tolist()
        assert 10 == cache.get_seq_length()
        cache.close()
        for fork in forks:
            assert forks[1].usage().in_use
            fork.close()


def test_closing_the_last_fork_lets_the_model_go() -> None:
    """The hooks stay in the model while any fork is open, and are gone with the last."""
    model = tiny("phi")
    hooks = len(model._forward_hooks)
    cache = paged(model)
    fork = copy.deepcopy(cache)
    cache.close()
    assert hooks + 1 == len(model._forward_hooks)
    fork.close()
    fork.close()

    assert hooks == len(model._forward_hooks)


def test_a_forgotten_cache_is_collected() -> None:
    """A cache that nobody names any more takes its hooks and pages along, though it was never closed."""
    import gc
    import weakref

    model = tiny("phi")
    hooks, cache = len(model._forward_hooks), paged(model)
    generate(model, {"input_ids": prompts(1)}, past_key_values=cache)
    pages = weakref.ref(cache.store.k_pages[0])
    del cache
    gc.collect()

    assert pages() is None
    assert hooks == len(model._forward_hooks)


def test_match_finds_earlier_prompts() -> None:
    """A prompt that begins like an earlier one computes only the rest, and gives the stock tokens."""
    model, ids = tiny("llama"), prompts(1, 30)
    expected = generate(model, {"input_ids": ids})
    with paged(model) as cache:
        assert 0 == cache.match(ids)
        assert expected.tolist() == generate(model, {"input_ids": ids}, past_key_values=cache).tolist()
        other = torch.cat([ids[:, :17], prompts(1, 8, seed=1)], 1)

        assert 17 == cache.match(other)
        got = generate(model, {"input_ids": other}, past_key_values=cache)
        assert generate(model, {"input_ids": other}).tolist() == got.tolist()
        # Of a text that is all there, one token is left to compute; the answer was stored too, in full pages.
        assert 29 == cache.match(ids)
        assert (30 + NEW_TOKENS - 1) // 4 * 4 == cache.match(expected)


def test_match_takes_the_least_over_the_rows() -> None:
    """In a padded batch the columns taken over are those that every row has."""
    model, inputs = tiny("llama"), left_padded(3, 20)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with paged(model) as cache:
        cache.match(ids, mask)
        generate(model, inputs, past_key_values=cache)
        changed = ids.clone()
        changed[1, 12] += 1
        expected = generate(model, {"input_ids": changed, "attention_mask": mask})

        assert 12 == cache.match(changed, mask)
        assert mask[:, :12].sum(1).tolist() == cache.row_lengths
        got = generate(model, {"input_ids": changed, "attention_mask": mask}, past_key_values=cache)
        assert expected.tolist() == got.tolist()


def test_match_before_beams() -> None:
    """Beams repeat the prompts that were matched, and share their pages."""
    model, ids = tiny("llama"), prompts(2, 20)
    expected = generate(model, {"input_ids": ids}, num_beams=3)
    with paged(model) as cache:
        cache.match(ids)
        generate(model, {"input_ids": ids}, past_key_values=cache)
        assert 19 == cache.match(ids)
        got = generate(model, {"input_ids": ids}, past_key_values=cache, num_beams=3)
        cache.store.allocator.check()

    assert expected.tolist() == got.tolist()


def test_without_match_nothing_is_indexed() -> None:
    """A cache that was never asked to match keeps no idle pages."""
    model = tiny("llama")
    with paged(model) as cache:
        generate(model, {"input_ids": prompts(1, 30)}, past_key_values=cache)
        cache.reset()

        assert 0 == cache.store.allocator.stats().idle


@pytest.mark.parametrize("name", KINDS)
def test_crop(name: str, stock_cache: Callable[[Any], Any]) -> None:
    """Cropping takes columns, padding too, and what follows gives the stock logits."""
    model, inputs = tiny(name), left_padded(2, 6)
    stock = stock_cache(model)
    with paged(model) as cache, torch.no_grad():
        for one in (stock, cache):
            one.activate_past_recording()
            model(**inputs, past_key_values=one)
            one.crop(-2)
        mask = torch.cat([inputs["attention_mask"][:, :4], torch.ones(2, 3, dtype=torch.long)], 1)
        expected, got = (
            model(prompts(2, 3, seed=1), attention_mask=mask, past_key_values=one).logits for one in (stock, cache)
        )

        assert 7 == cache.get_seq_length()
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        cache.crop(0)
        assert 7 == cache.get_seq_length()
        cache.crop(-100)
        assert (0, 0) == (cache.get_seq_length(), cache.usage().tokens_stored)

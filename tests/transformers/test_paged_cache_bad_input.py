"""What a PagedCache refuses, with names and numbers, and that nothing has changed afterwards."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from pagedkv import PagedCache
from pagedkv.allocator import BeyondWindow, OutOfPages, WrongThread
from pagedkv.transformers import UnsupportedModel
from tests.tiny_models import build, tiny, tiny_config
from tests.transformers.generating import generate, implementations, left_padded, paged, prompts


def snapshot(cache: PagedCache) -> list[Any]:
    """Return all that a cache holds."""
    if not cache.get_seq_length():
        return [cache.usage()]
    states = [side.tolist() for layer in cache.layers for side in (layer.keys, layer.values)]
    return [cache.usage(), cache.get_seq_length(), states]


def test_too_small_for_the_prompt() -> None:
    """A cache smaller than the prompt says both numbers before anything is written."""
    model = tiny("llama")
    with paged(model, num_pages=4) as cache:
        for pages in cache.store.page_tensors:
            pages.fill_(7.0)
        with pytest.raises(OutOfPages, match=r"^4 pages needed, 3 available") as error:
            generate(model, {"input_ids": prompts(1, 14)}, past_key_values=cache)

        assert (4, 3) == (error.value.needed, error.value.available)
        assert all(bool((pages == 7.0).all()) for pages in cache.store.page_tensors)
        assert (0, 0) == (cache.get_seq_length(), cache.usage().in_use)
        cache.store.allocator.check()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_running_out_on_the_way(name: str) -> None:
    """When pages run out, every row stands at its last whole token; once there is room, it goes on from there."""
    model, ids = tiny(name), prompts(2, 14)
    with paged(model, num_pages=4) as cache, pytest.raises(OutOfPages) as error:
        generate(model, {"input_ids": ids}, past_key_values=cache)
    with paged(model, num_pages=error.value.needed + 4) as cache:
        with pytest.raises(OutOfPages) as error:
            generate(model, {"input_ids": ids}, past_key_values=cache, max_new_tokens=200)
        cache.store.allocator.check()
        columns = cache.get_seq_length()

        assert error.value.needed > error.value.available
        assert columns > 14
        assert [columns, columns] == cache.row_lengths
        # One row alone has room, and what it holds is right.
        cache.batch_select_indices(torch.tensor([1]))
        text = generate(model, {"input_ids": ids}, max_new_tokens=columns - 14 + 6)[1:]
        start = {"input_ids": text[:, : columns + 1]}
        assert text.tolist() == generate(model, start, past_key_values=cache, max_new_tokens=5).tolist()


def test_a_forward_that_raises_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an exception in the middle of a forward the cache, the config and the books are as before it."""
    model = tiny("llama")
    names = implementations(model)
    with paged(model) as cache, torch.no_grad():
        model(prompts(2), past_key_values=cache)
        before = snapshot(cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[1].mlp, "forward", _raise(ZeroDivisionError("in the middle")))
            with pytest.raises(ZeroDivisionError, match="in the middle"):
                model(prompts(2, 3), past_key_values=cache)

            assert before == snapshot(cache)
            assert names == implementations(model)
        cache.store.allocator.check()
        expected = model(torch.cat([prompts(2), prompts(2, 3, seed=1)], 1)).logits[:, -3:]
        torch.testing.assert_close(
            model(prompts(2, 3, seed=1), past_key_values=cache).logits, expected, atol=1e-4, rtol=1e-4
        )


def test_an_interrupted_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """After KeyboardInterrupt, of which no hook hears, the next use of cache or model finds everything as before."""
    model = tiny("llama")
    names = implementations(model)
    with paged(model) as cache, torch.no_grad():
        model(prompts(2), past_key_values=cache)
        before = snapshot(cache)
        for use in ("cache", "model"):
            with monkeypatch.context() as patch:
                patch.setattr(model.model.layers[1].mlp, "forward", _raise(KeyboardInterrupt()))
                with pytest.raises(KeyboardInterrupt):
                    model(prompts(2, 3), past_key_values=cache)
            if use == "model":
                model(prompts(1))
            else:
                cache.crop(0)

            assert names == implementations(model)
            assert before == snapshot(cache)


def _raise(error: BaseException) -> Any:
    def forward(*args: Any, **kwargs: Any) -> None:
        raise error

    return forward


def test_another_model() -> None:
    """A cache made for one model and given to another says so, and stays usable with its own."""
    model, other = tiny("llama"), build(tiny_config("llama"), seed=1)
    with paged(model) as cache:
        with pytest.raises(RuntimeError, match=r"made for a LlamaForCausalLM .* another model"):
            generate(other, {"input_ids": prompts(1)}, past_key_values=cache)
        with pytest.raises(RuntimeError, match="another model"):  # a copy of its model has copies of its hooks
            generate(copy.deepcopy(model), {"input_ids": prompts(1)}, past_key_values=cache)

        assert generate(model, {"input_ids": prompts(1)}).tolist() == (
            generate(model, {"input_ids": prompts(1)}, past_key_values=cache).tolist()
        )


def test_another_thread() -> None:
    """A thread may use the cache once the one before has ended or handed over, and not before."""
    model, ids = tiny("llama"), {"input_ids": prompts(1)}
    expected = generate(model, ids).tolist()
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(generate(model, ids, past_key_values=cache).tolist())
        except WrongThread as error:
            outcome.append(str(error))

    def in_thread() -> Any:
        thread = threading.Thread(target=run, name="chat")
        thread.start()
        thread.join()
        return outcome.pop()

    with paged(model) as cache:
        assert expected == in_thread()  # nobody had used it yet
        cache.reset()  # the other thread has ended, so this one may
        assert "which still runs, 'chat' called" in in_thread()
        cache.hand_over()
        assert expected == in_thread()


def test_gradients() -> None:
    """K and V that want gradients are refused; under no_grad the same call works."""
    model = build(tiny_config("llama")).requires_grad_(True)
    with paged(model) as cache:
        with pytest.raises(RuntimeError, match=r"no gradients: call the model under torch\.no_grad"):
            model(prompts(1), past_key_values=cache)
        with torch.no_grad():
            model(prompts(1), past_key_values=cache)

        assert 14 == cache.get_seq_length()


def test_use_cache_false() -> None:
    """``use_cache=False`` beside a cache object is refused before anything is stored."""
    model = tiny("llama")
    with paged(model) as cache:
        with pytest.raises(ValueError, match="use_cache must be true with a PagedCache"):
            generate(model, {"input_ids": prompts(1)}, past_key_values=cache, use_cache=False)

        assert 0 == cache.get_seq_length()


def test_other_rows() -> None:
    """A batch of another size than the one in the cache is refused with both numbers."""
    model = tiny("llama")
    with paged(model) as cache:
        generate(model, {"input_ids": prompts(2)}, past_key_values=cache)
        before = snapshot(cache)
        with pytest.raises(ValueError, match="the batch must have 2 rows, as the cache has, had 3"):
            generate(model, {"input_ids": prompts(3, 30)}, past_key_values=cache)

        assert before == snapshot(cache)


def test_a_model_that_moved() -> None:
    """K and V of another dtype or device than the pages' are refused by name."""
    model = build(tiny_config("llama"))
    with paged(model) as cache:
        model.to(torch.bfloat16)
        with pytest.raises(ValueError, match=r"K of layer 0 must be \[rows, 2, tokens, 8\] in torch.float32"):
            generate(model, {"input_ids": prompts(1)}, past_key_values=cache)
        model.to("meta")
        with pytest.raises(ValueError, match="K of layer 0 must be on cpu, where its pages are, was on meta"):
            model(prompts(1).to("meta"), past_key_values=cache)

        assert 0 == cache.get_seq_length()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": "1GiB", "num_pages": 8}, ValueError, "memory and num_pages exclude each other"),
        ({"memory": 100}, ValueError, "memory must hold the null page and one more"),
        ({"num_pages": 1}, ValueError, "num_pages must be 2 to"),
        ({"num_pages": 8, "page_size": 12}, ValueError, "page_size must be a power of two"),
        ({"num_pages": 8, "attention_backend": "magic"}, ValueError, "attention_backend must be None or one of"),
    ],
)
def test_sizes(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Wrong sizes are refused by name, and leave no hook in the model."""
    model = tiny("llama")
    hooks = len(model._forward_hooks)
    with pytest.raises(error, match=message):
        PagedCache(model, **options)

    assert hooks == len(model._forward_hooks)


def test_models() -> None:
    """What is no decoder in eval mode is refused with the reason."""
    from transformers import AutoModelForSeq2SeqLM, T5Config

    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, was Linear"):
        PagedCache(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must be in eval mode"):
        PagedCache(build(tiny_config("llama")).train())
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration is an encoder-decoder"):
        PagedCache(AutoModelForSeq2SeqLM.from_config(config).eval())
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        PagedCache(tiny("mamba"))


def test_crop() -> None:
    """A positive crop is refused, and so is one beyond what a window still holds, for all rows or none."""
    model = tiny("mistral")
    with paged(model) as cache:
        generate(model, left_padded(2), past_key_values=cache, max_new_tokens=20)
        before = snapshot(cache)
        with pytest.raises(ValueError, match="tokens_to_remove must be 0 or negative, was 3"):
            cache.crop(3)
        with pytest.raises(BeyondWindow):
            cache.crop(-20)

        assert before == snapshot(cache)


def test_after_close() -> None:
    """A closed cache says that it is closed; closing twice is harmless."""
    model = tiny("llama")
    cache = paged(model)
    cache.close()
    cache.close()

    assert "PagedCache(closed)" == repr(cache)
    for use in (cache.reset, cache.usage, lambda: cache.crop(0), lambda: copy.deepcopy(cache), cache.__enter__):
        with pytest.raises(RuntimeError, match="used after close"):
            use()
    with pytest.raises(RuntimeError, match="used after close"):
        generate(model, {"input_ids": prompts(1)}, past_key_values=cache)


def test_rows_and_prompts() -> None:
    """Wrong arguments of the cache's own verbs are refused by name."""
    with paged(tiny("llama")) as cache:
        with pytest.raises(ValueError, match=r"input_ids must be \[rows, columns\], was \[14\]"):
            cache.match(prompts(1)[0])
        with pytest.raises(ValueError, match=r"attention_mask must be \[1, 14\]"):
            cache.match(prompts(1), torch.ones(1, 3))
        with pytest.raises(ValueError, match="repeats must be at least 1, was 0"):
            cache.batch_repeat_interleave(0)
        generate(tiny("llama"), {"input_ids": prompts(1)}, past_key_values=cache)
        with pytest.raises(ValueError, match="indices must be rows from 0 to 0, had 1"):
            cache.batch_select_indices(torch.tensor([1]))
        with pytest.raises(TypeError, match="keys and values of layer 0 must be stored by update"):
            cache.layers[0].keys = torch.zeros(1)

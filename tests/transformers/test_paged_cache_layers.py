"""PagedCache learns, without a list of models, which layers pages can serve, and never answers wrongly."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig
from transformers.cache_utils import Cache, LinearAttentionLayer

from pagedkv.transformers import UnsupportedModel
from pagedkv.transformers.layers import PagedHybridLayer, PagedIndexedLayer, PagedLayer
from tests.tiny_models import _BASE, _DEEPSEEK, _GQA, build, tiny, tiny_config
from tests.transformers.generating import both, generate, left_padded, paged, prompts

if TYPE_CHECKING:
    from collections.abc import Callable

FALCON_H1 = {
    "head_dim": 8,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
DEEPSEEK_V32 = {
    **_DEEPSEEK,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
    "index_topk": 6,
    "index_n_heads": 2,
    "index_head_dim": 8,
}


def hybrid(kind: str) -> Any:
    """Return a tiny model that keeps more than K and V."""
    if kind == "qwen3_next":
        return build(tiny_config(kind, num_hidden_layers=4))
    if kind == "falcon_h1":
        return build(AutoConfig.for_model(kind, **{**_BASE, **_GQA, **FALCON_H1}))
    return build(AutoConfig.for_model(kind, **{**_BASE, **DEEPSEEK_V32}))


@pytest.mark.parametrize(
    ("name", "gathered"),
    [("deepseek_v3", [0, 1]), ("jetmoe", [0, 1]), ("llama4", [0, 1]), ("bloom", [0, 1]), ("gpt_neo", [0, 1])],
)
def test_layers_that_need_gathered_states(name: str, gathered: list[int]) -> None:
    """K and V changed after storing, chunks, and attention past the interface are learned, and the tokens are equal."""
    model = tiny(name)
    with paged(model) as cache:
        assert gathered == sorted(cache.learned.gathered)

    expected, got = both(model, left_padded())

    assert expected.tolist() == got.tolist()


def test_falcon_is_left_alone() -> None:
    """A model that no attention function of ours can run on is not touched: everything is gathered."""
    model = tiny("falcon_alibi")
    with paged(model) as cache:
        assert cache.learned.untouched

    expected, got = both(model, left_padded(), num_beams=2)

    assert expected.tolist() == got.tolist()


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("qwen3_next", [LinearAttentionLayer] * 3 + [PagedLayer]),
        ("falcon_h1", [PagedHybridLayer] * 2),
        ("deepseek_v32", [PagedIndexedLayer] * 2),
    ],
)
def test_states_beside_pages(kind: str, layers: list[type]) -> None:
    """Recurrent, convolution and indexer states are the library's own, and follow beams, forks and resets."""
    model = hybrid(kind)
    inputs = {"input_ids": prompts(2)}
    expected = {beams: generate(model, inputs, num_beams=beams).tolist() for beams in (1, 2)}
    with paged(model) as cache:
        assert layers == [type(layer) for layer in cache.layers]
        for beams in (1, 2, 1):
            assert expected[beams] == generate(model, inputs, past_key_values=cache, num_beams=beams).tolist()
            cache.reset()
        with torch.no_grad():
            model(inputs["input_ids"], past_key_values=cache)
            fork = copy.deepcopy(cache)
            for one in (cache, fork, cache):
                one.batch_select_indices([1, 0])
            step = prompts(2, 1, seed=1)
            torch.testing.assert_close(
                model(step, past_key_values=cache).logits,
                model(step.flip(0), past_key_values=fork).logits.flip(0),
                atol=1e-4,
                rtol=1e-4,
            )
        fork.close()
        with pytest.raises(ValueError, match="match needs a model that keeps nothing but K and V"):
            cache.match(prompts(1))


def test_a_state_that_cannot_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that raises after a recurrent layer ran leaves a cache that says so until it is reset."""
    model = hybrid("qwen3_next")
    inputs = {"input_ids": prompts(1)}
    with paged(model) as cache, torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[3].mlp, "forward", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(**inputs, past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            model(**inputs, past_key_values=cache)
        cache.reset()

        assert generate(model, inputs).tolist() == generate(model, inputs, past_key_values=cache).tolist()


class Peek:
    """A cache that shows what `update` returned."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.keys = torch.empty(0)

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember K."""
        keys, values = self._cache.update(*args, **kwargs)
        self.keys = keys
        return keys, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def let_attention_peek(model: Any, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Have the last layer's attention change its output by the K that its cache returns."""
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def peeking(*args: Any, **kwargs: Any) -> Any:
        peeks = {name: Peek(value) for name, value in kwargs.items() if isinstance(value, Cache)}
        out, *rest = forward(*args, **{**kwargs, **peeks})
        for peek in peeks.values():
            out = change(out, peek.keys)
        return out, *rest

    attention.forward = peeking


def test_a_model_that_looks_at_k_on_the_side() -> None:
    """The trial at construction notices what no interface shows: then everything is gathered, and tokens are equal."""
    model = build(tiny_config("llama"))
    let_attention_peek(model, lambda out, keys: out * keys.shape[2])
    with paged(model) as cache:
        assert cache.learned.untouched

    expected, got = both(model, {"input_ids": prompts(1)})

    assert expected.tolist() == got.tolist()


def test_a_model_that_reads_padding() -> None:
    """Where answers depend on what stands in padding, padding is stored too: equal tokens, and no match of prompts."""
    model = build(tiny_config("llama"))
    let_attention_peek(model, lambda out, keys: out + keys[:, :, :1].mean((1, 3)).unsqueeze(2))
    with paged(model) as cache:
        assert (True, True) == (cache.learned.untouched, cache.learned.stores_padding)
        with pytest.raises(ValueError, match="match needs a model whose answers do not depend on"):
            cache.match(prompts(1))

    for options in ({}, {"num_beams": 3}):
        expected, got = both(model, left_padded(), **options)
        assert expected.tolist() == got.tolist()


def test_keys_during_a_forward() -> None:
    """While a forward runs, a layer's ``keys`` are those from before it, as they were then."""
    model = build(tiny_config("llama"))
    seen: list[torch.Tensor] = []
    with paged(model) as cache, torch.no_grad():
        model(prompts(2), past_key_values=cache)
        before = [layer.keys for layer in cache.layers]
        model.model.layers[1].register_forward_hook(lambda *args: seen.extend(layer.keys for layer in cache.layers))
        model(prompts(2, 1, seed=1), past_key_values=cache)

    assert 2 == len(seen)
    for one, other in zip(before, seen, strict=True):
        torch.testing.assert_close(other, one, atol=0, rtol=0)


def test_a_model_that_answers_otherwise_is_refused() -> None:
    """Where even gathering gives other logits than the stock cache, construction says so."""
    model = build(tiny_config("llama"))
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def different(*args: Any, **kwargs: Any) -> Any:
        ours = any("PagedCache" in type(value).__name__ for value in kwargs.values())
        out, *rest = forward(*args, **kwargs)
        return (out + 1.0 if ours else out), *rest

    attention.forward = different
    with pytest.raises(UnsupportedModel, match="logits of forward 1 differ by"):
        paged(model)


def test_windows_give_pages_back() -> None:
    """In a long text a windowed layer holds a few pages, however long the text is."""
    model = tiny("mistral")
    with paged(model, page_size=4) as cache:
        generate(model, {"input_ids": prompts(1, 40)}, past_key_values=cache, max_new_tokens=40)

        # One group of windows: a window of 5, one token to come, and the pages that they reach into.
        assert cache.usage().in_use <= 3
        assert cache.get_seq_length() == 79


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """In half precision pages are of the model's dtype, and logits agree within its rounding."""
    model = build(tiny_config("llama"), dtype=dtype)
    with paged(model) as cache, torch.no_grad():
        model(prompts(2), past_key_values=cache)
        got = model(prompts(2, 1, seed=1), past_key_values=cache).logits
        expected = model(torch.cat([prompts(2), prompts(2, 1, seed=1)], 1)).logits[:, -1:]

        assert dtype == cache.store.k_pages[0].dtype
        assert float((got - expected).abs().max()) <= 0.05 * float(expected.abs().max())

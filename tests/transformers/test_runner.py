"""ModelRunner: answers of a ragged step are the model's own, and nothing of the model is changed by it."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.cache import PagedKVCache
from pagedkv.engine.baselines import ConcatCache
from pagedkv.spec import KVSpec
from pagedkv.transformers import ModelRunner, UnsupportedModel, observe_kv_spec
from pagedkv.transformers.versions import require_supported
from tests.engine.ragged import run_schedule
from tests.tiny_models import GATHERED, SUPPORTED, UNSUPPORTED, WINDOW, build, stock_logits, tiny, tiny_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.attention import LayerSpec

TEXT = [5, 17, 42, 8, 23, 61, 90, 3, 77, 12, 55, 31]


def runner_of(model: Any) -> tuple[ModelRunner, ConcatCache]:
    """Return a runner on a concatenating backend."""
    backend = ConcatCache(observe_kv_spec(model), dtype=model.dtype)
    return ModelRunner(model, backend), backend


def logits_of(runner: ModelRunner, backend: ConcatCache, text: list[int], chunks: Sequence[int]) -> torch.Tensor:
    """Return the last token's logits after feeding ``text`` in ``chunks``."""
    sequence = backend.open(text)
    for chunk in chunks:
        batch = backend.begin_step({sequence: text[sequence.num_tokens : sequence.num_tokens + chunk]})
        logits = runner.forward(batch)
        backend.end_step(batch)
    sequence.close()
    return logits[0]


def config_text(model: Any) -> str:
    """Return all that the configs of a model say, the attention implementation included."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return repr([sorted((key, repr(value)) for key, value in vars(one).items()) for one in configs.values()])


@pytest.mark.parametrize("name", SUPPORTED + GATHERED)
@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (3,) * 4, (8, 4)], ids=str)
def test_any_chunking_gives_the_same_logits(name: str, chunks: tuple[int, ...]) -> None:
    """Positions are the text's own whatever the chunks (transformers#43082, unsloth#3699)."""
    model = tiny(name)
    runner, backend = runner_of(model)

    expected = stock_logits(model, TEXT)[-1]
    torch.testing.assert_close(logits_of(runner, backend, TEXT, chunks), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SUPPORTED + GATHERED)
def test_history_matters(name: str) -> None:
    """The models under test can tell: without the first half of the text their logits move by a tenth and more."""
    logits = stock_logits(tiny(name), TEXT)[-1]
    without = stock_logits(tiny(name), TEXT[6:])[-1]
    assert float((logits - without).abs().max()) > 0.1 * float(logits.max() - logits.min())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_later_tokens_change_nothing_before_them(name: str) -> None:
    """Causality holds in a batch of texts: another last token, or another neighbour, leaves a logit bit-equal.

    Fault kind: a custom attention function without a mask function loses causality (transformers#46862).
    """
    runner, backend = runner_of(tiny(name))
    one, two = backend.open(TEXT), backend.open(TEXT)
    first = runner.forward(batch := backend.begin_step({one: TEXT[:4], two: TEXT[2:9]}))
    backend.abandon_step(batch)
    second = runner.forward(backend.begin_step({one: TEXT[:4], two: [*TEXT[2:8], 88]}))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    """Config, random number generator and stock answers are untouched by construction and by steps.

    Fault kind: after a batch call the model keeps the paged implementation (transformers#45811).
    """
    model = tiny(name)
    before, answer = config_text(model), stock_logits(model, TEXT)
    state = torch.random.get_rng_state()
    runner, backend = runner_of(model)
    logits_of(runner, backend, TEXT, (12,))

    assert before == config_text(model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(answer, stock_logits(model, TEXT))


class BrokenCache(ConcatCache):
    """A backend that fails in the middle of a forward."""

    broken = False

    def attend(self, layer: int, q: torch.Tensor, batch: Any) -> torch.Tensor:
        """Fail in the second layer when broken."""
        if self.broken and layer == 1:
            raise OSError("the device is gone")
        return super().attend(layer, q, batch)


def test_an_exception_leaves_the_model_and_the_backend_as_they_were() -> None:
    """After a forward that raised, the config is as before, and the abandoned step can be run again."""
    model = tiny("llama")
    before = config_text(model)
    backend = BrokenCache(KVSpec.from_config(model.config))
    runner = ModelRunner(model, backend)
    sequence = backend.open(TEXT)
    backend.broken = True
    batch = backend.begin_step({sequence: TEXT})
    with pytest.raises(OSError, match="the device is gone"):
        runner.forward(batch)
    assert before == config_text(model)
    backend.abandon_step(batch)
    backend.broken = False
    logits = runner.forward(backend.begin_step({sequence: TEXT}))
    torch.testing.assert_close(logits[0], stock_logits(model, TEXT)[-1], atol=1e-4, rtol=0)


REASONS = {
    "falcon_alibi": "'falcon' model asks for an attention pattern of its own",
    "gpt_neo": r"stores K and V of layers \[0, 1\] but attends to them past the attention interface",
    "bloom": "BloomForCausalLM.forward must take 'position_ids'",
    "mamba": "recurrent state|must take a cache",  # older versions name its cache otherwise
    "qwen3_next": "recurrent state",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_that_cannot_be_routed_are_refused_with_the_reason(name: str) -> None:
    """At construction, naming the model or its part and why; the config is untouched afterwards."""
    model = tiny(name)
    before = config_text(model)
    backend = ConcatCache(KVSpec.from_config(tiny_config("llama")))
    with pytest.raises(UnsupportedModel, match=REASONS[name]):
        ModelRunner(model, backend)
    assert before == config_text(model)


def test_encoder_decoders_are_refused() -> None:
    """A model with a second input is refused by its config."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes: dict[str, int] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 97}
    model = BartForConditionalGeneration(BartConfig(**sizes)).eval()
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        ModelRunner(model, ConcatCache(KVSpec.from_config(tiny_config("llama"))))


def test_a_model_that_looks_at_the_cache_on_the_side_is_refused() -> None:
    """The door check compares logits: reading the returned V beside attention does not get past it."""
    model = build(tiny_config("llama"))
    attend = model.model.layers[0].self_attn
    stock = attend.forward

    def nosy(*args: Any, **kwargs: Any) -> Any:
        keyword = "cache" if "cache" in kwargs else "past_key_values"
        cache, seen = kwargs.get(keyword), []

        class Spy:
            def update(self, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> Any:
                k, v = (k, v) if cache is None else cache.update(k, v, *rest, **named)
                seen.append(v)
                return k, v

        out, weights = stock(*args, **{**kwargs, keyword: Spy()})
        return out + seen[0].mean(), weights

    attend.forward = nosy
    with pytest.raises(UnsupportedModel, match="other logits on a ragged step"):
        runner_of(model)


def test_positions_taken_from_the_cache_are_refused() -> None:
    """A model that ignores its position_ids gives other logits, and is refused (fault kind: position ids)."""
    model = build(tiny_config("llama"))
    stock = model.model.rotary_emb.forward

    def counting(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return stock(states, torch.arange(states.shape[1]).unsqueeze(0))

    model.model.rotary_emb.forward = counting
    with pytest.raises(UnsupportedModel, match="other logits on a ragged step"):
        runner_of(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": torch.ones(1)}, "a tensor 'bias' of its own"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "a mask of its own"),
    ],
)
def test_what_a_layer_says_besides_is_never_ignored(change: dict[str, Any], reason: str) -> None:
    """An unknown tensor, attention that is not causal and a mask are refused, never ignored."""
    model = build(tiny_config("mistral"))
    stock = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *args, **kwargs: stock(*args, **{**kwargs, **change})
    with pytest.raises(UnsupportedModel, match=reason):
        runner_of(model)


def test_the_rows_wanted_may_reach_attention() -> None:
    """A model that hands all its keywords down, ``logits_to_keep`` too, answers for any rows."""
    model = build(tiny_config("llama"))
    attentions = [layer.self_attn for layer in model.model.layers]
    rows = torch.tensor([0, 2])
    runner, backend = runner_of(model)
    for attention in attentions:
        attention.forward = partial(type(attention).forward, attention, logits_to_keep=rows)
    logits = runner.forward(backend.begin_step({backend.open(TEXT): TEXT}), rows)

    assert (logits - stock_logits(model, TEXT)[rows]).abs().max() < 1e-4


def test_another_window_than_the_configs_is_refused() -> None:
    """A layer whose own window is not what the model's config says is refused with both."""
    model = build(tiny_config("mistral"))
    model.model.layers[1].self_attn.config = tiny_config("mistral", sliding_window=99)
    with pytest.raises(UnsupportedModel, match="a window of 99, the config of layer 1 says 5"):
        runner_of(model)


def test_values_that_change_after_the_door_are_refused() -> None:
    """What later calls pass must agree with what was bound at construction."""
    model = build(tiny_config("llama"))
    runner, backend = runner_of(model)
    model.model.layers[1].self_attn.scaling = 0.9
    with pytest.raises(UnsupportedModel, match=r"layer 1 must attend as bound .* now says scale 0.9"):
        runner.forward(backend.begin_step({backend.open(TEXT): TEXT}))


def gathers(layers: set[int], name: str) -> None:
    """Assert which layers of a tiny model are handed their histories, and that a page-wise store serves them."""
    model = tiny(name)
    store = PagedKVCache.from_spec(observe_kv_spec(model), num_pages=64, page_size=4, check=True)
    runner = ModelRunner(model, store)
    assert layers == runner.gathered_layers
    _, error = run_schedule(runner, store)
    assert error < 1e-4


def test_layers_that_change_what_they_store_are_handed_their_histories() -> None:
    """Latents that are expanded later (MLA) and repeated heads (JetMoe) are learned at the door, not listed.

    Chunked layers of a hybrid (Llama 4) are handed theirs because pages know windows that slide only; its full layers
    stay on pages.
    """
    gathers({0, 1}, "deepseek_v3")
    gathers({0, 1}, "jetmoe")
    chunked = {index for index, layer in enumerate(KVSpec.from_config(tiny_config("llama4")).layers) if layer.chunked}
    assert chunked
    gathers(chunked, "llama4")
    gathers(set(), "gemma3")


def test_histories_of_another_length_are_refused() -> None:
    """A layer that drops a key of what it was handed is refused; it cannot be cut by lengths any more."""
    model = build(tiny_config("jetmoe"))
    runner, backend = runner_of(model)
    module = sys.modules[type(model).__module__]
    stock = module.ALL_ATTENTION_FUNCTIONS["pagedkv"]

    def short(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(module, query, key[:, :, 1:], value[:, :, 1:], *args, **kwargs)

    sequence = backend.open(TEXT)
    batch = backend.begin_step({sequence: TEXT})
    module.ALL_ATTENTION_FUNCTIONS["pagedkv"] = short
    try:
        with pytest.raises(UnsupportedModel, match="attends to 11 keys and 11 values, was given 12"):
            runner.forward(batch)
    finally:
        module.ALL_ATTENTION_FUNCTIONS["pagedkv"] = stock


class RecordingCache(ConcatCache):
    """A backend that remembers what was bound."""

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """Record and bind."""
        super().bind_layer(layer, spec)
        vars(self).setdefault("bound", {})[layer] = spec


def test_every_layer_is_bound_before_the_first_step() -> None:
    """Scale, window, softcap and sink logits reach the backend at construction, as the layers use them."""
    for name, softcap in (("gemma2", 2.0), ("gpt_oss", None)):
        model = tiny(name)
        backend = RecordingCache(KVSpec.from_config(model.config))
        ModelRunner(model, backend)
        bound: dict[int, LayerSpec] = vars(backend)["bound"]
        assert [0, 1] == list(bound)
        assert [8**-0.5] * 2 == [spec.scale for spec in bound.values()]
        assert [WINDOW, None] == [spec.window for spec in bound.values()]
        assert [softcap] * 2 == [spec.softcap for spec in bound.values()]
    sinks = bound[1].sink_logits
    assert sinks is not None
    assert torch.equal(model.model.layers[1].self_attn.sinks, sinks)


def test_half_precision_passes_the_door() -> None:
    """The door's tolerance is that of the model's dtype: bfloat16 and float16 models pass."""
    for dtype in (torch.bfloat16, torch.float16):
        model = build(tiny_config("llama"), dtype=dtype)
        runner, backend = runner_of(model)
        logits = logits_of(runner, backend, TEXT, (5, 7))
        assert logits.dtype == torch.float32
        expected = stock_logits(model, TEXT)[-1]
        assert float((logits - expected).abs().max()) < 0.1 * float(expected.max() - expected.min())


def test_wrong_arguments_are_refused() -> None:
    """What is no model, and a model in training mode, raise by name."""
    backend = ConcatCache(KVSpec.from_config(tiny_config("llama")))
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, was Linear"):
        ModelRunner(torch.nn.Linear(1, 1), backend)
    model = copy.deepcopy(tiny("llama")).train()
    with pytest.raises(ValueError, match="model must be in eval mode"):
        ModelRunner(model, backend)


def test_only_supported_versions_import() -> None:
    """Any other transformers version is refused with the range (fault kind: version drift, fla#1009)."""
    for version in ("5.17.0", "5.24.0", "5.99.1.dev0"):
        require_supported(version)
    for version in ("4.57.0", "5.16.3", "6.0.0"):
        with pytest.raises(ImportError, match=rf"transformers >=5.17,<6, found {version}"):
            require_supported(version)


def test_the_name_is_no_part_of_the_librarys_own() -> None:
    """The library matches parts of implementation names; ours triggers none of them."""
    from pagedkv.transformers.hook import IMPLEMENTATION

    for part in ("flash", "sdpa", "eager", "flex_attention", "/", "paged|"):
        assert part not in IMPLEMENTATION

"""The faster model step: the same tokens, on every kind of model, and a model that nobody can tell was touched."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from pagedkv import Engine, PagedKVCache, SamplingParams
from pagedkv.cli.subjects import reference_logits
from pagedkv.engine.equality import all_token_equal, compare_tokens
from pagedkv.engine.model_step import linears, products
from pagedkv.engine.model_step.acceptance import Acceptance
from pagedkv.engine.model_step.runner import FastRunner, find_patches
from pagedkv.native.library import LibraryUnavailableError, load
from pagedkv.transformers import ModelRunner
from tests.tiny_models import SUPPORTED, VOCAB, build, stock_greedy, tiny, tiny_config

NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def pack_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack the products of tiny models too, which would stay plain for their size."""
    monkeypatch.setattr(products, "LEAST_WORK", 0)


def has_library() -> bool:
    """Whether the compiled library is there; without it only linears are replaced."""
    try:
        load()
    except LibraryUnavailableError:
        return False
    return True


compiled = pytest.mark.skipif(not has_library(), reason="there is no compiled library")


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts of 1 to 30 tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 30))] for _ in range(count)]


def kinds(model: Any, **options: Any) -> dict[str, int]:
    """Return how many modules of each class are replaced, and how many functions."""
    patches = find_patches(model, **{"packed": True, "exact": False, **options})
    found: dict[str, int] = {"functions": len(patches.functions)}
    for module in patches.forwards:
        name = type(module).__name__
        found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.parametrize(
    ("name", "exact"), [*((name, False) for name in SUPPORTED), ("llama", True), ("gemma2", True), ("phi", True)]
)
def test_tokens_are_generates(name: str, *, exact: bool) -> None:
    """Ragged prompts in one batch give what the model alone gives each of them, exact or not."""
    model, texts = tiny(name), prompts(5)
    engine = Engine(model, num_pages=64, page_size=4, packed=True, exact=exact, max_step_tokens=32)

    answers = engine.generate(texts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))

    expected = [stock_greedy(model, text, NEW_TOKENS) for text in texts]
    assert all_token_equal(
        [
            compare_tokens(answer.token_ids, stock, partial(reference_logits, model, text, stock))
            for answer, stock, text in zip(answers, expected, texts, strict=True)
        ]
    )


@compiled
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # q, k, v and o of two layers and the head; gates hold their own linears.
        ("llama", {"functions": 1, "LlamaRMSNorm": 5, "LlamaMLP": 2, "Linear": 9}),
        ("qwen3", {"functions": 1, "Qwen3RMSNorm": 9, "Qwen3MLP": 2, "Linear": 9}),
        ("gemma2", {"functions": 1, "Gemma2RMSNorm": 9, "Gemma2MLP": 2, "Linear": 9}),
        # Routed experts and clamped gates stay as they are.
        ("gpt_oss", {"functions": 0, "GptOssRMSNorm": 5, "Linear": 9}),
        ("phi", {"functions": 1, "Linear": 13}),
        ("gpt2", {"functions": 0, "Linear": 1}),
    ],
)
def test_what_is_found_by_structure(name: str, expected: dict[str, int]) -> None:
    """Parts are found by what they compute; what computes something else is left alone."""
    assert expected == kinds(tiny(name))


@compiled
def test_a_part_that_computes_something_else_stays() -> None:
    """A norm with a twist and an MLP that adds one are no norm and no gated block, whatever their classes' names."""
    model = build(tiny_config("llama"))
    norm, mlp = model.model.layers[0].input_layernorm, model.model.layers[1].mlp

    class LlamaRMSNorm(type(norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.001  # type: ignore[no-any-return]

    class LlamaMLP(type(mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1  # type: ignore[no-any-return]

    norm.__class__, mlp.__class__ = LlamaRMSNorm, LlamaMLP
    found = kinds(model)

    assert (4, 1) == (found["LlamaRMSNorm"], found["LlamaMLP"])
    # Its linears are found on their own: two siblings and one alone.
    assert found["Linear"] == 9 + 3


def test_the_model_is_as_it_was() -> None:
    """No attribute, parameter, hook, global function or pool size differs after a step, nor after one that raised."""
    model = build(tiny_config("llama"))
    names = vars(__import__(type(model).__module__, fromlist=["x"]))
    before = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    rotary, threads = names["apply_rotary_pos_emb"], torch.get_num_threads()
    engine = Engine(model, num_pages=32, packed=True, threads=threads + 1)
    engine.generate(prompts(2), SamplingParams(max_new_tokens=3))
    engine.add_request("fails", [1, 2, 3])
    engine.backend.attend = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        engine.step()

    assert names["apply_rotary_pos_emb"] is rotary
    assert torch.get_num_threads() == threads
    assert all(dict(vars(module)) == was for module, was in attributes)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(after[key].data_ptr() == at and torch.equal(after[key], value) for key, (at, value) in before.items())


def test_the_model_can_still_be_trained() -> None:
    """Outside a step, and inside one's patches without inference mode, gradients flow as they did."""
    model = build(tiny_config("llama")).requires_grad_(True)
    tokens = torch.tensor([[5, 6, 7]])
    patches = find_patches(model, packed=True, exact=False)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        found: torch.Tensor = model.model.layers[0].self_attn.k_proj.weight.grad
        return found.clone()

    expected = gradient()
    with patches.applied():
        actual = gradient()

    assert torch.equal(actual, expected)
    assert expected.abs().max() > 0


def test_changed_weights_are_seen() -> None:
    """Weights written in place, or put in another's place, count from the next step on."""
    model, text = build(tiny_config("llama")), [3, 1, 4, 1, 5]
    engine = Engine(model, num_pages=32, packed=True, prefix_cache=False)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    answers = []
    for change in range(3):
        answers.append(engine.generate([text], params)[0].token_ids)
        assert list(answers[-1]) == stock_greedy(model, text, 6)
        weight = model.model.layers[0].self_attn.v_proj.weight
        if change == 0:
            model.model.layers[0].self_attn.v_proj.weight = torch.nn.Parameter(-weight.detach())
        else:
            with torch.no_grad():
                model.model.layers[1].mlp.down_proj.weight.mul_(-2)

    assert len(set(answers)) == 3


def test_listeners_and_foreign_forwards_stay() -> None:
    """A module with a hook, or with a forward somebody has put in, is not replaced."""
    model = build(tiny_config("llama"))
    heard: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: heard.append(1))
    head, layer = model.lm_head, model.model.layers[0]
    layer.mlp.down_proj.forward = lambda x: torch.nn.functional.linear(x, layer.mlp.down_proj.weight)
    patches = find_patches(model, packed=True, exact=False)

    assert head not in patches.forwards
    assert layer.mlp not in patches.forwards
    assert layer.mlp.down_proj not in patches.forwards
    assert layer.mlp.up_proj in patches.forwards


def test_siblings_hold_nothing_after_a_step() -> None:
    """Neither the input that siblings share nor their products outlive the forward pass, even one that raised."""
    model = build(tiny_config("llama"))
    patches = find_patches(model, packed=True, exact=False)
    q, k = (getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj"))
    x = torch.randn(1, 3, 32)
    with torch.inference_mode(), patches.applied():
        q(x)
        holders = [forget.__self__ for forget in patches.forget]  # type: ignore[attr-defined]
        assert any(one._input is x for one in holders)
        assert torch.allclose(k(x.clone()), torch.nn.functional.linear(x, k.weight), atol=1e-5)

    assert all(one._input is None and not one._parts for one in holders)


def test_packed_copies_are_counted_and_can_be_refused() -> None:
    """``packed=False`` copies no weight, few rows are fast all the same; with it the copies are all the linears'."""
    model = tiny("llama")
    cache = PagedKVCache.from_config(model.config, num_pages=8)
    copies = sum(one.weight.nbytes for one in model.modules() if type(one) is torch.nn.Linear)

    assert FastRunner(ModelRunner(model, cache), packed=True).extra_bytes == copies
    assert FastRunner(ModelRunner(model, cache), packed=False).extra_bytes == 0
    assert kinds(model, packed=False) == (kinds(model) if has_library() else {"functions": 0})


@compiled
def test_few_rows_and_many_take_their_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to `MOST_ROWS` rows go over the weights as they are, more over the copy, and both give the layer's own."""
    seen: list[str] = []

    def noted(name: str, make: Any) -> Any:
        def product(*layers: Any) -> Any:
            run = make(*layers)

            def note(x: torch.Tensor) -> Any:
                seen.append(name)
                return run(x)

            return note

        return product

    monkeypatch.setattr(linears, "own_product", noted("own", products.own_product))
    monkeypatch.setattr(linears, "packed_product", noted("packed", products.packed_product))
    layer = torch.nn.Linear(16, 6).requires_grad_(requires_grad=False).eval()
    found = linears.faster([layer], Acceptance(torch.float32, exact=False), pack=True)
    assert found is not None
    seen.clear()
    with torch.inference_mode():
        for rows in (1, products.MOST_ROWS, products.MOST_ROWS + 1):
            x = torch.randn(1, rows, 16)
            assert torch.allclose(found[0](x)[0], layer(x), atol=1e-5)

    assert seen == ["own", "own", "packed"]


@compiled
def test_exact_takes_no_sums_in_another_order() -> None:
    """With ``exact`` our own product is not tried, though it may be bit-equal on the trials."""
    layer = torch.nn.Linear(1, 6).requires_grad_(requires_grad=False).eval()
    accept = Acceptance(torch.float32, exact=True)

    assert linears.faster([layer], accept, pack=False) is None
    assert linears.faster([layer], Acceptance(torch.float32, exact=False), pack=False) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_stay_within_their_rounding(dtype: torch.dtype) -> None:
    """In half precision the logits are as near to float32's as the model's own, to twice their distance."""
    model = build(tiny_config("qwen3"))
    tokens = torch.tensor([prompts(1)[0]])
    exact = model(tokens).logits
    model = model.to(dtype)
    own = model(tokens).logits
    with torch.inference_mode(), find_patches(model, packed=True, exact=False).applied():
        ours = model(tokens).logits

    assert (ours - exact).abs().mean() <= 2 * (own - exact).abs().mean()


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"threads": 0}, ValueError, "threads must be .*, was 0"),
        ({"threads": "2"}, TypeError, "threads must be"),
        ({"packed": 1}, TypeError, "packed must be"),
        ({"exact": None}, TypeError, "exact must be"),
    ],
)
def test_bad_options(option: dict[str, Any], error: type[Exception], message: str) -> None:
    """What is no number of threads, or neither true nor false, is refused by name."""
    with pytest.raises(error, match=message):
        Engine(tiny("llama"), num_pages=8, **option)

"""How long a plan holds: what changes in a model afterwards, or happens beside it, leads back to the modules."""

from __future__ import annotations

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import Engine, SamplingParams
from tests.engine.planned import run, runner_of, twisted
from tests.engine.test_model_step import compiled, prompts
from tests.tiny_models import build, stock_greedy, tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = compiled


def test_modules_run_while_somebody_listens() -> None:
    """A hook, a forward put in, a module put in another's place: from the next step on, and while it lasts."""
    model = build(tiny_config("llama"))
    engine = Engine(model, num_pages=32, prefix_cache=False)
    layer, text, heard = model.model.layers[1], [3, 1, 4, 1, 5], list[int]()
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)

    def answer() -> list[int]:
        return list(engine.generate([text], params)[0].token_ids)

    own = answer()
    handle = layer.register_forward_hook(lambda *_: heard.append(1))
    assert answer() == own
    assert len(heard) == 4
    handle.remove()
    assert answer() == own
    assert len(heard) == 4

    layer.mlp.forward = torch.zeros_like
    assert answer() == stock_greedy(model, text, 4)
    del layer.mlp.forward
    assert answer() == own

    mlp, layer.mlp = layer.mlp, torch.nn.Identity()
    assert answer() == stock_greedy(model, text, 4)
    layer.mlp = mlp
    assert answer() == own

    class Other(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return -super().forward(*args, **kwargs)

    layer.__class__, was = Other, type(layer)
    assert answer() == stock_greedy(model, text, 4) != own
    layer.__class__ = was
    assert answer() == own


def test_attributes_that_change_are_seen() -> None:
    """An adapter that is switched by an attribute, a number or a tensor, counts from the next step on."""
    model = twisted(lambda own, x: x * getattr(own, "factor", 1))
    engine = Engine(model, num_pages=32, prefix_cache=False)
    layer, text, params = model.model.layers[0], [3, 1, 4], SamplingParams(max_new_tokens=5, ignore_eos=True)
    answers = []
    for factor in (None, -1, torch.tensor(-3.0), None):
        if factor is None:
            layer.__dict__.pop("factor", None)
        else:
            layer.factor = factor
        answers.append(engine.generate([text], params)[0].token_ids)
        assert list(answers[-1]) == stock_greedy(model, text, 5)

    assert answers[0] == answers[3]
    assert len(set(answers)) > 1


def test_what_a_forward_leaves_behind_is_left() -> None:
    """A model that keeps something of each step in an attribute runs by its modules."""

    def keeping(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.__dict__["seen"] = x
        return x

    model = twisted(keeping)
    runner, cache = runner_of(model)
    run(runner, cache, planned=True)

    assert not runner.has_plan
    assert model.model.layers[0].seen.shape[1] == 32


def test_a_plan_is_made_once_nobody_listens_any_more() -> None:
    """A hook that is there when the engine is made keeps the plan away only as long as it is there."""
    model = build(tiny_config("llama"))
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    runner, cache = runner_of(model)
    assert not runner.has_plan
    handle.remove()
    run(runner, cache, planned=True)

    assert runner.has_plan


@pytest.mark.parametrize("listened", [False, True])
def test_a_model_that_writes_its_buffers_runs_by_modules(*, listened: bool) -> None:
    """Its own writing is no change of weights that anybody made: nothing is looked at anew."""
    model = build(tiny_config("llama"))
    layer = model.model.layers[0]
    layer.register_buffer("count", torch.zeros(()))

    class Counting(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.count.add_(1)
            return super().forward(*args, **kwargs)

    layer.__class__ = Counting
    handle = model.model.norm.register_forward_hook(lambda *_: None) if listened else None
    runner, cache = runner_of(model)
    patches = runner._patches
    run(runner, cache, planned=True)
    if handle is not None:
        handle.remove()
        run(runner, cache, planned=True)

    assert not runner.has_plan
    assert runner._patches is patches
    assert layer.count > 0


def test_changed_weights_make_a_new_plan() -> None:
    """Weights that no replacement holds count too: an embedding written in place, a norm in another's place."""
    model, text = build(tiny_config("llama")), [3, 1, 4, 1, 5]
    engine = Engine(model, num_pages=32, prefix_cache=False)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    answers = []
    for change in range(4):
        answers.append(engine.generate([text], params)[0].token_ids)
        assert list(answers[-1]) == stock_greedy(model, text, 6)
        if change == 0:
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(-3)
        elif change == 1:
            model.model.norm.weight = torch.nn.Parameter(-model.model.norm.weight.detach())
        else:
            model.lm_head.bias = torch.nn.Parameter(torch.randn(len(model.lm_head.weight)) * 9)

    assert len(set(answers)) == 4


def with_trace(model: Any) -> None:
    """Put a traced module in an MLP's place."""
    model.model.layers[0].mlp = torch.jit.trace(  # type: ignore[no-untyped-call]
        model.model.layers[0].mlp, torch.randn(1, 5, 32)
    )


def with_sparse_buffer(model: Any) -> None:
    """Add a buffer that has no address."""
    model.model.layers[0].register_buffer("adjacency", torch.eye(4).to_sparse())


def with_lazy_layer(model: Any) -> None:
    """Add a layer without weights yet."""
    model.model.layers[0].extra = torch.nn.LazyLinear(4).eval()


def with_limit(model: Any) -> None:
    """Refuse steps of more than 32 tokens."""
    forward = type(model.model.layers[0]).forward

    class Limited(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            assert x.shape[1] <= 32
            return forward(self, x, **kwargs)

    model.model.layers[0].__class__ = Limited


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", [with_trace, with_sparse_buffer, with_lazy_layer, with_limit])
def test_odd_models_are_served(change: Callable[[Any], None]) -> None:
    """What cannot be looked at, recorded or tried is no reason to refuse a model."""
    model, text = build(tiny_config("llama")), [3, 1, 4]
    change(model)
    engine = Engine(model, num_pages=32, max_step_tokens=32, max_batch=8)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)

    assert list(engine.generate([text], params)[0].token_ids) == stock_greedy(model, text, 4)


def test_an_old_plan_goes_at_once() -> None:
    """With new weights the old plan and its copies are freed without the garbage collector."""
    model = build(tiny_config("llama"))
    runner, cache = runner_of(model, packed=True)
    assert runner._plan is not None
    old = weakref.ref(runner._plan._run)
    gc.disable()
    try:
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())
        run(runner, cache, planned=True)
        assert old() is None
    finally:
        gc.enable()
    assert runner.has_plan


def test_two_engines_of_one_model_in_two_threads() -> None:
    """They answer as one does, and the family's functions are the library's own afterwards."""
    model, texts = build(tiny_config("llama")), prompts(6)
    names = vars(sys.modules[type(model).__module__])
    rotary, params = names["apply_rotary_pos_emb"], SamplingParams(max_new_tokens=6, ignore_eos=True)
    engines = [Engine(model, num_pages=64, page_size=4, max_step_tokens=256) for _ in range(2)]
    for layer in model.model.layers:
        layer.noted = 1  # both go by the modules
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda engine: [engine.generate(texts, params) for _ in range(5)], engines))

    expected = [stock_greedy(model, text, 6) for text in texts]
    assert all([list(one.token_ids) for one in batch] == expected for rounds in answers for batch in rounds)
    assert names["apply_rotary_pos_emb"] is rotary

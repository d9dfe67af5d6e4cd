"""The plan of a model's step: the modules' bits on every step, and no plan where a step is not a row of calls."""

from __future__ import annotations

import gc
import random
import re
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import Engine, PagedKVCache, SamplingParams
from pagedkv.engine.model_step import plan as plans
from pagedkv.engine.model_step.runner import FastRunner
from pagedkv.spec import UnsupportedModel
from pagedkv.transformers import ModelRunner, observe_kv_spec
from tests.engine.test_model_step import compiled, prompts
from tests.tiny_models import build, stock_greedy, tiny, tiny_config
from tests.transformers import tiny_zoo

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = compiled

PLANNED = ["llama", "llama_mha", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "phi"]


def runner_of(model: Any, **options: Any) -> tuple[FastRunner, PagedKVCache]:
    """Return a fast runner and its cache."""
    shape: dict[str, Any] = {"num_pages": 256, "page_size": 4, "dtype": model.dtype, "prefix_cache": False}
    cache = PagedKVCache.from_spec(observe_kv_spec(model), **shape)
    return FastRunner(ModelRunner(model, cache), **options), cache


def run(runner: FastRunner, cache: PagedKVCache, *, planned: bool, seed: int = 0) -> list[torch.Tensor]:
    """Return the logits of some ragged steps of up to 90 tokens, by the plan or by the modules."""
    draw, vocab_size = random.Random(seed), cache.spec.vocab_size
    texts = [[draw.randrange(1, vocab_size) for _ in range(96)] for _ in range(3)]
    sequences = [cache.open(text) for text in texts]
    if not planned:
        runner._plan = None
    logits = []
    for counts in ((1, 0, 0), (70, 3, 17), (1, 1, 1), (5, 0, 2), (1, 30, 1)):
        steps = {
            sequence: text[sequence.num_tokens : sequence.num_tokens + count]
            for sequence, text, count in zip(sequences, texts, counts, strict=True)
            if count
        }
        batch = cache.begin_step(steps)
        total = sum(counts)
        rows = torch.tensor([draw.randrange(total) for _ in range(draw.randint(1, total))])
        logits.append(runner.forward(batch, rows if total > len(steps) else None))
        cache.end_step(batch)
    for sequence in sequences:
        sequence.close()
    return logits


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", PLANNED)
def test_gives_the_modules_bits(name: str, *, exact: bool) -> None:
    """On ragged steps of other sizes than those recorded, of one token and of many, with any rows wanted."""
    runner, cache = runner_of(tiny(name), packed=True, exact=exact)

    assert runner.has_plan
    planned = run(runner, cache, planned=True)
    by_modules = run(runner, cache, planned=False)
    assert all(map(torch.equal, planned, by_modules))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_planned(dtype: torch.dtype) -> None:
    """The logits are float32 all the same."""
    runner, cache = runner_of(build(tiny_config("qwen3")).to(dtype))

    assert runner.has_plan
    planned = run(runner, cache, planned=True)
    assert all(map(torch.equal, planned, run(runner, cache, planned=False)))
    assert {one.dtype for one in planned} == {torch.float32}


def twisted(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    """Return a llama whose first layer's output goes through ``change``."""
    model = build(tiny_config("llama"))
    layer = model.model.layers[0]

    class Twisted(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return change(self, super().forward(*args, **kwargs))

    layer.__class__ = Twisted
    return model


def by_content(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Look at the values, with one outcome in every step."""
    return x * 2 if (x.abs() < 1e9).all() else x


def by_list(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Look at a value past the operators."""
    return x * 2 if x[0, 0, 0].tolist() > -1e9 else x  # type: ignore[operator]


def by_array(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Look at a value through numpy."""
    return x * float(x.detach().cpu().numpy().max() > -1e9)


def by_mask(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Take as many values as there are positive ones."""
    return x + 0 * x[x > 0].sum()


def by_where(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Ask how many values are huge by an operator that hides it."""
    return x * 2 if not torch.where(x > 1e9)[0].numel() else x


def by_threshold(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Make as many values as there are tokens, up to 16."""
    return x * (1 + 1e-6 * torch.ones(min(16, x.shape[1])).sum())


def by_parity(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Take another operator for some numbers of tokens."""
    return x * (1 + 1e-6) if x.shape[1] % 4 == 2 else x + 0


def by_swallowed_content(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Look at a value and go on where that is refused."""
    try:
        far = x.abs().max().item() > 1e9
    except Exception:
        far = False
    return -x if far else x


def by_count(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Take another operator for a single token."""
    return x * 1 if x.shape[1] == 1 else x + 0


def by_square(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Make a number of values that grows with the square of the tokens."""
    return x + 0 * torch.zeros(x.shape[1] ** 2).sum()


def by_size_as_float(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiply by a float that follows the number of tokens."""
    return x * (1 + 1e-6 * x.shape[1])


def by_new_constant(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Add a number that Python computes from the number of tokens."""
    return x + torch.tensor([1e-6 * x.shape[1]])


def by_state(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Add what the last forward left behind."""
    before = own.__dict__.get("left")
    own.__dict__["left"] = x[:, -1:].clone()
    return x if before is None else x + 1e-9 * before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (by_content, "data_dependent_output|__bool__ looks at"),
        (by_list, "tolist looks at"),
        (by_array, "numpy looks at"),
        (by_mask, "dynamic_output_shape"),
        (by_where, "where.default is dynamic_output_shape"),
        (by_parity, "its logits of a step of [26] tokens"),
        (by_swallowed_content, "item looks at"),
        (by_threshold, "its logits of a step of (16|23) tokens"),
        (by_count, "steps part at|steps make"),
        (by_square, r"an argument is \[25, 9, 9, 1, 9\]"),
        (by_size_as_float, "or something else"),
        (by_new_constant, "constant"),
        (by_state, "constant"),
    ],
)
def test_no_plan_where_steps_differ(
    change: Callable[[Any, torch.Tensor], torch.Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What follows from content, from chance, from another step or not linearly from a size is left to the modules."""
    caplog.set_level("DEBUG", logger="pagedkv")
    runner, _ = runner_of(twisted(change))

    assert not runner.has_plan
    caplog.records[:] = [one for one in caplog.records if "runs by its modules" in one.getMessage()]
    assert re.search(why, caplog.records[-1].getMessage())


def test_no_plan_of_chance() -> None:
    """A forward pass that draws random numbers is not recorded, and the generator is as it was."""
    model = build(tiny_config("llama"))
    runner = ModelRunner(model, PagedKVCache.from_config(model.config, num_pages=8))
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x) + 1e-9 * torch.rand(1)
    before = torch.random.get_rng_state()

    assert plans.make_plan(runner) is None
    assert torch.equal(torch.random.get_rng_state(), before)


def test_integers_follow_tokens_and_rows() -> None:
    """What is a + b * tokens + c * rows in all steps is computed from a step's own sizes."""
    runner, cache = runner_of(
        twisted(lambda _, x: x + 0 * torch.arange(2 * x.shape[1] + 3)[: x.shape[1]].view(1, -1, 1))
    )

    assert runner.has_plan
    planned = run(runner, cache, planned=True)
    assert all(map(torch.equal, planned, run(runner, cache, planned=False)))


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


def test_a_plan_is_made_once_nobody_listens_any_more() -> None:
    """A hook that is there when the engine is made keeps the plan away only as long as it is there."""
    model = build(tiny_config("llama"))
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    runner, cache = runner_of(model)
    assert not runner.has_plan
    handle.remove()
    run(runner, cache, planned=True)

    assert runner.has_plan


def test_large_steps_run_by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan serves steps up to the size that it was tried on."""
    runner, cache = runner_of(tiny("llama"))
    sequence, heard = cache.open([1] * 100), []
    monkeypatch.setattr(runner._runner, "forward", lambda batch, rows: heard.append(len(batch.position_ids)))
    for count in (plans.MOST_TOKENS, plans.MOST_TOKENS + 1):
        batch = cache.begin_step({sequence: [1] * count})
        runner.forward(batch)
        cache.abandon_step(batch)
    sequence.close()

    assert heard == [plans.MOST_TOKENS + 1]


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


def test_a_step_leaves_nothing_behind() -> None:
    """Neither what a step made nor its batch outlives it, also where attention raised."""
    runner, cache = runner_of(tiny("llama"))
    sequence = cache.open([1, 2, 3])
    batch = cache.begin_step({sequence: [1, 2, 3]})
    logits = runner.forward(batch)
    cache.end_step(batch)
    left: list[weakref.ref[Any]] = [weakref.ref(logits), weakref.ref(batch)]
    del logits, batch
    gc.collect()

    assert [one() for one in left] == [None, None]
    assert runner.has_plan
    sequence.close()


@pytest.mark.slow
def test_every_architecture() -> None:
    """Whatever has a plan gives its modules' bits, and most that the engine runs have one."""
    planned, others, wrong = [], [], []
    for architecture in tiny_zoo.architectures():
        name = architecture.config_class.model_type
        try:
            runner, cache = runner_of(tiny_zoo.build(architecture))
        except (tiny_zoo.CannotBeTiny, UnsupportedModel, ValueError, TypeError):
            continue
        if not runner.has_plan:
            others.append(name)
            continue
        planned.append(name)
        by_plan = run(runner, cache, planned=True)
        if not all(map(torch.equal, by_plan, run(runner, cache, planned=False))):
            wrong.append(name)

    assert not wrong
    assert len(planned) > len(others), others


def test_engines_answer_as_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """Through whole requests, the plan's tokens are the model's own."""
    caplog.set_level("DEBUG", logger="pagedkv")
    model, texts = tiny("gemma3"), prompts(4)
    engine = Engine(model, num_pages=64, page_size=4, max_step_tokens=24)
    answers = engine.generate(texts, SamplingParams(max_new_tokens=8, ignore_eos=True))

    assert not [one for one in caplog.records if "runs by its modules" in one.getMessage()]
    assert [list(one.token_ids) for one in answers] == [stock_greedy(model, text, 8) for text in texts]

"""The plan of a model's step: the modules' bits on every step, and no plan where a step is not a row of calls."""

from __future__ import annotations

import gc
import re
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import Engine, PagedKVCache, SamplingParams
from pagedkv.engine.model_step import plan as plans
from pagedkv.spec import UnsupportedModel
from pagedkv.transformers import ModelRunner
from tests.engine.planned import run, runner_of, twisted
from tests.engine.test_model_step import compiled, prompts
from tests.tiny_models import build, stock_greedy, tiny, tiny_config
from tests.transformers import tiny_zoo

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = compiled

PLANNED = ["llama", "llama_mha", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "phi"]


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
    reasons = [message for message in caplog.messages if "runs by its modules" in message]
    assert re.search(why, reasons[-1])


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


def test_a_step_leaves_nothing_behind() -> None:
    """Neither what a step made nor its batch outlives it."""
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

    assert not [message for message in caplog.messages if "runs by its modules" in message]
    assert [list(one.token_ids) for one in answers] == [stock_greedy(model, text, 8) for text in texts]

"""Priorities with ageing: who goes first, for how long, and what samples that have yet to part are counted as."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine import AsyncEngine, Engine, EngineCore, SamplingParams
from tests.engine.scripted import VOCAB, cold, drain, make_core, tokens_of

if TYPE_CHECKING:
    from pagedkv.engine.async_stream import AsyncStream


def watch_admissions(core: EngineCore) -> list[Any]:
    """Return a list that grows by the id of every request that enters."""
    entered: list[Any] = []
    inner = core.scheduler._enter

    def enter(request: Any) -> None:
        entered.append(request.request_id)
        inner(request)

    core.scheduler._enter = enter  # type: ignore[method-assign]
    return entered


ONE = SamplingParams(max_new_tokens=1)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_calls_that_step_take_a_priority(call: str) -> None:
    """Priority 3 goes after 1 and before 5, which were queued earlier; 0 would go first."""
    core, _, _ = make_core(max_batch=1, max_step_tokens=8, scheduling="priority")
    engine = Engine.from_core(core)
    entered = watch_admissions(core)
    for priority in (5, 1):
        engine.add_request(priority, [1], ONE, priority=priority)
    if call == "generate":
        engine.generate([[7]], ONE, priority=3)
    else:
        engine.stream([7], ONE, priority=3).completion()

    assert [entered[0], len(entered)] == [1, 2]


@pytest.mark.parametrize("call", ["submit", "generate", "stream"])
def test_asynchronous_calls_take_a_priority(call: str) -> None:
    """The same beside a request that runs meanwhile; here all of them come after one another."""
    core, _, runner = make_core(max_batch=1, max_step_tokens=8, scheduling="priority")
    forward, all_are_there = runner.forward, threading.Event()

    def late_forward(*arguments: Any) -> Any:
        assert all_are_there.wait(60)
        return forward(*arguments)

    runner.forward = late_forward  # type: ignore[method-assign, assignment]
    ended: list[int] = []

    async def finish(stream: AsyncStream, priority: int) -> None:
        await stream.completion()
        ended.append(priority)

    async def ask(served: AsyncEngine) -> None:
        if call == "submit":
            await (await served.submit([7], ONE, priority=3)).completion()
        elif call == "generate":
            await served.generate([[7]], ONE, priority=3)
        else:
            assert [output async for output in served.stream([7], ONE, priority=3)]
        ended.append(3)

    async def serve_all() -> None:
        async with AsyncEngine(Engine.from_core(core)) as served:
            first = await served.submit([9], ONE)
            while not served.num_running:
                await asyncio.sleep(0.005)
            asked = asyncio.create_task(ask(served))
            while served.num_requests < 2:
                await asyncio.sleep(0.005)
            others = [asyncio.create_task(finish(await served.submit([1], ONE, priority=p), p)) for p in (5, 1)]
            all_are_there.set()
            await asyncio.gather(first.completion(), asked, *others)

    asyncio.run(asyncio.wait_for(serve_all(), 60))
    assert ended == [1, 3, 5]


def test_the_smaller_number_goes_first() -> None:
    """Of requests queued at one step the priority decides, and arrival among equals."""
    core, _, _ = make_core(max_batch=1, max_step_tokens=8, scheduling="priority")
    entered = watch_admissions(core)
    for name, priority in (("late", 2), ("a", 0), ("soon", -1), ("b", 0)):
        core.add_request(name, [1], ONE, priority=priority)
    drain(core)

    assert entered == ["soon", "a", "b", "late"]


def test_the_last_in_rank_is_preempted_first() -> None:
    """When pages run out the one of least priority leaves, also where it came first; answers are the same."""
    core, _, _ = make_core(14, 4, growth=0, max_batch=4, max_step_tokens=32, scheduling="priority")
    params = SamplingParams(max_new_tokens=20)
    for name, priority in enumerate((3, 0, 0, 1)):
        core.add_request(name, [name + 1] * 8, params, priority=priority)
    outputs = drain(core)

    assert [outputs[name][-1].metrics.preemptions for name in range(4)] == [1, 0, 0, 1]  # type: ignore[union-attr]
    assert tokens_of(outputs) == {name: cold([name + 1] * 8, params) for name in range(4)}


@pytest.mark.parametrize(("ageing", "starves"), [(1, False), (7, False), (10**6, True)])
def test_ageing_bounds_the_wait(ageing: int, starves: bool) -> None:
    """An endless stream of urgent requests: one of priority 5 enters 5 x ageing steps after it was queued.

    With ageing out of reach it starves, so the bound is ageing's doing.
    """
    core, _, _ = make_core(max_batch=1, max_step_tokens=8, scheduling="priority", ageing=ageing)
    entered = watch_admissions(core)
    core.add_request("first", [2], ONE)
    core.step()
    core.add_request("patient", [1], ONE, priority=5)
    steps = 0
    for number in range(60):
        core.add_request(number, [number % VOCAB], ONE)
        core.step()
        steps += 1
        if "patient" in entered:
            break

    assert ("patient" not in entered) == starves
    if not starves:
        # those queued less than 5 x ageing steps later, and the one of the same step that came before it
        assert steps == 5 * ageing + 1


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(-3, 3), st.integers(1, 20), st.integers(1, 6)), max_size=25),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(6, 16),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_nobody_waits_beyond_the_bound(
    requests: list[tuple[int, int, int, int]], ageing: int, max_passes: int, pages: int, batch: int
) -> None:
    """Any arrivals and priorities: whoever enters before a waiting request is within ageing's bound, or a pass.

    That is the bound of the scheduler's docstring: at most ``max_passes`` were queued more than ageing x (p - q)
    steps after it.
    """
    core, cache, _ = make_core(
        pages, 4, max_batch=batch, max_step_tokens=64, prefix_cache=False, growth=2, scheduling="priority",
        ageing=ageing, max_passes=max_passes,
    )  # fmt: skip
    entered = watch_admissions(core)
    queued: dict[int, tuple[int, int]] = {}
    seen: list[tuple[int, int]] = []  # (who entered, at which step)
    for step in range(400):
        for name, (arrives, priority, length, new) in enumerate(requests):
            if arrives == step and length + new - 1 <= pages * 4:
                core.add_request(name, [name % VOCAB] * length, SamplingParams(max_new_tokens=new), priority=priority)
                queued[name] = (step, priority)
        before = len(entered)
        core.step()
        seen += [(name, step) for name in entered[before:]]
        cache.check()
        if step > 12 and not core.has_unfinished:
            break

    assert not core.has_unfinished
    first = dict(reversed(seen))
    assert first.keys() == queued.keys()
    for name, (step, priority) in queued.items():
        beyond = [
            other
            for other, (later, own) in queued.items()
            if step <= first[other] < first[name] and later - step > ageing * (priority - own)
        ]
        assert len(beyond) <= max_passes


def test_samples_that_have_yet_to_part_are_counted() -> None:
    """Four samples take four tails: beside one that runs they wait until these fit too, so nobody is preempted.

    Without counting them the request enters at once, parts, and somebody has to leave.
    """
    core, cache, _ = make_core(12, 4, growth=8, max_batch=8, max_step_tokens=64)
    runs, four = SamplingParams(max_new_tokens=16), SamplingParams(max_new_tokens=6, n=4, seed=3, temperature=1.0)
    core.add_request("runs", [1] * 13, runs)
    core.step()
    core.add_request("four", [2] * 6, four)
    outputs = core.step()

    assert [output.request_id for output in outputs] == ["runs"]
    drain(core)
    assert core.stats.preemptions == 0
    assert cache.usage().in_use == 0


@pytest.mark.parametrize(
    ("options", "priority", "error", "message"),
    [
        ({}, 1, ValueError, "priority must be 0 with scheduling 'fcfs', was 1"),
        ({"scheduling": "priority"}, 101, ValueError, "priority must be -100 to 100, was 101"),
        ({"scheduling": "priority"}, True, TypeError, "priority"),
        ({"scheduling": "priority"}, 0.5, TypeError, "priority"),
    ],
)
def test_bad_priorities_stay_at_the_door(
    options: dict[str, Any], priority: Any, error: type[Exception], message: str
) -> None:
    """Each raises to its caller and queues nothing."""
    core, _, _ = make_core(**options)
    with pytest.raises(error, match=message):
        core.add_request("a", [1], ONE, priority=priority)

    assert not core.has_unfinished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduling": "lifo"}, "scheduling must be one of fcfs, priority, was 'lifo'"),
        ({"ageing": 0}, "ageing must be at least 1, was 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """An unknown policy, or one that would starve, is not built."""
    with pytest.raises(ValueError, match=message):
        make_core(**options)

"""AsyncEngine: the same answers to tasks, every way of leaving frees its pages, and nobody waits forever."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.engine import AsyncEngine, Engine, EngineBusy, EngineStopped, SamplingParams, StepFailed
from tests.engine.scripted import cold, make_core
from tests.tiny_models import tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from pagedkv.engine import StepOutput
    from tests.engine.naive_cache import NaiveCache
    from tests.engine.scripted import ScriptedRunner

PATIENCE = 120.0
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)


def scripted(**options: Any) -> tuple[Engine, NaiveCache, ScriptedRunner]:
    """Return an engine of token ids over a scripted runner, its cache and the runner."""
    core, cache, runner = make_core(**options)
    return Engine.from_core(core), cache, runner


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; a test that hangs fails."""
    asyncio.run(asyncio.wait_for(work, PATIENCE))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do; the test's time limit ends it."""
    while not condition():
        await asyncio.sleep(0.005)


def test_answers_are_the_engines_own() -> None:
    """Sixteen tasks at once, greedy and drawn, several samples each: all get what they would get alone."""
    prompts = [[index, 3, index + 1] for index in range(16)]
    params = [SamplingParams(max_new_tokens=9, temperature=index % 2, seed=index) for index in range(16)]

    async def work() -> None:
        engine, cache, _ = scripted()
        async with AsyncEngine(engine) as served:
            found = await asyncio.gather(*[served.generate([p], own) for p, own in zip(prompts, params, strict=True)])
            (many,) = await served.generate([prompts[1]], SamplingParams(max_new_tokens=9, temperature=1, seed=1, n=3))

        assert [cold(p, own) for p, own in zip(prompts, params, strict=True)] == [list(c[0].token_ids) for c in found]
        assert cold(prompts[1], params[1]) == list(many.token_ids)
        assert 3 == len(many.samples)
        assert 0 == cache.usage().in_use

    run(work())


def test_a_stream_brings_outputs_as_they_come() -> None:
    """A stream yields each step's tokens, in order; the last output has the request's metrics."""

    async def work() -> None:
        engine, _, _ = scripted()
        async with AsyncEngine(engine) as served:
            outputs = [output async for output in served.stream([1, 2, 3], SamplingParams(max_new_tokens=5))]

        assert cold([1, 2, 3], SamplingParams(max_new_tokens=5)) == [t for output in outputs for t in output.token_ids]
        assert [None] * 4 + ["length"] == [output.finish_reason for output in outputs]
        assert outputs[-1].metrics is not None
        assert (3, 5) == (outputs[-1].metrics.prompt_tokens, outputs[-1].metrics.new_tokens)

    run(work())


async def _cancelled(served: AsyncEngine) -> None:
    task = asyncio.create_task(served.generate([[1, 2]], LONG))
    await until(lambda: served.stats.steps > 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _timed_out(served: AsyncEngine) -> None:
    async def listen() -> None:
        async for _ in served.stream([1, 2], LONG):
            await asyncio.sleep(0.004)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(listen(), 0.02)


async def _dropped(served: AsyncEngine) -> None:
    stream = await served.submit([1, 2], LONG)
    await anext(stream)
    del stream
    gc.collect()


async def _closed(served: AsyncEngine) -> None:
    stream = await served.submit([1, 2], LONG)
    stream.close()
    stream.close()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("leave", [_cancelled, _timed_out, _dropped, _closed])
def test_whoever_leaves_frees_the_pages(leave: Callable[[AsyncEngine], Coroutine[Any, Any, None]]) -> None:
    """A task that is cancelled or runs out of time, and a stream that is dropped or closed, end their request."""

    async def work() -> None:
        engine, cache, runner = scripted()
        slow_down(runner, 0.002)
        ended: list[StepOutput] = []
        async with AsyncEngine(engine, observe=ended.append) as served:
            await leave(served)
            await until(lambda: bool(ended))
            await until(lambda: not engine.has_unfinished)

            assert ["abort"] == [output.finish_reason for output in ended]
            assert (0, 0) == (cache.usage().in_use, served.num_running)
            assert cold([7], SamplingParams()) == list((await served.generate([[7]]))[0].token_ids)

    run(work())


def slow_down(runner: ScriptedRunner, seconds: float) -> None:
    """Let every step of ``runner`` take ``seconds`` more."""
    forward = runner.forward

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return forward(*arguments)

    runner.forward = slow  # type: ignore[method-assign, assignment]


def test_a_failing_step_reaches_everybody_and_the_engine_goes_on() -> None:
    """When the model raises, running and waiting requests hear of it, their pages are free, the next one is fine."""

    async def work() -> None:
        engine, cache, runner = scripted(max_batch=2)
        slow_down(runner, 0.002)
        async with AsyncEngine(engine) as served:
            for _ in range(3):
                tasks = [asyncio.create_task(served.generate([[index]], LONG)) for index in range(5)]
                before = served.stats.steps
                await until(lambda before=before: served.stats.steps > before + 2)  # type: ignore[misc]
                runner.fail_next = 1
                errors = await asyncio.gather(*tasks, return_exceptions=True)

                assert [StepFailed] * 5 == [type(error) for error in errors]
                assert {"the scripted runner fails on purpose"} == {str(e.__cause__) for e in errors}  # type: ignore[union-attr]
                assert cold([7], SamplingParams()) == list((await served.generate([[7]]))[0].token_ids)
                assert 0 == cache.usage().in_use

    run(work())


def test_a_request_that_fails_every_time_spoils_none_after_it() -> None:
    """Several failing steps in a row, each with a new request, do not count as a broken engine."""

    async def work() -> None:
        engine, _, runner = scripted()
        async with AsyncEngine(engine) as served:
            runner.fail_next = 4
            for _ in range(4):
                with pytest.raises(StepFailed):
                    await served.generate([[1]])
            assert cold([1], SamplingParams()) == list((await served.generate([[1]]))[0].token_ids)

    run(work())


def test_a_broken_engine_says_so_to_everybody() -> None:
    """An engine that cannot even end requests is given up: all callers hear why, and no later one waits."""

    async def work() -> None:
        engine, _, _ = scripted()

        def broken() -> list[StepOutput]:
            raise OSError("the device has gone")

        engine.core.step = broken  # type: ignore[method-assign]
        async with AsyncEngine(engine) as served:
            errors = await asyncio.gather(*[served.generate([[i]]) for i in range(3)], return_exceptions=True)
            assert {True} == {isinstance(error, StepFailed | EngineStopped) for error in errors}
            assert [] == [error for error in errors if "OSError: the device has gone" not in str(error)]
            await until(lambda: served.refusal is not None)
            with pytest.raises(EngineStopped, match="has failed: OSError: the device has gone"):
                await served.submit([1])
            assert await served.drain()

    run(work())


def test_a_full_engine_refuses_at_once() -> None:
    """Beyond max_requests a request is refused with the number, and taken again once one has ended."""

    async def work() -> None:
        engine, _, runner = scripted()
        slow_down(runner, 0.002)
        async with AsyncEngine(engine, max_requests=2) as served:
            first, second = await served.submit([1], LONG), await served.submit([2], LONG)
            for refused in (served.submit([3]), served.tokenize([3])):
                with pytest.raises(EngineBusy, match="max_requests = 2 requests are unfinished"):
                    await refused
            first.close()
            await until(lambda: served.num_requests == 1)
            assert cold([3], SamplingParams()) == list((await served.generate([[3]]))[0].token_ids)
            second.close()

    run(work())


def test_bad_input_is_refused_and_harms_nobody() -> None:
    """What the engine refuses is raised by submit, with nothing queued; of a list nobody is left running."""

    async def work() -> None:
        engine, cache, _ = scripted()
        async with AsyncEngine(engine) as served:
            with pytest.raises(ValueError, match="prompt must hold at least one token, was empty"):
                await served.submit([])
            with pytest.raises(TypeError, match="prompts or messages must be given"):
                await served.generate([[1]], messages=[[]])
            with pytest.raises(ValueError, match=r"prompt\[0\] must be"):
                await served.generate([[1], [2], [-1]], LONG)
            assert await served.drain()
            assert (0, 0, 3) == (cache.usage().in_use, served.num_running, served.stats.finished["abort"] + 1)
        with pytest.raises(ValueError, match="max_requests must be"):
            AsyncEngine(engine, max_requests=0)
        with pytest.raises(TypeError, match="engine must be an Engine, was str"):
            AsyncEngine("engine")  # type: ignore[arg-type]

    run(work())


def test_draining_lets_the_running_end() -> None:
    """While it drains an engine refuses new requests and finishes the others; those over their grace are aborted."""

    async def work() -> None:
        engine, cache, runner = scripted()
        slow_down(runner, 0.002)
        async with AsyncEngine(engine) as served:
            task = asyncio.create_task(served.generate([[1]], SamplingParams(max_new_tokens=20)))
            await until(lambda: served.num_running == 1)
            draining = asyncio.create_task(served.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineStopped, match="the engine is shutting down"):
                await served.submit([2])
            assert (20, True) == (len((await task)[0].token_ids), await draining)
        engine, cache, runner = scripted()
        slow_down(runner, 0.002)
        async with AsyncEngine(engine) as served:
            stream = await served.submit([1], LONG)
            assert not await served.drain(grace=0.05)
            assert "abort" == (await stream.completion()).finish_reason
            assert 0 == cache.usage().in_use

    run(work())


def test_the_end_gives_the_engine_back() -> None:
    """After the ``async with`` running requests have been aborted and the caller's thread may use engine and cache."""
    model = tiny("llama")
    engine = Engine(model, num_pages=60)
    (expected,) = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True))

    async def work() -> None:
        async with AsyncEngine(engine) as served:
            stream = await served.submit([5, 6, 8], SamplingParams(max_new_tokens=200, ignore_eos=True))
            await anext(stream)
            assert served.usage.in_use >= 0
        assert "abort" == [output async for output in stream][-1].finish_reason
        with pytest.raises(EngineStopped, match="has ended"):
            await served.submit([1])
        with pytest.raises(RuntimeError, match="must be entered once"):
            await served.__aenter__()

    run(work())
    assert 0 == engine.backend.usage().in_use
    assert [expected.token_ids] == [
        c.token_ids for c in engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    ]


def test_before_its_start_it_takes_nothing() -> None:
    """Outside ``async with`` a request is refused, not queued for nobody."""

    async def work() -> None:
        with pytest.raises(EngineStopped, match="use it in an `async with`"):
            await AsyncEngine(scripted()[0]).submit([1])

    run(work())


def test_an_idle_engine_sleeps() -> None:
    """With nothing to do there is no step and no processor time; the next request wakes it, and usage is exact."""

    async def work() -> None:
        engine, _, _ = scripted(prefix_cache=False)
        async with AsyncEngine(engine) as served:
            await served.generate([[1, 2]])
            await until(lambda: served.usage.in_use == 0)
            thread = next(thread for thread in threading.enumerate() if thread.name == "pagedkv-step")
            steps, cpu = served.stats.steps, time.process_time()
            await asyncio.sleep(0.3)

            assert thread.is_alive()
            assert steps == served.stats.steps
            assert time.process_time() - cpu < 0.15
            assert cold([1], SamplingParams()) == list((await served.generate([[1]]))[0].token_ids)
        assert not thread.is_alive()

    run(work())


def test_a_slow_reader_delays_nobody() -> None:
    """What one task does not read waits for it; others get theirs meanwhile, and it finds all of its own."""

    async def work() -> None:
        engine, cache, _ = scripted()
        async with AsyncEngine(engine) as served:
            slow = await served.submit([1], LONG)
            await served.generate([[2]], SamplingParams(max_new_tokens=30))
            await until(lambda: cache.usage().in_use == 0)
            assert cold([1], LONG) == list((await slow.completion()).token_ids)

    run(work())


class SlowTokenizer:
    """Encodes only when the test lets it."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __deepcopy__(self, memo: object) -> SlowTokenizer:
        return self

    def encode(self, text: str) -> list[int]:
        """Wait, then return the characters' numbers."""
        assert self.gate.wait(PATIENCE)
        return [ord(char) % 50 for char in text]

    def decode(self, token_ids: list[int], **_: object) -> str:
        """Return a letter for each token."""
        return "".join(chr(97 + token % 26) for token in token_ids)


def test_tokenizing_does_not_hold_up_the_loop() -> None:
    """While a long prompt is tokenized the loop turns and running requests get their tokens."""

    async def work() -> None:
        core, _, _ = make_core()
        tokenizer = SlowTokenizer()
        async with AsyncEngine(Engine.from_core(core, tokenizer)) as served:
            running = await served.submit([1], LONG)
            held = asyncio.create_task(served.generate(["abc"], SamplingParams(max_new_tokens=3)))
            assert cold([1], LONG) == list((await running.completion()).token_ids)
            assert not held.done()
            tokenizer.gate.set()
            (completion,) = await held

        assert cold([ord(char) % 50 for char in "abc"], SamplingParams(max_new_tokens=3)) == list(completion.token_ids)

    run(work())


def test_a_loop_that_is_gone_ends_the_thread() -> None:
    """If the loop is closed with requests running, the thread aborts them and ends instead of serving nobody."""
    engine, cache, runner = scripted()
    slow_down(runner, 0.005)
    loop = asyncio.new_event_loop()
    served = AsyncEngine(engine)

    async def begin() -> Any:
        await served.__aenter__()
        return await served.submit([1], LONG)

    stream = loop.run_until_complete(begin())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "pagedkv-step"]
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    thread.join(PATIENCE)

    assert not thread.is_alive()
    assert 0 == cache.usage().in_use
    del stream

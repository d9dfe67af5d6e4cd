"""The step loop on a scripted model: answers, ends, doors, failures, counters."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pagedkv.allocator import OutOfPages
from pagedkv.engine import EngineCore, SamplingParams, StepOutput
from tests.engine.naive_cache import NaiveCache
from tests.engine.scripted import VOCAB, ScriptedRunner, cold, constant, drain, hashed, make_core, tokens_of

EOS = 7


def test_a_request_alone_follows_the_model() -> None:
    """Each token is the model's answer to everything before it, prompt included from the first step on."""
    text = [3, 1, 4, 1, 5]
    for _ in range(10):
        text.append(hashed(text))
    core, _, _ = make_core()
    core.add_request("a", [3, 1, 4, 1, 5], SamplingParams(max_new_tokens=10))

    assert tokens_of(drain(core)) == {"a": text[5:]}


def test_one_token_per_request_and_step() -> None:
    """Every active request gets exactly one token in every step once its prompt is in."""
    core, _, _ = make_core()
    for name in range(5):
        core.add_request(name, [name + 1] * (name + 3), SamplingParams(max_new_tokens=6))
    for _ in range(6):
        outputs = core.step()

        assert [output.request_id for output in outputs] == [0, 1, 2, 3, 4]
        assert {len(output.token_ids) for output in outputs} == {1}
    assert core.step() == []
    assert not core.has_unfinished


def test_a_place_is_taken_in_the_next_forward_pass() -> None:
    """A finished request leaves and a waiting one enters with no step between them: no place is ever empty."""
    core, _, runner = make_core(max_batch=1, max_step_tokens=16)
    for name in "abc":
        core.add_request(name, [ord(name) - 90] * 4, SamplingParams(max_new_tokens=3))
    produced = []
    while core.has_unfinished:
        produced += [output.request_id for output in core.step()]

    assert produced == list("aaabbbccc")
    assert len(runner.fed) == 9


def test_decode_first_then_chunks_within_one_budget() -> None:
    """A step's input tokens never exceed the budget, decoding requests go on, prompts come in chunks beside them."""
    core, _, runner = make_core(max_batch=4, max_step_tokens=6)
    core.add_request("short", [1, 2], SamplingParams(max_new_tokens=12))
    core.step()
    core.add_request("long", list(range(20)), SamplingParams(max_new_tokens=2))
    produced = [[output.request_id for output in core.step()] for _ in range(5)]

    assert [sorted(step.values()) for step in runner.fed[1:]] == [[1, 5], [1, 5], [1, 5], [1, 5], [1, 1]]
    assert produced == [["short"], ["short"], ["short"], ["short", "long"], ["short", "long"]]


def test_tokens_do_not_depend_on_chunks_or_neighbours() -> None:
    """The same request alone in one chunk, and in chunks of any size beside others: the same tokens."""
    prompts = {name: [(name * 7 + i) % VOCAB for i in range(5 + 9 * name)] for name in range(4)}
    params = SamplingParams(max_new_tokens=8)
    expected = {name: cold(prompt, params) for name, prompt in prompts.items()}
    for budget in (4, 5, 13, 64):
        core, _, _ = make_core(max_batch=4, max_step_tokens=budget)
        for name, prompt in prompts.items():
            core.add_request(name, prompt, params)

        assert tokens_of(drain(core)) == expected


def test_the_first_token_can_be_the_end() -> None:
    """EOS as the very first token: one token, reason stop, pages freed, the neighbour unaffected (ScaleLLM#304)."""
    core, cache, _ = make_core(rule=lambda text: EOS if text[0] == 1 else hashed(text), eos_token_ids=[EOS])
    neighbour = [5, 6, 8]
    core.add_request("ends", [1, 2, 3], SamplingParams(max_new_tokens=9))
    core.add_request("goes on", neighbour, SamplingParams(max_new_tokens=9, ignore_eos=True))
    first = core.step()

    assert first[0] == StepOutput("ends", (EOS,), finish_reason="stop", metrics=first[0].metrics)
    assert len(cache.sequences) == 1
    assert tokens_of(drain(core))["goes on"] == cold(neighbour, SamplingParams(max_new_tokens=9))[1:]


@pytest.mark.parametrize(
    ("given", "count", "reason"),
    [
        ({"max_new_tokens": 7}, 1, "stop"),
        ({"max_new_tokens": 7, "ignore_eos": True}, 7, "length"),
        ({"max_new_tokens": 1, "ignore_eos": True}, 1, "length"),
        ({"max_new_tokens": 1}, 1, "stop"),
        ({"max_new_tokens": 7, "ignore_eos": True, "stop_token_ids": [EOS]}, 1, "stop"),
        ({"max_new_tokens": 7, "ignore_eos": True, "stop_token_ids": [EOS + 1]}, 7, "length"),
    ],
)
def test_ends(given: dict[str, Any], count: int, reason: str) -> None:
    """EOS, ignore-EOS, own stop tokens and length; EOS exactly at the last token allowed is "stop" (vllm#52693)."""
    core, _, _ = make_core(rule=constant(EOS), eos_token_ids=[EOS])
    core.add_request("a", [1], SamplingParams(**given))
    outputs = drain(core)["a"]

    assert [output.token_ids for output in outputs] == [(EOS,)] * count
    assert [output.finish_reason for output in outputs] == [None] * (count - 1) + [reason]


@pytest.mark.parametrize("eos", [7, 8])
def test_any_of_several_eos_ids_ends(eos: int) -> None:
    """With a list of EOS ids each of them stops."""
    core, _, _ = make_core(rule=constant(eos), eos_token_ids=[8, 7])
    core.add_request("a", [1], SamplingParams(max_new_tokens=5))

    assert drain(core)["a"][0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], SamplingParams(), ValueError, "prompt must hold at least one token, was empty"),
        ([-1], SamplingParams(), ValueError, r"prompt\[0\] must be 0 to 49, was -1"),
        ([VOCAB], SamplingParams(), ValueError, r"prompt\[0\] must be 0 to 49, was 50"),
        ([True], SamplingParams(), TypeError, r"prompt\[0\] must be an int"),
        ([1.5], SamplingParams(), TypeError, r"prompt\[0\] must be an int"),
        ("text", SamplingParams(), TypeError, "prompt must be a list of token ids"),
        ([1], {"max_new_tokens": 3}, TypeError, "params must be SamplingParams, was dict"),
        ([1], SamplingParams(stop_token_ids=[VOCAB]), ValueError, r"stop_token_ids\[0\] must be 0 to 49, was 50"),
        ([1] * 30, SamplingParams(max_new_tokens=12), ValueError, "at most 41 tokens, .* were 30 \\+ 12 = 42"),
        ([1] * 42, SamplingParams(max_new_tokens=1), ValueError, "at most 41 tokens, .* were 42 \\+ 1 = 43"),
        ([1], SamplingParams(max_new_tokens=10**9), ValueError, "at most 41 tokens, all that the cache can ever hold"),
    ],
)
def test_bad_requests_stay_at_the_door(prompt: Any, params: Any, error: type[Exception], message: str) -> None:
    """Each raises to its caller, opens nothing, and the healthy request goes on as if alone (vllm#7632, #27987)."""
    core, cache, _ = make_core(10, 4)
    healthy = [9, 9, 9]
    core.add_request("healthy", healthy, SamplingParams(max_new_tokens=6))
    core.step()
    opened = cache.num_opened
    with pytest.raises(error, match=message):
        core.add_request("bad", prompt, params)
    outputs = drain(core)

    assert cache.num_opened == opened
    assert list(outputs) == ["healthy"]
    assert tokens_of(outputs)["healthy"] == cold(healthy, SamplingParams(max_new_tokens=6))[1:]


def test_the_longest_that_fits_is_served() -> None:
    """The bound at the door is exact: all of the pool, plus the last token, which is never stored."""
    core, cache, _ = make_core(10, 4)
    core.add_request("all", [1] * 30, SamplingParams(max_new_tokens=11))
    core.add_request("one", [1], SamplingParams(max_new_tokens=1))

    assert core.max_stored == 40
    assert {name: len(tokens) for name, tokens in tokens_of(drain(core)).items()} == {"all": 11, "one": 1}
    assert cache.usage().in_use == 0


def test_the_models_context_is_a_bound_too() -> None:
    """Prompt and new tokens together stay within the context, which the message names."""
    core, _, _ = make_core(64, 4, max_len=16)
    core.add_request("fits", [1] * 10, SamplingParams(max_new_tokens=6))
    with pytest.raises(ValueError, match="at most 16 tokens, the model's context, were 10 \\+ 7 = 17"):
        core.add_request("long", [1] * 10, SamplingParams(max_new_tokens=7))

    assert len(tokens_of(drain(core))["fits"]) == 6


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    """Two unfinished requests never share an id; afterwards it may be used again (vllm#10583)."""
    core, _, _ = make_core()
    core.add_request("a", [1, 2], SamplingParams(max_new_tokens=2))
    with pytest.raises(ValueError, match=r"request_id must not be in use .* was 'a'"):
        core.add_request("a", [3], SamplingParams(max_new_tokens=2))
    first = tokens_of(drain(core))
    core.add_request("a", [3], SamplingParams(max_new_tokens=2))

    assert first == {"a": cold([1, 2], SamplingParams(max_new_tokens=2))}
    assert tokens_of(drain(core)) == {"a": cold([3], SamplingParams(max_new_tokens=2))}
    with pytest.raises(TypeError, match="unhashable"):
        core.add_request(["a"], [3])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"watermark": 1.0}, ValueError, "watermark must be at least 0 and below 1, was 1.0"),
        ({"watermark": -0.1}, ValueError, "watermark"),
        ({"watermark": "0.1"}, TypeError, "watermark"),
        ({"max_batch": 0}, ValueError, "max_batch must be at least 1, was 0"),
        ({"max_batch": True}, TypeError, "max_batch"),
        ({"max_step_tokens": 0}, ValueError, "max_step_tokens must be at least 1"),
        ({"max_batch": 8, "max_step_tokens": 7}, ValueError, "max_step_tokens must be at least max_batch = 8, was 7"),
        ({"growth": -1}, ValueError, "growth"),
        ({"max_passes": -1}, ValueError, "max_passes"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """An engine that could not work is not built (vllm#11: watermark values)."""
    cache = NaiveCache(8, 4)
    with pytest.raises(error, match=message):
        EngineCore(ScriptedRunner(cache), cache, **options)


def test_abort_takes_effect_at_the_next_step() -> None:
    """Waiting and running requests end with reason abort and no more tokens; unknown ids are no error."""
    core, cache, _ = make_core(max_batch=1, max_step_tokens=8)
    core.add_request("runs", [1, 2, 3], SamplingParams(max_new_tokens=50))
    core.add_request("waits", [4], SamplingParams(max_new_tokens=50))
    core.step()

    assert [core.abort(name) for name in ("runs", "waits", "nobody")] == [True, True, False]
    assert core.abort("runs")
    outputs = core.step()

    assert [(output.request_id, output.token_ids, output.finish_reason) for output in outputs] == [
        ("runs", (), "abort"),
        ("waits", (), "abort"),
    ]
    assert cache.usage().in_use == 0
    assert not core.has_unfinished
    assert core.stats.finished == {"stop": 0, "length": 0, "abort": 2}


def test_an_abort_does_not_hit_the_next_request_of_that_name() -> None:
    """An abort names the request of its moment: one that finished first and an id used again are left alone."""
    core, _, _ = make_core()
    core.add_request("a", [1], SamplingParams(max_new_tokens=1))
    core._receive()
    core.abort("a")
    core._run(core.scheduler.schedule())
    core.add_request("a", [2], SamplingParams(max_new_tokens=3))

    assert tokens_of(drain(core))["a"] == cold([1], SamplingParams(max_new_tokens=1)) + cold(
        [2], SamplingParams(max_new_tokens=3)
    )


def test_a_failing_runner_leaves_everything_as_it_was() -> None:
    """The exception reaches the caller, every length is as before, and the next step gives the token due."""
    prompts = {"a": [1, 2, 3, 4, 5], "b": [6, 7]}
    params = SamplingParams(max_new_tokens=5)
    core, cache, runner = make_core()
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params)
    outputs = core.step()
    lengths = [sequence.num_tokens for sequence in cache.sequences]
    held = cache.usage().in_use
    runner.fail_next = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            core.step()

        assert [sequence.num_tokens for sequence in cache.sequences] == lengths
        assert cache.usage().in_use == held
        assert cache.in_flight is None
        cache.check()
    rest = tokens_of(drain(core))
    for row, (name, prompt) in enumerate(prompts.items()):
        assert [*outputs[row].token_ids, *rest[name]] == cold(prompt, params)


def test_an_abort_told_during_a_failing_step_is_not_lost() -> None:
    """Outputs that were due when the runner failed come with the next step."""
    core, _, runner = make_core()
    core.add_request("a", [1], SamplingParams(max_new_tokens=2))
    core.add_request("b", [2], SamplingParams(max_new_tokens=2))
    core.step()
    core.abort("a")
    runner.fail_next = 1
    with pytest.raises(RuntimeError, match="on purpose"):
        core.step()

    assert [(output.request_id, output.finish_reason) for output in core.step()] == [("a", "abort"), ("b", "length")]


def test_logits_of_the_wrong_shape_are_refused() -> None:
    """A runner that answers for something else is told both shapes, and the step is taken back."""
    core, cache, runner = make_core()
    runner.vocab = VOCAB + 1
    core.add_request("a", [1], SamplingParams(max_new_tokens=2))
    with pytest.raises(ValueError, match=r"must be \(1, 50\), were \(1, 51\)"):
        core.step()

    assert cache.in_flight is None


def test_pages_taken_by_somebody_else_raise() -> None:
    """If nothing runs and what waits does not fit, the step raises instead of idling for ever; later it goes on."""
    core, cache, _ = make_core(8, 4)
    other = cache.open([1])
    other.pages = [cache._take() for _ in range(7)]
    core.add_request("a", [1] * 8, SamplingParams(max_new_tokens=2))
    with pytest.raises(OutOfPages):
        core.step()
    other.close()

    assert tokens_of(drain(core)) == {"a": cold([1] * 8, SamplingParams(max_new_tokens=2))}


def test_sampled_tokens_depend_on_seed_and_position_only() -> None:
    """The same seeded request alone, among others, and squeezed through preemption: the same tokens."""
    requests = {
        name: ([name + 1] * (6 + name), SamplingParams(temperature=2.0, top_p=0.9, max_new_tokens=16, seed=name))
        for name in range(4)
    }
    expected = {name: cold(*request) for name, request in requests.items()}
    core, _, _ = make_core(12, 4, growth=0, max_step_tokens=8, max_batch=4)
    for name, (prompt, params) in requests.items():
        core.add_request(name, prompt, params)

    assert tokens_of(drain(core)) == expected
    assert core.stats.preemptions > 0
    assert len({tuple(tokens) for tokens in expected.values()}) == 4


def test_an_engine_seed_makes_unseeded_requests_repeatable() -> None:
    """Requests without a seed draw one from the engine's, in order of arrival; other engines draw others."""

    def run(seed: int) -> Any:
        core, _, _ = make_core(seed=seed)
        for name in range(3):
            core.add_request(name, [1], SamplingParams(temperature=5.0, max_new_tokens=12))
        return tokens_of(drain(core))

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(1)[0] != run(1)[1]


def test_metrics_add_up() -> None:
    """Cached and computed tokens make the prompt; the clock's times are in order; stats are the sums."""
    ticks = iter(range(1000))
    core, _, _ = make_core(clock=lambda: float(next(ticks)))
    prompt = list(range(11))
    metrics = []
    for name in "ab":
        core.add_request(name, prompt, SamplingParams(max_new_tokens=4))
        metrics.append(drain(core)[name][-1].metrics)
    first, second = metrics

    assert first is not None
    assert second is not None
    assert (first.cached_tokens, first.prefill_tokens) == (0, 11)
    assert (second.cached_tokens, second.prefill_tokens) == (8, 3)
    assert (second.prompt_tokens, second.new_tokens, second.refound_tokens, second.preemptions) == (11, 4, 0, 0)
    assert second.first_token_at is not None
    assert first.finished_at < second.arrived_at < second.first_token_at < second.finished_at
    assert (core.stats.cached_tokens, core.stats.prefill_tokens, core.stats.decode_tokens) == (8, 14, 6)
    assert (core.stats.new_tokens, core.stats.steps) == (8, 8)


class _Forgetful(NaiveCache):
    """A cache that keeps nothing: `num_tokens` stays 0, as the baseline `none` does."""

    def end_step(self, batch: Any, *, keep: Any = None) -> None:
        self.abandon_step(batch)


@pytest.mark.parametrize("budget", [4, 9, 64])
def test_a_cache_that_keeps_nothing_is_fed_everything(budget: int) -> None:
    """Where no token outlives its step every step feeds whole texts, and the answers are the same."""
    cache = _Forgetful(1024, 4)
    core = EngineCore(ScriptedRunner(cache), cache, max_batch=4, max_step_tokens=budget)
    prompts = {name: [name + 2] * (3 + 4 * name) for name in range(4)}
    params = SamplingParams(max_new_tokens=5)
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params)

    assert tokens_of(drain(core)) == {name: cold(prompt, params) for name, prompt in prompts.items()}


def test_submit_and_abort_from_other_threads() -> None:
    """Threads that add and abort while one thread steps: every request ends once, whole or aborted, and nothing leaks.

    The contract for sglang-omni#1704: the cache is only ever touched by the stepping thread.
    """
    core, cache, _ = make_core(48, 4, max_batch=8, max_step_tokens=16)
    stepping = threading.get_ident()
    owners = set()
    inner = cache.begin_step
    cache.begin_step = lambda inputs: (owners.add(threading.get_ident()), inner(inputs))[1]  # type: ignore[method-assign,func-returns-value]

    def submit(thread: int) -> None:
        for number in range(40):
            name = (thread, number)
            core.add_request(name, [thread + 1, number % VOCAB, 3], SamplingParams(max_new_tokens=4))
            if number % 3 == 0:
                core.abort(name)

    threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    outputs: dict[Any, list[StepOutput]] = {}
    while any(thread.is_alive() for thread in threads) or core.has_unfinished:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    for thread in threads:
        thread.join()

    assert len(outputs) == 160
    assert owners == {stepping}
    for (thread_number, number), row in outputs.items():
        assert [output.finished for output in row] == [False] * (len(row) - 1) + [True]
        if row[-1].finish_reason == "length":
            expected = cold([thread_number + 1, number % VOCAB, 3], SamplingParams(max_new_tokens=4))
            assert [token for output in row for token in output.token_ids] == expected
        else:
            assert number % 3 == 0
    assert cache.usage().in_use == 0
    cache.check()


def test_two_threads_cannot_step_at_once() -> None:
    """A second thread inside `step` is told so; the first goes on."""
    core, _, runner = make_core()
    core.add_request("a", [1], SamplingParams(max_new_tokens=2))
    errors: list[BaseException] = []

    def other() -> None:
        try:
            core.step()
        except RuntimeError as error:
            errors.append(error)

    forward = runner.forward

    def slow(batch: Any) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return forward(batch)

    runner.forward = slow  # type: ignore[method-assign,assignment]
    core.step()
    runner.forward = forward  # type: ignore[method-assign]

    assert ["by one thread at a time" in str(error) for error in errors] == [True]
    assert tokens_of(drain(core))["a"] == cold([1], SamplingParams(max_new_tokens=2))[1:]

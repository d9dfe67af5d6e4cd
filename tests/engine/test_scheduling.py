"""Who runs: no thrash, no starvation, shared prefixes, and the same answers under any pressure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine import SamplingParams
from pagedkv.engine.scheduler import _common_prefix
from tests.engine.scripted import VOCAB, cold, drain, make_core, tokens_of

if TYPE_CHECKING:
    from pagedkv.engine import EngineCore, RequestMetrics, StepOutput


def metrics_of(outputs: dict[Any, list[StepOutput]]) -> dict[Any, RequestMetrics]:
    """Return every finished request's metrics."""
    return {name: row[-1].metrics for name, row in outputs.items() if row[-1].metrics is not None}


def watch_victims(core: EngineCore) -> list[tuple[Any, list[Any]]]:
    """Return a list that grows by (victim, those who ran beside it) with every preemption."""
    seen: list[tuple[Any, list[Any]]] = []
    inner = core.scheduler.preempt_youngest

    def preempt() -> Any:
        running = [request.request_id for request in core.scheduler.running]
        victim = inner()
        if victim is not None:
            seen.append((victim.request_id, running))
        return victim

    core.scheduler.preempt_youngest = preempt  # type: ignore[method-assign]
    return seen


def test_no_thrash_scenario() -> None:
    """12 pages of 4, chunks of 4: B's 8-page prompt beside A's growth is computed at most twice (vllm#25538, #44594).

    Each step does useful work, and both finish within the tokens there are to feed.
    """
    core, cache, runner = make_core(12, 4, max_step_tokens=5, max_batch=4)
    a, b = list(range(24)), list(range(10, 42))
    core.add_request("A", a, SamplingParams(max_new_tokens=9))
    for _ in range(6):
        core.step()
    core.add_request("B", b, SamplingParams(max_new_tokens=4))
    outputs = drain(core, most_steps=60)
    metrics = metrics_of(outputs)

    assert metrics["B"].prefill_tokens <= 2 * len(b)
    assert metrics["A"].preemptions == 0
    assert all(sum(step.values()) > 0 for step in runner.fed)
    assert tokens_of(outputs)["B"] == cold(b, SamplingParams(max_new_tokens=4))
    assert cache.usage().in_use == 0


@pytest.mark.parametrize("watermark", [0.0, 0.5, 0.99])
def test_a_watermark_never_blocks_the_first_request(watermark: float) -> None:
    """On an empty pool whatever fits enters, however high the watermark (vllm#11)."""
    core, _, _ = make_core(10, 4, watermark=watermark)
    core.add_request("a", [1] * 30, SamplingParams(max_new_tokens=11))

    assert core.step() != []


def test_a_watermark_keeps_pages_for_those_who_run() -> None:
    """Beside others a new request must leave the watermark free."""

    def running_after_a_step(watermark: float) -> int:
        core, _, _ = make_core(10, 4, watermark=watermark, growth=0)
        core.add_request("a", [1] * 16, SamplingParams(max_new_tokens=4))
        core.step()
        core.add_request("b", [2] * 16, SamplingParams(max_new_tokens=4))
        core.step()
        return core.num_running

    assert running_after_a_step(0.0) == 2
    assert running_after_a_step(0.3) == 1


def test_admission_counts_what_unfinished_prompts_still_need() -> None:
    """Two 6-page prompts do not enter a 10-page pool together only because neither has been computed yet."""
    core, _, _ = make_core(10, 4, max_step_tokens=4, max_batch=4)
    for name in "ab":
        core.add_request(name, [ord(name) - 90] * 24, SamplingParams(max_new_tokens=2))
    core.step()

    assert core.num_running == 1
    assert {name: len(row) for name, row in tokens_of(drain(core)).items()} == {"a": 2, "b": 2}
    assert core.stats.preemptions == 0


def test_small_ones_pass_a_blocked_large_one() -> None:
    """20 pages, R holds 12: H (15 pages) must wait, S1 and S2 (2 each) need not; all are bounded (vllm#31731)."""
    core, _, _ = make_core(20, 4, max_batch=8)
    core.add_request("R", list(range(40)), SamplingParams(max_new_tokens=9))
    core.step()
    core.add_request("H", [5] * 50, SamplingParams(max_new_tokens=11))
    for name in ("S1", "S2"):
        core.add_request(name, [int(name[1])] * 5, SamplingParams(max_new_tokens=4))
    produced = [output.request_id for output in core.step()]
    ends = list(drain(core, most_steps=40))

    assert produced == ["R", "S1", "S2"]
    assert set(ends) == {"R", "H", "S1", "S2"}
    assert core.stats.preemptions == 0


@pytest.mark.parametrize("max_passes", [0, 1, 5])
def test_a_large_one_gets_its_turn(max_passes: int) -> None:
    """An endless stream of small requests: at most ``max_passes`` of them enter before the large one does."""
    core, _, _ = make_core(20, 4, max_batch=32, max_passes=max_passes)
    core.add_request("R", list(range(40)), SamplingParams(max_new_tokens=9))
    core.step()
    core.add_request("H", [5] * 60, SamplingParams(max_new_tokens=11))
    passed: set[Any] = set()
    for number in range(40):
        core.add_request(number, [number % VOCAB] * 5, SamplingParams(max_new_tokens=4))
        produced = {output.request_id for output in core.step()}
        if "H" in produced:
            break
        passed |= produced - {"R"}

    assert "H" in produced
    assert len(passed) == max_passes
    drain(core)


def test_a_step_does_not_look_through_a_long_queue() -> None:
    """With 200 requests blocked for pages a step asks the cache for the first few only, whatever the queue's length."""
    core, cache, _ = make_core(20, 4, max_batch=8)
    core.add_request("R", list(range(40)), SamplingParams(max_new_tokens=20))
    core.step()
    for number in range(200):
        core.add_request(number, [number % VOCAB] * 60, SamplingParams(max_new_tokens=4))
    asked = []
    inner = cache.room
    cache.room = lambda tokens, **options: (asked.append(tokens), inner(tokens, **options))[1]  # type: ignore[method-assign,func-returns-value]
    core.step()

    assert len(asked) == 8


def test_whoever_passes_never_pushes_anybody_out() -> None:
    """A request that passes must fit to its very end beside all that run; one that would not waits in line."""
    core, _, _ = make_core(20, 4, max_batch=8, growth=2)
    core.add_request("R", list(range(40)), SamplingParams(max_new_tokens=17))
    core.step()
    core.add_request("H", [5] * 60, SamplingParams(max_new_tokens=11))
    core.add_request("grows", [6] * 5, SamplingParams(max_new_tokens=40))
    core.add_request("small", [7] * 5, SamplingParams(max_new_tokens=4))
    produced = [output.request_id for output in core.step()]

    assert produced == ["R", "small"]
    drain(core)


def test_the_youngest_leaves_and_comes_back_once() -> None:
    """When pages run out the youngest is preempted, waits until it fits to its end, and is never preempted again."""
    core, cache, _ = make_core(14, 4, growth=0, max_batch=4, max_step_tokens=32)
    victims = watch_victims(core)
    prompts = {name: [name + 1] * 8 for name in range(4)}
    params = SamplingParams(max_new_tokens=20)
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params)
    outputs = drain(core)
    metrics = metrics_of(outputs)

    assert [victim for victim, _ in victims] == [3, 2]
    assert all(victim == running[-1] for victim, running in victims)
    assert [metrics[name].preemptions for name in range(4)] == [0, 0, 1, 1]
    assert all(m.prefill_tokens <= 2 * (m.prompt_tokens + m.new_tokens) for m in metrics.values())
    assert tokens_of(outputs) == {name: cold(prompt, params) for name, prompt in prompts.items()}
    assert cache.usage().in_use == 0


def test_coming_back_waits_for_room_to_the_very_end() -> None:
    """A victim whose next tokens fit again, but not its end beside its elder's, stays out: else it would leave twice.

    14 pages: B leaves at 5 + 5 + 5 pages; when C has ended 9 are free and B needs 5 now, but 7 at its end beside the
    7 that A may still take.
    """
    core, _, _ = make_core(14, 4, growth=0, max_batch=4, max_step_tokens=32)
    victims = watch_victims(core)
    requests = {"A": ([1] * 8, 40), "C": ([2] * 8, 12), "B": ([3] * 8, 20)}
    for name, (prompt, count) in requests.items():
        core.add_request(name, prompt, SamplingParams(max_new_tokens=count))
    outputs = drain(core)

    assert [victim for victim, _ in victims] == ["B"]
    assert outputs["B"][-1].finish_reason == "length"
    assert tokens_of(outputs)["B"] == cold([3] * 8, SamplingParams(max_new_tokens=20))


def test_seniority_never_overtakes_one_that_came_back() -> None:
    """An older request that enters late stands before younger ones, but after whoever was preempted once."""
    core, _, _ = make_core(64, 4, max_batch=8)
    for name in range(7):
        core.add_request(name, [name + 1] * 3, SamplingParams(max_new_tokens=4))
    core.step()
    requests = list(core.scheduler.running)
    late, last = requests[2], requests[6]
    core.scheduler.running[:] = [requests[0], requests[3], requests[5]]
    requests[3].preemptions = 1

    assert core.scheduler._place(late) == 2
    assert core.scheduler._place(last) == 3
    requests[3].preemptions = 0
    assert core.scheduler._place(late) == 1


def test_what_is_found_again_is_no_cache_hit() -> None:
    """Distinct prompts under preemption: cached tokens stay 0, what a victim finds again is told apart (vllm#25780)."""
    core, _, _ = make_core(13, 4, growth=0, max_batch=4, max_step_tokens=32)
    for name in range(4):
        core.add_request(name, [name + 1] * 8, SamplingParams(max_new_tokens=20))
    metrics = metrics_of(drain(core))

    assert core.stats.preemptions > 0
    assert [m.cached_tokens for m in metrics.values()] == [0, 0, 0, 0]
    assert core.stats.cached_tokens == 0
    assert core.stats.refound_tokens == sum(m.refound_tokens for m in metrics.values())
    for m in metrics.values():
        assert m.preemptions == 1 or (m.prefill_tokens, m.refound_tokens) == (8, 0)


def test_chats_that_share_a_prompt_compute_it_once() -> None:
    """16 chats with one system prompt arriving together: the first computes it, the others wait and reuse it."""
    core, _, _ = make_core(256, 4, max_batch=16, max_step_tokens=256)
    system = [value % VOCAB for value in range(40)]
    prompts = {name: [*system, name, name + 1, name + 2] for name in range(16)}
    params = SamplingParams(max_new_tokens=4)
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params)
    outputs = drain(core)

    assert tokens_of(outputs) == {name: cold(prompt, params) for name, prompt in prompts.items()}
    assert core.stats.cached_tokens == 15 * 40
    assert core.stats.prefill_tokens == 43 + 15 * 3
    assert core.stats.steps == 5


def test_others_do_not_wait_for_a_prefix_that_is_not_theirs() -> None:
    """Only those whose next pages are being computed wait; a stranger, and one without a full page in common, enter."""
    core, _, _ = make_core(64, 4, max_batch=8, max_step_tokens=64)
    core.add_request("first", [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_new_tokens=1))
    core.add_request("same", [1, 2, 3, 4, 5, 6, 7, 8, 10], SamplingParams(max_new_tokens=1))
    core.add_request("three", [1, 2, 3, 9, 9, 9], SamplingParams(max_new_tokens=1))
    core.add_request("stranger", [9, 8, 7, 6, 5], SamplingParams(max_new_tokens=1))

    assert [output.request_id for output in core.step()] == ["first", "three", "stranger"]
    assert [output.request_id for output in core.step()] == ["same"]


def test_waiting_for_a_prefix_ends_with_its_elder() -> None:
    """If the elder is aborted in the middle of its prefill, the one that waits computes the rest itself."""
    core, _, _ = make_core(64, 4, max_batch=2, max_step_tokens=8)
    system = list(range(32))
    core.add_request("elder", [*system, 1], SamplingParams(max_new_tokens=3))
    core.add_request("waits", [*system, 2], SamplingParams(max_new_tokens=3))
    core.step()
    core.abort("elder")
    outputs = drain(core)

    assert tokens_of(outputs)["waits"] == cold([*system, 2], SamplingParams(max_new_tokens=3))
    assert metrics_of(outputs)["waits"].cached_tokens == 8


def test_room_is_asked_at_admission() -> None:
    """A queued request's hits may vanish or appear before it enters; cached + computed is its prompt (vllm#17305)."""
    core, cache, _ = make_core(8, 4, max_batch=2, max_step_tokens=32)
    params = SamplingParams(max_new_tokens=3)
    shared = list(range(12))
    core.add_request("seeds", shared, params)
    drain(core)
    core.add_request("holds", [40] * 24, SamplingParams(max_new_tokens=9))
    core.add_request("queued", [*shared, 5], params)
    outputs = drain(core)
    metrics = metrics_of(outputs)["queued"]

    assert tokens_of(outputs)["queued"] == cold([*shared, 5], params)
    assert metrics.cached_tokens + metrics.prefill_tokens == 13
    assert cache.usage().in_use == 0


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
@settings(max_examples=60)
def test_common_prefix_is_the_naive_count(a: list[int], b: list[int]) -> None:
    """The bisected length of the common prefix is what counting one by one gives."""
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1

    assert _common_prefix(a, b) == expected
    assert _common_prefix([*a, *b], [*a, *b, 1]) == len(a) + len(b)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step at which it arrives
        st.sampled_from([(), tuple(range(8)), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)]),  # what it shares with others
        st.lists(st.integers(0, 3), min_size=1, max_size=14),
        st.integers(1, 14),  # max_new_tokens
        st.sampled_from([0.0, 3.0]),  # temperature
        st.one_of(st.none(), st.none(), st.integers(0, 25)),  # the step at which it is aborted
    ),
    min_size=1,
    max_size=10,
)


def _chaos(
    requests: list[tuple[Any, ...]], *, pages: int, page_size: int, budget: int, batch: int, prefix_cache: bool
) -> None:
    """Serve ``requests`` under pressure; every answer must be the cold one, and every promise kept."""
    core, cache, runner = make_core(
        pages, page_size, prefix_cache=prefix_cache, max_batch=batch, max_step_tokens=max(budget, batch), growth=2,
        max_passes=2, rule=lambda text: (sum(text) * 7 + len(text)) % 20, eos_token_ids=[19],
    )  # fmt: skip
    victims = watch_victims(core)
    accepted: dict[int, tuple[list[int], SamplingParams]] = {}
    outputs: dict[Any, list[StepOutput]] = {}
    for step in range(600):
        for name, (arrives, shared, own, new, temperature, _) in enumerate(requests):
            if arrives == step:
                params = SamplingParams(max_new_tokens=new, temperature=temperature, seed=name)
                prompt = [*shared, *own]
                fits = len(prompt) + new - 1 <= pages * page_size
                if fits:
                    core.add_request(name, prompt, params)
                    accepted[name] = (prompt, params)
                else:
                    with pytest.raises(ValueError, match="that the cache can ever hold"):
                        core.add_request(name, prompt, params)
            if requests[name][5] == step:
                core.abort(name)
        fed = len(runner.fed)
        produced = core.step()
        cache.check()
        for output in produced:
            outputs.setdefault(output.request_id, []).append(output)

        assert len(produced) == len({output.request_id for output in produced})
        assert len(runner.fed) == fed + 1 or core.num_waiting + core.num_running == 0
        if not core.has_unfinished and step > 12:
            break
    assert not core.has_unfinished
    assert cache.usage().in_use == 0
    assert set(outputs) == set(accepted)
    assert len({victim for victim, _ in victims}) == len(victims)
    assert all(victim != running[0] for victim, running in victims)
    for name, (prompt, params) in accepted.items():
        tokens = [token for output in outputs[name] for token in output.token_ids]
        expected = cold(prompt, params, rule=lambda text: (sum(text) * 7 + len(text)) % 20, eos_token_ids=[19])
        metrics = outputs[name][-1].metrics

        assert metrics is not None
        assert metrics.prefill_tokens <= 2 * (len(prompt) + len(tokens))
        assert metrics.preemptions <= 1
        if outputs[name][-1].finish_reason == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected


@given(
    REQUESTS,
    st.integers(3, 16),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 3, 8, 64]),
    st.integers(1, 5),
    st.booleans(),
)
@settings(max_examples=150)
def test_chaos(
    requests: list[tuple[Any, ...]], pages: int, page_size: int, budget: int, batch: int, prefix_cache: bool
) -> None:
    """Any arrivals, aborts and pool: cold answers, no double preemption, no leak, no idle step, an end."""
    _chaos(requests, pages=pages, page_size=page_size, budget=budget, batch=batch, prefix_cache=prefix_cache)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(
    REQUESTS.filter(lambda requests: len(requests) > 4),
    st.integers(3, 24),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3, 8, 64]),
    st.integers(1, 8),
    st.booleans(),
)
@settings(max_examples=1500)
def test_chaos_long(
    requests: list[tuple[Any, ...]], pages: int, page_size: int, budget: int, batch: int, prefix_cache: bool
) -> None:
    """The same with thousands of examples."""
    _chaos(requests, pages=pages, page_size=page_size, budget=budget, batch=batch, prefix_cache=prefix_cache)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_nothing_leaks_over_many_requests(prefix_cache: bool) -> None:
    """150 requests of every length, exact multiples of the page among them: in use is 0 after each (imp#1115)."""
    core, cache, _ = make_core(32, 16, prefix_cache=prefix_cache)
    for number in range(150):
        prompt = [number % VOCAB] * (1 + number * 7 % 70)
        core.add_request(number, prompt, SamplingParams(max_new_tokens=1 + number % 40))
        drain(core)

        assert cache.usage().in_use == 0
    cache.check()

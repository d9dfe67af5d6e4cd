"""The step loop on the real cache: every token's content checked through real pages, and the books after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.cache import PagedKVCache
from pagedkv.engine import EngineCore, SamplingParams, StepOutput
from pagedkv.spec import KVSpec, LayerKV
from tests.engine.scripted import VOCAB, cold, hashed

if TYPE_CHECKING:
    from pagedkv.backend import StepBatch

SPEC = KVSpec(layers=(LayerKV(1, 2, 2),), max_len=256, vocab_size=VOCAB)


class ContentRunner:
    """Writes (token, position) as K, reads a whole text back through its pages, and answers `hashed` of it."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache

    def forward(self, batch: StepBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Check positions and return logits that peak at the answer."""
        assert rows is None, "nobody asked for more than last rows"
        marks = torch.stack([batch.input_ids, batch.position_ids], dim=-1).float()[:, None, :]
        self.cache.write(0, marks, marks, batch)
        logits = torch.zeros(len(batch.sequences), VOCAB)
        for row, (sequence, count) in enumerate(zip(batch.sequences, batch.q_lens, strict=True)):
            length = sequence.num_tokens + count
            table = torch.from_numpy(sequence.block_table().astype("int64"))
            stored = self.cache.k_pages[0][table].transpose(1, 2).reshape(-1, 2)[:length]
            assert stored[:, 1].tolist() == list(range(length))
            logits[row, hashed([int(token) for token in stored[:, 0].tolist()])] = 1.0
        return logits


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 10),  # the step at which it arrives
        st.integers(0, 20),  # how much of a common text it begins with
        st.lists(st.integers(0, 3), min_size=1, max_size=10),
        st.integers(1, 14),  # max_new_tokens
        st.one_of(st.none(), st.none(), st.integers(0, 20)),  # the step at which it is aborted
    ),
    min_size=1,
    max_size=8,
)


@given(REQUESTS, st.integers(4, 16), st.sampled_from([1, 2, 4]), st.sampled_from([2, 5, 64]), st.booleans())
@settings(max_examples=100)
def test_chaos_on_the_paged_cache(
    requests: list[tuple[Any, ...]], usable: int, page_size: int, budget: int, prefix_cache: bool
) -> None:
    """Any arrivals, aborts and pool sizes: cold answers, nobody preempted twice, and no page left at the end.

    Sub-page hits, merged duplicates and copies of the real allocator are in play.
    """
    cache = PagedKVCache(
        SPEC, num_pages=usable + 1, page_size=page_size, max_batch=4, prefix_cache=prefix_cache, check=True
    )
    for tensor in cache.page_tensors:
        tensor.fill_(float("nan"))
    core = EngineCore(
        ContentRunner(cache), cache, vocab_size=VOCAB, max_len=256, max_batch=min(4, budget), max_step_tokens=budget,
        watermark=0.0, growth=2, max_passes=2, prefix_page_size=page_size if prefix_cache else None, seed=0,
    )  # fmt: skip
    accepted: dict[int, tuple[list[int], SamplingParams]] = {}
    outputs: dict[Any, list[StepOutput]] = {}
    for step in range(600):
        for name, (arrives, shared, own, new, aborted) in enumerate(requests):
            prompt, params = [*range(shared), *own], SamplingParams(max_new_tokens=new)
            if arrives == step and len(prompt) + new - 1 <= usable * page_size:
                core.add_request(name, prompt, params)
                accepted[name] = (prompt, params)
            if aborted == step:
                core.abort(name)
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        cache.allocator.check()
        if not core.has_unfinished and step > 10:
            break

    assert not core.has_unfinished
    assert cache.usage().in_use == 0
    assert set(outputs) == set(accepted)
    for name, (prompt, params) in accepted.items():
        tokens = [token for output in outputs[name] for token in output.token_ids]
        expected, metrics = cold(prompt, params), outputs[name][-1].metrics

        assert metrics is not None
        assert metrics.preemptions <= 1
        assert metrics.prefill_tokens <= 2 * (len(prompt) + len(tokens))
        assert tokens == (expected[: len(tokens)] if outputs[name][-1].finish_reason == "abort" else expected)


def test_the_longest_that_fits_the_pool_is_served_after_a_partial_hit() -> None:
    """A request as large as the pool that finds part of a page still gets through: the copy's source is given back."""
    cache = PagedKVCache(SPEC, num_pages=5, page_size=4, max_batch=2, check=True)
    core = EngineCore(ContentRunner(cache), cache, vocab_size=VOCAB, max_len=256, max_batch=2, prefix_page_size=4)
    for name, prompt in enumerate(([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 9, 9, 9, 9])):
        params = SamplingParams(max_new_tokens=17 - len(prompt))
        core.add_request(name, prompt, params)
        tokens: list[int] = []
        while core.has_unfinished:
            tokens += [token for output in core.step() for token in output.token_ids]

        assert tokens == cold(prompt, params)
    assert core.max_stored == 16
    assert cache.usage().in_use == 0

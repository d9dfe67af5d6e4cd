"""The check for cache backends: all of ours pass it, and each way of being wrong is noticed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from pagedkv.cache import PagedKVCache
from pagedkv.engine.baselines.concat import ConcatCache
from pagedkv.engine.baselines.none import NoCache
from pagedkv.engine.baselines.static import StaticCache
from pagedkv.testing import BackendError, check_cache_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pagedkv.backend import StepBatch
    from pagedkv.spec import KVSpec

STEPS = settings(max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
QUICK = settings(STEPS, max_examples=60, phases=[Phase.generate], print_blob=False)


def paged(spec: KVSpec) -> PagedKVCache:
    """Return a cache of twelve pages of four slots: two or three sequences fill it."""
    return PagedKVCache(spec, num_pages=13, page_size=4, check=True)


@pytest.mark.parametrize(
    "make_backend",
    [
        paged,
        lambda spec: PagedKVCache(spec, num_pages=13, page_size=4, prefix_cache=False),
        lambda spec: ConcatCache(spec, max_tokens=40),
        lambda spec: StaticCache(spec, max_batch=4),
        NoCache,
    ],
    ids=["paged", "paged-unshared", "concat", "static", "none"],
)
@pytest.mark.parametrize("window", [None, 5])
def test_our_backends_pass(make_backend: Callable[[KVSpec], Any], window: int | None) -> None:
    """Paged or dense, with and without a window: the protocol holds whatever is done."""
    check_cache_backend(make_backend, window=window, settings=STEPS)


class Leaky(PagedKVCache):
    """Keeps a sequence for itself."""

    def open(self, tokens: Any, **options: Any) -> Any:
        """Open one more that nobody closes, and have it hold a page."""
        hoard = self.allocator.open([])
        if self.allocator.stats().free:
            hoard.reserve(1)
        return super().open(tokens, **options)


class Careless(PagedKVCache):
    """Writes nothing beyond the first token of a step."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store the first row's K and V for all."""
        super().write(layer, k[:1].expand_as(k).contiguous(), v, batch)


class Stubborn(PagedKVCache):
    """Keeps all tokens of a step."""

    def end_step(self, batch: StepBatch, *, keep: Any = None) -> None:
        """Ignore ``keep``."""
        super().end_step(batch)


class Nosy(PagedKVCache):
    """Makes room when it is only asked for it."""

    def room(self, tokens: Any, **options: Any) -> Any:
        """Open a sequence."""
        self.allocator.open(tokens).reserve(1)
        return super().room(tokens, **options)


class Unordered(PagedKVCache):
    """Hands out histories in another order than it was asked for."""

    def gather(self, layer: int, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn K and V around."""
        k, v = super().gather(layer, batch)
        return k.flip(0), v.flip(0)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Leaky, "nothing may be held"),
        (Careless, "must attend to its own text"),
        (Stubborn, "num_tokens must be"),
        (Nosy, "room must change nothing"),
        (Unordered, "gather must return the stored K of layer"),
    ],
)
def test_check_notices_a_wrong_backend(kind: type[PagedKVCache], complaint: str) -> None:
    """Each way of breaking the protocol is found and named."""

    def make_backend(spec: KVSpec) -> Any:
        return kind(spec, num_pages=40, page_size=4)

    with pytest.raises((BackendError, ExceptionGroup)) as caught:
        check_cache_backend(make_backend, settings=QUICK)
    error = caught.value
    messages = [str(one) for one in error.exceptions] if isinstance(error, ExceptionGroup) else [str(error)]

    assert any(re.search(complaint, message) for message in messages), messages

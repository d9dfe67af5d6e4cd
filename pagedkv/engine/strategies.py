"""The paged cache of an engine by its memory strategy: as asked, or decided once from what was declared.

Takes a model, a strategy's name and sizes; gives a cache and a `StrategyChoice` that says why; refuses a strategy that
the model does not bear, unless it was the engine's own choice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedkv.cache import PagedKVCache
from pagedkv.engine.defaults import BASELINE_BATCH, MOST_BATCH
from pagedkv.recompute import RecomputeCache, layers_to_recompute
from pagedkv.sizing import free_memory, parse_memory
from pagedkv.sliding import DEFAULT_SINK_TOKENS, DEFAULT_WINDOW, SlidingCache
from pagedkv.spec import KVSpec, UnsupportedModel
from pagedkv.strategy import STRATEGIES, estimate_kv_bytes, strategy_for
from pagedkv.transformers import observe_kv_spec

if TYPE_CHECKING:
    from pagedkv.strategy import Strategy

_log = logging.getLogger("pagedkv")


class StrategyChoice(NamedTuple):
    """What an engine keeps of K and V, and why."""

    name: Strategy
    reason: str


class Sizes(NamedTuple):
    """What a caller said of memory; None where nothing was said."""

    memory: int | str | None
    num_pages: int | None
    page_size: int
    max_batch: int | None
    max_len: int


def make_paged(
    model: Any,
    strategy: str,
    sizes: Sizes,
    *,
    window: int = DEFAULT_WINDOW,
    num_sink_tokens: int = DEFAULT_SINK_TOKENS,
    **options: Any,
) -> tuple[PagedKVCache, StrategyChoice]:
    """Return the cache of ``model`` by ``strategy``, and the choice; ``options`` are `PagedKVCache.from_spec`'s.

    ``"auto"`` decides by `choose_strategy` from ``max_batch`` (32 where none was declared) texts of ``max_len`` tokens
    within the memory given, else within what is free; where it would recompute and the model does not bear it, it keeps
    everything, and requests that do not fit wait or are preempted. What it decided is logged.

    Raises:
        ValueError: for an unknown strategy, or as the cache; `UnsupportedModel` where it is not possible.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, was {strategy!r}")
    placed = {
        "memory": sizes.memory, "num_pages": sizes.num_pages, "page_size": sizes.page_size, "max_len": sizes.max_len,
        "max_batch": sizes.max_batch or MOST_BATCH, "dtype": model.dtype, "device": model.device, **options,
    }  # fmt: skip
    choice = _decided(model, strategy, sizes)
    if choice.name == "recompute":
        try:
            return RecomputeCache.of(model, num_layers=_num_layers(model, sizes), **placed), choice
        except UnsupportedModel as error:
            if strategy != "auto":
                raise
            choice = StrategyChoice("full", f"{choice.reason}: recompute, but {error}")
    if strategy == "auto":
        _log.info("memory strategy %s: %s", *choice)
    spec = observe_kv_spec(model)
    if choice.name == "sliding":
        return SlidingCache.of(spec, window=window, num_sink_tokens=num_sink_tokens, **placed), choice
    return PagedKVCache.from_spec(spec, **placed), choice


def _decided(model: Any, strategy: Any, sizes: Sizes) -> StrategyChoice:
    if strategy != "auto":
        return StrategyChoice(strategy, "as asked")
    batch = sizes.max_batch or BASELINE_BATCH
    needed = estimate_kv_bytes(model.config, batch, sizes.max_len, model.dtype)
    limit = _limit(model, sizes)
    reason = f"{batch} texts of {sizes.max_len} tokens take {needed:,} bytes, {needed / limit:.0%} of {limit:,}"
    return StrategyChoice(strategy_for(needed, limit), reason)


def _limit(model: Any, sizes: Sizes) -> int:
    if sizes.memory is not None:
        return parse_memory(sizes.memory)
    if sizes.num_pages is not None:
        bytes_per_token = KVSpec.from_config(model.config).bytes_per_token(model.dtype)
        return sizes.num_pages * sizes.page_size * bytes_per_token
    return free_memory(model.device)


def _num_layers(model: Any, sizes: Sizes) -> int | None:
    """Return how many layers must keep input states for what was declared; None, all, where no batch was."""
    if sizes.max_batch is None:
        return None
    spec = KVSpec.from_config(model.config)
    width = model.config.get_text_config(decoder=True).hidden_size
    return layers_to_recompute(spec, width, sizes.max_batch * sizes.max_len, model.dtype, _limit(model, sizes))

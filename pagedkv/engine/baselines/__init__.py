"""Baseline cache backends: what serving looks like without pages, behind the same protocol.

`NoCache` recomputes everything, `ConcatCache` grows tensors by concatenation, `StaticCache` reserves the longest
length for every sequence. They are here to be run and measured beside `PagedKVCache`, and answer the same.
"""

from pagedkv.engine.baselines.concat import ConcatCache
from pagedkv.engine.baselines.none import NoCache
from pagedkv.engine.baselines.static import StaticCache

BASELINES = {"none": NoCache, "concat": ConcatCache, "static": StaticCache}

__all__ = ["BASELINES", "ConcatCache", "NoCache", "StaticCache"]

"""pagedkv: a paged KV-cache memory manager for LLM inference that stands alone.

Public names load on first use (PEP 562), so that ``import pagedkv.allocator`` brings in no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "AsyncEngine": "pagedkv.engine",
    "BlockAllocator": "pagedkv.allocator",
    "OutOfPages": "pagedkv.allocator",
    "CacheBackend": "pagedkv.backend",
    "PagedCache": "pagedkv.transformers",
    "PagedKVCache": "pagedkv.cache",
    "Engine": "pagedkv.engine",
    "SamplingParams": "pagedkv.engine",
    "choose_strategy": "pagedkv.strategy",
    "estimate_kv_bytes": "pagedkv.strategy",
}

__all__ = [
    "AsyncEngine",
    "BlockAllocator",
    "CacheBackend",
    "Engine",
    "OutOfPages",
    "PagedCache",
    "PagedKVCache",
    "SamplingParams",
    "__version__",
    "choose_strategy",
    "estimate_kv_bytes",
]

if TYPE_CHECKING:
    from pagedkv.allocator import BlockAllocator, OutOfPages
    from pagedkv.backend import CacheBackend
    from pagedkv.cache import PagedKVCache
    from pagedkv.engine import AsyncEngine, Engine, SamplingParams
    from pagedkv.strategy import choose_strategy, estimate_kv_bytes
    from pagedkv.transformers import PagedCache


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

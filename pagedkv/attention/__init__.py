"""Paged attention: reads K and V through block tables, writes them by slot, copies pages.

Takes page tensors, block tables and lengths; gives attention output. It knows no allocator, no model and no
request: whoever holds the pages says where they are. ``docs/memory-layout.md`` specifies the memory.
"""

from .api import copy_pages, paged_attention, write_kv
from .backends import backend_names
from .batch import AttentionBatch
from .layer_spec import LayerSpec
from .quantise import KV_QUANTS, dequantise, quantise

__all__ = [
    "KV_QUANTS",
    "AttentionBatch",
    "LayerSpec",
    "backend_names",
    "copy_pages",
    "dequantise",
    "paged_attention",
    "quantise",
    "write_kv",
]

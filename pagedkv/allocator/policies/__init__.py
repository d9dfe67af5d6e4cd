"""Eviction policies, one a file; each says which paper it follows and where it departs from it.

Takes the calls of `EvictionPolicy`, gives victims, and refuses to know sequences, tables and tokens.
"""

from .arc import ARC
from .lfu import LFU
from .lru import LRU
from .priority import Priority
from .s3fifo import S3FIFO
from .slru import SLRU

__all__ = ["ARC", "LFU", "LRU", "S3FIFO", "SLRU", "Priority"]

"""The block allocator: pages, references, block tables and the prefix index, in plain integers.

Takes token ids and counts, gives page ids, and refuses to know tensors, requests and model configs.
"""

from .block_allocator import BlockAllocator
from .errors import (
    BeyondWindow,
    CopiesPending,
    ForeignSequence,
    InvariantViolation,
    NotReserved,
    OutOfPages,
    PromptMismatch,
    ReservationOpen,
    SequenceClosed,
    WrongThread,
)
from .eviction import LRU, EvictionPolicy
from .groups import FullAttention, SlidingWindow
from .ledger import Room
from .lifecycle import ResetReport
from .namespace import Media, Namespace
from .sequence import Sequence
from .stats import Stats

__all__ = [
    "LRU",
    "BeyondWindow",
    "BlockAllocator",
    "CopiesPending",
    "EvictionPolicy",
    "ForeignSequence",
    "FullAttention",
    "InvariantViolation",
    "Media",
    "Namespace",
    "NotReserved",
    "OutOfPages",
    "PromptMismatch",
    "ReservationOpen",
    "ResetReport",
    "Room",
    "Sequence",
    "SequenceClosed",
    "SlidingWindow",
    "Stats",
    "WrongThread",
]

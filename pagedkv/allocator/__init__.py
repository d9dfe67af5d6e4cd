"""The block allocator: pages, references, block tables and the prefix index, in plain integers.

Takes token ids and counts, gives page ids, and refuses to know tensors, requests and model configs.
"""

from .block_allocator import BlockAllocator
from .content_hash import content_hashes
from .errors import (
    AlreadyUnpinned,
    BeyondWindow,
    CopiesPending,
    ForeignSequence,
    InvariantViolation,
    NotReserved,
    OutOfPages,
    PlanOpen,
    PlanSettled,
    PromptMismatch,
    ReservationOpen,
    SequenceClosed,
    SequenceSwapped,
    StepEnded,
    WrongThread,
)
from .eviction import ContentPolicy, EvictionPolicy
from .groups import FullAttention, SlidingWindow
from .host_pool import HostPool
from .leaks import Leak
from .ledger import Room
from .lifecycle import ResetReport
from .namespace import Media, Namespace
from .observer import Observer
from .pins import Pin
from .policies import ARC, LFU, LRU, S3FIFO, SLRU, Priority
from .sequence import Sequence
from .stats import Stats
from .steps import StepInFlight
from .swapping import SwapPlan

__all__ = [
    "ARC",
    "LFU",
    "LRU",
    "S3FIFO",
    "SLRU",
    "AlreadyUnpinned",
    "BeyondWindow",
    "BlockAllocator",
    "ContentPolicy",
    "CopiesPending",
    "EvictionPolicy",
    "ForeignSequence",
    "FullAttention",
    "HostPool",
    "InvariantViolation",
    "Leak",
    "Media",
    "Namespace",
    "NotReserved",
    "Observer",
    "OutOfPages",
    "Pin",
    "PlanOpen",
    "PlanSettled",
    "Priority",
    "PromptMismatch",
    "ReservationOpen",
    "ResetReport",
    "Room",
    "Sequence",
    "SequenceClosed",
    "SequenceSwapped",
    "SlidingWindow",
    "Stats",
    "StepEnded",
    "StepInFlight",
    "SwapPlan",
    "WrongThread",
    "content_hashes",
]

"""The trace lab: what was asked of an allocator, written down, read back and replayed against other policies.

Takes files and requests, drives a real `BlockAllocator`, and refuses to know models and clocks.
"""

from ..observer import Observer
from .belady import Belady, NextUses
from .event_log import EventLog
from .reader import read_trace
from .replay import ReplayResult, replay
from .request import Ids, Request, Runs, Trace, TraceError

__all__ = [
    "Belady",
    "EventLog",
    "Ids",
    "NextUses",
    "Observer",
    "ReplayResult",
    "Request",
    "Runs",
    "Trace",
    "TraceError",
    "read_trace",
    "replay",
]

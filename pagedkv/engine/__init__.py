"""A batch engine on the cache: continuous batching, sampling, streaming, preemption without thrash.

`Engine` serves a transformers model; `EngineCore` is its step loop on integers, for runners of one's own. The
baseline caches are in `pagedkv.engine.baselines`.
"""

from pagedkv.engine.core import EngineCore, Runner
from pagedkv.engine.engine import Engine
from pagedkv.engine.outputs import Completion, EngineStats, FinishReason, RequestMetrics, StepOutput
from pagedkv.engine.request import SamplingParams
from pagedkv.engine.stream import RequestStream
from pagedkv.engine.text import TextStream

__all__ = [
    "Completion",
    "Engine",
    "EngineCore",
    "EngineStats",
    "FinishReason",
    "RequestMetrics",
    "RequestStream",
    "Runner",
    "SamplingParams",
    "StepOutput",
    "TextStream",
]

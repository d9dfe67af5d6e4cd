"""A batch engine on the cache: continuous batching, sampling, streaming, preemption without thrash.

`Engine` serves a transformers model, and `AsyncEngine` everybody on an event loop with it; `EngineCore` is its step
loop on integers, for runners of one's own. The baseline caches are in `pagedkv.engine.baselines`.
"""

from pagedkv.engine.async_engine import AsyncEngine, EngineBusy, EngineStopped, StepFailed
from pagedkv.engine.async_stream import AsyncStream
from pagedkv.engine.core import EngineCore, Runner
from pagedkv.engine.engine import Engine
from pagedkv.engine.logprobs import Logprob
from pagedkv.engine.outputs import Completion, EngineStats, FinishReason, RequestMetrics, Sample, StepOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.stream import RequestStream
from pagedkv.engine.text import TextStream

__all__ = [
    "AsyncEngine",
    "AsyncStream",
    "Completion",
    "Engine",
    "EngineBusy",
    "EngineCore",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "Logprob",
    "RequestMetrics",
    "RequestStream",
    "Runner",
    "Sample",
    "SamplingParams",
    "StepFailed",
    "StepOutput",
    "TextStream",
]

"""What Prometheus scrapes: the engine's counters, what the cache holds now, and how long people waited.

Takes an engine and every finished sample, gives the text format; refuses to keep what the engine counts already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedkv.engine import AsyncEngine, StepOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_COUNTERS = {
    "steps": "Model steps.",
    "prefill_tokens": "Prompt tokens that were computed.",
    "new_tokens": "Tokens generated.",
    "cached_tokens": "Prompt tokens that the prefix cache gave.",
    "preemptions": "Requests that had to leave the batch when pages ran out.",
    "drafted_tokens": "Tokens drafted by prompt lookup.",
    "accepted_tokens": "Drafted tokens that held.",
}


class Metrics:
    """One server's metrics. All times are seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._queue = self._histogram("queue_seconds", "From arrival to the first step that ran a sample.")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to a sample's first token.")
        self._between = self._histogram("time_between_tokens_seconds", "From each token of a sample to its next.")
        self._whole = self._histogram("request_seconds", "From arrival to a sample's end.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"pagedkv_{name}", text, buckets=_SECONDS, registry=self.registry)

    def observe(self, output: StepOutput) -> None:
        """Take in a finished sample."""
        metrics = output.metrics
        if metrics is None:
            return
        if metrics.queue_time is not None:
            self._queue.observe(metrics.queue_time)
        if metrics.time_to_first_token is not None:
            self._first.observe(metrics.time_to_first_token)
        for seconds in metrics.between_tokens:
            self._between.observe(seconds)
        self._whole.observe(metrics.finished_at - metrics.arrived_at)

    def watch(self, engine: AsyncEngine) -> None:
        """Show ``engine``'s counters and what its cache holds."""
        self.registry.register(_EngineCollector(engine))

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector:
    """Reads an engine whenever somebody asks."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        """Yield every family."""
        stats, usage = self._engine.stats, self._engine.usage
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"pagedkv_{name}", text, value=getattr(stats, name))
        finished = CounterMetricFamily("pagedkv_finished_samples", "Samples by why they ended.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        for name, text, value in (
            ("running_samples", "Samples that hold pages.", self._engine.num_running),
            ("waiting_samples", "Samples that wait for a place.", self._engine.num_waiting),
            ("cache_pages_in_use", "Pages that running samples hold, at most a second ago.", usage.in_use),
            ("cache_tokens_stored", "Tokens in them, a shared page's once.", usage.tokens_stored),
            ("cache_slots_held", "Token slots of them; less the stored tokens it is what is wasted.", usage.slots_held),
            ("cache_bytes_held", "Bytes of them over all layers.", usage.bytes_held),
        ):
            yield GaugeMetricFamily(f"pagedkv_{name}", text, value=value)

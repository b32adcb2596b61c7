"""Prometheus metrics of a server: what its clients saw, and what the engine counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

#: bounds in seconds
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000)

#: the engine's counters, by its name for them: metric and meaning
_COUNTERS: dict[str, tuple[str, str]] = {
    "steps": ("engine_steps", "Steps launched"),
    "prefill_steps": ("prefill_steps", "Prefill steps launched"),
    "middle_chunks": ("middle_chunks", "Prefill chunks that produced no output"),
    "decode_steps": ("decode_steps", "Decode steps launched"),
    "prompt_tokens": ("computed_prompt_tokens", "Prompt tokens computed, cached ones left out"),
    "generated_tokens": ("engine_generated_tokens", "Tokens emitted by the engine"),
    "drafted_tokens": ("spec_drafted_tokens", "Draft tokens verified"),
    "accepted_tokens": ("spec_accepted_tokens", "Draft tokens that held"),
    "stale_payloads": ("stale_statuses", "Transfers that carried another step's tag"),
    "impossible_statuses": ("impossible_statuses", "Status rows that no step can have"),
    "guard_errors": ("guard_errors", "Bad state rows that the kernels refused"),
    "finished": ("engine_finished_requests", "Requests that ended by themselves"),
    "failed": ("engine_failed_requests", "Requests that ended with an error"),
    "aborted": ("engine_aborted_requests", "Requests that were aborted"),
    "preemptions": ("preemptions", "Requests that were put back to be computed again"),
    "lookup_tokens": ("prefix_lookup_tokens", "Prompt tokens looked up in the prefix cache"),
    "hit_tokens": ("prefix_hit_tokens", "Prompt tokens that the prefix cache had"),
}
#: what the engine holds now
_GAUGES: dict[str, tuple[str, str]] = {
    "running": ("running_requests", "Requests that run"),
    "waiting": ("waiting_requests", "Requests in the engine's queue"),
    "prefilling": ("prefilling_requests", "Requests whose prompt is being computed"),
    "used_blocks": ("kv_used_blocks", "KV blocks that requests hold"),
    "cached_blocks": ("kv_cached_blocks", "KV blocks that only the prefix cache holds"),
    "num_blocks": ("kv_blocks", "KV blocks of the pool"),
    "checkpoints": ("state_checkpoints", "Recurrent states that prefixes can resume from"),
}
#: shares of two counters: meaning, part and whole
_RATIOS: dict[str, tuple[str, str, str]] = {
    "spec_acceptance_ratio": (
        "Draft tokens that held, of those verified",
        "accepted_tokens",
        "drafted_tokens",
    ),
    "kv_usage_ratio": ("KV blocks in use, of the pool", "used_blocks", "num_blocks"),
    "prefix_hit_ratio": (
        "Prompt tokens that the cache had, of those looked up",
        "hit_tokens",
        "lookup_tokens",
    ),
}


class ServerMetrics:
    """Metrics of one server, in a registry of their own.

    Args:
        engine_stats: gives the engine's counters by name.
        streams: gives the number of requests in flight.
    """

    def __init__(
        self, engine_stats: Callable[[], Mapping[str, float]], streams: Callable[[], int]
    ) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"namespace": "atom", "registry": self.registry}
        self.requests = Counter(
            "requests", "Requests by endpoint and how they ended", ["endpoint", "end"], **shared
        )
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of requests", **shared)
        self.cached_tokens = Counter(
            "cached_prompt_tokens", "Prompt tokens that were not computed again", **shared
        )
        self.output_tokens = Counter("generation_tokens", "Tokens sent to clients", **shared)
        self.first_token = Histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_FIRST_TOKEN,
            **shared,
        )
        self.between_tokens = Histogram(
            "inter_token_latency_seconds",
            "From a token to the next; tokens of one step share its time",
            buckets=_BETWEEN_TOKENS,
            **shared,
        )
        self.whole = Histogram(
            "request_seconds", "From a request's arrival to its end", buckets=_WHOLE, **shared
        )
        flight = Gauge("requests_in_flight", "Requests taken and not ended", **shared)
        flight.set_function(streams)
        self.registry.register(_EngineCollector(engine_stats))

    def page(self) -> bytes:
        """The text of ``/metrics``."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        # without it a registry would collect once to learn the names, before there is an engine
        yield from ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, value in stats.items():
            if name in _COUNTERS:
                metric, about = _COUNTERS[name]
                yield CounterMetricFamily(f"atom_{metric}", about, value=value)
            elif name in _GAUGES:
                metric, about = _GAUGES[name]
                yield GaugeMetricFamily(f"atom_{metric}", about, value=value)
            else:
                about = f"{name.replace('_', ' ')} (the engine's own name)"
                yield GaugeMetricFamily(f"atom_engine_{name}", about, value=value)
        yield from _ratios(stats)


def _ratios(stats: Mapping[str, float]) -> Iterator[Metric]:
    for metric, (about, part, whole) in _RATIOS.items():
        if stats.get(whole):
            value = stats.get(part, 0.0) / stats[whole]
            yield GaugeMetricFamily(f"atom_{metric}", about, value=value)

"""A throughput point on an accelerator, with prefixes that leave the device and come back."""

from __future__ import annotations

from typing import Any

import pytest

from atom.benchmarks.throughput_point import run_point
from atom.benchmarks.throughput_rows import Outcome
from atom.benchmarks.throughput_settings import ThroughputSettings, build_points
from atom.device.accelerator import why_no_accelerator

SMALL: dict[str, Any] = {
    "device": "accelerator",
    "concurrency": [4],
    "pool_gib": [0.002],
    "special": ["zero_copy"],
    "sessions": 24,
    "max_context_tokens": 512,
    "num_kv_blocks": 56,
    "output_tokens": 16,
    "duration_seconds": 1.5,
    "think_cap_seconds": 0.01,
}


@pytest.mark.gpu
@pytest.mark.skipif(why_no_accelerator() is not None, reason=str(why_no_accelerator()))
def test_status_and_tier_are_measured_there() -> None:
    settings = ThroughputSettings.parse(SMALL)
    points = {point.arm.name: point for point in build_points(settings) if point.pool_gib}
    told: dict[str, dict[str, Any]] = {name: {} for name in points}
    for name, point in points.items():
        assert run_point(settings, point, told[name].update) is Outcome.OK
        assert told[name]["errors"] == told[name]["stale_statuses"] == 0
        assert told[name]["pool_hit_tokens"] > 0
        assert told[name]["hit_tokens"] > 0
        assert told[name]["statuses"] == told[name]["decode_steps"]
    # which is shorter is the sweep's question: here others may use the same device
    assert all(told[name]["status_latency_p50_us"] > 0 for name in ("hold", "zero_copy"))

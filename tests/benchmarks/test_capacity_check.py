"""Step times from measured rows, and a point of the engine beside the same simulated."""

from __future__ import annotations

from typing import Any

import pytest

from atom.benchmarks.agentic_sessions import generate_sessions
from atom.benchmarks.capacity import CapacityLoad, simulate
from atom.benchmarks.capacity_check import Checked, check, machine_from
from atom.benchmarks.throughput_rows import Outcome, ThroughputRow
from atom.benchmarks.throughput_settings import (
    ThroughputSettings,
    build_points,
    engine_settings,
)
from atom.errors import BadInput

SETTINGS = ThroughputSettings.parse(
    {"concurrency": [4], "pool_gib": [0.002], "max_context_tokens": 900, "duration_seconds": 2.0}
)
SESSIONS = generate_sessions(8, 42, block_tokens=1, max_context_tokens=900).sessions


def measured(**over: Any) -> ThroughputRow:
    """A row whose decode step takes 1 ms and 0.1 ms a request, and whose prefill 20 us a token."""
    values: dict[str, Any] = dict.fromkeys(ThroughputRow.model_fields)
    batch = over.pop("decode_batch_mean", 2.0)
    values |= {
        "point_id": "x",
        "arm": "hold",
        "system": "atom",
        "repeat": 0,
        "order": 0,
        "concurrency": 4,
        "outcome": Outcome.OK,
        "wall_seconds": 1.0,
        "cold_start": "process",
        "worker": "",
        "prefill_seconds": 0.2,
        "prompt_tokens_computed": 10_000,
        "decode_steps": 1000,
        "decode_batch_mean": batch,
        "decode_seconds": 1.0 + 0.1 * batch,
        "kv_bytes_per_token": 512,
        "state_image_bytes": 4096,
    }
    return ThroughputRow.model_validate(values | over)


def test_step_times_come_from_the_rows() -> None:
    machine = machine_from([measured(), measured(decode_batch_mean=6.0)])
    assert machine.prefill_token_seconds == pytest.approx(20e-6)
    assert machine.decode_base_seconds == pytest.approx(1e-3)
    assert machine.decode_row_seconds == pytest.approx(0.1e-3)
    assert machine_from([measured()]).decode_base_seconds == pytest.approx(1.2e-3)
    with pytest.raises(BadInput, match="no point timed"):
        machine_from([measured(decode_seconds=None)])


def test_a_simulated_point_agrees_with_itself_and_not_with_another() -> None:
    point = next(one for one in build_points(SETTINGS) if one.pool_gib is not None)
    load = CapacityLoad(
        concurrency=4,
        duration_seconds=2.0,
        warmup_requests_per_lane=SETTINGS.warmup_requests,
        seed=SETTINGS.seed,
        think_cap_seconds=SETTINGS.think_cap_seconds,
    )
    engine = engine_settings(SETTINGS, point.arm, 4, point.pool_gib)
    row = simulate(SESSIONS, load, engine, machine_from([measured()]))
    found = measured(
        point_id=point.point_id,
        pool_gib=point.pool_gib,
        hit_tokens=row.hit_tokens,
        lookup_tokens=row.lookup_tokens,
        states_loaded=row.state_loads,
        effective_total_throughput=row.effective_total_throughput,
    )
    lost = {point.point_id: row.state_load_failures}
    (same,) = check(SETTINGS, [found], lost, SESSIONS)
    assert row.hit_tokens > 0
    assert same.agrees("hits")
    assert same.failed[0] == same.failed[1]
    assert same.agrees("throughput")
    other = Checked("x", (0.5, 0.6), (None, 0.1), (100.0, 109.0))
    assert other.agrees("hits") is False
    assert other.agrees("failed") is None
    assert other.agrees("throughput")

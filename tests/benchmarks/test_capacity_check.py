"""Step times from measured rows, and a point of the engine beside the same simulated."""

from __future__ import annotations

from typing import Any

import pytest

from atom.benchmarks.agentic_sessions import generate_sessions
from atom.benchmarks.capacity_check import (
    FACTORS,
    Checked,
    compare,
    like_id,
    machine_of,
    simulate_like,
    usable,
)
from atom.benchmarks.throughput_rows import Outcome, ThroughputRow
from atom.benchmarks.throughput_settings import ThroughputSettings, build_points
from atom.errors import BadInput

SETTINGS = ThroughputSettings.parse(
    {"concurrency": [4], "pool_gib": [0.002], "max_context_tokens": 900, "duration_seconds": 2.0}
)
SESSIONS = generate_sessions(8, 42, block_tokens=1, max_context_tokens=900).sessions


def measured(**over: Any) -> ThroughputRow:
    """A row whose decode step takes 1.2 ms and whose prefill step takes 4 ms."""
    values: dict[str, Any] = dict.fromkeys(ThroughputRow.model_fields)
    values |= {
        "point_id": "x",
        "arm": "hold",
        "system": "atom",
        "protocol": "hold",
        "repeat": 0,
        "order": 0,
        "concurrency": 4,
        "outcome": Outcome.OK,
        "wall_seconds": 1.0,
        "cold_start": "process",
        "worker": "",
        "prefill_seconds": 0.2,
        "prefill_steps": 50,
        "decode_steps": 1000,
        "decode_seconds": 1.2,
        "kv_bytes_per_token": 512,
        "state_image_bytes": 4096,
    }
    return ThroughputRow.model_validate(values | over)


def test_step_times_come_from_the_row() -> None:
    machine = machine_of(measured())
    assert machine.prefill_base_seconds == pytest.approx(4e-3)
    assert machine.decode_seconds(3, 1000) == pytest.approx(1.2e-3)
    assert machine_of(measured(), 1.1).decode_seconds(3, 0) == pytest.approx(1.32e-3)
    assert usable(SETTINGS, measured())
    for over in ({"decode_seconds": None}, {"outcome": Outcome.CRASH}, {"protocol": "blocking"}):
        assert not usable(SETTINGS, measured(**over))


def test_a_simulated_point_agrees_with_itself_and_not_with_another() -> None:
    point = next(one for one in build_points(SETTINGS) if one.pool_gib is not None)
    known = measured(point_id=point.point_id, pool_gib=point.pool_gib)
    rows = [simulate_like(SETTINGS, known, SESSIONS, factor) for factor in FACTORS]
    assert [row.point_id for row in rows] == [like_id(point.point_id, f) for f in FACTORS]
    row = rows[0]
    assert row.hit_tokens > 0
    found = measured(
        point_id=point.point_id,
        pool_gib=point.pool_gib,
        hit_tokens=row.hit_tokens,
        lookup_tokens=row.lookup_tokens,
        states_loaded=row.state_loads,
        effective_total_throughput=row.effective_total_throughput,
        tokens_per_request=row.tokens_per_request,
        requests=row.requests,
    )
    simulated = {one.point_id: one for one in rows}
    (same,) = compare([found], simulated, {point.point_id: row.state_load_failures})
    assert same.agrees("hits")
    assert same.failed[0] == same.failed[1]
    assert same.agrees("throughput")
    assert same.apart == 0
    assert same.reach is not None
    assert same.reach[0] <= (same.hits[1] or 0) <= same.reach[1]
    assert compare([measured()], simulated, {}) == []
    other = Checked("x", (0.5, 0.6), (None, 0.1), (100.0, 109.0))
    assert other.agrees("hits") is False
    assert other.agrees("failed") is None
    assert other.agrees("throughput")
    with pytest.raises(BadInput, match="no point of the run's settings"):
        simulate_like(SETTINGS, measured(point_id="other"), SESSIONS, 1.0)

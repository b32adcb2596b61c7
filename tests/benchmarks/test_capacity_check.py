"""Step times from measured rows, and a point of the engine beside the same simulated."""

from __future__ import annotations

from typing import Any

import pytest

from atom.benchmarks.agentic_sessions import generate_sessions
from atom.benchmarks.capacity_check import (
    AS_IT_IS,
    CHANGES,
    Change,
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
    rows = [simulate_like(SETTINGS, SESSIONS, known, change) for change in CHANGES]
    assert [row.point_id for row in rows] == [like_id(point.point_id, c) for c in CHANGES]
    assert len({row.point_id for row in rows}) == len(CHANGES)
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
    assert [size for size, _ in same.by_caches] == [0.9, 0.95, 1.0, 1.05, 1.1]
    small = simulate_like(SETTINGS, SESSIONS, known, Change(caches=0.3))
    assert small.hit_tokens / small.lookup_tokens < 0.9 * (same.hits[1] or 0)
    assert len(same.by_order) == 3
    assert len({same.hits[1], *same.by_order}) > 1
    assert compare([measured()], simulated, {}) == []
    other = Checked("x", (0.5, 0.6), (None, 0.1), (100.0, 109.0))
    assert other.agrees("hits") is False
    assert other.agrees("failed") is None
    assert other.agrees("throughput")
    with pytest.raises(BadInput, match="no point of the run's settings"):
        simulate_like(SETTINGS, SESSIONS, measured(point_id="other"), AS_IT_IS)


def test_the_size_of_the_caches_at_which_the_model_finds_what_was_measured() -> None:
    sizes = ((0.9, 0.0), (1.0, 0.1), (1.1, 0.5))
    cliff = Checked("x", (0.2, 0.1), (None, None), (1.0, 1.0), by_caches=sizes)
    assert cliff.like_caches == pytest.approx(1.025)
    # 0.4 a tenth of the size: a tenth of 0.2 is half a percent of it
    assert cliff.closeness == pytest.approx(0.005)
    beyond = Checked("x", (0.6, 0.1), (None, None), (1.0, 1.0), by_caches=sizes)
    assert beyond.like_caches is None
    flat = Checked("x", (0.2, 0.2), (None, None), (1.0, 1.0), by_caches=((0.9, 0.2), (1.0, 0.2)))
    assert flat.like_caches is None
    assert flat.closeness is None
    assert Change(caches=0.9).name == "caches x0.9"

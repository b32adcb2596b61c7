"""The fit finds numbers that made its data, and its baselines are what they say."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from atom.benchmarks.capacity_fit import (
    Observation,
    Setup,
    Surface,
    errors,
    fit,
    line_baseline,
    nearest_failures,
    working_set_baseline,
)
from atom.benchmarks.capacity_rows import CapacityRow
from atom.errors import BadInput

SCALES, MEMORIES, RATES = (2.0, 3.0, 4.0), (100.0, 200.0), (5.0, 20.0)
SETUPS: tuple[Setup, ...] = ((32, None), (32, 96.0), (32, 160.0), (48, 224.0))


def throughput(setup: Setup, scale: float, memory: float, rate: float) -> float:
    if setup[1] is None:
        return 30e3 * (memory / 100) ** 0.1
    return 30e3 * math.exp(setup[1] / setup[0]) / scale**0.5 * (memory / 100) ** 0.2 * rate**0.3


def failed(setup: Setup, scale: float, memory: float, rate: float) -> float:
    return 0.2 * math.log(scale) + 0.02 * math.log(memory) + 0.001 * setup[0]


def itl(scale: float, memory: float, rate: float) -> float:
    return 0.03 * (memory / 100) / rate**0.2


def made_row(setup: Setup, scale: float, memory: float, rate: float, **over: Any) -> CapacityRow:
    asked = 100_000
    values: dict[str, Any] = dict.fromkeys(
        (name for name, field in CapacityRow.model_fields.items() if field.is_required()), 0
    )
    values |= {
        "concurrency": setup[0],
        "pool_gib": setup[1],
        "arm": "shared_lru",
        "offload_policy": None if setup[1] is None else "shared_lru",
        "state_share": None,
        "state_checkpoint_tokens": 256,
        "byte_scale": scale,
        "device_gb": memory,
        "load_gb_per_second": rate,
        "effective_total_throughput": throughput(setup, scale, memory, rate),
        "state_pairs": asked,
        "state_pairs_failed": round(asked * failed(setup, scale, memory, rate)),
        "ttft_mean_seconds": 10.0,
        "itl_p90_seconds": itl(scale, memory, rate),
    }
    return CapacityRow.model_validate(values | over)


def grid() -> list[CapacityRow]:
    places = product(SCALES, MEMORIES, RATES)
    rows = [made_row(s, *place) for s, place in product(SETUPS, places) if s[1]]
    return [*(made_row((32, None), SCALES[0], m, RATES[0]) for m in MEMORIES), *rows]


def seen(setup: Setup, slowness: float, *place: float) -> Observation:
    share = failed(setup, *place)
    value = throughput(setup, *place) / slowness
    if setup[1] is None:
        return Observation(setup, (value,))
    return Observation(setup, (value,), (share, share), itl(*place) * slowness)


@pytest.mark.parametrize("place", [(3.0, 150.0, 10.0), (2.0, 200.0, 5.0), (4.0, 120.0, 17.0)])
def test_a_fit_finds_what_made_its_data(place: tuple[float, float, float]) -> None:
    surface = Surface(grid())
    found = fit(surface, [seen((32, None), 1.25, *place)], [seen((32, 96.0), 1.25, *place)])
    assert found.slowness == pytest.approx(1.25, rel=0.02)
    assert found.byte_scale == pytest.approx(place[0], rel=0.05)
    assert found.device_gb == pytest.approx(place[1], rel=0.1)
    assert found.load_gb_per_second == pytest.approx(place[2], rel=0.15)
    assert found.misfit < 0.1
    assert found.numbers == 3
    # what it has not seen follows
    other = seen((48, 224.0), 1.25, *place)
    predicted = surface.predict(other.setup, found)
    assert predicted.throughput == pytest.approx(other.mean_throughput, rel=0.03)
    assert predicted.failed == pytest.approx(other.middle_failed, abs=0.01)
    assert predicted.itl_p90_seconds == pytest.approx(other.itl_p90_seconds, rel=0.05)


def test_the_nearest_failures_are_those_of_the_place_that_made_them() -> None:
    surface, place = Surface(grid()), (3.0, 200.0, 5.0)
    offload = [seen(setup, 1.0, *place) for setup in SETUPS if setup[1]]
    found = nearest_failures(surface, offload)
    assert [found[one.setup] for one in offload] == pytest.approx(
        [one.middle_failed for one in offload], abs=1e-4
    )
    # control: shares that no place gives are not reached
    other = [replace(one, failed=(0.9, 0.9)) for one in offload]
    assert max(nearest_failures(surface, other).values()) < 0.5


def test_data_of_another_law_do_not_fit() -> None:
    # control: a fit that always fitted would say nothing
    odd = Observation((32, 96.0), (50e6,), (0.9, 0.9))
    assert fit(Surface(grid()), [], [odd]).misfit > 100


def test_a_grid_with_a_hole_is_refused() -> None:
    rows = [row for row in grid() if (row.pool_gib, row.byte_scale) != (96.0, 3.0)]
    with pytest.raises(BadInput, match="holes at 32 sessions"):
        Surface(rows)
    with pytest.raises(BadInput, match="holes at 32 sessions, pool None"):
        Surface([row for row in grid() if row.pool_gib or row.device_gb == 100.0])
    with pytest.raises(BadInput, match="two byte scales"):
        Surface([row for row in grid() if row.byte_scale == 2.0])


def test_the_line_is_a_line() -> None:
    known = [
        Observation((10, pool), (1000 + 100 * (pool or 0),), (0.5, 0.5) if pool else None)
        for pool in (None, 10.0, 30.0)
    ]
    found = line_baseline(known, (10, 20.0))
    assert found.throughput == pytest.approx(3000)
    assert found.failed == pytest.approx(0.5)
    assert line_baseline(known, (10, None)).failed is None


def test_the_working_set_is_found() -> None:
    def made(pool: float | None) -> Observation:
        held = (pool or 0) / 10 / 8
        return Observation((10, pool), (1000 / (1 - held),), (1 - held, 1 - held))

    found = working_set_baseline([made(None), made(20.0), made(40.0)], (10, 60.0))
    assert found.throughput == pytest.approx(4000, rel=1e-3)
    assert found.failed == pytest.approx(0.25, abs=1e-3)


def test_errors_are_relative_for_rates_and_absolute_for_shares() -> None:
    surface = Surface(grid())
    one = seen((32, 96.0), 1.0, 3.0, 100.0, 5.0)
    exact = fit(surface, [], [one])
    found = surface.predict(one.setup, exact)
    assert errors([(found, one)]).throughput < 0.01
    twice = Observation(one.setup, (2 * one.mean_throughput,), (0.0, 0.0))
    assert errors([(found, twice)]).throughput == pytest.approx(math.log(2), abs=0.01)
    assert errors([(found, twice)]).failed == pytest.approx(one.middle_failed, abs=0.01)

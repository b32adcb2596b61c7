"""Points of the capacity sweep: names, refusals, and what a remedy changes."""

from __future__ import annotations

from typing import Any

import pytest

from atom.benchmarks.agentic_sessions import generate_sessions
from atom.benchmarks.capacity_points import (
    Arm,
    CapacitySettings,
    Remedy,
    build_points,
    check_fits,
    machine_of,
    parse_arm,
    run_point,
)
from atom.errors import BadInput

#: a small world of the same proportions
SMALL: dict[str, Any] = {
    "setups": [[6, 0], [6, 4]],
    "byte_scale": [0.1],
    "device_gb": [1.0],
    "duration_seconds": 20.0,
    "sessions": 8,
}


def test_the_published_setups_are_the_default() -> None:
    points = build_points(CapacitySettings())
    assert {(p.concurrency, p.pool_gib) for p in points} == {
        (32, None), (48, None), (64, None), (32, 96), (32, 160), (48, 224), (64, 288)
    }  # fmt: skip
    assert len({p.point_id for p in points}) == 7


def test_no_offload_runs_once_for_each_device_memory() -> None:
    grid = CapacitySettings.parse(
        {
            "byte_scale": [1, 2],
            "device_gb": [10, 20],
            "load_gb_per_second": [5, 10, 20],
            "arms": ["shared_lru", "paired"],
        }
    )
    points = build_points(grid)
    assert sum(p.pool_gib is None for p in points) == 3 * 2
    assert sum(p.pool_gib is not None for p in points) == 4 * 2 * 2 * 2 * 3


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("paired", Arm(Remedy.PAIRED)),
        ("late_lookup", Arm(Remedy.LATE_LOOKUP)),
        ("isolated-0.25", Arm(Remedy.ISOLATED, 0.25)),
        ("spacing-1024", Arm(Remedy.SPACING, 1024)),
        ("admission-0.75", Arm(Remedy.ADMISSION, 0.75)),
    ],
)
def test_an_arm_is_read_and_named(text: str, arm: Arm) -> None:
    assert parse_arm(text) == arm
    assert arm.name == text


@pytest.mark.parametrize(
    "text", ["other", "paired-2", "async_loads-1", "isolated-1", "spacing-1000", "admission-x"]
)
def test_another_arm_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="arms"):
        parse_arm(text)
    with pytest.raises(BadInput, match="arms"):
        CapacitySettings.parse({"arms": [text]})


def test_only_leaves_points_by_pattern_or_says_their_names() -> None:
    chosen = CapacitySettings.parse({"only": ["*/c48/*"]})
    assert {p.concurrency for p in build_points(chosen)} == {48}
    with pytest.raises(BadInput, match="the first is shared_lru/c32/none"):
        build_points(CapacitySettings.parse({"only": ["c48"]}))


@pytest.mark.parametrize(
    "name", ["setups", "arms", "byte_scale", "device_gb", "load_gb_per_second"]
)
def test_an_empty_list_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        CapacitySettings.parse({name: []})


@pytest.mark.parametrize("setup", [[0, 96], [2.5, 96], [1e12, 96], [32, -1], [32, 1e-6], [32, 1e9]])
def test_a_setup_that_means_nothing_is_refused(setup: list[float]) -> None:
    with pytest.raises(BadInput, match="setups: expected sessions"):
        CapacitySettings.parse({"setups": [setup]})


def test_a_device_that_holds_no_request_is_refused_before_any_point_runs() -> None:
    sessions = generate_sessions(2, 42).sessions
    small = CapacitySettings.parse(SMALL | {"device_gb": [1.0, 0.001]})
    with pytest.raises(BadInput, match=r"device_gb 0.001 at byte_scale 0.1 holds"):
        check_fits(small, build_points(small), sessions)
    fits = CapacitySettings.parse(SMALL)
    check_fits(fits, build_points(fits), sessions)


def test_remedies_change_what_they_say() -> None:
    arms = ["shared_lru", "paired", "admission-0.5", "spacing-1024", "isolated-0.2"]
    arms += ["late_lookup", "async_loads"]
    settings = CapacitySettings.parse(SMALL | {"arms": arms})
    sessions = generate_sessions(8, 42).sessions
    rows = {
        (point.arm.name, point.pool_gib): run_point(settings, sessions, point)
        for point in build_points(settings)
    }
    shared = rows["shared_lru", 4.0]
    assert shared.state_pairs > 0
    assert shared.state_failure_rate == shared.state_pairs_failed / shared.state_pairs
    assert rows["paired", 4.0].state_pairs_failed == 0
    assert rows["admission-0.5", 4.0].served_sessions == 3
    assert rows["admission-0.5", 4.0].concurrency == 6
    assert rows["spacing-1024", 4.0].state_checkpoint_tokens == 1024
    assert rows["isolated-0.2", 4.0].state_share == 0.2
    assert rows["shared_lru", None].hit_tokens < shared.hit_tokens
    # the same points, but for the way with the pool that each does without
    ways = {
        point.arm.name: (one.loads_block, one.looks_up_at_arrival)
        for point in build_points(settings)
        if (one := machine_of(settings, point))
    }
    assert ways["shared_lru"] == (True, True)
    assert ways["late_lookup"] == (True, False)
    assert ways["async_loads"] == (False, True)

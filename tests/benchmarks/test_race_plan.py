"""The plan: counts, order, patterns and time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.benchmarks.race_estimate import estimate_seconds
from atom.benchmarks.race_plan import (
    BLOCK_TRIALS,
    Job,
    blocks,
    build_arms,
    build_jobs,
    quick,
)
from atom.benchmarks.race_worker import job_message, read_job
from atom.config import AllocatorBackend, CopyProtocol, Front, RaceSettings
from atom.errors import BadInput


def planned(**values: Any) -> RaceSettings:
    """Settings with some values changed."""
    return RaceSettings.parse(values)


ACCELERATOR = planned(device="accelerator")


def test_names_are_unique_and_start_with_their_grid() -> None:
    arms = build_arms(ACCELERATOR)
    assert len({arm.name for arm in arms}) == len(arms)
    assert all(arm.name.startswith(f"{arm.grid}/") for arm in arms)
    grids = {"main", "queue", "batch", "allocator", "source", "cut", "edge", "alias"}
    assert {arm.grid for arm in arms} == grids


def test_every_main_cell_gets_the_published_number_of_trials() -> None:
    for arm in build_arms(ACCELERATOR):
        if arm.grid == "main":
            trials = arm.trials * ACCELERATOR.processes
            assert trials == (100 if arm.front is Front.MATMUL else 200), arm.name


def test_a_null_arm_differs_from_unpatched_by_name_only() -> None:
    arms = {arm.name: arm for arm in build_arms(ACCELERATOR)}
    null = [arm for arm in arms.values() if arm.is_null]
    assert len(null) == 12
    for arm in null:
        twin = arms[arm.name.replace("/null/", "/unpatched/")]
        assert arm.protocol is twin.protocol is CopyProtocol.UNPATCHED
        assert (arm.front, arm.copy_path, arm.trials) == (twin.front, twin.copy_path, twin.trials)


def test_every_queue_setting_and_allocator_gets_five_processes() -> None:
    jobs = build_jobs(ACCELERATOR)
    settings = Counter((job.queue_setting, job.allocator) for job in jobs)
    assert set(settings.values()) == {5}
    assert {queues for queues, _ in settings} == {"default", "1", "2", "4", "8", "32"}
    assert {allocator for _, allocator in settings} == set(AllocatorBackend)


def test_the_full_sweep_fits_seven_minutes_and_the_quick_one_a_minute() -> None:
    for settings, limit in ((ACCELERATOR, 420), (quick(ACCELERATOR), 60)):
        assert estimate_seconds(build_jobs(settings), settings) < limit


def test_two_hundred_stores_are_planned_at_what_they_move() -> None:
    settings = planned(device="accelerator", only=("main/unpatched/store_on_copy_stream/engine",))
    (arm,) = build_arms(settings)
    jobs = build_jobs(settings)
    starts = 2.5 * len(jobs)
    seconds = estimate_seconds(jobs, settings) - starts
    bytes_per_second = (arm.trials + arm.traced + 1) * 5 * 256 * 2**20 / seconds
    assert 4e10 < bytes_per_second < 5.5e10


def test_a_pattern_selects_and_an_unknown_one_names_the_nearest() -> None:
    chosen = build_arms(planned(only=("main/hold/*/kernel", "batch/512")))
    assert {arm.grid for arm in chosen} == {"main", "batch"}
    assert len(chosen) == 6 + 3
    with pytest.raises(BadInput, match="main/unpatched/store_on_copy_stream/engine"):
        build_arms(planned(only=("main/unpatched/store_on_copy_streem/engine",)))


def test_the_allocator_grid_is_for_accelerators_only() -> None:
    assert not [arm for arm in build_arms(planned()) if arm.grid == "allocator"]
    with pytest.raises(BadInput, match="no arm matches"):
        build_arms(planned(only=("allocator/*",)))


@given(st.integers(0, 2**31), st.integers(1, 30))
def test_blocks_interleave_and_run_every_trial_once(seed: int, trials: int) -> None:
    settings = planned(trials=trials, processes=1, only=("main/hold", "batch"), seed=seed)
    (job,) = build_jobs(settings)
    order = blocks(job)
    done: Counter[str] = Counter()
    for point, count in order:
        assert 1 <= count <= BLOCK_TRIALS
        done[point.point_id] += count
        unfinished = [p for p in job.points if done[p.point_id] < p.arm.trials]
        if unfinished:
            # Nobody is two blocks ahead of an arm that still has trials to run.
            least = min(done[p.point_id] for p in unfinished)
            assert done[point.point_id] <= least + BLOCK_TRIALS
    assert done == {p.point_id: p.arm.trials for p in job.points}


def test_order_follows_the_seed() -> None:
    def order(seed: int) -> list[list[str]]:
        jobs = build_jobs(planned(seed=seed, trials=2, processes=2))
        return [[point.point_id for point, _ in blocks(job)] for job in jobs]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_job_survives_its_message() -> None:
    settings = planned(trials=3, processes=2)
    job: Job = build_jobs(settings)[-1]
    assert read_job(job_message(settings, job)) == (settings, job)


def test_a_damaged_job_is_refused() -> None:
    settings = planned(trials=3, processes=1)
    message = job_message(settings, build_jobs(settings)[0])
    with pytest.raises(BadInput, match="no usable job"):
        read_job({**message, "arms": ["main/nobody"]})
    with pytest.raises(BadInput, match="trials"):
        read_job({**message, "settings": {"trials": 0}})

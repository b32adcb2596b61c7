"""The race on a real GPU: certain where the copy stream is parked, gone under every protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.benchmarks.race_plan import Arm, NextStep
from atom.benchmarks.race_rows import Outcome
from atom.benchmarks.race_trial import TrialBench
from atom.config import CopyProtocol, Front, RaceSettings, Source
from atom.device import CopyPath, DeviceKind, open_device
from atom.workbook.sweeps import run_race

pytestmark = pytest.mark.gpu

TRIALS = 20
SETTINGS = RaceSettings.parse({"device": "accelerator", "spin_seconds": 0.005})
PARKED = Arm("test/arm", "test", CopyProtocol.UNPATCHED, False, Front.SPIN, CopyPath.ENGINE, 1)


@pytest.fixture(scope="module")
def bench() -> Iterator[TrialBench]:
    """A bench on the accelerator; skipped where the copy stream shares the default's queue."""
    made = TrialBench(open_device("accelerator"), SETTINGS, seed=1)
    if made.device.properties.kind is DeviceKind.HIP:
        made.warm_up(PARKED)
        if made.run(PARKED).outcome is Outcome.CLEAN:
            pytest.skip("the copy stream drew the default stream's hardware queue")
    yield made
    made.close()


def outcomes(bench: TrialBench, arm: Arm) -> list[Outcome]:
    bench.warm_up(arm)
    trials = [bench.run(arm) for _ in range(TRIALS)]
    if arm.protocol is CopyProtocol.UNPATCHED and arm.source is Source.ALLOCATOR:
        assert all(trial.address_reused for trial in trials)
    assert all(trial.tag_caught for trial in trials if trial.outcome is not Outcome.CLEAN)
    return [trial.outcome for trial in trials]


@pytest.mark.parametrize("path", list(CopyPath))
def test_unpatched_races_every_time_behind_a_parked_stream(
    bench: TrialBench, path: CopyPath
) -> None:
    arm = dataclasses.replace(PARKED, copy_path=path)
    assert outcomes(bench, arm) == [Outcome.OVERWRITTEN] * TRIALS


@pytest.mark.parametrize("path", list(CopyPath))
@pytest.mark.parametrize("protocol", [p for p in CopyProtocol if p is not CopyProtocol.UNPATCHED])
def test_every_other_protocol_is_clean_there(
    bench: TrialBench, protocol: CopyProtocol, path: CopyPath
) -> None:
    arm = dataclasses.replace(PARKED, protocol=protocol, copy_path=path)
    assert outcomes(bench, arm) == [Outcome.CLEAN] * TRIALS


def test_a_static_output_needs_its_writer_to_wait(bench: TrialBench) -> None:
    held = dataclasses.replace(PARKED, protocol=CopyProtocol.HOLD, source=Source.GRAPH_OUTPUT)
    assert outcomes(bench, held) == [Outcome.OVERWRITTEN] * TRIALS
    waited = dataclasses.replace(held, source=Source.GRAPH_OUTPUT_WAIT)
    assert outcomes(bench, waited) == [Outcome.CLEAN] * TRIALS


@pytest.mark.parametrize("step", [NextStep.HALF, NextStep.FEW])
def test_a_smaller_next_tensor_gives_partial(bench: TrialBench, step: NextStep) -> None:
    arm = dataclasses.replace(PARKED, next_step=step)
    assert outcomes(bench, arm) == [Outcome.PARTIAL] * TRIALS


def test_a_traced_trial_shows_the_write_before_the_copy(bench: TrialBench) -> None:
    bench.warm_up(PARKED)
    trial = bench.run(PARKED, traced=True)
    ends = {span.label: span.end_us for span in trial.spans}
    assert ends["next write"] < ends["copy"]


def test_a_small_sweep_runs_in_workers_and_is_recorded(tmp_path: Path) -> None:
    settings = RaceSettings.parse(
        {
            "device": "accelerator",
            "trials": 4,
            "processes": 1,
            "hardware_queues": [1],
            "only": ["main/unpatched/spin", "queue/1/hold/spin", "allocator"],
        }
    )
    run = run_race(settings, tmp_path)
    assert run.provenance.evidence == "measured"
    assert run.provenance.exit_state == "finished"
    assert set(run.tables["trials"]["allocator"]) == {
        "native",
        "expandable_segments",
        "cuda_malloc_async",
    }
    assert run.provenance.facts["facts_from"] in ("nvml", "nvidia-smi", "rocm-smi", None)

"""The co-location sweep: what it records and prints, what spoils a point, and how it goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from fake_point import COMMAND

from atom.__main__ import main
from atom.benchmarks import colocation_point
from atom.benchmarks.colocation_settings import ColocationSettings, Neighbour
from atom.benchmarks.throughput_process import run_point
from atom.device.interface import DeviceKind
from atom.workbook import colocation_runs
from atom.workbook.colocation_runs import SWEEP, ColocationSweep
from atom.workbook.records import check_folder, load_run
from atom.workbook.throughput_runs import ThroughputSweep

WORDS = ["sweep", "colocation", "--device", "virtual", "--quick", "-p", "sessions", "2"]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, same_commit: None) -> None:
    """Engines and neighbours that do at once what a test wants."""
    monkeypatch.setattr(ThroughputSweep, "process", COMMAND)
    monkeypatch.setattr(ColocationSweep, "working", COMMAND)
    monkeypatch.setattr(ThroughputSweep, "refuse_no_model", lambda self, name: None)
    monkeypatch.setattr(ThroughputSweep, "refuse_missing", lambda self, settings: None)


def folders(root: Path) -> list[Path]:
    return sorted(file.parent for file in root.rglob("run.json"))


def test_a_run_is_recorded_point_by_point_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["-p", "model", "ok", "-p", "race", "true", "-p", "race_trials", "1"]
    given += ["-p", "repeats", "2", "--only", "hold/*/0", "--only", "race/[ac][lo][op]*/any/[01]"]
    given += ["-p", "neighbours", "[copy, serve]"]
    words = [*WORDS, *given, "--out", str(tmp_path)]
    assert main([*words, "-p", "budget_seconds", "0.01"]) == 0
    assert "7 points did not run: no time was left" in capsys.readouterr().err
    [folder] = folders(tmp_path)
    assert main([*WORDS[:2], "--resume", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "over alone; no interval: nothing was repeated" in printed
    assert "main/hold/store_on_copy_stream/engine" in printed
    run = load_run(folder)
    assert check_folder(folder) == []
    points = run.tables["points"]
    assert set(points["neighbour"]) == {"alone", "copy", "serve"}
    assert (points["neighbours_at_end"] == points["neighbours"]).all()
    assert len(run.tables["race"]) == 4 * 7
    assert set(run.tables["race"]["repeat"]) == {0, 1}
    assert len(run.tables["neighbours"]) == 4
    assert set(run.tables["bandwidth"]["what"]) == {"host copy"}
    facts = run.provenance.facts
    assert "NVML; this device is virtual" in facts["bandwidth"]["pcie"]
    assert facts["gpus"] == 1


def test_those_who_serve_have_sessions_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def seen(job: dict[str, Any], command: Any) -> dict[str, Any]:
        jobs.append(job)
        return run_point(job, command)

    monkeypatch.setattr(colocation_point, "run_point", seen)
    settings = ColocationSettings.parse(
        {"model": "ok", "neighbours": ["serve"], "neighbour_counts": [2], "race": False}
        | {"sessions": 2, "pool_gib": [], "concurrency": [2], "only": ["serve x2"], "repeats": 1}
    )
    device = SWEEP.open(settings)
    ready = SWEEP.prepare(settings, device)
    [(_, tables)] = list(SWEEP.measure(settings, device, ready, ()))
    assert sorted(job["settings"]["seed"] for job in jobs) == [42, 43, 44]
    assert len(tables["neighbours"]) == 2
    assert {job["gate"] is None for job in jobs} == {True, False}


def test_a_neighbour_that_does_not_start_costs_its_point_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (sys.executable, "-c", "import sys; print('no device'); sys.exit(5)")
    monkeypatch.setattr(ColocationSweep, "working", broken)
    words = [*WORDS, "-p", "model", "ok", "-p", "neighbours", "[copy]", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "1 points did not run: a neighbour (copy) ended before" in capsys.readouterr().err
    run = load_run(folders(tmp_path)[0])
    assert list(run.tables["points"]["neighbour"]) == ["alone"]
    [reason] = run.provenance.facts["stopped_early"]["not_run"].values()
    assert "no device" in reason


def test_what_is_not_as_it_must_be_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "-p", "model", "stale", "--only", "alone", "--out", str(tmp_path)]
    assert main(words) == 1
    assert "alone/any/0: ok, 1 stale statuses" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["-p", "memory_nodes", "[near]"], "names no memory node of the GPU"),
        (["-p", "neighbours", "[sweep]"], "name several with --gpus"),
        (["--scheduler", "tcp://x:1"], "sweep colocation has no --scheduler"),
        (["--only", "nobody"], "fits no point; conditions: alone"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    given: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "-p", "model", "ok", *given, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not folders(tmp_path)


def test_the_plan_follows_from_the_gpus() -> None:
    alone = SWEEP.parse({"device": "accelerator"}, quick=False)
    assert (alone.shared_gpu, alone.neighbour_counts) == (True, (1, 3))
    four = SWEEP.parse({"device": "accelerator", "gpus": [0, 1, 2, 3]}, quick=False)
    assert (four.shared_gpu, four.neighbour_counts) == (False, (1, 3))
    assert four.neighbours[-1] is Neighbour.SWEEP
    assert len(SWEEP.plan(four)) == 2 * (2 * (1 + 2 * 3 + 1) + (1 + 2 * 3))
    quick = SWEEP.parse({"device": "accelerator", "gpus": [0, 1]}, quick=True)
    assert [point.record_id for point in SWEEP.plan(quick)] == [
        "hold/c16/6GiB/copy x1/any/0",
        "hold/c16/6GiB/alone/any/0",
    ]


def test_counters_are_read_of_the_gpu_that_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[dict[int, str]] = []

    def bandwidths(kind: Any, gpus: dict[int, str], period: float) -> None:
        names.append(gpus)

    monkeypatch.setattr(colocation_runs, "Bandwidths", bandwidths)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    for given in ({}, {"gpus": [0, 1]}, {"gpus": [1]}):
        settings = SWEEP.parse({"device": "accelerator", **given}, quick=False)
        observer = colocation_runs._Observer(settings, "", DeviceKind.CUDA, COMMAND, COMMAND)
        observer._bandwidths()
    assert names == [{0: "5"}, {0: "5", 1: "3"}, {1: "3"}]


def test_points_of_a_sweep_at_once_are_a_row_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")

    def jobs_at_once(client: None, next_job: Any, sweep: str, command: Any) -> Iterator[Any]:
        jobs = [next_job(), next_job()]
        assert next_job() is None
        assert len({job["key"] for job in jobs}) == len({job["log"] for job in jobs}) == 2
        with ThreadPoolExecutor(2) as pool:
            # the second is late, and they come as they end
            late = pool.submit(run_point, {**jobs[1], "does": "slow 0.5"}, command)
            first = run_point(jobs[0], command)
            yield jobs[1], {**late.result(), "worker": "1"}
        # neither began before the other was there
        assert first["wall_seconds"] > 0.5
        yield jobs[0], {**first, "worker": "0"}

    client = SimpleNamespace(wait_for_workers=lambda count, timeout: None)
    monkeypatch.setattr(colocation_runs, "run_jobs", jobs_at_once)
    monkeypatch.setattr(colocation_runs, "local_cluster", lambda shown: nullcontext(client))
    words = [*WORDS, "-p", "model", "ok", "--gpus", "0,1", "--only", "sweep*"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    run = load_run(folders(tmp_path)[0])
    points = run.tables["points"]
    assert list(points["observed"]) == [0, 1]
    assert set(points["worker"]) == {"0", "1"}
    assert (points["neighbours"] == 1).all()
    assert (points["neighbours_at_end"] == 1).all()
    # from the load on, and not from the start of the processes
    assert (run.tables["bandwidth"]["second"] <= points["exposure_seconds"].max()).all()


def test_a_sweep_at_once_of_which_one_does_not_start_is_no_hang_and_counts_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_dies(client: None, next_job: Any, sweep: str, command: Any) -> Iterator[Any]:
        jobs = [next_job(), next_job()]
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(run_point, jobs[0], command)
            yield jobs[1], {**run_point({**jobs[1], "does": "die first"}, command), "worker": "1"}
            yield jobs[0], {**whole.result(), "worker": "0"}

    client = SimpleNamespace(wait_for_workers=lambda count, timeout: None)
    monkeypatch.setattr(colocation_runs, "run_jobs", one_dies)
    monkeypatch.setattr(colocation_runs, "local_cluster", lambda shown: nullcontext(client))
    words = [*WORDS, "-p", "model", "ok", "--gpus", "0,1", "--only", "sweep*"]
    assert main([*words, "--out", str(tmp_path)]) == 1
    assert "0 of 1 neighbours lasted" in capsys.readouterr().err

    def closed(*_: Any) -> Iterator[Any]:
        raise OSError("the scheduler is gone")

    monkeypatch.setattr(colocation_runs, "run_jobs", closed)
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "Dask: OSError: the scheduler is gone" in capsys.readouterr().err

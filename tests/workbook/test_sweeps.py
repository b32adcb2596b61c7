"""A sweep records whole processes, survives being killed, resumes, and counts nothing twice."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atom.benchmarks.race import JobFailed, measure
from atom.benchmarks.race_plan import build_arms, build_jobs
from atom.config import RaceSettings
from atom.errors import BadInput, DeviceError
from atom.workbook import run_writer, sweeps
from atom.workbook.records import load_run
from atom.workbook.run_writer import read_provenance
from atom.workbook.sweeps import (
    SweepResult,
    add_arguments,
    result_text,
    run_race,
    settings_from,
    sweep_race,
)

SMALL: dict[str, Any] = {
    "trials": 3,
    "processes": 2,
    "hardware_queues": [2],
    "only": ["main/unpatched/spin", "main/hold/spin", "queue/2/unpatched/spin"],
}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["race", *words])


def points_of(settings: RaceSettings) -> set[str]:
    return {f"{arm.name}@{n}" for arm in build_arms(settings) for n in range(settings.processes)}


def test_a_run_records_every_point_once(tmp_path: Path) -> None:
    settings = RaceSettings.parse(SMALL)
    run = run_race(settings, tmp_path)
    trials = run.tables["trials"]
    assert run.provenance.exit_state == "finished"
    assert run.provenance.machine == "virtual-mi355x"
    assert set(trials["point_id"]) == points_of(settings)
    assert trials["point_id"].is_unique
    planned = {arm.name: arm.trials for arm in build_arms(settings)}
    assert (trials["trials"] == trials["arm"].map(planned)).all()
    unpatched = trials[trials["arm"] == "main/unpatched/spin/engine"]
    assert (unpatched["overwritten"] == 3).all()
    assert not run.tables["timeline"].empty


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    settings = RaceSettings.parse(SMALL)
    first, second = (
        run_race(settings, tmp_path / name).tables["trials"].drop(columns="elapsed_s")
        for name in ("a", "b")
    )
    assert first.equals(second)


def launch(root: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "atom", "sweep", "race", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    )


def wait_for_points(root: Path, count: int) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        files = list(root.glob("*/*/.partial/*.json"))
        if len(files) >= count:
            return files[0].parents[1]
        time.sleep(0.01)
    raise AssertionError("no point was written in time")


@pytest.mark.usefixtures("same_commit")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_sweep_resumes_where_it_was(tmp_path: Path, stop: signal.Signals) -> None:
    words = ["--device", "virtual", "--trials", "6", "--processes", "8", "--only", "main"]
    process = launch(tmp_path, *words, "--out", "runs")
    folder = wait_for_points(tmp_path / "runs", 1)
    process.send_signal(stop)
    _, errors = process.communicate(timeout=60)
    if stop is signal.SIGINT:
        assert process.returncode == 130
        assert "--resume" in errors
    else:
        assert process.returncode == -signal.SIGKILL
    before = load_run(folder)
    kept = set(before.tables["trials"]["point_id"])
    assert before.provenance.exit_state == ("running" if stop is signal.SIGKILL else "interrupted")
    settings = RaceSettings.parse(before.provenance.settings)
    assert kept < points_of(settings)
    # whole processes only
    assert len(kept) % len(build_arms(settings)) == 0
    assert len(kept) > 0

    result = sweep_race(settings, root=tmp_path / "runs", resume=folder)
    trials = result.run.tables["trials"]
    assert result.run.path == folder
    assert result.run.provenance.exit_state == "finished"
    assert trials["point_id"].is_unique
    assert set(trials["point_id"]) == points_of(settings)
    kept_rows = trials[trials["point_id"].isin(kept)].reset_index(drop=True)
    assert kept_rows.equals(before.tables["trials"])
    with pytest.raises(BadInput, match="finished"):
        sweep_race(settings, root=tmp_path / "runs", resume=folder)


WORKER_THAT_CRASHES = """
import os, sys
from atom.benchmarks import race_worker
whole = race_worker.run_job
def run_job(device, settings, job):
    for number, event in enumerate(whole(device, settings, job)):
        yield event
        if job.process == 1 and number == 2:
            print("an illegal memory access was encountered", file=sys.stderr, flush=True)
            os.abort()
race_worker.run_job = run_job
code = race_worker.main()
sys.stderr.flush()
os._exit(code)
"""


@pytest.mark.usefixtures("same_commit")
def test_a_crashed_worker_is_told_with_its_last_words_and_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = RaceSettings.parse({**SMALL, "only": ["main/unpatched/spin"], "processes": 3})
    script = tmp_path / "worker.py"
    script.write_text(WORKER_THAT_CRASHES)
    result = sweep_race(
        settings, root=tmp_path, subprocesses=True, command=[sys.executable, str(script)]
    )
    assert len(result.failures) == 1
    assert "process=1" in result.failures[0]
    assert "an illegal memory access was encountered" in result.failures[0]
    assert "signal 6" in result.failures[0]
    assert set(result.run.tables["trials"]["process"]) == {0, 2}
    assert result.run.provenance.exit_state == "failed"
    # The failed process alone is planned, and run again.
    capsys.readouterr()
    before = sorted(result.run.path.rglob("*"))
    assert sweeps.run(parse("--dry-run", "--resume", str(result.run.path))) == 0
    assert "1 processes, 4 trials" in capsys.readouterr().out
    assert sorted(result.run.path.rglob("*")) == before
    again = sweep_race(settings, root=tmp_path, resume=result.run.path)
    assert not again.failures
    with pytest.raises(BadInput, match="nothing of it is left"):
        sweeps.run(parse("--dry-run", "--resume", str(result.run.path)))
    assert set(again.run.tables["trials"]["point_id"]) == points_of(settings)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('hello')", "in place of a message"),
        ('print(\'{"type": "imported"}\')', "ended early|closed its input"),
        ("raise SystemExit(2)", "exit code 2"),
    ],
)
def test_a_worker_that_breaks_its_protocol_fails_its_job(body: str, words: str) -> None:
    settings = RaceSettings.parse({**SMALL, "only": ["main/hold/spin"], "processes": 1})
    events = list(
        measure(
            settings,
            build_jobs(settings),
            subprocesses=True,
            command=[sys.executable, "-c", body],
        )
    )
    assert len(events) == 1
    assert isinstance(events[0], JobFailed)
    assert re.search(words, events[0].reason)


def test_a_failed_process_ends_the_command_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_race(RaceSettings.parse(SMALL), tmp_path)

    def failed(*_: Any, **__: Any) -> SweepResult:
        return SweepResult(run, ("queues=2: gone",))

    monkeypatch.setattr(sweeps, "sweep_race", failed)
    assert sweeps.run(parse("--device", "virtual")) == 3
    assert "do not count" in capsys.readouterr().err
    with pytest.raises(DeviceError, match="gone"):
        run_race(RaceSettings.parse(SMALL), tmp_path)


def test_the_command_prints_intervals_and_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "virtual", "--trials", "4", "--processes", "2", "--out", str(tmp_path)]
    assert sweeps.run(parse(*words, "--only", "main/*/spin/engine")) == 0
    text = capsys.readouterr().out
    assert "main/unpatched/spin/engine" in text
    assert "8/8" in text
    assert "simulated on MI355X" in text
    assert "no proof of safety" in text


def test_a_dry_run_lists_arms_and_time_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "accelerator", "--dry-run", "--out", str(tmp_path)]
    assert sweeps.run(parse(*words)) == 0
    text = capsys.readouterr().out
    assert "allocator/cuda_malloc_async/hold" in text
    assert "about" in text.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_wrong_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="did you mean 'trials'"):
        settings_from(parse("--device", "virtual", "-p", "trails", "3"))
    with pytest.raises(BadInput, match="trials"):
        settings_from(parse("--device", "virtual", "--trials", "0"))
    with pytest.raises(BadInput, match="nearest"):
        sweeps.run(parse("--device", "virtual", "--only", "mian/*", "--out", str(tmp_path)))
    run = run_race(RaceSettings.parse(SMALL), tmp_path)
    with pytest.raises(BadInput, match="leave out: trials"):
        settings_from(parse("--resume", str(run.path), "--trials", "3"))
    assert settings_from(parse("--resume", str(run.path))) == RaceSettings.parse(SMALL)


def test_a_hiding_variable_stops_a_sweep_on_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    settings = RaceSettings.parse({**SMALL, "device": "accelerator"})
    with pytest.raises(BadInput, match="unset CUDA_LAUNCH_BLOCKING"):
        sweep_race(settings, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_accelerator_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom.device.accelerator.why_no_accelerator", lambda: "none here")
    with pytest.raises(DeviceError, match="none here"):
        sweep_race(RaceSettings.parse({**SMALL, "device": "accelerator"}), root=tmp_path)


def test_workers_that_never_reach_the_device_end_the_sweep(tmp_path: Path) -> None:
    settings = RaceSettings.parse({**SMALL, "processes": 20})
    command = [sys.executable, "-c", "raise SystemExit('no driver')"]
    with pytest.raises(DeviceError, match="no driver") as caught:
        sweep_race(settings, root=tmp_path, subprocesses=True, command=command)
    assert str(caught.value).count("no driver") == sweeps.HOPELESS_FAILURES
    assert not list(tmp_path.iterdir())


def test_no_row_makes_no_table(tmp_path: Path) -> None:
    run = run_race(RaceSettings.parse(SMALL), tmp_path)
    assert "no process finished" in result_text(run.tables["trials"].iloc[:0])


def test_what_a_worker_sees_is_recorded_for_its_setting(tmp_path: Path) -> None:
    facts = run_race(RaceSettings.parse(SMALL), tmp_path).provenance.facts
    # one worker's environment stood for the whole run before
    assert set(facts["in_workers"]) == {
        "queues=default allocator=native",
        "queues=2 allocator=native",
    }
    assert "in_worker" not in facts


def test_a_sweep_that_is_resumed_on_another_device_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RaceSettings.parse(SMALL)
    folder = run_race(settings, tmp_path).path
    record = json.loads((folder / "run.json").read_text())
    record.update(exit_state="interrupted", device="MI300X")
    (folder / "run.json").write_text(json.dumps(record))
    (folder / run_writer.PARTIAL).mkdir()
    with pytest.raises(BadInput, match="was started on MI300X"):
        sweep_race(settings, root=tmp_path, resume=folder)
    # and can still be resumed where it began
    assert read_provenance(folder).exit_state == "failed"

"""The throughput sweep: each end is a row, nothing is lost, and it goes on where it stopped."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from fake_point import COMMAND

from atom.__main__ import main
from atom.benchmarks.seeded_model import shipped_model
from atom.benchmarks.throughput_rows import Outcome, ThroughputRow
from atom.benchmarks.throughput_settings import ThroughputSettings, build_points
from atom.errors import BadInput, DeviceError
from atom.workbook.records import check_folder, load_run
from atom.workbook.run_writer import RunWriter, read_provenance
from atom.workbook.throughput_dask import (
    Lost,
    connected,
    local_cluster,
    run_jobs,
    visible,
)
from atom.workbook.throughput_results import tables_of, unexpected
from atom.workbook.throughput_runs import ThroughputSweep, record_throughput

ONE_TRACE = json.dumps(
    {
        "id": "one",
        "block_size": 64,
        "requests": [{"t": 0.0, "in": 64, "out": 4, "hash_ids": [1], "api_time": 1.0}],
    }
)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, same_commit: None) -> None:
    """Points end at once."""
    monkeypatch.setattr(ThroughputSweep, "process", COMMAND)
    monkeypatch.setattr(ThroughputSweep, "refuse_no_model", lambda self, settings: None)


def settings(does: str = "ok", **values: Any) -> ThroughputSettings:
    return ThroughputSettings.parse({"model": does, "pool_gib": [0.001], "sessions": 2, **values})


@pytest.mark.parametrize(
    ("does", "outcome", "detail"),
    [
        ("ok", Outcome.OK, None),
        ("kill", Outcome.CRASH, "its process was killed by SIGKILL"),
        ("die 3", Outcome.CRASH, "its process ended with code 3: the last words"),
        ("die 4", Outcome.OUT_OF_MEMORY, "code 4"),
        ("die 7", Outcome.GUARD_ERROR, "code 7"),
        ("hang", Outcome.HANG, "its load did not end within 0 s and it was killed"),
    ],
)
def test_each_end_of_a_point_is_a_row(
    does: str, outcome: Outcome, detail: str | None, tmp_path: Path
) -> None:
    limit = 0.4 if does == "hang" else None
    run = record_throughput(
        settings(does, concurrency=[2], no_offload=False, time_limit_seconds=limit), tmp_path
    )
    [row] = run.tables["points"].to_dict("records")
    assert row["outcome"] == outcome.value
    assert (detail or "") in str(row["outcome_detail"])
    # what it had told before its end
    assert row["exposure_seconds"] == (1.0 if does == "ok" else 0.5)
    assert row["requests"] == (11 if does == "ok" else 10)
    assert run.provenance.exit_state == "finished"
    assert check_folder(run.path) == []
    assert len(unexpected(run.tables["points"])) == (does != "ok")


def test_one_that_was_never_asked_anything_says_nothing_of_its_protocol() -> None:
    [point] = build_points(settings(concurrency=[2], no_offload=False))
    end = {"told": {}, "exit_code": 1, "timed_out": None, "wall_seconds": 1.0, "last_words": "no"}
    for part, detail in ((None, "code 1"), ("start", "it had no request within 1 s")):
        [row] = tables_of(settings(), point, end | {"timed_out": part}, 9.0)["points"]
        assert isinstance(row, ThroughputRow)
        assert (row.outcome, row.exposure_seconds) == (Outcome.START_FAILED, None)
        assert detail in str(row.outcome_detail)


def test_a_stale_status_under_hold_is_unexpected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", "throughput", "--device", "virtual", "--quick", "--out", str(tmp_path)]
    command += ["-p", "sessions", "2"]
    assert main([*command, "-p", "model", "stale"]) == 1
    printed = capsys.readouterr()
    assert "hold/c4/no-pool/0: ok, 1 stale statuses" in printed.err
    assert "hold/c4/0.002GiB/0" in printed.out
    assert main([*command, "-p", "model", "ok", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["outcome"] for row in rows} == {"ok"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--traces", "TRACES"], "one.json: not readable as JSON"),
        (["-p", "device_profile", "none"], "no device profile 'none'; known: MI355X, H200"),
    ],
)
def test_a_dry_run_refuses_what_the_sweep_would(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.json").write_text("{")
    given = [str(tmp_path) if word == "TRACES" else word for word in words]
    assert main(["sweep", "throughput", "--device", "virtual", "--dry-run", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_names_what_this_machine_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise BadInput("LMCache cannot be imported")

    monkeypatch.setattr("atom.workbook.throughput_runs.import_lmcache", missing)
    words = ["sweep", "throughput", "--device", "virtual", "--dry-run", "-p", "sessions", "2"]
    assert main([*words, "-p", "special", "[backends]"]) == 0
    printed = capsys.readouterr()
    assert "the sweep would be refused: LMCache cannot be imported" in printed.err
    assert "hold, lmcache/c4/0.002GiB/0" in printed.out


def test_what_no_time_was_left_for_is_named_and_runs_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sweep", "throughput", "--device", "virtual", "--out", str(tmp_path)]
    words += ["-p", "model", "sleep 0.6", "-p", "concurrency", "[2, 4, 8]", "-p", "pool_gib", "[]"]
    words += ["-p", "sessions", "2", "-p", "setup_seconds", "0", "-p", "duration_seconds", "0.1"]
    monkeypatch.setattr("atom.workbook.throughput_queue._AROUND_SECONDS", 0.5)
    assert main([*words, "-p", "budget_seconds", "1.1"]) == 0
    printed = capsys.readouterr()
    assert "2 points did not run: no time was left; go on with:" in printed.err
    [folder] = [file.parent for file in tmp_path.rglob("run.json")]
    run = load_run(folder)
    assert len(run.tables["points"]) == 1
    assert run.provenance.exit_state == "interrupted"
    assert len(run.provenance.facts["stopped_early"]["not_run"]) == 2
    # it may be shared as it is: it says itself what it left out
    assert check_folder(folder) == []
    assert main(["sweep", "throughput", "--resume", str(folder), "--dry-run", "--json"]) == 0
    left = {point["point"] for point in json.loads(capsys.readouterr().out)["points"]}
    assert left == set(run.provenance.facts["stopped_early"]["not_run"])
    assert main(["sweep", "throughput", "--resume", str(folder)]) == 0
    assert load_run(folder).provenance.exit_state == "finished"
    assert len(load_run(folder).tables["points"]) == 3


def test_a_warm_up_runs_first_and_is_no_row(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    (marks / "one.json").write_text(ONE_TRACE)
    values = {"concurrency": [2], "traces": str(marks), "warm_up": True, "logs": str(tmp_path)}
    run = record_throughput(settings("ok", **values, special=["guard"]), tmp_path / "out")
    points = list(run.tables["points"]["point_id"])
    assert len(points) == 3
    logs = sorted(file.name for file in tmp_path.glob("*.log*"))
    # the largest point of the first set of kernels, as there is one GPU
    assert [name for name in logs if "warm" in name] == ["hold_c2_0.001GiB_0.log.warm-up"]
    assert len(logs) == 4


def test_traces_may_have_moved_when_a_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, other = (tmp_path / a / b for a, b in (("a", "t"), ("b", "t"), ("c", "u")))
    for folder in (old, new, other):
        folder.mkdir(parents=True)
        (folder / "one.json").write_text(ONE_TRACE)
    out = tmp_path / "out"
    words = ["sweep", "throughput", "--device", "virtual", "--quick", "--out", str(out)]
    words += ["--traces", str(old), "-p", "model", "ok", "-p", "budget_seconds", "0.01"]
    assert main(words) == 0
    [folder] = [file.parent for file in out.rglob("run.json")]
    assert read_provenance(folder).exit_state == "interrupted"
    assert read_provenance(folder).facts["traces"]["source"] == "recorded: t"
    capsys.readouterr()
    resume = ["sweep", "throughput", "--resume", str(folder)]
    assert main([*resume, "--traces", str(other)]) == 2
    assert "the run was started with traces of t" in capsys.readouterr().err
    assert main(resume) == 2
    assert "name the traces of this run with --traces DIR" in capsys.readouterr().err
    assert main([*resume, "--traces", str(new)]) == 0
    assert read_provenance(folder).exit_state == "finished"


def test_options_of_one_experiment_are_refused_by_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("race", "lifetime"):
        assert main(["sweep", name, "--device", "virtual", "--gpus", "0,1"]) == 2
        assert f"sweep {name} has no --gpus" in capsys.readouterr().err
    assert main(["sweep", "throughput", "--device", "virtual", "--trials", "3"]) == 2
    assert "sweep throughput has no --trials" in capsys.readouterr().err


def test_a_worker_sees_one_gpu_of_those_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(2, "CUDA_VISIBLE_DEVICES") == {"CUDA_VISIBLE_DEVICES": "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-x")
    assert visible(1, "CUDA_VISIBLE_DEVICES") == {"CUDA_VISIBLE_DEVICES": "GPU-x"}
    with pytest.raises(BadInput, match="--gpus: 2 is none of the 2 that CUDA_VISIBLE_DEVICES"):
        visible(2, "CUDA_VISIBLE_DEVICES")


def left_early(client: Any, folder: Path) -> None:
    """An interrupt that has ended the cluster too is an interrupt and no other failure."""
    settings = {"model": "sleep 0.1", "traces": str(folder)}
    job = {"settings": settings, "marks": False, "limit_seconds": 30.0}
    jobs = iter({**job, "point_id": f"left/c{number}"} for number in range(9))
    ends = run_jobs(client, lambda: next(jobs, None), "left", COMMAND)
    next(ends)
    with pytest.MonkeyPatch.context() as patch:

        def gone(*_: Any) -> None:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

        patch.setattr(client, "run", gone)
        ends.close()  # type: ignore[attr-defined]


def test_a_worker_killed_in_mid_point_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    names = [f"hold/c{number}/no-pool/0" for number in range(7)]
    jobs = [
        {
            "point_id": name,
            "settings": {"model": "sleep 0.5", "traces": str(tmp_path)},
            "marks": True,
            "limit_seconds": 30.0,
        }
        for name in names
    ]
    killed: list[str] = []

    def kill_one() -> None:
        while not (marks := list(tmp_path.iterdir())):
            time.sleep(0.01)
        name, point, worker = marks[0].name.rsplit(".", 2)
        os.kill(int(worker), signal.SIGKILL)
        killed.append(name)
        # its point gives the GPU back by itself
        while Path(f"/proc/{point}/cmdline").exists():
            time.sleep(0.01)

    queue = iter(jobs)
    killer = threading.Thread(target=kill_one)
    with local_cluster([{"SHOWN": str(gpu)} for gpu in range(3)]) as client:
        killer.start()
        ends = list(run_jobs(client, lambda: next(queue, None), "sweep", COMMAND))
        killer.join()
        left_early(client, tmp_path)
    assert not [end for _, end in ends if isinstance(end, Lost)]
    assert sorted(job["point_id"] for job, _ in ends) == names
    assert all(end["exit_code"] == 0 for _, end in ends if not isinstance(end, Lost))
    # the killed one ran twice, every other once, at most three at a time
    runs = [mark.name.rsplit(".", 2)[0] for mark in tmp_path.iterdir()]
    assert len(runs) == 8
    assert runs.count(killed[0]) == 2


def test_sweeps_that_start_together_have_logs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.gmtime()
    monkeypatch.setattr(time, "gmtime", lambda *_: now)
    words = ["sweep", "throughput", "--device", "virtual", "--quick", "-p", "sessions", "2"]
    for _ in range(2):
        assert main([*words, "-p", "model", "ok", "--out", str(tmp_path)]) == 0
    assert len(list((tmp_path / ".logs").iterdir())) == 2


def test_a_disk_that_fills_up_costs_the_point_in_progress_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "throughput", "--device", "virtual", "--out", str(tmp_path)]
    given = ["-p", "model", "ok", "-p", "sessions", "2", "-p", "concurrency", "[2]"]
    whole = RunWriter._write_provenance
    kept: list[Any] = []

    def full(writer: RunWriter, *given: Any) -> None:
        if writer.points:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(writer, *given)

    def one(writer: RunWriter, *given: Any) -> None:
        if kept:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept.append(given)
        write_point(writer, *given)

    write_point = RunWriter.write_point
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "_write_provenance", full)
        patch.setattr(RunWriter, "write_point", one)
        assert main([*words, *given]) == 2
    said = capsys.readouterr().err
    [folder] = (tmp_path / "virtual-mi355x").iterdir()
    assert "1 finished points are kept; go on with: " in said
    assert f"--resume {folder}" in said
    assert main([*words[:2], "--resume", str(folder)]) == 0
    assert len(load_run(folder).tables["points"]) == 3


@pytest.mark.parametrize("model", ["preset:none", "nowhere"])
def test_a_model_that_is_not_there_is_refused_before_any_point(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with pytest.raises(BadInput, match=r"no model size is named 'none'|nowhere|config\.json"):
        record_throughput(settings(model), tmp_path)
    assert not list(tmp_path.iterdir())


def test_sequences_longer_than_a_checkpoint_was_made_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    checkpoint = str(shipped_model())
    room = {"num_kv_blocks": 2**20}
    ThroughputSweep.refuse_no_model(settings(checkpoint, max_context_tokens=2**14, **room))
    ThroughputSweep.refuse_no_model(settings("preset:tiny", max_context_tokens=2**20, **room))
    with pytest.raises(BadInput, match="max_context_tokens 32768: the model was made for 16384"):
        ThroughputSweep.refuse_no_model(settings(checkpoint, max_context_tokens=2**15, **room))


def test_a_backend_that_is_not_installed_is_refused_before_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lmcache.utils", None)
    with pytest.raises(BadInput, match="LMCache cannot be imported"):
        record_throughput(settings(special=["backends"]), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_scheduler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("atom.workbook.throughput_dask._CONNECT_SECONDS", 0.3)
    with (
        pytest.raises(DeviceError, match=r"no Dask scheduler answers at tcp://127.0.0.1:9"),
        connected("tcp://127.0.0.1:9"),
    ):
        pass

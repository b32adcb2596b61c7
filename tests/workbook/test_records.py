"""Recorded runs: what is written comes back, what is damaged is named, what ended never changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from atom.device.interface import DeviceKind, DeviceProperties
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import provenance as provenance_module
from atom.workbook import run_checks, schemas, tables
from atom.workbook.provenance import redact, relevant_environment
from atom.workbook.records import (
    TABLES,
    Provenance,
    RunWriter,
    check_folder,
    collect_provenance,
    load_run,
    load_runs,
)
from atom.workbook.records_cli import check
from atom.workbook.tables import csv_text, parse_rows, to_frame

SETTINGS = {"trials": 4, "only": ["a", "b"]}


class ToyRow(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str = Field(min_length=1)
    trials: int = Field(ge=1)
    stale: int = Field(ge=0)
    clean: int = Field(ge=0)
    seconds: float | None = None
    queues: int | None = Field(default=None, ge=1)
    shared: bool | None = None
    remark: str = ""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.stale + self.clean != self.trials:
            raise ValueError(f"stale + clean is {self.stale + self.clean}, not {self.trials}")
        return self


class SpanRow(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    lane: str
    start_us: float


def properties(kind: DeviceKind = DeviceKind.CUDA) -> DeviceProperties:
    virtual = kind is DeviceKind.VIRTUAL
    return DeviceProperties(
        name="MI355X" if virtual else "NVIDIA H200",
        kind=kind,
        evidence=Evidence.SIMULATED if virtual else Evidence.MEASURED,
        machine="mi355x-virtual" if virtual else "h200",
        memory_bytes=1,
        hardware_queues=None,
        queue_variable=None,
        driver=None,
        runtime="virtual" if virtual else "CUDA 13.0",
    )


def row(arm: str = "a", stale: int = 1, **more: Any) -> ToyRow:
    return ToyRow(arm=arm, trials=4, stale=stale, clean=4 - stale, **more)


@pytest.fixture(autouse=True)
def _toy_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schemas.TABLES, "toy", {"trials": ToyRow, "spans": SpanRow})
    monkeypatch.setattr(provenance_module, "source_commit", lambda: ("0" * 40, False))


def new_writer(root: Path, **more: Any) -> RunWriter:
    made = collect_provenance(properties(), "toy", SETTINGS, more)
    return RunWriter(root, "h200", "toy", made)


def finished_run(root: Path, **more: Any) -> Path:
    writer = new_writer(root, **more)
    writer.write_point("a", {"trials": [row("a")], "spans": [SpanRow(lane="copy", start_us=0.5)]})
    writer.write_point("b", {"trials": [row("b", 0, seconds=0.25, queues=4)]})
    writer.finish("finished")
    return writer.path


# -- tables


@given(
    st.lists(
        st.builds(
            row,
            arm=st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), min_size=1),
            stale=st.integers(0, 4),
            seconds=st.none() | st.floats(allow_nan=False, allow_infinity=False),
            queues=st.none() | st.integers(1, 2**62),
            shared=st.none() | st.booleans(),
        ).filter(lambda made: made.arm.strip().lower() not in tables._NOT_A_NUMBER)
    )
)
def test_rows_survive_the_file(rows: list[ToyRow]) -> None:
    assert parse_rows(csv_text(rows, ToyRow), ToyRow, "f.csv") == rows


def test_blank_stays_missing_in_the_frame() -> None:
    frame = to_frame([row(), row(seconds=0.0, queues=1, shared=False)], ToyRow)
    assert frame["seconds"].isna().tolist() == [True, False]
    assert frame["queues"].dtype == "Int64"
    assert frame["queues"].isna().tolist() == [True, False]
    assert frame["shared"].isna().tolist() == [True, False]
    # a missing count adds nothing; a zero in its place would change the mean
    assert frame["queues"].mean() == 1


GOOD = "arm,trials,stale,clean,seconds,queues,shared,remark\na,4,1,3,,,,\n"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("stale,clean", "stalee,clean", r"f\.csv:1:stale: this column is missing"),
        ("stale,clean", "stalee,clean", r"f\.csv:1:stalee: no such column"),
        ("seconds,queues", "queues,queues", r"f\.csv:1:queues: this column stands twice"),
        ("a,4,1,3,,", "a,4,1,3,NaN,", r"f\.csv:2:seconds: 'NaN' is no value"),
        ("a,4,1,3,,", "a,4,1,3,inf,", r"f\.csv:2:seconds: 'inf' is no value"),
        ("a,4,1,3", "a,4,-1,5", r"f\.csv:2:stale: .*greater than or equal to 0, got '-1'"),
        ("a,4,1,3", "a,4,1,2", r"f\.csv:2:\(whole row\): stale \+ clean is 3, not 4"),
        ("a,4,1,3", "a,4,,3", r"f\.csv:2:stale: blank, but this column needs a value"),
        ("a,4,1,3", "a,4,one,3", r"f\.csv:2:stale: .*got 'one'"),
        ("a,4,1,3,,,,\n", "a,4,1,3\n", r"f\.csv:2: 4 cells, but the header has 8"),
        ("a,4,1,3,,,,\n", 'a,4,1,3,,,,"x\n', r"f\.csv:2: not a CSV row"),
        (GOOD, "", r"f\.csv:1: empty"),
        ("a,4,1,3,,", "a,4,1,3,1e999,", r"f\.csv:2:seconds: '1e999' is no number of 64 bits"),
        ("3,,,,", f"3,,{2**63},,", rf"f\.csv:2:queues: '{2**63}' is no number of 64 bits"),
        ("3,,,,", "3,,1_0,,", r"f\.csv:2:queues: '1_0' is no number of 64 bits"),
    ],
)
def test_a_bad_cell_is_named_by_file_line_and_column(before: str, after: str, said: str) -> None:
    assert before in GOOD
    assert parse_rows(GOOD, ToyRow, "f.csv") == [row()]
    with pytest.raises(BadInput, match=said):
        parse_rows(GOOD.replace(before, after), ToyRow, "f.csv")


def test_all_faults_of_a_file_come_at_once() -> None:
    text = GOOD + "b,4,-1,5,,,,\nc,4,x,3,,,,\n"
    with pytest.raises(BadInput) as caught:
        parse_rows(text, ToyRow, "f.csv")
    assert re.findall(r"f\.csv:(\d+):stale", str(caught.value)) == ["3", "4"]


# -- runs


def test_a_finished_run_comes_back(tmp_path: Path) -> None:
    run = load_run(finished_run(tmp_path))
    assert run.tables["trials"]["arm"].tolist() == ["a", "b"]
    assert run.tables["spans"]["lane"].tolist() == ["copy"]
    assert run.provenance.exit_state == "finished"
    assert run.provenance.files["trials.csv"].rows == 2
    assert not (run.path / ".partial").exists()
    assert check_folder(tmp_path) == []


def test_the_race_experiment_is_registered() -> None:
    assert set(TABLES["race"]) == {"trials", "timeline"}


def test_a_valid_looking_edit_is_found_by_its_sum(tmp_path: Path) -> None:
    file = finished_run(tmp_path) / "trials.csv"
    file.write_text(file.read_text().replace("a,4,1,3", "a,4,0,4"))
    with pytest.raises(BadInput, match=r"trials\.csv: changed since the run ended"):
        load_run(file.parent)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: (run / "spans.csv").unlink(), r"spans\.csv: no such file"),
        (lambda run: (run / "more.csv").write_text("x\n"), r"more\.csv: not listed in run\.json"),
        (lambda run: (run / "run.json").write_text("{"), r"run\.json:\(whole file\)"),
        (lambda run: (run / "trials.csv").write_bytes(b"\xff\xfe"), "UTF-8"),
    ],
)
def test_a_damaged_run_hides_no_other(tmp_path: Path, damage: Any, said: str) -> None:
    damaged, whole = finished_run(tmp_path), finished_run(tmp_path)
    runs, problems = load_runs([tmp_path], "toy")
    assert (len(runs), problems) == (2, [])
    damage(damaged)
    runs, problems = load_runs([tmp_path], "toy")
    assert [run.path for run in runs] == [whole]
    assert len(problems) == 1
    assert re.search(said, problems[0])
    assert damaged.name in problems[0]


def test_runs_are_found_once_and_by_experiment(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    runs, problems = load_runs([tmp_path, path, tmp_path / "absent"], "toy")
    assert [run.path for run in runs] == [path]
    assert [problem.endswith("no such folder") for problem in problems] == [True]
    assert load_runs([tmp_path], "race") == ([], [])
    copy = shutil.copytree(path, tmp_path / "copies" / path.name)
    runs, problems = load_runs([copy, path], "toy")
    assert len(runs) == 1
    assert [problem.split(": ")[1][:16] for problem in problems] == ["the same run as "]
    with pytest.raises(BadInput, match="known: race"):
        load_runs([tmp_path], "rase")


# -- writing


def test_a_point_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_writer(tmp_path)
    writer.write_point("a", {"trials": [row("a")]})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            writer.write_point("b", {"trials": [row("b")]})
    assert not writer.has("b")
    assert load_run(writer.path).tables["trials"]["arm"].tolist() == ["a"]
    writer.write_point("b", {"trials": [row("b")]})
    assert load_run(writer.path).tables["trials"]["arm"].tolist() == ["a", "b"]


def test_ctrl_c_behind_the_rename_loses_no_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_writer(tmp_path)
    rename = os.replace

    def interrupted(*names: Any) -> None:
        rename(*names)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.write_point("a", {"trials": [row("a")]})
    writer.finish("interrupted", "interrupted by the user")
    assert load_run(writer.path).tables["trials"]["arm"].tolist() == ["a"]
    assert RunWriter.resume(writer.path, SETTINGS).has("a")


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_records import SpanRow, ToyRow, new_writer, row
from atom.workbook import provenance, schemas
schemas.TABLES["toy"] = {"trials": ToyRow, "spans": SpanRow}
provenance.source_commit = lambda: ("0" * 40, False)
writer = new_writer(Path(sys.argv[1]))
print(writer.path, flush=True)
for number in range(100000):
    rows = [row(f"{number}") for _ in range(200)]
    writer.write_point(str(number), {"trials": rows})
    print(number, flush=True)
"""


def test_a_killed_run_keeps_each_finished_point_and_is_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        told = [child.stdout.readline() for _ in range(5)]
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert len(told) == 5
    (path / ".partial" / ".writing-left-by-the-kill").write_text('{"point": "half')

    killed = load_run(path)
    counts = killed.tables["trials"].groupby("arm").size()
    assert killed.provenance.exit_state == "running"
    assert len(counts) >= 5
    assert set(counts) == {200}

    writer = RunWriter.resume(path, SETTINGS)
    assert writer.points == tuple(str(number) for number in range(len(counts)))
    writer.write_point("last", {"trials": [row("last")]})
    writer.finish("finished")
    assert len(load_run(path).tables["trials"]) == 200 * len(counts) + 1
    assert check_folder(path) == []


def test_an_interrupted_run_is_readable_and_goes_on(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    writer.write_point("a", {"trials": [row("a")]})
    writer.finish("interrupted", "stopped in /home/someone/atom/file.py")
    stopped = load_run(writer.path)
    assert stopped.tables["trials"]["arm"].tolist() == ["a"]
    assert stopped.provenance.error == "stopped in file.py"
    assert "exit_state" in check_folder(writer.path)[0]

    again = RunWriter.resume(writer.path, SETTINGS)
    assert again.has("a")
    again.write_point("b", {"trials": [row("b")]})
    again.finish("finished")
    assert load_run(writer.path).tables["trials"]["arm"].tolist() == ["a", "b"]


def test_a_deleted_point_is_not_written_over_another(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    for name in "abc":
        writer.write_point(name, {"trials": [row(name)]})
    writer.finish("interrupted")
    (writer.path / ".partial" / "000001.json").unlink()
    again = RunWriter.resume(writer.path, SETTINGS)
    again.write_point("b", {"trials": [row("b")]})
    assert sorted(again.points) == ["a", "b", "c"]
    assert sorted(load_run(writer.path).tables["trials"]["arm"]) == ["a", "b", "c"]


def test_what_cannot_be_resumed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="finished and never changes"):
        RunWriter.resume(finished_run(tmp_path), SETTINGS)
    writer = new_writer(tmp_path)
    with pytest.raises(BadInput, match="written by another process"):
        RunWriter.resume(writer.path, SETTINGS)
    writer.finish("failed", "out of memory")
    with pytest.raises(BadInput, match="trials: recorded 4, now 5"):
        RunWriter.resume(writer.path, {**SETTINGS, "trials": 5})
    monkeypatch.setattr(provenance_module, "source_commit", lambda: ("1" * 40, False))
    with pytest.raises(BadInput, match="other software"):
        RunWriter.resume(writer.path, SETTINGS)
    monkeypatch.setattr(provenance_module, "source_commit", lambda: ("0" * 40, False))
    RunWriter.resume(writer.path, SETTINGS).finish("finished")


def test_a_writer_refuses_what_would_spoil_a_run(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    writer.write_point("a", {"trials": [row("a")]})
    with pytest.raises(BadInput, match="already in"):
        writer.write_point("a", {"trials": [row("a")]})
    with pytest.raises(BadInput, match="no table 'span'"):
        writer.write_point("b", {"span": []})
    with pytest.raises(BadInput, match="rows of ToyRow only"):
        writer.write_point("b", {"trials": [SpanRow(lane="x", start_us=0)]})
    with pytest.raises(BadInput, match="NaN"):
        writer.write_point("b", {"spans": [SpanRow(lane="x", start_us=float("nan"))]})
    with pytest.raises(BadInput, match="exists"):
        RunWriter(tmp_path, "h200", "toy", writer.provenance)
    with pytest.raises(BadInput, match="provenance says"):
        RunWriter(tmp_path, "mi355x", "toy", writer.provenance)
    writer.finish("finished")
    with pytest.raises(BadInput, match="has ended"):
        writer.write_point("c", {"trials": [row("c")]})
    with pytest.raises(BadInput, match="ended already"):
        writer.finish("failed")
    assert load_run(writer.path).tables["trials"]["arm"].tolist() == ["a"]


# -- provenance and checks


def test_provenance_names_no_host_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "TORCH_HOME": "/home/someone/torch",
        "HOSTNAME": "gpu-box",
        "HF_TOKEN": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-box-17")
    facts = {"processes": ["/opt/server/bin/serve on gpu-box-17"], "watts": 700}
    made = collect_provenance(properties(), "toy", {"records": ["data/runs"]}, facts)
    text = made.model_dump_json()
    for secret in ("/home", "gpu-box", "someone", "secret", "/opt"):
        assert secret not in text
    assert made.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert made.environment["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"
    assert made.settings == {"records": ["data/runs"]}
    assert made.facts["watts"] == 700


def test_only_variables_that_matter_are_kept() -> None:
    kept = relevant_environment({"GPU_MAX_HW_QUEUES": "4", "PATH": "x", "HIP_X": "a@b", "A": "1"})
    assert kept == {"GPU_MAX_HW_QUEUES": "4"}


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("data/runs and 1/2", "data/runs and 1/2"),
        ("http://127.0.0.1:8000/v1/chat", "http://127.0.0.1:8000/v1/chat"),
        ('File "/usr/lib/x/y.py", line 3', 'File "y.py", line 3'),
        ("~/atom/run", "run"),
        (r"C:\Users\me\atom", "atom"),
    ],
)
def test_redaction_cuts_absolute_paths_alone(text: str, redacted: str) -> None:
    assert redact(text) == redacted
    assert redact({"a": [text]}) == {"a": [redacted]}


def test_kind_and_evidence_must_agree() -> None:
    made = collect_provenance(properties(DeviceKind.VIRTUAL), "toy", SETTINGS)
    assert (made.evidence, made.profile) == (Evidence.SIMULATED, "MI355X")
    content = json.loads(made.model_dump_json())
    assert Provenance.model_validate(content) == made
    with pytest.raises(ValueError, match="evidence of a virtual device is simulated"):
        Provenance.model_validate({**content, "evidence": "measured"})


def test_check_names_a_run_that_lies_in_the_wrong_place(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    moved = path.parent.parent / "mi355x" / "renamed"
    moved.parent.mkdir()
    path.rename(moved)
    said = "\n".join(check_folder(tmp_path))
    assert f"its folder is {moved.name}" in said
    assert "the folder above is mi355x" in said


def test_check_finds_paths_that_somebody_put_in(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    file = path / "run.json"
    content = json.loads(file.read_text())
    content["facts"]["log"] = "/home/someone/log.txt"
    file.write_text(json.dumps(content))
    assert check_folder(path) == [
        f"{tables.shown_path(file)}:facts: holds a path, user or host name; remove it"
    ]


def test_line_breaks_of_a_text_are_no_path() -> None:
    """A text in JSON's quotes has a backslash before each n, which begins no folder's name."""
    cells = [json.dumps("198+11=2 was \nThen\nKate"), "none"]
    assert run_checks._private_cells(Path("x"), {"texts": pd.DataFrame({"text": cells})}) == []
    for cell in (json.dumps("at /home/someone/log.txt"), '"at /home/someone/log.txt'):
        found = run_checks._private_cells(Path("x"), {"texts": pd.DataFrame({"text": [cell]})})
        assert len(found) == 1


def test_the_command_tells_good_from_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = finished_run(tmp_path)
    assert check(path) == 0
    printed = capsys.readouterr()
    assert "valid" in printed.out
    assert "KiB, about" in printed.err
    (path / "trials.csv").write_text("nonsense\n")
    assert check(tmp_path) == 2
    assert "trials.csv:1:arm" in capsys.readouterr().out
    assert check(tmp_path / "absent") == 2


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None
)
@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 6))
def test_a_resumed_run_equals_an_unbroken_one(
    tmp_path_factory: pytest.TempPathFactory, stales: list[int], stop: int
) -> None:
    def points() -> list[tuple[str, ToyRow]]:
        return [(f"p{number}", row(f"p{number}", stale)) for number, stale in enumerate(stales)]

    whole, broken = (new_writer(tmp_path_factory.mktemp("runs")) for _ in range(2))
    for name, one in points():
        whole.write_point(name, {"trials": [one]})
    whole.finish("finished")
    for name, one in points()[:stop]:
        broken.write_point(name, {"trials": [one]})
    broken.finish("interrupted")
    again = RunWriter.resume(broken.path, SETTINGS)
    for name, one in points():
        if not again.has(name):
            again.write_point(name, {"trials": [one]})
    again.finish("finished")
    assert (whole.path / "trials.csv").read_bytes() == (again.path / "trials.csv").read_bytes()


def test_a_fact_that_shows_itself_later_is_added_once(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, watts=700)
    writer.add_fact("in_workers", "queues=4", {"log": "/home/someone/x.log"})
    writer.add_fact("in_workers", "queues=8", {"log": None})
    writer.add_fact("in_workers", "queues=4", {"log": "another"})
    writer.finish("finished")
    assert load_run(writer.path).provenance.facts == {
        "watts": 700,
        "in_workers": {"queues=4": {"log": "x.log"}, "queues=8": {"log": None}},
    }
    with pytest.raises(BadInput, match="has ended"):
        writer.add_fact("in_workers", "queues=32", {})

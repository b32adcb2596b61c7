"""Damage that leaves every row and every sum valid, and names that must not be shared."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.device.interface import DeviceKind, DeviceProperties
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook.provenance import redact
from atom.workbook.records import RunWriter, check_folder, collect_provenance, load_run
from atom.workbook.tables import DATA

RECORDED = sorted(path.parent for path in (DATA / "runs").rglob("run.json"))


def changed(
    folder: Path, table: str, change: Callable[[list[str]], list[str]], **provenance: Any
) -> list[str]:
    """Problems of a copy of a recorded run whose rows changed and whose sums were made anew."""
    source = next(path for path in RECORDED if (path / table).exists())
    copy = folder / source.parent.name / source.name
    shutil.copytree(source, copy)
    lines = (copy / table).read_text().splitlines()
    lines = [lines[0], *change(lines[1:])]
    content = ("\n".join(lines) + "\n").encode()
    (copy / table).write_bytes(content)
    record = json.loads((copy / "run.json").read_text())
    record["files"][table] = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "rows": len(lines) - 1,
    }
    record.update(provenance)
    (copy / "run.json").write_text(json.dumps(record))
    return check_folder(copy)


def test_every_recorded_run_is_valid(tmp_path: Path) -> None:
    assert RECORDED
    assert check_folder(DATA / "runs") == []
    # the control of all tests below: a copy with new sums and no change
    assert changed(tmp_path, "trials.csv", lambda rows: rows) == []


@pytest.mark.parametrize("table", ["trials.csv", "timeline.csv"])
def test_a_row_that_stands_twice_is_named(tmp_path: Path, table: str) -> None:
    said = "\n".join(changed(tmp_path, table, lambda rows: [*rows[:5], rows[1], *rows[5:]]))
    assert f"{table}:7:point_id: " in said
    assert "stands in line 3 already" in said


def test_a_dropped_row_is_missed_even_without_a_plan(tmp_path: Path) -> None:
    said = "\n".join(changed(tmp_path, "trials.csv", lambda rows: rows[1:]))
    assert "is to have one row for each of" in said


def test_a_dropped_arm_is_missed_by_the_plan(tmp_path: Path) -> None:
    def without_first_arm(rows: list[str]) -> list[str]:
        arm = rows[0].split(",")[2]
        return [row for row in rows if row.split(",")[2] != arm]

    source = RECORDED[0]
    rows = len((source / "trials.csv").read_text().splitlines()) - 1
    said = "\n".join(
        changed(tmp_path, "trials.csv", without_first_arm, planned_rows={"trials": rows})
    )
    assert f"but the run planned {rows}" in said


def test_a_row_under_another_protocol_is_refused(tmp_path: Path) -> None:
    def swapped(rows: list[str]) -> list[str]:
        cells = rows[0].split(",")
        cells[4] = "blocking"
        return [",".join(cells), *rows[1:]]

    said = "\n".join(changed(tmp_path, "trials.csv", swapped))
    assert "but protocol is 'blocking'" in said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ended": "2020-01-01T00:00:00Z"}, "lies before started"),
        ({"started": "2026-13-01T00:00:00Z"}, "is no date and time"),
        ({"ended": None}, "exit_state is finished"),
        ({"device": "NVIDIA H200 of bob@corp-gpu17 /home/bob"}, "run.json:device"),
        ({"device": "NVIDIA H200 of gpu17"}, "only its marketing name"),
        ({"driver": "580 of bob"}, "run.json:driver"),
        ({"runtime": "CUDA 13.0 on gpu17"}, "run.json:runtime"),
        ({"torch": "bob's build"}, "run.json:torch"),
        ({"commit": "bob/main"}, "run.json:commit"),
        ({"environment": {"HOSTNAME": "gpu17"}}, "run.json:environment"),
        ({"facts": {"from": "gpu17.corp.internal"}}, "run.json:facts"),
        ({"facts": {"from": "at 10.1.2.3"}}, "run.json:facts"),
        ({"settings": {"only": ["bob@gpu17"]}}, "run.json:settings"),
        ({"error": "see gpu17:/home/bob/x"}, "run.json:error"),
    ],
)
def test_provenance_that_cannot_be_or_names_somebody(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    assert said in "\n".join(changed(tmp_path, "trials.csv", lambda rows: rows, **fields))


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("/home/bob", "(home)"),
        ("of ~bob", "of (home)"),
        (r"C:\Users\bob", "(home)"),
        ("bob@corp-gpu17 said", "(user) said"),
        ("bob@10.1.2.3:22 said", "(user):22 said"),
        ("gpu17:/scratch/bob/run.log", "gpu17:run.log"),
        ("gpu17.corp.internal", "(host)"),
        ("10.1.2.3 and 127.0.0.1", "(address) and 127.0.0.1"),
        ("main/hold/spin/engine@0", "main/hold/spin/engine@0"),
        ("00000000:00:06.0 580.159.04 2.11.0+cu130", "00000000:00:06.0 580.159.04 2.11.0+cu130"),
        ("data/runs/h200 and 3/4", "data/runs/h200 and 3/4"),
    ],
)
def test_redaction_leaves_no_user_and_no_host(text: str, redacted: str) -> None:
    assert redact(text) == redacted
    # what was redacted once passes the check
    assert redact(redacted) == redacted


def test_a_run_that_lacks_planned_rows_is_not_finished(tmp_path: Path) -> None:
    properties = DeviceProperties(
        name="NVIDIA H200",
        kind=DeviceKind.CUDA,
        evidence=Evidence.MEASURED,
        machine="h200",
        memory_bytes=1,
        hardware_queues=None,
        queue_variable=None,
        driver=None,
        runtime="CUDA 13.0",
    )
    made = collect_provenance(properties, "lifetime", {}, {}, {"trials": 1})
    writer = RunWriter(tmp_path, "h200", "lifetime", made)
    with pytest.raises(BadInput, match="0 rows of trials, 1 were planned"):
        writer.finish("finished")
    # the points so far are kept for a resumed run
    writer.finish("interrupted")
    assert load_run(writer.path).provenance.planned_rows == {"trials": 1}

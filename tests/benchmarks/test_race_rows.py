"""A race row whose columns and whose arm's name disagree is refused."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atom.benchmarks.race_plan import build_arms
from atom.benchmarks.race_rows import RaceRow, TimelineRow
from atom.config import RaceSettings

RUNS = Path(__file__).resolve().parents[2] / "data" / "runs"


def recorded(start: str) -> dict[str, Any]:
    """The first recorded row whose arm begins with ``start``."""
    for file in sorted(RUNS.rglob("*-race-*/trials.csv")):
        with file.open() as lines:
            for row in csv.DictReader(lines):
                if row["arm"].startswith(start):
                    return {name: value or None for name, value in row.items()}
    raise AssertionError(f"no recorded row of {start}")


@pytest.mark.parametrize(
    ("start", "changed"),
    [
        ("main/hold/", {"protocol": "unpatched"}),
        ("main/unpatched/", {"is_null": "True"}),
        ("main/null/", {"is_null": "False"}),
        ("main/hold/spin/", {"front": "matmul"}),
        ("main/hold/spin/engine", {"copy_path": "kernel"}),
        ("queue/4/", {"queue_setting": "8"}),
        ("batch/8/", {"batch_size": "32"}),
        ("allocator/", {"allocator": "native"}),
        ("source/graph_output/", {"source": "allocator"}),
        ("cut/half/hold", {"protocol": "blocking"}),
        ("edge/recorded_first/", {"producer_edge": "at_send"}),
        ("alias/4/", {"queue_setting": "default"}),
        ("alias/4/", {"grid": "edge"}),
        ("alias/4/", {"process": "77"}),
    ],
)
def test_a_column_against_the_name_is_refused(start: str, changed: dict[str, str]) -> None:
    row = recorded(start)
    RaceRow.model_validate(row)
    with pytest.raises(ValidationError):
        RaceRow.model_validate({**row, **changed})


def test_every_planned_arm_can_be_recorded() -> None:
    row = recorded("main/hold/")
    for arm in build_arms(RaceSettings.parse({"device": "accelerator"})):
        columns = {name: getattr(arm, name) for name in vars(arm) if name in RaceRow.model_fields}
        trials = {"trials": row["trials"]}
        made = {**row, **columns, **trials, "arm": arm.name, "point_id": f"{arm.name}@0"}
        RaceRow.model_validate({**made, "process": 0})


def test_a_span_belongs_to_the_point_that_it_names() -> None:
    values = {
        "arm": "main/x",
        "process": 1,
        "trial": 0,
        "lane": "copy",
        "label": "copy",
        "start_us": 0.0,
        "end_us": 1.0,
        "outcome": "clean",
    }
    TimelineRow.model_validate({"point_id": "main/x@1", **values})
    with pytest.raises(ValidationError, match="not that of its arm"):
        TimelineRow.model_validate({"point_id": "main/x@2", **values})

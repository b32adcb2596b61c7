"""Tables of the sanitizer on other libraries' programs."""

from __future__ import annotations

import pandas as pd
import pytest

from atom.benchmarks.foreign_rows import BlindSpotRow, ForeignFindingRow, ForeignRow
from atom.workbook import foreign_analysis
from atom.workbook.records import Run
from atom.workbook.tables import to_frame

DONE = ForeignRow(
    program="cache",
    library="transformers",
    version="5.17.0",
    outcome="finished",
    steps=3,
    step_milliseconds=10,
    step_milliseconds_again=12,
    step_milliseconds_watched=22,
    slow_down=2,
    operations=100,
    findings=1,
)
ABSENT = ForeignRow(
    program="hooks", library="accelerate", outcome="not installed", steps=0, text="not here"
)
FOUND = ForeignFindingRow(
    program="cache",
    number=1,
    kind="freed-in-use",
    edge="c",
    times=4,
    operation="cat",
    stream="stream 1",
    place="transformers/cache_utils.py:7 in update",
    fix="wait",
)


@pytest.fixture
def run() -> Run:
    spots = [BlindSpotRow(program="cache", number=1, text="compiled code")]
    spots.append(BlindSpotRow(program="other", number=1, text="compiled code"))
    spots.append(BlindSpotRow(program="other", number=2, text="a kernel"))
    tables = {
        "programs": to_frame([DONE, ABSENT], ForeignRow),
        "findings": to_frame([FOUND], ForeignFindingRow),
        "blind_spots": to_frame(spots, BlindSpotRow),
    }
    return Run.model_construct(tables=tables) if hasattr(Run, "model_construct") else _plain(tables)


def _plain(tables: dict[str, pd.DataFrame]) -> Run:
    made = object.__new__(Run)
    object.__setattr__(made, "tables", tables)
    return made


def test_a_program_that_did_not_run_says_why(run: Run) -> None:
    table = foreign_analysis.programs_table(run).set_index("program")
    assert table.loc["cache", "slow-down"] == "2.00x"
    assert table.loc["cache", "ms a step, off / again / on"] == "10.0 / 12.0 / 22.0"
    assert table.loc["hooks", "outcome"] == "not installed: not here"
    assert table.loc["hooks", "findings"] == foreign_analysis.NOTHING
    assert foreign_analysis.median_slow_down(run) == 2


def test_missing_lines_are_shown_as_missing(run: Run) -> None:
    (row,) = foreign_analysis.findings_table(run).to_dict("records")
    assert (row["freed at"], row["seen"]) == (foreign_analysis.NOTHING, 4)


def test_blind_spots_are_gathered(run: Run) -> None:
    table = foreign_analysis.blind_spots_table(run).set_index("not seen")
    assert dict(table["in"]) == {"compiled code": "every program", "a kernel": "other"}


def test_no_run_is_no_table(tmp_path: object) -> None:
    assert foreign_analysis.newest([str(tmp_path), "nowhere"]) is None

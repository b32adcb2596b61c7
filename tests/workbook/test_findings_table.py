"""The README's findings are what the recorded rows say."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.workbook.findings_table import BEGIN, END, findings_markdown
from atom.workbook.race_analysis import most_complete
from atom.workbook.records import Run, load_runs

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorded() -> Run:
    runs, problems = load_runs([_ROOT / "data" / "runs" / "h200"], "race")
    assert not problems
    run = most_complete(runs)
    assert run is not None
    return run


def test_the_readme_shows_the_recorded_rows(recorded: Run) -> None:
    readme = (_ROOT / "README.md").read_text()
    begin, end = readme.index(BEGIN), readme.index(END) + len(END)
    assert readme[begin:end] == findings_markdown(recorded)


def test_every_row_has_an_arm(recorded: Run) -> None:
    table = findings_markdown(recorded)
    unpatched = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")][2:]
    assert all("/" in cell for cell in unpatched)

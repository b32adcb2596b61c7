"""The sanitizer on programs of other libraries: rows, limits, and one program from end to end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from atom.benchmarks import foreign_code
from atom.benchmarks.foreign_code import PROJECT, _finding_row, run_all, without_paths
from atom.benchmarks.foreign_programs import PROGRAMS, Program, programs_for
from atom.benchmarks.foreign_rows import ForeignRow, Outcome
from atom.errors import BadInput
from atom.lifetime.findings import Edge, Finding, Kind, Site, Use
from atom.workbook.foreign_record import record, shown
from atom.workbook.records import load_run

SMALL = "activations saved on the CPU"


def test_a_program_runs_and_is_recorded(tmp_path: Path) -> None:
    path = record([SMALL], tmp_path, device="virtual", steps=1)
    (row,) = load_run(path).tables["programs"].to_dict("records")
    assert (row["outcome"], row["library"]) == ("finished", "torch")
    assert row["version"] == torch.__version__
    assert row["findings"] == 0
    assert row["slow_down"] > 0


def test_every_program_says_what_it_runs() -> None:
    assert {each.name for each in programs_for("cpu")} < set(PROGRAMS)
    assert {each.library for each in PROGRAMS.values()} == {"transformers", "accelerate", "torch"}


def test_an_unknown_program_is_refused() -> None:
    with pytest.raises(BadInput, match=r"known: .*continuous batching"):
        run_all(["nothing"], "cpu", 5)


def test_what_is_not_installed_or_late_or_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Program("absent", "no-such-library", lambda place: lambda: None, 1)
    monkeypatch.setitem(PROGRAMS, "absent", absent)
    rows, _, _ = run_all(["absent", SMALL], "cpu", 1)
    assert [row.outcome for row in rows] == [Outcome.ABSENT, Outcome.LATE]
    assert "no-such-library is not installed" in shown(rows[0])
    end = time.monotonic() + 0.5
    monkeypatch.setattr(foreign_code, "PROCESS_SECONDS", 0.3)
    measured, outcome, text = foreign_code._in_process(PROGRAMS[SMALL], "cpu", 1, 0.3)
    assert (measured, outcome) == (None, Outcome.LATE)
    assert "within" in text
    assert time.monotonic() < end + 20
    measured, outcome, text = foreign_code._in_process(absent, "cpu", 1, 30)
    assert (measured, outcome) == (None, Outcome.FAILED)
    assert "absent" in text


def test_a_row_has_its_figures_or_its_reason() -> None:
    plain: dict[str, Any] = {"program": "x", "library": "torch", "steps": 0}
    ForeignRow(**{**plain, "outcome": "failed", "text": "why"})
    wrongs: list[dict[str, Any]] = [{"outcome": "failed"}, {"outcome": "finished", "text": "why"}]
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            ForeignRow(**{**plain, **wrong})


def test_a_finding_becomes_a_row_without_paths_of_a_machine() -> None:
    library = Site(
        "/opt/x/lib/python3.12/site-packages/transformers/cache_utils.py",
        77,
        "prefetch",
        ((f"{PROJECT}/atom/benchmarks/foreign_programs.py", 5),),
    )
    use = Use("_to_copy", "stream 1 (0x7f00)", library, "bfloat16[8, 4]", 64)
    finding = Finding(Edge.REUSE, Kind.FREED_IN_USE, use, use, freed=library, fix="do it")
    row = _finding_row("p", 1, finding)
    assert row.place == "transformers/cache_utils.py:77 in prefetch"
    assert row.callers == "atom/benchmarks/foreign_programs.py:5"
    assert row.stream == "stream 1"
    assert row.freed == row.place
    assert row.second is not None
    assert "/opt" not in row.model_dump_json()


def test_paths_are_cut_in_words_too() -> None:
    assert without_paths("kept /a/b/dist-packages/torch/x.py:3 in f") == "kept torch/x.py:3 in f"
    assert without_paths("at /home/someone/y.py:3") == "at y.py:3"
    assert without_paths("2/3 of a/b") == "2/3 of a/b"

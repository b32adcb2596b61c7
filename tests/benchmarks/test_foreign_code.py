"""The sanitizer on programs of other libraries: rows, limits, and one program from end to end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from atom.__main__ import main
from atom.benchmarks import foreign_code
from atom.benchmarks.foreign_code import (
    PROJECT,
    ForeignSettings,
    HandOver,
    _finding_row,
    chosen,
    run_program,
    without_paths,
)
from atom.benchmarks.foreign_programs import PROGRAMS, Program, programs_for
from atom.benchmarks.foreign_rows import ForeignRow, Outcome
from atom.config import DeviceChoice
from atom.errors import BadInput
from atom.lifetime.findings import Edge, Finding, Kind, Report, Site, Use
from atom.workbook.records import load_runs

SMALL = "activations saved on the CPU"


def test_a_program_runs_and_is_recorded(tmp_path: Path) -> None:
    options = ["--device", "virtual", "--only", "activations*", "-p", "steps", "1"]
    assert main(["sweep", "foreign", *options, "--out", str(tmp_path)]) == 0
    runs, problems = load_runs([tmp_path], "foreign")
    assert problems == []
    (row,) = runs[0].tables["programs"].to_dict("records")
    assert (row["program"], row["outcome"], row["library"]) == (SMALL, "finished", "torch")
    assert row["version"] == torch.__version__
    assert row["findings"] == 0
    assert row["slow_down"] > 0


def test_every_program_says_what_it_runs() -> None:
    assert {each.name for each in programs_for("cpu")} < set(PROGRAMS)
    assert {each.library for each in PROGRAMS.values()} == {"transformers", "accelerate", "torch"}
    assert [each.name for each in chosen(ForeignSettings())] == list(PROGRAMS)


def test_an_unknown_program_is_refused() -> None:
    for programs, device in ((["nothing"], "accelerator"), (["offloaded cache"], "virtual")):
        given = ForeignSettings.parse({"programs": programs, "device": device})
        with pytest.raises(BadInput, match=rf"no program '{programs[0]}'.*known: .*training loop"):
            chosen(given)


def test_what_is_not_installed_or_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Program("absent", "no-such-library", lambda place: lambda: None, 1)
    settings = ForeignSettings.parse({"device": "virtual", "seconds": 30})
    row = run_program(absent, settings).row
    assert (row.outcome, row.text) == (Outcome.ABSENT, "no-such-library is not installed here")
    monkeypatch.setattr(Program, "version", lambda self: "1.0")
    row = run_program(absent, settings).row
    assert (row.outcome, row.version) == (Outcome.FAILED, "1.0")
    assert row.text is not None
    assert "absent" in row.text


def test_a_hung_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    settings = ForeignSettings.model_construct(device=DeviceChoice.VIRTUAL, seconds=0.3, steps=1)
    rows = run_program(PROGRAMS[SMALL], settings)
    assert (rows.row.outcome, rows.row.findings) == (Outcome.LATE, None)
    assert rows.row.text == "did not end within 0 s"
    assert time.monotonic() < started + 20


def test_a_program_near_its_limit_hands_over_what_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(foreign_code.os, "_exit", ended.append)
    site = Site("x.py", 3, "f")
    report = Report()
    report.add(Finding(Edge.REUSE, Kind.FREED_IN_USE, Use("copy", "stream 1", site), fix="hold"))
    report.note("compiled code")
    report.operations = 7
    over = HandOver(tmp_path / "out.json", 5)
    over.watched(report)
    over.give_up()
    assert ended == [4]
    left = json.loads((tmp_path / "out.json").read_text())

    def process(command: list[str], **_: Any) -> Any:
        Path(command[command.index("--out") + 1]).write_text(json.dumps(left))

    monkeypatch.setattr(foreign_code.subprocess, "run", process)
    rows = run_program(PROGRAMS[SMALL], ForeignSettings())
    assert (rows.row.outcome, rows.row.findings, rows.row.slow_down) == (Outcome.LATE, 1, None)
    assert rows.row.text is not None
    assert "seen 7 operations" in rows.row.text
    assert [row.place for row in rows.findings] == ["x.py:3 in f"]
    assert [row.text for row in rows.blind_spots] == ["compiled code"]


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

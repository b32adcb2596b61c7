"""The comparison of detectors: what their outputs mean, and one run on the virtual device."""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atom.__main__ import main
from atom.device import open_device
from atom.errors import BadInput
from atom.lifetime import compare_detectors, decode_loop
from atom.lifetime.compare_detectors import (
    DetectorSettings,
    chosen,
    command_of,
    judge,
    load_scenarios,
    named_lines,
    shorten,
    slowdown,
)
from atom.lifetime.decode_loop import measure, summary
from atom.lifetime.detector_rows import Detector, DetectorRow, Result
from atom.lifetime.sanitizer import sanitizer
from atom.workbook.records import load_runs

SCENARIOS = load_scenarios().SCENARIOS
FAULTY, CORRECT = SCENARIOS["status_dropped"], SCENARIOS["status_held"]
FIRST = FAULTY.program.__code__.co_firstlineno


def line_of(text: str) -> int:
    lines = Path(compare_detectors.SCENARIOS).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if n > FIRST and line.strip() == text)


@pytest.mark.parametrize(
    ("detector", "code", "text", "result"),
    [
        (Detector.NOTHING, 0, "done", Result.MISSED),
        (Detector.NOTHING, 1, "Traceback", Result.FAILED),
        (Detector.TORCH, 0, "done", Result.MISSED),
        (Detector.TORCH, 1, "CSAN detected a possible data race on tensor", Result.CAUGHT),
        (Detector.TORCH, 1, "ImportError", Result.FAILED),
        (Detector.MEMCHECK, 0, "========= ERROR SUMMARY: 0 errors", Result.MISSED),
        (Detector.MEMCHECK, 0, "========= ERROR SUMMARY: 1 error", Result.CAUGHT),
        (Detector.MEMCHECK, 1, "no such option", Result.FAILED),
        (Detector.OURS, 1, "", Result.FAILED),
    ],
)
def test_an_output_has_one_meaning(
    detector: Detector, code: int, text: str, result: Result
) -> None:
    assert judge(FAULTY, detector, code, text, None)["result"] is result
    of_correct = {Result.MISSED: Result.SILENT, Result.CAUGHT: Result.FALSE_ALARM}
    expected = of_correct.get(result, result)
    assert judge(CORRECT, detector, code, text, None)["result"] is expected


def test_lines_are_recognised_in_other_tools_words() -> None:
    copy = line_of("queue_copy(device, side, host, verdict)")
    free = line_of("del verdict")
    assert named_lines(FAULTY, f'File "a/scenarios.py", line {copy}, in f') == (True, False, False)
    assert named_lines(FAULTY, f"f in scenarios.py:{free}") == (False, True, False)
    assert named_lines(FAULTY, "scenarios.py:1 scenarios.py:2") == (False, False, False)
    assert named_lines(SCENARIOS["two_writers"], "scenarios.py:1")[1:] == (None, None)


def test_rows_agree_with_themselves() -> None:
    good: dict[str, Any] = {
        "scenario": "x",
        "detector": "nothing",
        "faulty": True,
        "expected": "freed-in-use",
        "result": "missed",
        "findings": 0,
        "exit_code": 0,
        "seconds": 1,
    }
    DetectorRow(**good)
    for change in (
        {"result": "silent"},
        {"expected": "nothing"},
        {"faulty": False, "expected": "nothing"},
    ):
        with pytest.raises(ValidationError):
            DetectorRow(**{**good, **change})


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_detectors, "find_compute_sanitizer", lambda: None)
    assert command_of(Detector.MEMCHECK, ["x.py"], Path("r")) is None
    monkeypatch.setattr(compare_detectors, "find_compute_sanitizer", lambda: "tool")
    found = command_of(Detector.MEMCHECK, ["x.py"], Path("r"))
    assert found is not None
    assert found[1]["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"
    assert "--track-stream-ordered-races" in found[0]
    torch_found = command_of(Detector.TORCH, ["x.py"], Path("r"))
    assert torch_found is not None
    assert torch_found[1] == {"TORCH_CUDA_SANITIZER": "1"}


def test_no_path_of_a_machine_is_kept() -> None:
    assert shorten("Error: /home/someone/a/b.py:3 is bad") == "Error: b.py:3 is bad"
    assert len(shorten("x" * 500)) == 200


def test_an_unknown_program_is_refused() -> None:
    for given, text in (
        ({"device": "virtual", "detectors": ["nothing"]}, "nowhere"),
        ({}, "mapped_slot_dropped"),
    ):
        settings = DetectorSettings.parse({**given, "scenarios": [text]})
        with pytest.raises(BadInput, match=f"no scenario {text} for"):
            chosen(settings)
    with pytest.raises(BadInput, match="no virtual device is watched by compute-sanitizer"):
        DetectorSettings.parse({"device": "virtual"})


def test_a_recorded_comparison_on_the_virtual_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "status_dropped", "--only", "status_hel?", "--out", str(tmp_path)]
    values = ["-p", "jobs", "2", "-p", "steps", "0", "-p", "detectors", "[atom.lifetime]"]
    assert main(["sweep", "detectors", "--device", "virtual", *options, *values]) == 0
    assert "1 of 1" in capsys.readouterr().out
    [run], problems = load_runs([tmp_path], "detectors")
    assert problems == []
    table = run.tables["detectors"].set_index(["scenario", "detector"])
    ours = table.xs("atom.lifetime", level="detector")
    assert list(ours.index) == ["status_dropped", "status_held"]
    assert ours.loc["status_dropped", "result"] == "caught"
    assert ours.loc["status_held", "result"] == "silent"
    assert ours["as_expected"].all()
    assert ours.loc["status_dropped", ["names_copy", "names_free", "names_reuse"]].all()


def test_the_timed_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(command: Sequence[str], *_: Any) -> tuple[int, str, float]:
        words = command[command.index("atom.lifetime.decode_loop") + 1 :]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = decode_loop.main(words)
        return code, out.getvalue(), 1.0

    monkeypatch.setattr(compare_detectors, "run_process", here)
    given = {"device": "virtual", "detectors": ["nothing", "atom.lifetime"], "steps": 3}
    rows = slowdown(DetectorSettings.parse(given), 0)
    ours = Detector.OURS
    assert [(row.arm, row.detector) for row in rows] == [
        ("nothing", Detector.NOTHING),
        ("nothing again", Detector.NOTHING),
        ("atom.lifetime, stopped", ours),
        ("atom.lifetime", ours),
    ]
    assert all(row.steps == 3 and row.findings == 0 and row.slow_down for row in rows)
    assert rows[0].slow_down == 1


@pytest.mark.gpu
def test_the_decode_loop_is_correct_and_its_slow_down_is_bounded() -> None:
    """The goal is under 3; 5.2 was measured on an H200, where torch's bare mode alone takes 2.2."""
    device = open_device("accelerator")

    def median() -> float:
        return statistics.median(measure(device, 20))

    # the host's own speed drifts: the arms take turns, and each one's best counts
    off, on = [median()], []
    for _ in range(3):
        with sanitizer() as report:
            on.append(median())
        assert not report.findings, report.text()
        assert report.operations > 25 * 100
        off.append(median())
    print(f"off {off}, on {on}")
    assert min(on) / min(off) < 8
    # what stays when it is off: torch cannot take its callbacks back
    assert min(off[1:]) / off[0] < 1.5


def test_the_decode_loop_runs_without_a_gpu() -> None:
    times = measure(open_device("virtual"), 3, layers=1, width=64)
    assert len(times) == 3
    found = summary(times)
    assert 0 < found["low"] <= found["median"] <= found["high"]

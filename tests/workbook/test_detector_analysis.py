"""Tables of the comparison of detectors, and its sweep: what a stop leaves, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atom.__main__ import main
from atom.device.interface import DeviceKind, DeviceProperties
from atom.errors import DeviceError
from atom.evidence import Evidence
from atom.lifetime import compare_detectors
from atom.lifetime.detector_rows import NULL_ARM, Detector, DetectorRow, Result, SlowdownRow
from atom.workbook import detector_analysis, detector_runs
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter


def row(detector: Detector, result: Result, faulty: bool = True) -> DetectorRow:
    return DetectorRow(
        scenario="status_dropped" if faulty else "status_held",
        detector=detector,
        faulty=faulty,
        expected="freed-in-use" if faulty else "nothing",
        result=result,
        findings=int(result in (Result.CAUGHT, Result.FALSE_ALARM)),
        as_expected=True if detector is Detector.OURS else None,
        names_copy=True if result is Result.CAUGHT else None,
        exit_code=0,
        seconds=1,
    )


def timed(arm: str, detector: Detector, slow_down: float | None, repeat: int = 0) -> SlowdownRow:
    known = slow_down is not None
    return SlowdownRow(
        arm=arm,
        detector=detector,
        repeat=repeat,
        steps=3 if known else 0,
        operations=100 if detector is Detector.OURS else 0,
        step_milliseconds=5.0 if known else None,
        step_milliseconds_low=4.0 if known else None,
        step_milliseconds_high=6.0 if known else None,
        slow_down=slow_down,
        findings=0,
        text=None if known else "compute-sanitizer was not found",
    )


ROWS = [
    row(Detector.NOTHING, Result.MISSED),
    row(Detector.OURS, Result.CAUGHT),
    row(Detector.TORCH, Result.MISSED),
    row(Detector.MEMCHECK, Result.ABSENT),
    row(Detector.NOTHING, Result.SILENT, False),
    row(Detector.OURS, Result.SILENT, False),
    row(Detector.TORCH, Result.FALSE_ALARM, False),
    row(Detector.MEMCHECK, Result.ABSENT, False),
]
TIMES = [
    timed("nothing", Detector.NOTHING, 1.0),
    timed(NULL_ARM, Detector.NOTHING, 1.02),
    timed(str(Detector.OURS), Detector.OURS, 2.4),
    timed(str(Detector.OURS), Detector.OURS, 2.6, repeat=1),
    timed(str(Detector.MEMCHECK), Detector.MEMCHECK, None),
]


def written(root: Path, rows: Sequence[DetectorRow], times: Sequence[SlowdownRow]) -> Run:
    """A synthetic run of a real device, all in one point, as the first recorder made it."""
    device = DeviceProperties(
        name="NVIDIA H200",
        kind=DeviceKind.CUDA,
        evidence=Evidence.MEASURED,
        machine="h200",
        memory_bytes=1,
        hardware_queues=None,
        queue_variable=None,
        driver=None,
        runtime="CUDA",
    )
    provenance = collect_provenance(device, "detectors", {"jobs": 12, "steps": 3}, {})
    writer = RunWriter(root, "h200", "detectors", provenance)
    writer.write_point("all", {"detectors": rows, "slowdown": times})
    writer.finish("finished")
    return load_run(writer.path)


def test_a_recorded_run_is_found_and_counted(tmp_path: Path) -> None:
    assert detector_analysis.recorded(["nowhere", str(tmp_path)]) == (None, [])
    run = written(tmp_path, ROWS, TIMES)
    # a smaller one that is newer does not take its place
    written(tmp_path, ROWS[:4], [])
    found, problems = detector_analysis.recorded([str(tmp_path)])
    assert problems == []
    assert found is not None
    assert found.provenance.run_id == run.provenance.run_id
    table = detector_analysis.detectors_table(found).set_index("detector")
    names = [str(Detector.OURS), str(Detector.TORCH), str(Detector.MEMCHECK)]
    assert list(table.index) == names
    assert tuple(table["caught"]) == ("1 of 1", "0 of 1", "–")
    assert tuple(table["false alarms"]) == ("0 of 1", "1 of 1", "–")
    assert tuple(table["not installed"]) == (0, 0, 2)
    assert tuple(table["decode step"]) == ("2.50x", "–", "–")
    assert tuple(table["names the copy"]) == ("1 of 1", "–", "–")
    single = detector_analysis.scenarios_table(found)
    assert list(single[str(Detector.TORCH)]) == ["missed", "false alarm"]


def test_what_the_comparison_says(tmp_path: Path) -> None:
    run = written(tmp_path, ROWS, TIMES)
    assert detector_analysis.conclusions(run) == [
        "atom.lifetime: 1 of 1 faults caught, false alarms on 0 of 1 correct programs.",
        "torch.cuda._sanitizer: 0 of 1 faults caught, false alarms on 1 of 1 correct programs.",
        "compute-sanitizer memcheck is not installed there.",
        "An eager decode step takes 2.50 times as long under ours (the null arm: 1.02); the goal "
        "is under 3, which is met.",
    ]
    table = detector_analysis.slow_down_table(run)
    assert list(table["over nothing"]) == ["1.00x", "1.02x", "2.40x", "2.60x", "–"]
    assert table["ms a step [quartiles]"].iloc[0] == "5.00 [4.00, 6.00]"
    assert table["ms a step [quartiles]"].iloc[-1] == "compute-sanitizer was not found"
    slow = written(tmp_path, ROWS, [TIMES[1], timed(str(Detector.OURS), Detector.OURS, 3.0)])
    assert detector_analysis.conclusions(slow)[-1].endswith("which is missed.")
    assert len(detector_analysis.conclusions(written(tmp_path, ROWS, []))) == 3


def test_what_is_not_as_it_must_be_is_said(tmp_path: Path) -> None:
    assert detector_runs.unexpected(written(tmp_path, ROWS, TIMES)) == []
    wrong = [
        row(Detector.OURS, Result.MISSED),
        row(Detector.OURS, Result.SILENT, False).model_copy(update={"as_expected": False}),
        row(Detector.NOTHING, Result.FAILED),
    ]
    times = [TIMES[2].model_copy(update={"findings": 2})]
    found = detector_runs.unexpected(written(tmp_path, wrong, times))
    assert [text.split(":")[0] for text in found] == [
        "status_dropped",
        "status_held",
        "status_dropped",
        "atom.lifetime, repeat 0",
    ]


@pytest.mark.usefixtures("same_commit")
def test_a_sweep_goes_on_behind_the_programs_that_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def process(command: Sequence[str], *_: Any) -> tuple[int, str, float]:
        name = next(word for word in command if word.startswith("status_"))
        ran.append(name)
        if name == "status_held" and len(ran) < 4:
            raise DeviceError("lost")
        return 0, "done", 1.0

    monkeypatch.setattr(compare_detectors, "run_process", process)
    command = ["sweep", "detectors", "--device", "virtual", "--out", str(tmp_path)]
    options = ["--only", "status_*", "-p", "detectors", "[nothing]", "-p", "steps", "0"]
    assert main([*command, *options, "-p", "jobs", "1"]) == 3
    [folder] = [file.parent for file in tmp_path.rglob("run.json")]
    assert "1 finished points are kept" in capsys.readouterr().err
    assert main(["sweep", "detectors", "--resume", str(folder), "--dry-run", "--json"]) == 0
    left = [point["point"] for point in json.loads(capsys.readouterr().out)["points"]]
    assert left == ["status_held", "status_under_offload", "status_held_under_offload"]
    ran[:] = ["", "", "", ""]
    assert main(["sweep", "detectors", "--resume", str(folder)]) == 0
    assert ran[4:] == left
    table = load_run(folder).tables["detectors"]
    assert list(table["scenario"]) == ["status_dropped", *left]

"""``python -m atom sweep detectors``: the same programs under several detectors; recorded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from atom.config import DeviceChoice
from atom.device import Device
from atom.lifetime.compare_detectors import (
    VIRTUAL_DETECTORS,
    DetectorSettings,
    chosen,
    compare,
    find_compute_sanitizer,
    slowdown,
)
from atom.lifetime.detector_rows import EXPERIMENT, Detector, Result
from atom.workbook.detector_analysis import detectors_table
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep
from atom.workbook.records import Run

QUICK: dict[str, Any] = {
    "scenarios": ("status_dropped", "status_held", "view_of_a_dropped_base", "two_writers"),
    "steps": 0,
}
#: seconds of a process, start of Python included, for the estimate
_PROCESS_SECONDS = {
    Detector.NOTHING: 8.0,
    Detector.OURS: 9.0,
    Detector.TORCH: 9.0,
    Detector.MEMCHECK: 35.0,
}


class DetectorSweep(PointSweep[DetectorSettings]):
    """A point a program, under every detector; then a point a repeat of the timed decode loop."""

    command = "detectors"
    experiment = EXPERIMENT
    settings = DetectorSettings
    table = "detectors"
    why_not = "a program runs once under a detector; see -p repeats N for the timed decode loop"
    only = "scenarios"

    def parse(self, given: dict[str, Any], quick: bool) -> DetectorSettings:
        """See :class:`PointSweep`."""
        if given.get("device") == DeviceChoice.VIRTUAL:
            given.setdefault("detectors", [str(detector) for detector in VIRTUAL_DETECTORS])
        settings = DetectorSettings.parse(given, where="sweep detectors")
        return settings.with_defaults(QUICK) if quick else settings

    def plan(self, settings: DetectorSettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        names = list(chosen(settings))
        each = sum(_PROCESS_SECONDS[detector] for detector in settings.detectors)
        side_by_side = min(settings.jobs, len(names) * len(settings.detectors))
        count = len(settings.detectors)
        points = [
            PlannedPoint(name, f"{name}: {count} detectors", each / side_by_side) for name in names
        ]
        if settings.steps:
            points += [
                PlannedPoint(
                    _timing(repeat),
                    f"{_timing(repeat)}: {settings.steps} decode steps under {count} detectors",
                    each + _PROCESS_SECONDS[Detector.NOTHING],
                )
                for repeat in range(settings.repeats)
            ]
        return points

    def facts(self, ready: Any) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        return {"compute_sanitizer": find_compute_sanitizer() is not None}

    def measure(
        self, settings: DetectorSettings, device: Device, ready: Any, done: Collection[str]
    ) -> Measured:
        """See :class:`PointSweep`."""
        for name, rows in compare(settings, done):
            yield name, {"detectors": rows, "slowdown": []}
        if settings.steps:
            for repeat in range(settings.repeats):
                if _timing(repeat) not in done:
                    rows_of_repeat = slowdown(settings, repeat)
                    yield _timing(repeat), {"detectors": [], "slowdown": rows_of_repeat}

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return detectors_table(run).to_string(index=False)

    def unexpected(self, run: Run) -> list[str]:
        """See :class:`PointSweep`."""
        return unexpected(run)


SWEEP = DetectorSweep()


def _timing(repeat: int) -> str:
    return f"timing, repeat {repeat}"


def unexpected(run: Run) -> list[str]:
    """What our sanitizer missed, reported without cause, or named wrongly; and what did not end."""
    found = []
    for row in run.tables["detectors"].itertuples():
        if str(row.detector) == str(Detector.OURS):
            wrong = str(row.result) not in (str(Result.CAUGHT), str(Result.SILENT))
            if wrong or not row.as_expected:
                found.append(
                    f"{row.scenario}: {row.detector}: {row.result}; expected {row.expected}: "
                    f"{row.text}"
                )
        elif str(row.detector) == str(Detector.NOTHING) and str(row.result) == str(Result.FAILED):
            found.append(f"{row.scenario}: did not end without a detector: {row.text}")
    for row in run.tables["slowdown"].itertuples():
        if str(row.detector) == str(Detector.OURS) and (row.findings or not row.steps):
            found.append(f"{row.arm}, repeat {row.repeat}: {row.findings} findings; {row.text}")
    return found

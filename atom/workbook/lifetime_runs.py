"""``python -m atom sweep lifetime``: run the seven paths with and without protection; record."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from atom.benchmarks.lifetime_paths import own_queue_stream
from atom.benchmarks.source_lifetime import EXPERIMENT, Point, build_points, run_point
from atom.config import LifetimeSettings
from atom.device import Device
from atom.device.interface import Stream
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep, record_points
from atom.workbook.records import Run
from atom.workbook.sweep_progress import SweepProgress

QUICK_TRIALS = 10
#: host seconds of a trial beyond its parked time, for the estimate
_TRIAL_SECONDS = 0.002


class LifetimeSweep(PointSweep[LifetimeSettings]):
    """The seven paths, protected and not."""

    command = "lifetime"
    experiment = EXPERIMENT
    settings = LifetimeSettings
    row_a_point = True
    table = "trials"
    takes = frozenset({"trials"})
    why_not = "it is one process; see --trials N"
    only = "paths"

    def parse(self, given: dict[str, Any], quick: bool) -> LifetimeSettings:
        """See :class:`PointSweep`."""
        if quick:
            given.setdefault("trials", QUICK_TRIALS)
        return LifetimeSettings.parse(given, where="sweep lifetime")

    def plan(self, settings: LifetimeSettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        seconds = settings.trials * (settings.park_seconds + _TRIAL_SECONDS)
        return [
            PlannedPoint(_record_id(point), f"{point.point_id}: {settings.trials} trials", seconds)
            for point in build_points(settings)
        ]

    def prepare(self, settings: LifetimeSettings, device: Device) -> Stream:
        """See :class:`PointSweep`."""
        return own_queue_stream(device, settings.park_seconds)

    def measure(
        self, settings: LifetimeSettings, device: Device, ready: Stream, done: Collection[str]
    ) -> Measured:
        """See :class:`PointSweep`."""
        for point in build_points(settings):
            if _record_id(point) not in done:
                row = run_point(device, ready, point, settings.trials, settings.park_seconds)
                yield _record_id(point), {"trials": [row]}

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return result_text(run.tables["trials"])

    def unexpected(self, run: Run) -> list[str]:
        """See :class:`PointSweep`."""
        return unexpected(run.tables["trials"])


def _record_id(point: Point) -> str:
    return point.point_id.replace("/", "-")


SWEEP = LifetimeSweep()


def record_lifetime(
    settings: LifetimeSettings,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run the experiment and record it; see :func:`record_points`."""
    return record_points(SWEEP, settings, root, progress, resume)


def unexpected(table: pd.DataFrame) -> list[str]:
    """Points that are not as the fix says: protected never stale, controls always."""
    expected = table["trials"].where(table["arm"] == "control", 0)
    return [
        f"{row.point_id}: {row.stale} of {row.trials} trials were stale"
        for row in table[table["stale"] != expected].itertuples()
    ]


def result_text(table: pd.DataFrame) -> str:
    """Stale of trials: a row a path, two columns a protocol."""
    protocols: Sequence[str] = list(dict.fromkeys(table["protocol"]))
    lines = ["stale trials with the protocol in force / with its protection taken away"]
    lines.append(f"{'':14}" + "".join(f"{name:>18}" for name in protocols))
    for path, group in table.groupby("path", sort=False):
        cells = []
        for protocol in protocols:
            counts = {}
            for row in group[group["protocol"] == protocol].itertuples():
                counts[row.arm] = f"{row.stale}/{row.trials}"
            both = [counts.get(arm, "-") for arm in ("protected", "control")]
            cells.append(" / ".join(both) if counts else "")
        lines.append(f"{path:14}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)

"""The small simulation that notebook 07 makes itself: a curve over pools."""

from __future__ import annotations

from atom.benchmarks.capacity_points import (
    CapacitySettings,
    build_points,
    check_fits,
    read_sessions,
    run_point,
)
from atom.benchmarks.capacity_rows import CapacityRow
from atom.config import OffloadCapacitySettings
from atom.workbook.notebook_progress import notebook_progress
from atom.workbook.sweep_progress import SweepProgress

#: seconds of a point, for the estimate
_POINT_SECONDS = 2.0


def panel_settings(settings: OffloadCapacitySettings) -> CapacitySettings:
    """The small sweep that a notebook's parameters mean: no offload, then each pool.

    Raises:
        BadInput: an unknown remedy.
    """
    pools = [0.0, *sorted(settings.pool_gib)]
    return CapacitySettings.parse(
        {
            "setups": [[settings.concurrency, pool] for pool in pools],
            "arms": list(settings.remedies),
            "byte_scale": [settings.byte_scale],
            "device_gb": [settings.device_gb],
            "load_gb_per_second": [settings.load_gb_per_second],
            "duration_seconds": settings.duration_seconds,
            "sessions": max(2 * settings.concurrency, 16),
            "seed": settings.seed,
        },
        where="notebook 07",
    )


def curve_rows(panel: CapacitySettings, progress: SweepProgress | None = None) -> list[CapacityRow]:
    """Every pool under every remedy.

    Raises:
        BadInput: the device holds no request as long as the longest.
    """
    progress = progress or notebook_progress()
    points, sessions = build_points(panel), read_sessions(panel)
    check_fits(panel, points, sessions)
    progress.start(len(points), _POINT_SECONDS * len(points))
    rows = []
    for point in points:
        rows.append(run_point(panel, sessions, point))
        progress.advance(1)
    progress.stop()
    return rows

"""Small simulations that notebook 07 makes itself: a curve over pools, and a slower host link."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from atom.benchmarks.capacity_points import (
    CapacitySettings,
    build_points,
    read_sessions,
    run_point,
)
from atom.benchmarks.capacity_rows import CapacityRow
from atom.config import OffloadCapacitySettings
from atom.workbook.notebook_progress import notebook_progress
from atom.workbook.sweep_progress import SweepProgress

#: how many times slower the link to the host is taken to be
_SLOWER = (1.0, 4.0, 16.0)
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
            "duration_seconds": settings.duration_seconds,
            "sessions": max(2 * settings.concurrency, 16),
            "seed": settings.seed,
        },
        where="notebook 07",
    )


def curve_rows(panel: CapacitySettings, progress: SweepProgress | None = None) -> list[CapacityRow]:
    """Every pool under every remedy."""
    return _run([panel], progress)


def link_rows(panel: CapacitySettings, progress: SweepProgress | None = None) -> list[CapacityRow]:
    """The largest pool under the first remedy, with the link as it is and slower."""
    rate = panel.load_gb_per_second[0]
    small = {"setups": (panel.setups[-1],), "arms": panel.arms[:1]}
    return _run(
        [
            panel.model_copy(update={**small, "load_gb_per_second": (rate / factor,)})
            for factor in _SLOWER
        ],
        progress,
    )


def _run(panels: Sequence[CapacitySettings], progress: SweepProgress | None) -> list[CapacityRow]:
    progress = progress or notebook_progress()
    points = [(panel, point) for panel in panels for point in build_points(panel)]
    sessions = read_sessions(panels[0])
    progress.start(len(points), _POINT_SECONDS * len(points))
    rows = []
    for panel, point in points:
        rows.append(run_point(panel, point, sessions))
        progress.advance(1)
    progress.stop()
    return rows


def links_table(rows: Sequence[CapacityRow]) -> pd.DataFrame:
    """A row a link: throughput, hits, and waiting."""
    base = rows[0].effective_total_throughput
    return pd.DataFrame(
        {
            "link": "as it is" if factor == 1 else f"{factor:g} times slower",
            "tok/s": f"{row.effective_total_throughput:,.0f}",
            "over the first": f"{row.effective_total_throughput / base:.2f}",
            "prompt tokens found": f"{row.cached_share or 0:.0%}",
            "TTFT mean, s": f"{row.ttft_mean_seconds or 0:.2f}",
            "loaded": f"{row.loaded_bytes / 2**30:,.0f} GiB",
        }
        for factor, row in zip(_SLOWER, rows, strict=True)
    )


def link_sentences(panel: CapacitySettings, rows: Sequence[CapacityRow]) -> list[str]:
    """What the slower links say of the 8%."""
    base = rows[0].effective_total_throughput
    losses = [1 - row.effective_total_throughput / base for row in rows[1:]]
    needed = [f for f, loss in zip(_SLOWER[1:], losses, strict=True) if loss >= 0.07]
    rate = 1e9 * panel.load_gb_per_second[0]
    busy = rows[0].loaded_bytes / rate / rows[0].simulated_seconds
    verdict = (
        f"a link {needed[0]:g} times slower is enough for such a difference"
        if needed
        else f"not even a link {_SLOWER[-1]:g} times slower makes such a difference"
    )
    return [
        f"Loads keep the link busy {busy:.1%} of the time; in the model {verdict}.",
        "The model counts bytes over a rate alone. Host work for each copy, which neighbours slow "
        "down too, is not in it: the source's own guess stays open.",
    ]

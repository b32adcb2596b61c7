"""``python -m atom sweep greedy-equality``: greedy tokens of many engines, compared; recorded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pandas as pd

from atom.benchmarks.greedy_equality import Models, load_models, measure_greedy_equality
from atom.benchmarks.greedy_equality_rows import (
    EXPERIMENT,
    GreedyEqualitySettings,
    Precision,
    build_arms,
)
from atom.benchmarks.greedy_equality_rows import quick as make_quick
from atom.config import DeviceChoice
from atom.device import Device
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep
from atom.workbook.records import Run

#: model and precision on an accelerator
ACCELERATOR: dict[str, Any] = {"model": "preset:m395", "precision": Precision.BFLOAT16}
#: seconds of an arm, for the estimate
_ARM_SECONDS = 4.0


class GreedyEqualitySweep(PointSweep[GreedyEqualitySettings]):
    """An engine an arm, its greedy tokens beside the reference's."""

    command = "greedy-equality"
    experiment = EXPERIMENT
    settings = GreedyEqualitySettings
    row_a_point = True
    why_not = "an arm is one engine, run once"

    def parse(self, given: dict[str, Any], quick: bool) -> GreedyEqualitySettings:
        """See :class:`PointSweep`."""
        settings = GreedyEqualitySettings.parse(given, where="sweep greedy-equality")
        if settings.device is DeviceChoice.ACCELERATOR:
            settings = settings.with_defaults(ACCELERATOR)
        return make_quick(settings) if quick else settings

    def plan(self, settings: GreedyEqualitySettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        return [
            PlannedPoint(arm.name, f"{arm.name}: {settings.requests} requests", _ARM_SECONDS)
            for arm in build_arms(settings)
        ]

    def prepare(self, settings: GreedyEqualitySettings, device: Device) -> Models:
        """See :class:`PointSweep`."""
        return load_models(settings, device)

    def measure(
        self, settings: GreedyEqualitySettings, device: Device, ready: Models, done: Collection[str]
    ) -> Measured:
        """See :class:`PointSweep`."""
        for row in measure_greedy_equality(device, ready, settings, done):
            yield row.point_id, {"arms": [row]}

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return result_text(run.tables["arms"])

    def unexpected(self, run: Run) -> list[str]:
        """See :class:`PointSweep`."""
        return unexpected(run.tables["arms"])


SWEEP = GreedyEqualitySweep()


def unexpected(table: pd.DataFrame) -> list[str]:
    """Arms that differ by more than rounding, and a control that does not."""
    found = []
    for row in _rows(table):
        if row.control and not row.above_bound:
            found.append(f"{row.arm}: wrong on purpose, yet no token differs by more than rounding")
        if not row.control and row.above_bound:
            found.append(
                f"{row.arm}: {row.above_bound} requests differ by more than the rounding error "
                f"of {row.bound:.4f}, up to {row.largest_shortfall:.4f}"
            )
    return found


def _rows(table: pd.DataFrame) -> list[Any]:
    return list(table.itertuples())


def result_text(table: pd.DataFrame) -> str:
    """An arm a line: what was compared, what differs, and by how much."""
    lines = [
        f"{'arm':30} {'tokens':>7} {'accepted':>9} {'differ':>8} {'above':>6} {'shortfall':>10}"
    ]
    rows = _rows(table)
    for row in rows:
        share = f"{row.accepted_tokens / row.drafted_tokens:.0%}" if row.drafted_tokens else "-"
        shortfall = "-" if pd.isna(row.largest_shortfall) else f"{row.largest_shortfall:.4f}"
        lines.append(
            f"{row.arm:30} {row.tokens_compared:>7} {share:>9} "
            f"{f'{row.first_differences}/{row.requests}':>8} {row.above_bound:>6} {shortfall:>10}"
        )
    first = rows[0]
    lines += [
        "",
        f"{first.precision}: rounding moves the gap between the two likeliest tokens by "
        f"{first.bound:.4f} at most;",
        f"the gap's median is {first.median_margin:.4f}, and at {first.places_above_bound:.0%} of "
        "the places it is larger than that",
    ]
    return "\n".join(lines)

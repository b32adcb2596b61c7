"""``python -m atom sweep engine-speed``: time the engine beside transformers, and record it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from atom.benchmarks.engine_speed import run_points
from atom.benchmarks.engine_speed_rows import SpeedArm
from atom.benchmarks.engine_speed_settings import (
    EXPERIMENT,
    OUR_DECODE,
    EngineSpeedSettings,
    PointKind,
    SpeedPoint,
    build_points,
    sized,
)
from atom.device import Device
from atom.workbook.engine_speed_analysis import ArmSpeed, Goal, Ratio, goals, summarise
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep, record_points
from atom.workbook.provenance import package_version
from atom.workbook.records import Run
from atom.workbook.sweep_progress import SweepProgress

_PEERS = ("transformers", "flash-linear-attention", "fla-core", "causal-conv1d", "kernels")
#: seconds of a point apart from its repeats: engines, compilation, warming up
_SETUP_SECONDS = {PointKind.MEMORY: 20.0, PointKind.DECODE: 15.0, PointKind.PREFILL: 15.0}
_REPEAT_SECONDS = {PointKind.MEMORY: 0.0, PointKind.DECODE: 4.5, PointKind.PREFILL: 0.5}


class EngineSpeedSweep(PointSweep[EngineSpeedSettings]):
    """The engine beside transformers: decode, prefill and memory."""

    command = "engine-speed"
    experiment = EXPERIMENT
    settings = EngineSpeedSettings
    why_not = "see -p repeats N and -p steps N"

    def parse(self, given: dict[str, Any], quick: bool) -> EngineSpeedSettings:
        """See :class:`PointSweep`."""
        return sized(given, quick=quick)

    def plan(self, settings: EngineSpeedSettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        return [
            PlannedPoint(
                point.point_id,
                f"{point.point_id:24} {_setup_text(point, settings)}",
                _SETUP_SECONDS[point.kind] + settings.repeats * _REPEAT_SECONDS[point.kind],
            )
            for point in build_points(settings)
        ]

    def facts(self, ready: Any) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        return {"peers": {name: package_version(name) or "not installed" for name in _PEERS}}

    def measure(
        self, settings: EngineSpeedSettings, device: Device, ready: Any, done: Collection[str]
    ) -> Measured:
        """See :class:`PointSweep`."""
        for point, tables in run_points(settings, device, tuple(done)):
            yield point.point_id, tables

    def results(self, run: Run) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        summaries = summarise(run.tables["samples"], run.tables["floors"])
        reached = goals(summaries, run.tables["samples"])
        return {
            "arms": [asdict(summary) for summary in summaries],
            "goals": [asdict(goal) for goal in reached],
        }

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        summaries = summarise(run.tables["samples"], run.tables["floors"])
        return result_text(run, summaries, goals(summaries, run.tables["samples"]))


SWEEP = EngineSpeedSweep()


def record_engine_speed(
    settings: EngineSpeedSettings,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run the experiment and record it; see :func:`record_points`."""
    return record_points(SWEEP, settings, root, progress, resume)


def _setup_text(point: SpeedPoint, settings: EngineSpeedSettings) -> str:
    if point.kind is PointKind.MEMORY:
        return f"plan and peak of an engine with {settings.draft_tokens} drafts"
    ours = OUR_DECODE if point.kind is PointKind.DECODE else (SpeedArm.OURS, SpeedArm.NULL)
    names = [arm.value for arm in (*ours, SpeedArm.TRANSFORMERS) if settings.wants(arm)]
    what = f"{settings.steps} steps"
    if point.kind is PointKind.PREFILL:
        what = f"a prompt of {point.prompt_tokens:,} tokens"
    return f"{what}, {settings.repeats} repeats: {'; '.join(names)}"


def result_text(run: Run, summaries: Sequence[ArmSpeed], reached: Sequence[Goal]) -> str:
    """Arms, where the device's time goes, memory, and goals, as text."""
    lines = []
    last = None
    for arm in summaries:
        if arm.point_id != last:
            last = arm.point_id
            lines += [
                "",
                f"{last:20} {'tokens/s':>24} {'step ms':>9} {'p99':>8} {'x floor':>8} "
                f"{'x ours':>7} {'x peer':>7} {'tok/row':>7} {'host':>6} {'gap':>6} {'agree':>6}",
            ]
        if arm.left_out is not None or arm.tokens_per_s is None:
            lines.append(f"  {arm.arm:18} left out: {arm.left_out}")
            continue
        rate, low, high = arm.tokens_per_s
        parts = arm.parts or {}
        lines.append(
            f"  {arm.arm:18} {rate:9,.0f} [{low:,.0f}, {high:,.0f}]".ljust(45)
            + f" {_number(arm.step_ms, 3):>9} {_number(arm.step_p99_ms, 3):>8}"
            + f" {_number(_middle(arm.over_floor), 2):>8} {_number(_middle(arm.over_ours), 2):>7}"
            + f" {_number(_middle(arm.over_transformers), 1):>7}"
            + f" {_number(arm.tokens_per_row, 2):>7} {_number(parts.get('host_ms'), 3):>6}"
            + f" {_number(parts.get('gap_ms'), 3):>6} {_number(arm.agreement, 2):>6}"
        )
        if arm.kernels:
            lines.append(f"  {'':18} ({arm.kernels})")
    lines += _device_time_lines(run.tables["device_time"])
    lines += ["", f"{'memory, MiB':28} {'planned':>12} {'measured':>12}"]
    memory = run.tables["memory"]
    planned = memory["planned_bytes"].astype(float) / 2**20
    measured = memory["measured_bytes"].astype(float) / 2**20
    for part, plan, found in zip(memory["part"], planned, measured, strict=True):
        shown = _number(None if np.isnan(found) else found, 1, ",")
        lines.append(f"  {part:26} {plan:12,.1f} {shown:>12}")
    lines += ["", "goals"]
    for goal in reached:
        sign = ">=" if goal.at_least else "<="
        value = "no value" if goal.value is None else _interval(goal.value)
        bound = f"{sign} {goal.wanted:g}"
        lines.append(f"  {goal.point_id:20} {goal.name:38} {value:26} {bound:8} {goal.outcome}")
    return "\n".join(lines).lstrip("\n")


def _device_time_lines(table: pd.DataFrame) -> list[str]:
    lines = []
    for (point_id, arm), rows in table.groupby(["point_id", "arm"], sort=False):
        reasons = rows["left_out"].dropna()
        if len(reasons):
            lines.append(f"{point_id} {arm}: no device times: {reasons.iloc[0]}")
            continue
        found = rows.sort_values("ms_per_step", ascending=False)
        text = ", ".join(f"{row.category} {row.ms_per_step:.3f}" for row in found.itertuples())
        lines.append(f"{point_id} {arm}: ms a step: {text}")
    return ["", *lines] if lines else []


def _middle(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio[0]


def _interval(ratio: Ratio) -> str:
    return f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]"


def _number(value: float | None, digits: int, separator: str = "") -> str:
    return "-" if value is None else f"{value:{separator}.{digits}f}"

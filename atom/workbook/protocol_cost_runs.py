"""``python -m atom sweep protocol-cost``: what each way to protect a copy costs, recorded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atom.benchmarks.protocol_cost import run_points
from atom.benchmarks.protocol_cost_rows import BARE_ARMS, ENGINE_ARMS, GUARD_ARMS, Pressure
from atom.benchmarks.protocol_cost_settings import (
    EXPERIMENT,
    CostPoint,
    PointKind,
    ProtocolSweepSettings,
    build_points,
    sized,
)
from atom.device import Device
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep, record_points
from atom.workbook.protocol_cost_analysis import cost_goals, limits_by_name, summarise
from atom.workbook.protocol_cost_paired import pooled_goals
from atom.workbook.records import Run
from atom.workbook.sweep_progress import SweepProgress

#: rough host seconds of a step of the bare loop, and of the engine with one request and with 512
_BARE_STEP = {Pressure.IDLE: 1.2e-4, Pressure.STORE: 3.5e-4, Pressure.STUCK: 2.5e-4}
_ENGINE_STEP = (1.6e-3, 1.2e-2)
#: every limit once; the store of some is most of it
_LIMITS_ROUND = 1e-3
#: engines, graphs and the first runs of a batch's point
_ENGINE_SETUP_SECONDS = 8.0


class ProtocolCostSweep(PointSweep[ProtocolSweepSettings]):
    """The protocols beside each other, in a bare loop and in the engine."""

    command = "protocol-cost"
    experiment = EXPERIMENT
    settings = ProtocolSweepSettings
    table = "samples"
    why_not = "see -p repeats N, -p steps N and -p loops '[bare]'"

    def parse(self, given: dict[str, Any], quick: bool) -> ProtocolSweepSettings:
        """See :class:`PointSweep`."""
        return sized(given, quick=quick)

    def plan(self, settings: ProtocolSweepSettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        return [
            PlannedPoint(
                point.point_id,
                f"{point.point_id:28} {point_text(point, settings)}",
                point_seconds(point, settings),
            )
            for point in build_points(settings)
        ]

    def measure(
        self, settings: ProtocolSweepSettings, device: Device, ready: Any, done: Collection[str]
    ) -> Measured:
        """See :class:`PointSweep`."""
        for point, tables in run_points(settings, device, tuple(done)):
            yield point.point_id, tables

    def results(self, run: Run) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        samples = run.tables["samples"]
        summaries = summarise(samples)
        goals = (*pooled_goals(samples), *cost_goals(summaries))
        return {
            "arms": [asdict(one) for one in summaries],
            "limits": limits_by_name(run.tables["limits"]),
            "goals": [asdict(goal) for goal in goals],
        }

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return result_text(run)


SWEEP = ProtocolCostSweep()


def record_protocol_cost(
    settings: ProtocolSweepSettings,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run the experiment and record it; see :func:`record_points`."""
    return record_points(SWEEP, settings, root, progress, resume)


def point_text(point: CostPoint, settings: ProtocolSweepSettings) -> str:
    """What a point runs, in words."""
    if point.kind is PointKind.LIMITS:
        return f"{settings.repeats} repeats of {settings.limit_calls} calls each"
    if point.kind is PointKind.MEMORY:
        return f"{settings.memory_steps} steps an arm, watched one by one"
    bare = point.kind is PointKind.BARE
    guards = settings.guards and point.pressure is Pressure.IDLE
    names = BARE_ARMS if bare else (*ENGINE_ARMS, *(GUARD_ARMS if guards else ()))
    count = sum(settings.wants(arm) for arm in names)
    steps = settings.steps if bare else settings.steps_of(point.batch)
    repeats = settings.repeats if bare else settings.engine_repeats
    return f"{count} arms, {repeats} repeats of {steps} steps"


def point_seconds(point: CostPoint, settings: ProtocolSweepSettings) -> float:
    """How long a point takes on an accelerator, roughly."""
    if point.kind is PointKind.LIMITS:
        return settings.repeats * settings.limit_calls * _LIMITS_ROUND + 1
    if point.kind is PointKind.MEMORY:
        return settings.memory_steps * 5 * 3e-4 + 5 * settings.stuck_seconds
    if point.kind is PointKind.BARE:
        arms = sum(settings.wants(arm) for arm in BARE_ARMS)
        steps = settings.warmup_steps + settings.steps + 2 * settings.watched_steps
        return arms * settings.repeats * steps * _BARE_STEP[point.pressure]
    idle = point.pressure is Pressure.IDLE
    arms = sum(settings.wants(arm) for arm in ENGINE_ARMS)
    if idle and settings.guards:
        arms += sum(settings.wants(arm) for arm in GUARD_ARMS)
    steps = settings.engine_warmup_steps + settings.steps_of(point.batch)
    steps += settings.engine_watched_steps + 6
    least, most = _ENGINE_STEP
    step = least + (most - least) * min(point.batch, 1024) / 512
    return arms * settings.engine_repeats * steps * step + _ENGINE_SETUP_SECONDS * (1 + 2 * idle)


def result_text(run: Run) -> str:
    """Limits, arms point by point, and goals."""
    summaries = summarise(run.tables["samples"])
    lines = ["limits, us: median, p99"]
    for name, (median, tail) in limits_by_name(run.tables["limits"]).items():
        lines.append(f"  {name:28} {median:8.2f} {tail:8.2f}")
    last = None
    for one in summaries:
        if one.point_id != last:
            last = one.point_id
            lines += [
                "",
                f"{last:24} {'step us':>9} {'p99':>9} {'x base':>7} {'make':>6} {'send':>7} "
                f"{'p99':>7} {'recv':>6} {'wait':>8} {'kept us':>9} {'held':>8} {'events':>6} "
                "stale",
            ]
        if one.failed:
            reason = (one.left_out or "")[:90]
            lines.append(f"  {one.arm:22} {one.failed} of {one.windows} windows left out: {reason}")
        if one.step_us is None:
            continue
        ratio = "-" if one.step_ratio is None else f"{one.step_ratio[0]:.3f}"
        lines.append(
            f"  {one.arm:22} {_text(one.step_us, 1):>9} {_text(one.step_p99_us, 1):>9} {ratio:>7} "
            f"{_text(one.make_us, 2):>6} {_text(one.send_us, 2):>7} {_text(one.send_p99_us, 1):>7} "
            f"{_text(one.receive_us, 2):>6} {_text(one.wait_us, 1):>8} {_text(one.kept_us, 1):>9} "
            f"{_text(one.held_beyond_bytes, 0):>8} {_text(one.events_a_step, 2):>6} {one.stale}"
        )
    lines += ["", "goals"]
    for goal in (*pooled_goals(run.tables["samples"]), *cost_goals(summaries)):
        value = "no value" if goal.value is None else "{:.3f} [{:.3f}, {:.3f}]".format(*goal.value)
        sign = ">=" if goal.at_least else "<="
        lines.append(
            f"  {goal.point_id:27} {goal.name:33} {value:28} {sign} {goal.wanted:g} {goal.outcome}"
        )
    return "\n".join(lines)


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

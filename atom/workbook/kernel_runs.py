"""``python -m atom sweep kernels``: time the state kernels on an accelerator, and record it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atom.benchmarks.kernel_rows import Question
from atom.benchmarks.kernel_speed import (
    EXPERIMENT,
    GraphBench,
    KernelSpeedSettings,
    build_points,
    run_points,
)
from atom.benchmarks.kernel_speed import quick as make_quick
from atom.config import DeviceChoice
from atom.device import Device
from atom.errors import BadInput
from atom.workbook.kernel_analysis import ArmSummary, summarise
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep, record_points
from atom.workbook.provenance import package_version
from atom.workbook.records import Run
from atom.workbook.sweep_progress import SweepProgress

#: seconds of a point (compilation of the peers' kernels included), for the estimate
_POINT_SECONDS = 1.6

#: libraries that are compared with
_PEERS = ("flash-linear-attention", "fla-core", "transformers", "causal-conv1d")


class KernelSweep(PointSweep[KernelSpeedSettings]):
    """Our state kernels beside others, and guard modes beside each other."""

    command = "kernels"
    experiment = EXPERIMENT
    settings = KernelSpeedSettings
    why_not = "it is one process; see -p repeats N"
    asks_for_device = False

    def parse(self, given: dict[str, Any], quick: bool) -> KernelSpeedSettings:
        """See :class:`PointSweep`."""
        if given.pop("device", DeviceChoice.ACCELERATOR) == DeviceChoice.VIRTUAL:
            raise BadInput("sweep kernels needs an accelerator: a virtual device has no speed")
        settings = KernelSpeedSettings.parse(given, where="sweep kernels")
        return make_quick(settings) if quick else settings

    def plan(self, settings: KernelSpeedSettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        points = build_points(settings)
        if not points:
            raise BadInput("sweep kernels: no point has such an arm")
        return [
            PlannedPoint(
                point.point_id,
                f"{point.point_id}: {len(point.arms)} arms, {settings.repeats} repeats",
                _POINT_SECONDS,
            )
            for point in points
        ]

    def prepare(self, settings: KernelSpeedSettings, device: Device) -> GraphBench:
        """See :class:`PointSweep`."""
        return GraphBench(device)

    def facts(self, ready: GraphBench) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        peers = {name: package_version(name) or "not installed" for name in _PEERS}
        return {"kernels": {"cold_bytes": ready.cold_bytes, **peers}}

    def measure(
        self,
        settings: KernelSpeedSettings,
        device: Device,
        ready: GraphBench,
        done: Collection[str],
    ) -> Measured:
        """See :class:`PointSweep`."""
        for point, rows in run_points(settings, ready, done):
            yield point.point_id, {"samples": rows}

    def results(self, run: Run) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        return {"rows": [asdict(summary) for summary in summarise(run.tables["samples"])]}

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return result_text(summarise(run.tables["samples"]))


SWEEP = KernelSweep()


def record_kernels(
    settings: KernelSpeedSettings,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run the experiment and record it; see :func:`record_points`."""
    return record_points(SWEEP, settings, root, progress, resume)


def result_text(summaries: Sequence[ArmSummary]) -> str:
    """A table a point: median, rate and ratio with its interval."""
    lines = []
    last = None
    for summary in summaries:
        if summary.point_id != last:
            last = summary.point_id
            guard = summary.question == Question.GUARD
            base = "unguarded" if guard else "copy_"
            lines += ["", f"{last:50} {'us':>9} {'TB/s':>6}   time over {base}"]
        if summary.microseconds is None:
            lines.append(f"  {summary.arm:48} left out: {summary.left_out}")
            continue
        line = f"  {summary.arm:48} {summary.microseconds:9.2f} {summary.terabytes_per_s:6.2f}"
        if summary.ratio is not None:
            line += f"   {summary.ratio:.3f} [{summary.low:.3f}, {summary.high:.3f}]"
        lines.append(line)
    lines += ["", "TB/s: bytes of our kernel over the arm's time. 95% bootstrap intervals."]
    return "\n".join(lines).lstrip("\n")

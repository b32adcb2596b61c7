"""``python -m atom sweep engine-fault``: the fault in a whole engine, arm by arm; recorded."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd

from atom.benchmarks.engine_fault import (
    EXPERIMENT,
    load_fault_model,
    measure_engine_fault,
)
from atom.benchmarks.engine_fault_arms import EngineFaultSettings, build_points, point_id
from atom.benchmarks.engine_fault_arms import quick as make_quick
from atom.benchmarks.engine_fault_child import run_in_child
from atom.config import DeviceChoice
from atom.device import Device
from atom.models.weights import LoadedModel
from atom.transfer.copy_protocol import UnpatchedWarning
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep, record_points
from atom.workbook.provenance import redact
from atom.workbook.records import Run
from atom.workbook.sweep_progress import SweepProgress

#: budgets and model on an accelerator, where the defaults would be over before the store is
ACCELERATOR: dict[str, Any] = {"token_budgets": (8192, 16384), "model": "preset:m395"}
#: what ``--quick`` takes there
QUICK_ACCELERATOR: dict[str, Any] = {"token_budgets": (8192,)}
#: seconds of an arm, for the estimate
_ARM_SECONDS = 4.0


class EngineFaultSweep(PointSweep[EngineFaultSettings]):
    """An engine an arm and token budget."""

    command = "engine-fault"
    experiment = EXPERIMENT
    settings = EngineFaultSettings
    row_a_point = True
    why_not = "an arm is one engine, run once"

    def parse(self, given: dict[str, Any], quick: bool) -> EngineFaultSettings:
        """See :class:`PointSweep`."""
        settings = EngineFaultSettings.parse(given, where="sweep engine-fault")
        if settings.device is DeviceChoice.ACCELERATOR:
            return settings.with_defaults(ACCELERATOR | (QUICK_ACCELERATOR if quick else {}))
        return make_quick(settings) if quick else settings

    def plan(self, settings: EngineFaultSettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        names = [point_id(arm, budget) for budget, arm in build_points(settings)]
        return [PlannedPoint(_record_id(name), name, _ARM_SECONDS) for name in names]

    def prepare(self, settings: EngineFaultSettings, device: Device) -> LoadedModel:
        """See :class:`PointSweep`."""
        return load_fault_model(settings, device)

    def measure(
        self,
        settings: EngineFaultSettings,
        device: Device,
        ready: LoadedModel,
        done: Collection[str],
    ) -> Measured:
        """See :class:`PointSweep`. Arms that may end an accelerator's process have their own."""
        child = run_in_child if settings.device is DeviceChoice.ACCELERATOR else None
        recorded = frozenset(
            name
            for name in (point_id(arm, budget) for budget, arm in build_points(settings))
            if _record_id(name) in done
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnpatchedWarning)
            for row in measure_engine_fault(device, ready, settings, child, recorded):
                # an error of a foreign library may name a file or a host
                clean = row.model_copy(update={"error": redact(row.error)})
                yield _record_id(row.point_id), {"arms": [clean]}

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return result_text(run.tables["arms"])

    def unexpected(self, run: Run) -> list[str]:
        """See :class:`PointSweep`."""
        return unexpected(run.tables["arms"])


def _record_id(name: str) -> str:
    return name.replace("/", "-")


SWEEP = EngineFaultSweep()


def record_engine_fault(
    settings: EngineFaultSettings,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run the experiment and record it; see :func:`record_points`."""
    return record_points(SWEEP, settings, root, progress, resume)


def unexpected(table: pd.DataFrame) -> list[str]:
    """Protected arms that were stale, failed a request, or died."""
    found = []
    for row in table[[str(name) != "unpatched" for name in table["protocol"]]].itertuples():
        if row.stale_statuses or row.guard_errors or row.failed_requests or row.crashed:
            found.append(
                f"{row.point_id}: {row.stale_statuses} stale statuses, {row.guard_errors} guard "
                f"errors, {row.failed_requests} failed requests; {row.error}"
            )
    return found


def result_text(table: pd.DataFrame) -> str:
    """An arm a line: statuses, the value found, what caught it, and what became of the requests."""
    lines = [
        f"{'arm/token budget':32} {'stale':>9} {'largest':>8} {'tag':>4} {'guard':>6} "
        f"{'failed':>7} {'changed':>8}  first wrong status; end"
    ]
    for row in table.to_dict("records"):
        guard = "-" if pd.isna(row["guard_value"]) else str(int(row["guard_value"]))
        end = "died" if row["crashed"] else ""
        if end and not pd.isna(row["exit_code"]):
            end += f" (exit code {int(row['exit_code'])})"
        wrong = "" if pd.isna(row["first_wrong_status"]) else row["first_wrong_status"]
        stale = f"{row['stale_statuses']}/{row['statuses']}"
        changed = f"{row['changed_requests']}/{row['compared_requests']}"
        lines.append(
            f"{row['point_id']:32} {stale:>9} {row['largest_bonus']:>8} "
            f"{row['stale_payloads']:>4} {guard:>6} {row['failed_requests']:>7} {changed:>8}  "
            f"{wrong} {end}".rstrip()
        )
    return "\n".join(lines)

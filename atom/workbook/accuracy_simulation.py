"""A small accuracy sweep on the virtual device, in this process; and the recorded runs.

Two schedules. Under the adversarial one nothing but the default stream's work runs until the host
waits for something else: every copy is as late as it can be. On the device's clock, bulk stores of
chosen sizes delay the copies as they would on the card of the profile.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from atom.benchmarks.accuracy_point import run_point
from atom.benchmarks.accuracy_rows import EXPERIMENT
from atom.benchmarks.accuracy_settings import AccuracySettings, build_points
from atom.benchmarks.greedy_equality_rows import EXPERIMENT as GREEDY
from atom.device import Device
from atom.device.operations import Part
from atom.device.virtual import VirtualDevice
from atom.evidence import Evidence
from atom.model_engine.engine_builder import load_model
from atom.workbook.accuracy_parameters import AccuracyNotebookSettings
from atom.workbook.accuracy_runs import AccuracySweep, Ready, tables_of
from atom.workbook.notebook_progress import notebook_progress
from atom.workbook.point_sweep import Measured, record_points
from atom.workbook.records import Run, existing, load_runs
from atom.workbook.sweep_progress import SweepProgress

ADVERSARIAL = ("hold/no-pool/plain", "hold/pool/mtp", "unpatched/pool/mtp")
PRESSED = ("hold/no-pool/plain", "unpatched/no-pool/mtp/*", "hold/no-pool/mtp/*")


class SimulatedSettings(AccuracySettings):
    """Settings of a sweep whose points run in one process on a virtual device."""

    schedule: Literal["clock", "latest"] = "clock"
    """clock: copies take what the profile says; latest: each runs when somebody waits for it."""


def simulated_settings(
    settings: AccuracyNotebookSettings, schedule: Literal["clock", "latest"]
) -> SimulatedSettings:
    """The sweep that a notebook's parameters mean."""
    adversarial = schedule == "latest"
    items = settings.items if adversarial else settings.pressure_items
    return SimulatedSettings.parse(
        {
            "schedule": schedule,
            "device_profile": settings.device_profile,
            "items": items,
            # one set of examples for all: their prefix is computed once
            "sampling": "first_n",
            "max_tokens": settings.max_tokens,
            "concurrency": min(items, 48),
            "pressure": [[2, 1], [8, 16], [8, 3]],
            "protocol": ["hold", "unpatched"],
            "only": list(ADVERSARIAL if adversarial else PRESSED),
            "seed": settings.seed,
        },
        where="notebook 04",
    )


def latest(ready: list[Part]) -> Part:
    """Choose the default stream's work before any other's."""
    return next((part for part in ready if part.stream_id == 0), ready[0])


class SimulatedSweep(AccuracySweep):
    """The sweep of ``sweep accuracy``, each point in this process on a device of its own."""

    def open(self, settings: AccuracySettings) -> Device:
        """See :class:`PointSweep`."""
        assert isinstance(settings, SimulatedSettings)
        if settings.schedule == "latest":
            return VirtualDevice(settings.device_profile, mode="schedule", chooser=latest)
        return VirtualDevice(settings.device_profile, seed=settings.seed)

    def measure(
        self, settings: AccuracySettings, device: Device, ready: Ready, done: Collection[str]
    ) -> Measured:
        """See :class:`PointSweep`."""
        loaded = load_model(ready.model, device, seed=settings.seed)
        reference: list[str] | None = None
        with ready.keep:
            for point in build_points(settings):
                if point.point_id in done:
                    continue
                told: dict[str, Any] = {}
                began = time.monotonic()
                # a kernel's thread has an event loop that runs, and a point needs one of its own
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(
                        run_point,
                        settings,
                        point,
                        told.update,
                        model=ready.model,
                        loaded=loaded,
                        device=self.open(settings),
                        task=ready.task,
                        reference=reference,
                    ).result()
                if point.is_reference:
                    reference = [row["answer_hash"] for row in told["items_table"]]
                end = {
                    "told": told,
                    "wall_seconds": time.monotonic() - began,
                    "exit_code": None,
                    "timed_out": None,
                    "last_words": "",
                }
                yield point.point_id, tables_of(settings, point, ready, end, settings.point_seconds)


SWEEP = SimulatedSweep()


@dataclass(frozen=True)
class AccuracyRuns:
    """What there is to analyse.

    Attributes:
        adversarial: simulated, every copy as late as it can be.
        pressed: simulated, on the clock, with bulk stores beside the steps.
        measured: of this engine on hardware; ``None`` where there is none yet.
        greedy: measured greedy tokens of several engines, compared, the newest whole run; ``None``
            if there is none.
        greedy_before: the older whole runs of that experiment, in their order.
        servers: measured runs of servers that are not ours; may be empty.
        problems: runs that could not be used, and why.
    """

    adversarial: Run
    pressed: Run
    measured: Run | None
    greedy: Run | None
    greedy_before: tuple[Run, ...]
    servers: tuple[Run, ...]
    problems: tuple[str, ...]


def gather_runs(
    settings: AccuracyNotebookSettings, root: str | Path, progress: SweepProgress | None = None
) -> AccuracyRuns:
    """Recorded runs, and the small simulated ones made now where ``records`` holds none.

    Args:
        settings: of the notebook.
        root: folder of the runs that are made now.
        progress: told what it does; by default the runner that executes the notebook.
    """
    asked, problems = load_runs(settings.records, EXPERIMENT)
    beside, more = load_runs(existing(settings.measured), EXPERIMENT)
    measured: list[Run] = []
    for run in _hardware(asked) or _hardware(beside):
        state = run.provenance.exit_state
        if state == "running":
            problems.append(f"{run.provenance.run_id} is {state}: left out")
            continue
        if state != "finished":
            problems.append(f"{run.provenance.run_id} is {state}: its finished points are shown")
        measured.append(run)
    servers = [run for run in measured if run.tables["points"]["protocol"].isna().all()]
    ours = [run for run in measured if run not in servers]
    best = max(ours, key=_size, default=None)
    problems += [
        f"{run.provenance.run_id}: fewer points than {best.provenance.run_id}, which is shown"
        for run in ours
        if best is not None and run is not best
    ]
    simulated = []
    for schedule in ("latest", "clock"):
        known = [run for run in asked if run.provenance.settings.get("schedule") == schedule]
        if known:
            simulated.append(known[-1])
            continue
        wanted = simulated_settings(settings, schedule)
        simulated.append(record_points(SWEEP, wanted, root, progress or notebook_progress()))
    compared, others = load_runs([*settings.records, *existing(settings.measured)], GREEDY)
    whole = [run for run in _hardware(compared) if run.provenance.exit_state == "finished"]
    whole.sort(key=lambda run: run.provenance.run_id)
    problems = list(dict.fromkeys([*problems, *more, *others]))
    return AccuracyRuns(
        simulated[0],
        simulated[1],
        best,
        whole[-1] if whole else None,
        tuple(whole[:-1]),
        tuple(servers),
        tuple(problems),
    )


def _hardware(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.provenance.evidence is Evidence.MEASURED]


def _size(run: Run) -> tuple[int, str]:
    return len(run.tables["points"]), run.provenance.run_id

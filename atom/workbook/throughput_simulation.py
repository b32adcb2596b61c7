"""A small sweep of throughput on the virtual device, in this process; and all recorded runs."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from atom.benchmarks.throughput_point import run_point
from atom.benchmarks.throughput_rows import EXPERIMENT
from atom.benchmarks.throughput_settings import (
    GRID_FIELDS,
    ThroughputPoint,
    ThroughputSettings,
    build_points,
)
from atom.config import ThroughputNotebookSettings
from atom.device import Device
from atom.device.profiles import DeviceProfile, find_profile
from atom.device.virtual import VirtualDevice
from atom.evidence import Evidence
from atom.workbook.notebook_progress import notebook_progress
from atom.workbook.point_sweep import Measured, record_points
from atom.workbook.records import Run, existing, load_runs
from atom.workbook.sweep_progress import SweepProgress
from atom.workbook.throughput_outcomes import OURS
from atom.workbook.throughput_results import tables_of
from atom.workbook.throughput_runs import Ready, ThroughputSweep

#: seconds of a point beyond its window: start, warm-up, last answers
_AROUND_SECONDS = 1.5
#: the tiny model's scale: a dozen prompts of a few hundred tokens in a device pool that holds two
_SCALE: dict[str, Any] = {
    "sessions": 16,
    "block_tokens": 1,
    "max_context_tokens": 448,
    "think_cap_seconds": 0.05,
    "output_tokens": 12,
    "num_kv_blocks": 44,
    "num_state_checkpoints": 10,
    "special": ["repeats", "factorial", "guard", "zero_copy"],
}


class SimulatedSettings(ThroughputSettings):
    """Settings of a sweep on a virtual device whose link to the host may be slowed."""

    link_slowdown: float = Field(1.0, ge=1, le=1e6)
    """How many times slower the host link is than the profile's."""

    @property
    def virtual_profile(self) -> DeviceProfile:
        """The profile with its link slowed, and a name that says so."""
        found = find_profile(self.device_profile)
        if self.link_slowdown == 1:
            return found
        return replace(
            found,
            name=f"{found.name}, host link at 1/{self.link_slowdown:g}",
            d2h_bytes_per_second=found.d2h_bytes_per_second / self.link_slowdown,
            h2d_bytes_per_second=found.h2d_bytes_per_second / self.link_slowdown,
        )


def simulated_settings(settings: ThroughputNotebookSettings) -> SimulatedSettings:
    """The small sweep that a notebook's parameters mean."""
    sessions, pools = sorted(settings.concurrency), sorted(settings.pool_gib)
    heavy = [[sessions[-1], pools[-1]]]
    return SimulatedSettings.parse(
        {
            **_SCALE,
            "device_profile": settings.device_profile,
            "link_slowdown": settings.link_slowdown,
            "duration_seconds": settings.duration_seconds,
            "concurrency": sessions,
            "pool_gib": pools,
            "central_concurrency": sessions[-1:],
            "crash_points": heavy,
            "heavy_points": heavy,
            "seed": settings.seed,
        },
        where="notebook 05",
    )


class SimulatedSweep(ThroughputSweep):
    """The sweep of ``sweep throughput``, each point in this process on a device of its own.

    A process a point would load the libraries again each time, which takes longer than the point.
    """

    def open(self, settings: ThroughputSettings) -> Device:
        """See :class:`PointSweep`."""
        assert isinstance(settings, SimulatedSettings)
        return VirtualDevice(settings.virtual_profile, seed=settings.seed)

    def measure(
        self,
        settings: ThroughputSettings,
        device: Device,
        ready: Ready,
        done: Collection[str],
    ) -> Measured:
        """See :class:`PointSweep`."""
        for point in build_points(settings):
            if point.point_id not in done:
                yield point.point_id, self._point(settings, point, ready)

    def _point(
        self, settings: ThroughputSettings, point: ThroughputPoint, ready: Ready
    ) -> dict[str, Sequence[BaseModel]]:
        told: dict[str, Any] = {"cold_start": "engine"}
        began = time.monotonic()
        # a kernel's thread has an event loop that runs, and a point needs one of its own
        with ThreadPoolExecutor(1) as pool:
            pool.submit(
                run_point,
                settings,
                point,
                told.update,
                traces=ready.traces,
                device=self.open(settings),
            ).result()
        end = {
            "told": told,
            "wall_seconds": time.monotonic() - began,
            "exit_code": None,
            "timed_out": None,
            "last_words": "",
        }
        return dict(tables_of(settings, point, end, settings.duration_seconds))


SWEEP = SimulatedSweep()


@dataclass(frozen=True)
class ThroughputRuns:
    """What there is to analyse.

    Attributes:
        simulated: on the virtual device.
        measured: hardware runs of one machine and one scale, oldest first; may be empty.
        servers: measured runs of servers that are not ours; may be empty.
        race: the race run that timed bulk stores on that machine; ``None`` if there is none.
        problems: runs that could not be used, and why.
    """

    simulated: Run
    measured: tuple[Run, ...]
    servers: tuple[Run, ...]
    race: Run | None
    problems: tuple[str, ...]


def gather_runs(
    settings: ThroughputNotebookSettings, root: str | Path, progress: SweepProgress | None = None
) -> ThroughputRuns:
    """Recorded runs, and the small simulated one made now where ``records`` holds none.

    Args:
        settings: of the notebook.
        root: folder of the run that is made now.
        progress: told what it does; by default the runner that executes the notebook.
    """
    asked, problems = _usable(settings.records, EXPERIMENT)
    # what is named in records has to be there
    present = existing(settings.measured)
    beside, more = _usable(present, EXPERIMENT)
    problems += more
    known = [run for run in asked if run.provenance.evidence is Evidence.SIMULATED]
    hardware = _hardware(asked) or _hardware(beside)
    servers = [run for run in hardware if not (run.tables["points"]["system"] == OURS).any()]
    measured, left = same_scale(
        [run for run in hardware if run.path not in {own.path for own in servers}]
    )
    problems += left
    simulated = (
        known[-1]
        if known
        else record_points(
            SWEEP, simulated_settings(settings), root, progress or notebook_progress()
        )
    )
    races: list[Run] = []
    if measured:
        races, more = _usable([*settings.records, *present], "race")
        machine = measured[0].provenance.machine
        races = [run for run in _hardware(races) if run.provenance.machine == machine]
    race = max(races, key=lambda run: len(run.tables["timeline"]), default=None)
    return ThroughputRuns(
        simulated, tuple(measured), tuple(servers), race, tuple(dict.fromkeys(problems))
    )


def _usable(folders: Sequence[str], experiment: str) -> tuple[list[Run], list[str]]:
    """Runs that have ended. One that ended early has whole points too, and is named."""
    runs, problems = load_runs(folders, experiment)
    kept = []
    for run in runs:
        state = run.provenance.exit_state
        usable = state == "finished" or (experiment == EXPERIMENT and state != "running")
        if usable:
            kept.append(run)
        if state != "finished":
            shown = "its finished points are shown" if usable else "left out"
            problems.append(f"{run.provenance.run_id} is {state}: {shown}")
    return kept, problems


def _hardware(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.provenance.evidence is Evidence.MEASURED]


#: settings that another part of one experiment may have of its own
_OWN = frozenset(
    (
        *(*GRID_FIELDS, "repeats", "central_repeats", "only"),
        *("budget_seconds", "setup_seconds", "time_limit_seconds", "start_limit_seconds"),
        "warm_up",
    )
)


def same_scale(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs of the machine and scale that has most points, and why the others are left out.

    A sweep may be recorded in parts, each with arms of its own. What they share (machine, model,
    load, engine sizes) has to be equal for their points to stand on one page.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        # a setting that came later is none in a record of before
        shared = {
            name: value
            for name, value in run.provenance.settings.items()
            if name not in _OWN and value is not None
        }
        key = (run.provenance.machine, repr(sorted(shared.items())))
        groups.setdefault(key, []).append(run)
    if not groups:
        return [], []

    def size(group: Sequence[Run]) -> tuple[int, str]:
        newest = max(run.provenance.run_id for run in group)
        return sum(len(run.tables["points"]) for run in group), newest

    chosen = max(groups.values(), key=size)
    left = [
        f"{run.provenance.run_id}: another machine, model, load or size than the runs shown"
        for group in groups.values()
        if group is not chosen
        for run in group
    ]
    return chosen, left

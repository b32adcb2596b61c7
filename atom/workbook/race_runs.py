"""The runs that notebook 02 analyses: one simulated, and a measured one if there is any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atom.config import DeviceChoice, RaceMicrobenchmarkSettings
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook.notebook_progress import notebook_progress
from atom.workbook.race_analysis import most_complete
from atom.workbook.records import Run, existing, load_runs
from atom.workbook.run_choice import runs_beside
from atom.workbook.sweeps import EXPERIMENT, SweepProgress, run_race


@dataclass(frozen=True)
class RaceRuns:
    """What there is to analyse.

    Attributes:
        simulated: a run on the virtual device.
        measured: the most complete finished run on hardware, ``None`` if there is none.
        problems: runs that could not be used, and why.
        others: more finished runs of the measured run's machine, which may hold other grids.
        beside: the most complete finished run of each other machine, and the recorded one of the
            measured run's own machine where that run was asked for.
    """

    simulated: Run
    measured: Run | None
    problems: tuple[str, ...]
    others: tuple[Run, ...] = ()
    beside: tuple[Run, ...] = ()

    def with_grid(self, grid: str) -> Run | None:
        """The measured run that holds most of a grid's trials; ``None`` if none has any."""
        runs = ([self.measured] if self.measured is not None else []) + list(self.others)
        found = [int((run.tables["trials"]["grid"] == grid).sum()) for run in runs]
        return runs[found.index(max(found))] if any(found) else None


def gather_runs(
    settings: RaceMicrobenchmarkSettings,
    simulated_root: str | Path,
    hardware_root: str | Path,
    progress: SweepProgress | None = None,
) -> RaceRuns:
    """Load ``records``, or run the experiment now, and load the recorded hardware runs beside it.

    A simulated run is made whenever ``records`` holds none: it needs no device, and equal settings
    give equal rows. The accelerator is used only if the settings ask for it and ``records`` is
    empty.

    Args:
        settings: of the notebook.
        simulated_root, hardware_root: folders of new runs.
        progress: told what a sweep does; by default the runner that executes the notebook.

    Raises:
        BadInput: ``records`` holds no usable run.
        DeviceError: no accelerator, or a process of the sweep failed.
    """
    progress = progress or notebook_progress()
    runs: list[Run] = []
    problems: list[str] = []
    if settings.records:
        runs, problems = load_runs(settings.records, EXPERIMENT)
        if not runs:
            raise BadInput("records: no usable run of the race:\n" + "\n".join(problems))
    elif settings.device is DeviceChoice.ACCELERATOR:
        runs = [run_race(settings.race(DeviceChoice.ACCELERATOR), hardware_root, progress)]
    recorded, more = load_runs(existing(settings.measured), EXPERIMENT)
    problems += more
    known = {run.provenance.run_id for run in runs}
    runs += [run for run in recorded if run.provenance.run_id not in known]
    measured = [run for run in runs if run.provenance.evidence is Evidence.MEASURED]
    for run in measured:
        if run.provenance.exit_state != "finished":
            state = run.provenance.exit_state
            problems.append(f"{run.provenance.run_id} is {state}: resume it to use it")
    finished = all_finished = [run for run in measured if run.provenance.exit_state == "finished"]
    if settings.records or settings.device is DeviceChoice.ACCELERATOR:
        # what was asked for goes before what merely lies there
        asked = [run for run in finished if run.provenance.run_id in known]
        finished = asked or finished
    simulated = most_complete(
        [
            run
            for run in runs
            if run.provenance.evidence is Evidence.SIMULATED and run.provenance.run_id in known
        ]
    )
    if simulated is None:
        simulated = run_race(settings.race(DeviceChoice.VIRTUAL), simulated_root, progress)
    chosen = most_complete(finished)
    others = tuple(
        run
        for run in finished
        if chosen is not None
        and run is not chosen
        and run.provenance.machine == chosen.provenance.machine
    )
    beside = runs_beside(chosen, all_finished, known, most_complete)
    return RaceRuns(simulated, chosen, tuple(problems), others, beside)

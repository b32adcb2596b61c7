"""What notebook 03 shows of lifetime runs, explorations and mutations, from rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from atom.benchmarks.lifetime_queues import QueueRow
from atom.benchmarks.source_lifetime import CONTROL, EXPERIMENT, GRAPH_OUTPUT, PROTECTED
from atom.benchmarks.source_lifetime_rows import ExplorationRow, MutationRow
from atom.config import CopyProtocol, DeviceChoice, SourceLifetimeSettings
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.lifetime.explore import Exploration
from atom.workbook.lifetime_published import published_points
from atom.workbook.lifetime_runs import record_lifetime
from atom.workbook.notebook_progress import notebook_progress
from atom.workbook.records import Run, existing, load_runs
from atom.workbook.run_choice import runs_beside
from atom.workbook.sweep_progress import SweepProgress


@dataclass(frozen=True)
class LifetimeRuns:
    """What there is to analyse.

    Attributes:
        simulated: a run on the virtual device.
        measured: the newest of the largest finished runs on hardware, ``None`` if there is none.
        problems: runs that could not be used, and why.
        beside: one run of each other machine, or ours beside one that was asked for.
    """

    simulated: Run
    measured: Run | None
    problems: tuple[str, ...]
    beside: tuple[Run, ...] = ()


def gather_runs(
    settings: SourceLifetimeSettings,
    simulated_root: str | Path,
    hardware_root: str | Path,
    progress: SweepProgress | None = None,
) -> LifetimeRuns:
    """Load ``records``, or run the experiment now, and load the recorded hardware runs beside it.

    A simulated run is made whenever ``records`` holds none. The accelerator is used only if the
    settings ask for it and ``records`` is empty.

    Args:
        settings: of the notebook.
        simulated_root, hardware_root: folders of new runs.
        progress: told what it does; by default the runner that executes the notebook.

    Raises:
        BadInput: ``records`` holds no usable run.
        DeviceError: no accelerator, or no stream that can be parked.
    """
    progress = progress or notebook_progress()
    runs: list[Run] = []
    problems: list[str] = []
    if settings.records:
        runs, problems = load_runs(settings.records, EXPERIMENT)
        if not runs:
            raise BadInput("records: no usable lifetime run:\n" + "\n".join(problems))
    elif settings.device is DeviceChoice.ACCELERATOR:
        wanted = settings.lifetime(DeviceChoice.ACCELERATOR)
        runs = [record_lifetime(wanted, hardware_root, progress)]
    asked = {run.provenance.run_id for run in runs}
    recorded, more = load_runs(existing(settings.measured), EXPERIMENT)
    problems += more
    runs += [run for run in recorded if run.provenance.run_id not in asked]
    finished = []
    for run in runs:
        if run.provenance.exit_state == "finished":
            finished.append(run)
        else:
            problems.append(f"{run.provenance.run_id} is {run.provenance.exit_state}")
    measured = [run for run in finished if run.provenance.evidence is Evidence.MEASURED]
    # what was asked for goes before what merely lies there
    chosen = largest([run for run in measured if run.provenance.run_id in asked] or measured)
    simulated = largest(
        run
        for run in finished
        if run.provenance.evidence is Evidence.SIMULATED and run.provenance.run_id in asked
    )
    if simulated is None:
        wanted = settings.lifetime(DeviceChoice.VIRTUAL)
        simulated = record_lifetime(wanted, simulated_root, progress)
    beside = runs_beside(chosen, measured, asked, largest)
    return LifetimeRuns(simulated, chosen, tuple(problems), beside)


def largest(runs: Iterable[Run]) -> Run | None:
    """Of the runs with most trials, the newest; ``None`` of none."""
    return max(
        runs,
        key=lambda run: (int(run.tables["trials"]["trials"].sum()), run.provenance.run_id),
        default=None,
    )


def plain(trials: pd.DataFrame) -> pd.DataFrame:
    """Rows with enum members as text, so that they compare alike however they were made."""
    rows = trials.copy()
    for column in ("protocol", "window"):
        rows[column] = [str(value) for value in rows[column]]
    return rows


def words(name: object) -> str:
    """A path's or a protocol's name as text."""
    return "clean()" if name == "clean" else str(name).replace("_", " ")


def seven_paths(trials: pd.DataFrame) -> pd.DataFrame:
    """Rows of the seven paths, without the graph arm."""
    rows = plain(trials)
    return rows[rows["path"] != GRAPH_OUTPUT]


def counts_table(trials: pd.DataFrame) -> pd.DataFrame:
    """One row a path, one column a protocol: stale trials with its protection / without."""
    rows = seven_paths(trials)
    table = []
    for path, group in rows.groupby("path", sort=False):
        line = {"path": words(path)}
        for protocol in dict.fromkeys(rows["protocol"]):
            cells = group[group["protocol"] == protocol]
            found = {row.arm: f"{row.stale}/{row.trials}" for row in cells.itertuples()}
            line[protocol] = " · ".join(found.get(arm, "–") for arm in (PROTECTED, CONTROL))
        table.append(line)
    return pd.DataFrame(table)


def beside_published(trials: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Published counts of the lifetime test, and ours: a row a path, columns by arm and kind.

    Args:
        trials: rows of the trials table, by kind of evidence or by run.
    """
    found = {kind: seven_paths(rows) for kind, rows in trials.items()}
    table: dict[str, dict[str, str]] = {}
    for point in published_points():
        line = table.setdefault(point.path, {"path": point.path})
        line[f"{point.arm}: published"] = f"{point.stale}/{point.trials}"
        for kind, rows in found.items():
            own = rows[rows["point_id"] == point.point_id]
            counts = [f"{one.stale}/{one.trials}" for one in own.itertuples()]
            line[f"{point.arm}: {kind}"] = counts[0] if counts else "–"
    return pd.DataFrame(list(table.values()))


def exposure_table(trials: pd.DataFrame) -> pd.DataFrame:
    """When each path's race is open in the engine before the fix, and whether it drops there."""
    rows = seven_paths(trials).drop_duplicates("path")
    return pd.DataFrame(
        {
            "path": words(row.path),
            "window": row.window,
            "the pre-fix engine itself drops the source": "yes" if row.engine_drops else "no",
            "what drops it, or keeps it": row.engine_why,
        }
        for row in rows.itertuples()
    )


def nets_table(trials: pd.DataFrame) -> pd.DataFrame:
    """Of the stale trials of the controls: those that the epoch tag or a bounds guard stops."""
    rows = plain(trials)
    rows = rows[(rows["arm"] == CONTROL) & (rows["path"] != GRAPH_OUTPUT)]
    sums = rows.groupby("protocol", sort=False)[["stale", "tag_caught", "guard_caught"]].sum()
    return sums.reset_index().rename(
        columns={
            "protocol": "protection taken from",
            "tag_caught": "epoch tag alone",
            "guard_caught": "bounds guard alone",
        }
    )


def unexpected(trials: pd.DataFrame) -> list[str]:
    """Points that are not as the fix says: protected never stale, controls always."""
    rows = plain(trials)
    wanted = rows["trials"].where(rows["arm"] == CONTROL, 0)
    return [
        f"{row.point_id}: {row.stale} of {row.trials}"
        for row in rows[rows["stale"] != wanted].itertuples()
    ]


def graph_counts(trials: pd.DataFrame) -> dict[str, tuple[int, int]]:
    """Stale and trials of the graph arm: ``control`` holds alone, ``protected`` also waits."""
    rows = trials[trials["path"] == GRAPH_OUTPUT]
    return {
        str(arm): (int(stale), int(count))
        for arm, stale, count in zip(rows["arm"], rows["stale"], rows["trials"], strict=True)
    }


# -- explorations and mutations


def exploration_table(rows: Sequence[ExplorationRow], depth: int) -> pd.DataFrame:
    """One row a path, one column a protocol: schedules run at that depth, and what they showed."""
    table = []
    for path in dict.fromkeys(row.path for row in rows):
        line = {"path": words(path)}
        for row in rows:
            if row.path == path and row.depth == depth:
                result = row.violations.split(", ") if row.violations else []
                shown = "foreign bytes" if "foreign bytes" in result else (result or ["holds"])[0]
                more = "" if row.complete else "+"
                line[str(row.protocol)] = f"{row.schedules}{more}: {shown}"
        table.append(line)
    return pd.DataFrame(table)


def queues_table(rows: Sequence[QueueRow]) -> pd.DataFrame:
    """One row a path: schedules and what broke, with a queue a stream and with one for all."""

    def shown(found: Exploration) -> str:
        return f"{found.schedules}: {', '.join(sorted(found.counterexamples)) or 'holds'}"

    return pd.DataFrame(
        {
            "path, unpatched": words(row.path),
            "a queue a stream": shown(row.own),
            "one queue for both": shown(row.shared),
        }
        for row in rows
    )


def proved(rows: Sequence[ExplorationRow], protocol: CopyProtocol) -> bool:
    """Whether every program of that protocol was covered in full and broke nothing."""
    own = [row for row in rows if row.protocol is protocol]
    return bool(own) and all(row.complete and not row.violations for row in own)


def mutations_table(rows: Sequence[MutationRow]) -> pd.DataFrame:
    """The mutations that change something, and what caught each."""
    return pd.DataFrame(
        {
            "mutation": row.mutation,
            "breaks": row.edge,
            "caught by": "NOT CAUGHT" if row.killed_by is None else row.killed_by,
            "on": "–" if row.path is None else f"{words(row.path)}, {row.protocol}",
            "depth": row.depth,
            "steps": row.steps,
            "foreign bytes from depth": "never" if row.foreign_depth is None else row.foreign_depth,
            "tag alone": row.tag_alone,
            "guard alone": row.guard_alone,
        }
        for row in rows
        if not row.equivalent
    )


def equivalents_table(rows: Sequence[MutationRow]) -> pd.DataFrame:
    """The mutations that change nothing, and why."""
    return pd.DataFrame(
        {
            "mutation": row.mutation,
            "what it does": row.what,
            "schedules": row.schedules,
            "caught": "yes" if row.caught else "no",
            "why it changes nothing": row.argument,
        }
        for row in rows
        if row.equivalent
    )


def caught(rows: Sequence[MutationRow], name: str) -> MutationRow | None:
    """The mutation of that name, if it was caught."""
    return next((row for row in rows if row.mutation == name and row.caught), None)

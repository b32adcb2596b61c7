"""Recorded throughput runs of the engine on hardware, and the capacity model beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from atom.benchmarks.capacity_check import Checked, check
from atom.benchmarks.throughput_point import read_sessions
from atom.benchmarks.throughput_rows import EXPERIMENT, ThroughputRow
from atom.benchmarks.throughput_settings import ThroughputSettings
from atom.errors import AtomError
from atom.evidence import Evidence
from atom.kv_transfer.pool_entry import EntryKind
from atom.kv_transfer.tier_counts import Cause
from atom.workbook.race_analysis import label_of
from atom.workbook.records import Run, existing, load_runs
from atom.workbook.throughput_outcomes import OURS

#: simulating takes time: of a run, so many points
_MOST_POINTS = 4


@dataclass(frozen=True)
class RecordedCheck:
    """Points of a recorded run beside the model.

    Attributes:
        points: none where there is no run, or none that can be simulated here.
        notes: what was not done, and why.
        machine: of the run.
        run_ids: of the run.
    """

    points: tuple[Checked, ...] = ()
    notes: tuple[str, ...] = ()
    machine: str = ""
    run_ids: tuple[str, ...] = ()


def check_recorded(*groups: Sequence[str]) -> RecordedCheck:
    """Simulate points of the newest hardware run of our engine; those asked for go first."""
    runs: list[Run] = []
    for folders in groups:
        found, _ = load_runs(existing(folders), EXPERIMENT)
        runs = [run for run in found if _is_ours(run)]
        if runs:
            break
    if not runs:
        return RecordedCheck(
            notes=(
                "Not run: no recorded throughput run of this engine on hardware. Record one with "
                "python -m atom sweep throughput.",
            )
        )
    notes = []
    for run in sorted(runs, key=lambda one: one.provenance.run_id, reverse=True):
        try:
            points = check_run(run)
        except AtomError as error:
            notes.append(f"{run.provenance.run_id}: not simulated: {error}")
            continue
        if points:
            return RecordedCheck(
                tuple(points), tuple(notes), label_of(run), (run.provenance.run_id,)
            )
    return RecordedCheck(notes=tuple(notes) or ("No point of these runs can be simulated.",))


def _is_ours(run: Run) -> bool:
    hardware = run.provenance.evidence is Evidence.MEASURED
    return hardware and bool((run.tables["points"]["system"] == OURS).any())


def check_run(run: Run, most: int = _MOST_POINTS) -> list[Checked]:
    """Points of a run beside the model.

    Args:
        run: a throughput run of our engine.
        most: points, those with most sessions and largest pools first.

    Raises:
        BadInput: its traces are not here, or sizes and times were not recorded.
    """
    settings = ThroughputSettings.parse(
        run.provenance.settings, where=f"settings of {run.provenance.run_id}"
    )
    rows = [
        ThroughputRow.model_validate({str(k): None if pd.isna(v) else v for k, v in line.items()})
        for line in run.tables["points"].fillna({"worker": ""}).to_dict("records")
    ]
    rows = [row for row in rows if row.protocol == settings.protocol[0] and row.repeat == 0]
    rows.sort(key=lambda row: (-(row.pool_gib or 0), -row.concurrency))
    causes = run.tables["causes"]
    wanted = causes[
        (causes["what"] == "load")
        & (causes["kind"] == EntryKind.STATE.value)
        & (causes["cause"] == Cause.EVICTED.value)
    ]
    evicted = {str(k): int(v) for k, v in wanted.groupby("point_id")["count"].sum().items()}
    sessions = read_sessions(settings).sessions
    return check(settings, rows[:most], evicted, sessions)


def _pair(values: tuple[float | None, float | None], form: str) -> str:
    return " / ".join("" if value is None else format(value, form) for value in values)


def checked_table(points: Sequence[Checked]) -> pd.DataFrame:
    """Measured and simulated, a row a point."""
    words = {True: "yes", False: "no", None: ""}
    return pd.DataFrame(
        {
            "point": one.point_id,
            "hits, measured / simulated": _pair(one.hits, ".1%"),
            "within 10%": words[one.agrees("hits")],
            "state loads failed": _pair(one.failed, ".1%"),
            "failures within 10%": words[one.agrees("failed")],
            "tok/s": _pair(one.throughput, ",.0f"),
            "throughput within 10%": words[one.agrees("throughput")],
        }
        for one in points
    )


def checked_sentences(points: Sequence[Checked]) -> list[str]:
    """How many points agree."""
    said = []
    for what, name in (("hits", "hit rate"), ("failed", "failure rate"), ("throughput",) * 2):
        judged = [one.agrees(what) for one in points if one.agrees(what) is not None]
        said.append(f"{name}: {sum(map(bool, judged))} of {len(judged)} points within 10%")
    return ["; ".join(said) + "."]

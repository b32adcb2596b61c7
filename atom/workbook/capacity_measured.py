"""Recorded throughput runs of the engine on hardware, and the capacity model beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd

from atom.benchmarks.capacity_check import (
    AGREES,
    FACTORS,
    Checked,
    compare,
    like_id,
    simulate_like,
    usable,
)
from atom.benchmarks.capacity_rows import EXPERIMENT, CapacityRow
from atom.benchmarks.session_model import Session
from atom.benchmarks.throughput_point import read_sessions
from atom.benchmarks.throughput_rows import EXPERIMENT as THROUGHPUT
from atom.benchmarks.throughput_rows import ThroughputRow
from atom.benchmarks.throughput_settings import ThroughputSettings
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.kv_transfer.pool_entry import EntryKind
from atom.kv_transfer.tier_counts import Cause
from atom.workbook.capacity_analysis import rows_of
from atom.workbook.race_analysis import label_of
from atom.workbook.records import Run, existing, load_run, load_runs
from atom.workbook.throughput_outcomes import OURS

#: hits below it come and go with a part of the requests: the caches hold just less than is asked
_CLIFF = 0.5


@dataclass(frozen=True)
class RecordedCheck:
    """Points of a recorded run beside the model.

    Attributes:
        points: none where there is no run, or none that was simulated.
        notes: what was not done, and why.
        machine: of the measured run.
        run_ids: of the measured run and of the simulated one.
    """

    points: tuple[Checked, ...] = ()
    notes: tuple[str, ...] = ()
    machine: str = ""
    run_ids: tuple[str, ...] = ()


def check_recorded(*groups: Sequence[str]) -> RecordedCheck:
    """The newest hardware run of our engine that was also simulated; runs asked for go first."""
    for folders in groups:
        runs = [run for run in load_runs(existing(folders), THROUGHPUT)[0] if _is_ours(run)]
        models = load_runs(existing(folders), EXPERIMENT)[0]
        for run in sorted(runs, key=lambda one: one.provenance.run_id, reverse=True):
            for model in sorted(models, key=lambda one: one.provenance.run_id, reverse=True):
                like = model.provenance.settings.get("like")
                if like is not None and Path(like).name == run.path.name:
                    points = compare(
                        _rows(run),
                        {row.point_id: row for row in rows_of(model)},
                        _evicted(run),
                    )
                    ids = (run.provenance.run_id, model.provenance.run_id)
                    return RecordedCheck(tuple(points), (), label_of(run), ids)
    return RecordedCheck(
        notes=(
            "No rows: not run. Simulate a recorded throughput run of this engine with "
            "python -m atom sweep capacity -p like RUN_FOLDER, and --traces if it used some.",
        )
    )


def _is_ours(run: Run) -> bool:
    hardware = run.provenance.evidence is Evidence.MEASURED
    return hardware and bool((run.tables["points"]["system"] == OURS).any())


def _rows(run: Run) -> list[ThroughputRow]:
    return [
        ThroughputRow.model_validate({str(k): None if pd.isna(v) else v for k, v in line.items()})
        for line in run.tables["points"].fillna({"worker": ""}).to_dict("records")
    ]


def _evicted(run: Run) -> dict[str, int]:
    """State loads of each point that failed since the state had been evicted."""
    causes = run.tables["causes"]
    wanted = causes[
        (causes["what"] == "load")
        & (causes["kind"] == EntryKind.STATE.value)
        & (causes["cause"] == Cause.EVICTED.value)
    ]
    return {str(k): int(v) for k, v in wanted.groupby("point_id")["count"].sum().items()}


def _measured(folder: str) -> tuple[ThroughputSettings, list[ThroughputRow]]:
    """Settings of a throughput run and its points that can be simulated, in a fixed order."""
    run = load_run(folder)
    if run.provenance.experiment != THROUGHPUT:
        raise BadInput(f"like: {folder} is a run of {run.provenance.experiment}")
    settings = ThroughputSettings.parse(run.provenance.settings, where=f"settings of {folder}")
    rows = [row for row in _rows(run) if usable(settings, row)]
    if not rows:
        raise BadInput(f"like: {folder} has no point that ended well with times and sizes")
    return settings, sorted(rows, key=lambda row: (row.pool_gib or 0, row.concurrency, row.repeat))


def like_plan(folder: str) -> list[str]:
    """Names of the rows that simulating a throughput run gives.

    Raises:
        BadInput: no throughput run, or none of its points can be simulated.
    """
    _, rows = _measured(folder)
    return [like_id(row.point_id, factor) for row, factor in product(rows, FACTORS)]


def like_sessions(folder: str, traces: str | None) -> tuple[Session, ...]:
    """The sessions of a throughput run.

    Args:
        folder: of the run.
        traces: where its recorded sessions lie here; ``None`` for a run that generated its own.

    Raises:
        BadInput: it used recorded sessions and none are named, or the other way round.
    """
    settings, _ = _measured(folder)
    if (settings.traces is None) is not (traces is None):
        raise BadInput(f"--traces {traces}: the run in {folder} has traces of {settings.traces}")
    return read_sessions(settings.model_copy(update={"traces": traces})).sessions


def like_rows(
    folder: str, sessions: Sequence[Session], done: Collection[str]
) -> Iterator[CapacityRow]:
    """Simulate the points of a throughput run, each with three step times.

    Args:
        folder: of the run.
        sessions: of :func:`like_sessions`.
        done: names of rows that are left out.
    """
    settings, rows = _measured(folder)
    for row, factor in product(rows, FACTORS):
        if like_id(row.point_id, factor) not in done:
            yield simulate_like(settings, row, sessions, factor)


def _pair(values: tuple[float | None, float | None], form: str) -> str:
    return " / ".join("–" if value is None else format(value, form) for value in values)


def _failed_of(one: Checked) -> str:
    """How many state loads failed of how many, measured and simulated; nothing without a pool."""
    if one.asked is None:
        return ""
    return " / ".join(
        f"{round((share or 0.0) * asked)} of {asked}"
        for share, asked in zip(one.failed, one.asked, strict=True)
    )


def _reason(one: Checked) -> str:
    """Why a point's hits may differ by more than a tenth."""
    measured, _ = one.hits
    if one.agrees("hits") is not False or measured is None:
        return ""
    if one.apart is not None and one.apart < 1.5:
        return "one request"
    if one.reach is not None and one.reach[0] * (1 - AGREES) <= measured <= one.reach[1] * (
        1 + AGREES
    ):
        return "within what a tenth of the step time does"
    return "at the cliff" if measured < _CLIFF else "not explained"


def checked_table(points: Sequence[Checked]) -> pd.DataFrame:
    """Measured and simulated, a row a point."""
    words = {True: "yes", False: "no", None: ""}
    return pd.DataFrame(
        {
            "point": one.point_id,
            "hits, measured / simulated": _pair(one.hits, ".1%"),
            "steps 10% shorter to longer": ""
            if one.reach is None
            else f"{one.reach[0]:.1%} to {one.reach[1]:.1%}",
            "within 10%": words[one.agrees("hits")],
            "else": _reason(one),
            "requests": _pair(one.requests, "d"),
            "state loads failed": _failed_of(one),
            "tok/s": _pair(one.throughput, ",.0f"),
            "throughput within 10%": words[one.agrees("throughput")],
        }
        for one in points
    )


def checked_sentences(points: Sequence[Checked]) -> list[str]:
    """How many points agree, and what sets the others apart."""
    counts = []
    for what, name in (("hits", "hit rate"), ("failed", "failure rate"), ("throughput",) * 2):
        judged = [one.agrees(what) for one in points if one.agrees(what) is not None]
        counts.append(f"{name}: {sum(map(bool, judged))} of {len(judged)} points within 10%")
    said = ["; ".join(counts) + "."]
    high = [one for one in points if (one.hits[0] or 0.0) >= _CLIFF]
    if high and all(one.agrees("hits") for one in high):
        said.append(
            f"Where half of the tokens or more are found, all {len(high)} points agree in hits."
        )
    reasons = [reason for one in points if (reason := _reason(one))]
    if reasons:
        parts = [f"{reasons.count(name)} {name}" for name in dict.fromkeys(reasons)]
        said.append(f"Of the {len(reasons)} points that differ in hits: {'; '.join(parts)}.")
    lost = [one for one in points if one.agrees("failed") is False]
    if lost:
        said.append(
            "Failed state loads differ, measured / simulated: "
            + "; ".join(f"{one.point_id} {_failed_of(one)}" for one in lost)
            + ". Where the model finds fewer prefixes, it also asks for fewer states."
            * all(one.asked is not None and one.asked[1] < one.asked[0] for one in lost)
        )
    if "at the cliff" in reasons:
        said.append(
            "At the cliff the caches hold just less than the sessions ask for, and which of two "
            "requests comes first decides whether one is found. The model has the engine's order, "
            "but one mean time for every step of a point, and the rows have no more: it finds less "
            "there than the engine did. A window holds some hundred requests."
        )
    return said


def repeats_table(points: Sequence[Checked]) -> pd.DataFrame:
    """Points that were measured twice: how far two measurements of the same lie apart."""
    twins: dict[str, list[Checked]] = {}
    for one in points:
        twins.setdefault(one.point_id.rsplit("/", 1)[0], []).append(one)
    return pd.DataFrame(
        {
            "point": name,
            "hits, first and second": _pair((own[0].hits[0], own[1].hits[0]), ".1%"),
            "second over first": ""
            if not own[0].hits[0]
            else f"{(own[1].hits[0] or 0) / own[0].hits[0]:.2f}",
            "tok/s, second over first": f"{own[1].throughput[0] / own[0].throughput[0]:.2f}",
        }
        for name, own in twins.items()
        if len(own) > 1
    )

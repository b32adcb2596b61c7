"""Recorded capacity sweeps: which run is the grid of the fit, the remedies, and the repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from atom.benchmarks.capacity_rows import EXPERIMENT, CapacityRow
from atom.evidence import Evidence
from atom.workbook.records import Run, existing, load_runs

#: where a simulation lies in the grid
PLACE = ("byte_scale", "device_gb", "load_gb_per_second")


@dataclass(frozen=True)
class CapacityRuns:
    """Recorded simulations. Of equal runs the one with the longest window counts, then the newest.

    Attributes:
        grid: the run whose grid of byte scales, device memories and load rates is largest; ``None``
            if no run has one.
        remedies: the run with most arms at one place of the grid and one order of the sessions;
            ``None`` if no run has more than one arm.
        repeats: runs with other orders of the sessions than the first, at one place of the grid:
            that of the run with most of them; none if no run has another order.
        problems: runs that could not be used, and why.
    """

    grid: Run | None
    remedies: Run | None
    repeats: tuple[Run, ...]
    problems: tuple[str, ...]


def gather_runs(*groups: Sequence[str]) -> CapacityRuns:
    """The runs to analyse; those of an earlier group of folders go first."""
    problems: list[str] = []
    grid = remedies = None
    repeats: tuple[Run, ...] = ()
    for folders in groups:
        runs, more = load_runs(existing(folders), EXPERIMENT)
        problems += more
        usable = [r for r in runs if r.provenance.exit_state == "finished"]
        usable = [r for r in usable if r.provenance.evidence is Evidence.SIMULATED]
        usable = [r for r in usable if r.provenance.settings.get("like") is None]
        in_one = [run for run in usable if _in_one_place(run)]
        problems += [
            f"{run.path}: several sizes: no comparison of remedies"
            for run in usable
            if not _in_one_place(run) and _count(run, "arm") > 1
        ]
        grid = grid or _largest(_cells, 4, usable)
        once = [run for run in in_one if _orders(run) <= 1]
        remedies = remedies or _largest(lambda run: _count(run, "arm"), 2, once)
        again = [run for run in in_one if _orders(run) > 1]
        most = _largest(_orders, 2, again)
        repeats = repeats or tuple(run for run in again if most and _place(run) == _place(most))
    return CapacityRuns(grid, remedies, repeats, tuple(dict.fromkeys(problems)))


def _largest(size: Callable[[Run], int], least: int, runs: Iterable[Run]) -> Run | None:
    def rank(run: Run) -> tuple[Any, ...]:
        return size(run), run.provenance.settings["duration_seconds"], run.provenance.run_id

    return max((run for run in runs if size(run) >= least), key=rank, default=None)


def _count(run: Run, column: str) -> int:
    rows = run.tables["points"]
    return int(rows[column].nunique()) if column in rows else 0


def _place(run: Run) -> list[Any]:
    return [run.tables["points"][axis].iloc[0] for axis in PLACE]


def _orders(run: Run) -> int:
    """Orders of the sessions that a run has, the first, which others have, counted in any case."""
    rows = run.tables["points"]
    return len({0, *rows["repeat"]}) if "repeat" in rows else 1


def _cells(run: Run) -> int:
    places = [_count(run, axis) for axis in PLACE]
    return math.prod(places) if min(places) > 1 else 0


def _in_one_place(run: Run) -> bool:
    return all(_count(run, axis) <= 1 for axis in PLACE)


def rows_of(run: Run) -> list[CapacityRow]:
    """Rows of a run as models."""
    found = []
    for values in run.tables["points"].to_dict("records"):
        plain = {str(k): None if pd.isna(v) else v for k, v in values.items()}
        found.append(CapacityRow.model_validate(plain))
    return found


def run_text(run: Run) -> str:
    """What a recorded run simulated, in words."""
    settings = run.provenance.settings
    load = "generated sessions" if settings["traces"] is None else "recorded sessions"
    orders = sorted({int(number) for number in run.tables["points"]["repeat"]})
    return (
        f"{len(run.tables['points'])} points of {settings['duration_seconds']:,.0f} simulated s, "
        f"{load}, {_count(run, 'arm')} arm(s), "
        + ("" if orders == [0] else f"order {', '.join(map(str, orders))} of the sessions, ")
        + f"run {run.provenance.run_id}"
    )

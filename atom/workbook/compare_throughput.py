"""A throughput run's figures for a comparison: quotients to its own points without offload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from atom.benchmarks.throughput_rows import Outcome
from atom.workbook.compare_model import TimeRatio
from atom.workbook.records import Run
from atom.workbook.throughput_analysis import rows_of

#: what is divided by that of the point without offload: column, in words
_QUOTIENTS = {
    "total_throughput": "tokens a second",
    "ttft_mean_seconds": "time to first token",
    "itl_p90_seconds": "inter-token latency, p90",
}
#: events of trials, in words, with the columns of both
_RATES = (
    ("points that did not end well", "unwell", "one"),
    ("failed requests", "errors", "asked"),
    ("stale statuses", "stale_statuses", "statuses"),
    ("state loads that failed", "state_load_failures", "state_loads"),
    ("accepted drafts", "accepted_tokens", "drafted_tokens"),
)


def rates(run: Run) -> Iterator[tuple[str, int, int]]:
    """Events of trials by setting, summed over its repeats."""
    points = run.tables["points"].copy()
    points["one"] = 1
    points["unwell"] = [int(str(one) != Outcome.OK) for one in points["outcome"]]
    points["asked"] = points["requests"] + points["errors"]
    points["state_loads"] = points["states_loaded"] + points["state_load_failures"]
    for setting, group in _settings(points):
        for words, events, trials in _RATES:
            known = group[[events, trials]].dropna().sum()
            if known[trials]:
                yield f"{words}, {setting}", int(known[events]), int(known[trials])


def quotients(run: Run) -> Iterator[tuple[str, TimeRatio]]:
    """Each setting with a CPU pool over the run's own without one, at as many sessions.

    Both of one sitting: where a run was resumed its host may have become another.
    """
    points = run.tables["points"].assign(sitting=[row["sitting"] for row in rows_of([run])])
    ended = points[[str(one) == Outcome.OK for one in points["outcome"]]]
    bare = ended[ended["pool_gib"].isna()]
    for setting, group in _settings(ended[ended["pool_gib"].notna()]):
        first = group.iloc[0]
        base = bare[
            (bare["system"] == first["system"])
            & (bare["protocol"].astype(str) == str(first["protocol"]))
            & (bare["mtp"].astype(str) == str(first["mtp"]))
            & (bare["concurrency"] == first["concurrency"])
            & bare["sitting"].isin(group["sitting"])
        ]
        group = group[group["sitting"].isin(base["sitting"])]
        for column, words in _QUOTIENTS.items():
            top, bottom = _repeats(group, column), _repeats(base, column)
            most = min(len(top), len(bottom))
            if most and all(bottom):
                yield f"{words}, {setting}", TimeRatio(top[:most], bottom[:most])


def times(run: Run) -> Iterator[tuple[str, TimeRatio]]:
    """Latencies in us, a value a repeat."""
    points = run.tables["points"]
    for setting, group in _settings(points[[str(one) == Outcome.OK for one in points["outcome"]]]):
        for column in ("ttft_mean_seconds", "itl_p90_seconds"):
            if values := _repeats(group, column):
                scaled = tuple(1e6 * value for value in values)
                yield f"{_QUOTIENTS[column]}, {setting}", TimeRatio(scaled)


def _settings(points: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Repeats of one setting, under its name: a point's identity without the repeat."""
    # a list of one name would be taken for a column's
    names = points["point_id"].map(lambda point_id: str(point_id).rsplit("/", 1)[0])
    for name, group in points.groupby(names, sort=False):
        yield str(name), group


def _repeats(points: pd.DataFrame, column: str) -> tuple[float, ...]:
    values: list[Any] = list(points.sort_values("repeat")[column].dropna())
    return tuple(float(value) for value in values)

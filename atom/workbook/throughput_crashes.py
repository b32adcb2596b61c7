"""Crashes under load: survival steps, rates over exposure, and what else differed between arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from atom.workbook.published_derived import (
    crash_exposure,
)
from atom.workbook.published_derived import crash_times as crash_times  # beside the watches
from atom.workbook.published_tables import load_published
from atom.workbook.statistics import exact_interval, poisson_interval, poisson_ratio_interval

#: minutes of a published run
HOUR = 60.0


@dataclass(frozen=True)
class Step:
    """Share of runs that were still alive from a moment on, with its exact 95% interval."""

    minute: float
    alive: int
    runs: int

    @property
    def share(self) -> float:
        """Alive of all."""
        return self.alive / self.runs

    @property
    def interval(self) -> tuple[float, float]:
        """Exact 95% interval of the share: every run was watched up to its own end."""
        return exact_interval(self.alive, self.runs)


def survival(minutes: Sequence[float], runs: int) -> list[Step]:
    """Steps of the share of ``runs`` runs alive, of which some ended after ``minutes``.

    Args:
        minutes: end of each run that crashed; the others were watched to the horizon.
        runs: all of them.
    """
    steps = [Step(0.0, runs, runs)]
    for minute in sorted(minutes):
        steps.append(Step(minute, steps[-1].alive - 1, runs))
    return steps


@dataclass(frozen=True)
class Watched:
    """Runs of one arm that were watched for crashes.

    Attributes:
        name: which runs.
        runs, events: how many, and how many ended with the event.
        hours: exposure, up to the event.
        hours_range: its least and its most, where it is not printed.
        event: what counted.
    """

    name: str
    runs: int
    events: int
    hours: float
    hours_range: tuple[float, float]
    event: str = "crash"

    @property
    def risk(self) -> tuple[float, float]:
        """Exact 95% interval of a run's risk."""
        return exact_interval(self.events, self.runs)

    @property
    def rate(self) -> tuple[float, float]:
        """Exact 95% interval of events an hour, over the whole range of exposures."""
        least, most = self.hours_range
        return poisson_interval(self.events, most)[0], poisson_interval(self.events, least)[1]


def published_watches() -> dict[str, Watched]:
    """The unfixed runs, the fixed ones, and the two of the debug build, by a key."""
    table, hours = load_published("crash_history"), crash_exposure()
    ended = table[table["outcome"].isin(["crashed", "completed"])]
    first, second = (ended[ended["site"] == site] for site in ("first", "second"))
    debug = table[table["outcome"] == "caught"]
    caught = float(debug["minutes_low"].sum()) / 60
    return {
        "unfixed": Watched(
            "unpatched, first machine",
            int(first["runs"].sum()),
            int((first["outcome"] == "crashed").sum()),
            hours.unfixed,
            (hours.unfixed_low, hours.unfixed_high),
        ),
        "fixed": Watched(
            "record_stream, second machine",
            int(second["runs"].sum()),
            int((second["outcome"] == "crashed").sum()),
            hours.fixed,
            (hours.fixed, hours.fixed),
        ),
        "debug": Watched(
            "unpatched debug build, second machine",
            int(debug["runs"].sum()),
            len(debug),
            caught,
            (caught, caught),
            event="bad count caught",
        ),
    }


def watched_table(watches: Sequence[Watched]) -> pd.DataFrame:
    """A row an arm: runs, events, exposure, and the intervals of risk and rate."""
    return pd.DataFrame(
        {
            "runs": one.name,
            "event": one.event,
            "events of runs": f"{one.events} of {one.runs}",
            "hours watched": f"{one.hours:.2f}"
            + (
                ""
                if one.hours_range[0] == one.hours_range[1]
                else f" ({one.hours_range[0]:.2f} to {one.hours_range[1]:.2f})"
            ),
            "risk of a run, exact 95%": f"{one.risk[0]:.1%} to {one.risk[1]:.1%}",
            "events an hour, exact 95%": f"{one.rate[0]:.2f} to {one.rate[1]:.2f}",
        }
        for one in watches
    )


@dataclass(frozen=True)
class RateComparison:
    """How many times the rate of ``first`` is that of ``second``: exact, over all exposures.

    Attributes:
        low: the least that fits, at the exposure that favours it least.
        high: the most; infinity where the second has no event.
        p: largest two-sided p-value of equal rates over the exposures.
    """

    low: float
    high: float
    p: float


def compare_rates(first: Watched, second: Watched) -> RateComparison:
    """Compare two arms' rates, each exposure anywhere in its range."""
    found = [
        poisson_ratio_interval(first.events, hours, second.events, others)
        for hours in (first.hours, *first.hours_range)
        for others in (second.hours, *second.hours_range)
    ]
    return RateComparison(
        min(low for low, _, _ in found),
        max(high for _, high, _ in found),
        max(p for _, _, p in found),
    )


def confounds_table() -> pd.DataFrame:
    """What else differs between the unfixed and the fixed runs, and what does not."""
    table = load_published("crash_history")
    ended = table[table["outcome"].isin(["crashed", "completed"])]
    lines = []
    columns = {
        "machine": "site",
        "source tree": "tree",
        "sessions": "concurrency_sessions",
        "pool, GiB": "cpu_pool_gib",
    }
    for name, column in columns.items():
        line = {"what": name}
        sets = []
        for protocol in ("unpatched", "record_stream"):
            values = ended[ended["protocol"] == protocol][column]
            known = [_text(value) for value in sorted(set(values.dropna()))]
            sets.append(dict.fromkeys(known))
            missing = int(values.isna().sum())
            line[protocol] = ", ".join(known) + (f"; {missing} not named" if missing else "")
        line["in common"] = ", ".join(one for one in sets[0] if one in sets[1]) or "nothing"
        lines.append(line)
    return pd.DataFrame(lines)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def matched_settings() -> pd.DataFrame:
    """Crashed of all runs by setting, for the settings that both arms have."""
    table = load_published("crash_history")
    ended = table[table["outcome"].isin(["crashed", "completed"])].dropna(subset=["cpu_pool_gib"])
    lines = []
    keys = ended[["concurrency_sessions", "cpu_pool_gib"]].drop_duplicates()
    for sessions, pool in sorted(keys.itertuples(index=False, name=None)):
        same = (ended["concurrency_sessions"] == sessions) & (ended["cpu_pool_gib"] == pool)
        rows = ended[same]
        cells = {}
        for protocol in ("unpatched", "record_stream"):
            own = rows[rows["protocol"] == protocol]
            crashed = int((own["outcome"] == "crashed").sum())
            cells[protocol] = f"{crashed} of {int(own['runs'].sum())}" if len(own) else None
        if all(cells.values()):
            lines.append({"setting": f"{int(sessions)} sessions, {pool:g} GiB", **cells})
    return pd.DataFrame(lines)

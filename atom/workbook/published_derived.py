"""Figures that follow from the published tables: computed from the CSV files, never typed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from atom.workbook.published_tables import load_published
from atom.workbook.statistics import smallest_detectable_difference, wilson_interval


def environment_value(subject: str, name: str) -> float:
    """A number of ``environment.csv``."""
    return float(environment_text(subject, name))


def environment_text(subject: str, name: str) -> str:
    """The only value under ``subject`` and ``name`` in ``environment.csv``."""
    table = load_published("environment")
    values = table[(table["subject"] == subject) & (table["name"] == name)]["value"]
    if len(values) != 1:
        raise KeyError(f"environment.csv holds {len(values)} values of {subject} / {name}")
    return str(values.iloc[0])


def agentx_derived() -> pd.DataFrame:
    """AgentX points with what follows from them.

    Added columns: ``tokens_per_request`` (throughput x GPUs x seconds / requests), ``cycle_s``
    (mean time from one request of a session to its next: sessions x seconds / requests, for one
    open request a session), ``ttft_share`` (of that cycle), ``pool_per_session_gib``, and
    ``gain_over_no_offload`` (against the point with as many sessions).
    """
    table = load_published("agentx")
    seconds = table["duration_s"] / table["requests"]
    table["tokens_per_request"] = table["throughput_tok_s_per_gpu"] * table["gpus"] * seconds
    table["cycle_s"] = table["concurrency_sessions"] * seconds
    table["ttft_share"] = table["ttft_mean_s"] / table["cycle_s"]
    table["pool_per_session_gib"] = table["cpu_pool_gib"] / table["concurrency_sessions"]
    base = table[~table["offload"]].set_index("concurrency_sessions")["throughput_tok_s_per_gpu"]
    gain = table["throughput_tok_s_per_gpu"] / table["concurrency_sessions"].map(base)
    table["gain_over_no_offload"] = gain.where(table["offload"])
    return table


def state_loads_by_pool() -> pd.DataFrame:
    """State-load failures with pool per session, largest first.

    ``pool_less_bracket_gib`` reads the bracketed figure as GiB taken off the pool, which the source
    does not say.
    """
    table = load_published("state_load_failures")
    table["pool_per_session_gib"] = table["cpu_pool_gib"] / table["concurrency_sessions"]
    points = load_published("agentx").dropna(subset=["cpu_pool_gib"])
    keys = ["concurrency_sessions", "cpu_pool_gib"]
    brackets = points[[*keys, "state_figure_no_unit"]].drop_duplicates()
    table = table.merge(brackets, on=keys, how="left", validate="one_to_one")
    rest = table["cpu_pool_gib"] - table["state_figure_no_unit"].astype("float64")
    table["pool_less_bracket_gib"] = rest / table["concurrency_sessions"]
    return table.sort_values("pool_per_session_gib", ascending=False, ignore_index=True)


def rises_without_overlap(table: pd.DataFrame, by: str) -> bool:
    """Whether failure ranges rise, each wholly above the last, as ``by`` falls."""
    ordered = table.sort_values(by, ascending=False)
    lows, highs = ordered["failed_percent_low"], ordered["failed_percent_high"]
    return bool((lows.to_numpy()[1:] > highs.to_numpy()[:-1]).all())


def correct_items(score: float, decimals: int, items: int) -> list[int]:
    """Every count of right answers whose share prints as ``score`` at ``decimals`` digits."""
    printed = f"{score:.{decimals}f}"
    half = 0.5 * 10**-decimals
    first = max(0, math.floor((score - half) * items))
    last = min(items, math.ceil((score + half) * items))
    return [k for k in range(first, last + 1) if f"{k / items:.{decimals}f}" == printed]


def gsm8k_derived() -> pd.DataFrame:
    """Accuracy results with the count of right answers, its Wilson interval, and what it can show.

    Added columns: ``correct_items`` (missing where the score is a range or fits several counts),
    ``wilson_low``, ``wilson_high``, ``detectable`` (smallest loss that a second run of as many
    items would show with 80% power).
    """
    table = load_published("gsm8k")
    items = int(environment_value("gsm8k", "items"))
    rows: list[tuple[int | None, float, float, float]] = []
    for row in table.to_dict("records"):
        fits = correct_items(row["strict_match"], row["decimals"], items)
        if len(fits) != 1 or not pd.isna(row["strict_match_high"]):
            rows.append((None, math.nan, math.nan, math.nan))
            continue
        low, high = wilson_interval(fits[0], items)
        rows.append((fits[0], low, high, smallest_detectable_difference(items, fits[0] / items)))
    added = pd.DataFrame(rows, columns=["correct_items", "wilson_low", "wilson_high", "detectable"])
    added["correct_items"] = added["correct_items"].astype("Int64")
    return pd.concat([table, added], axis=1)


#: protocols that the source has versions of
_VERSIONS = ("unpatched", "record_stream", "hold")


@dataclass(frozen=True)
class Exposure:
    """Hours that offload runs were watched, without and with a fix.

    Attributes:
        unfixed: if the two times that are given roughly belong to the listed runs.
        unfixed_low: least, from the printed shortest and longest time alone.
        unfixed_high: most, likewise.
        fixed: hours with a fix.
    """

    unfixed: float
    unfixed_low: float
    unfixed_high: float
    fixed: float


@dataclass(frozen=True)
class CrashTimes:
    """When the unfixed runs of the first machine ended.

    Attributes:
        likely: if the two times that are given roughly belong to two of the listed runs; then the
            printed shortest and longest are the other two.
        earliest, latest: with those two anywhere between the printed ends.
        runs: unfixed runs.
    """

    likely: tuple[float, ...]
    earliest: tuple[float, ...]
    latest: tuple[float, ...]
    runs: int


def crash_times() -> CrashTimes:
    """Times of the published crashes of the first machine, as far as they are printed."""
    table = load_published("crash_history")
    first = table[table["site"] == "first"]
    crashed = first[first["outcome"] == "crashed"]
    rough = sorted(crashed[crashed["minutes_basis"] == "about"]["minutes_low"].astype(float))
    shortest = environment_value("fault", "shortest time to a crash")
    longest = environment_value("fault", "longest time to a crash")
    free = len(crashed) - 2
    return CrashTimes(
        likely=tuple(sorted([shortest, *rough, longest])),
        earliest=tuple(sorted([shortest, *[shortest] * free, longest])),
        latest=tuple(sorted([shortest, *[longest] * free, longest])),
        runs=int(first["runs"].sum()),
    )


def crash_exposure() -> Exposure:
    """Exposure of the first machine's unfixed runs and of the fixed ones, in hours."""
    table, times = load_published("crash_history"), crash_times()
    completed = table[table["outcome"] == "completed"]
    whole = completed[completed["site"] == "first"]["minutes_high"].sum()
    fixed = completed[completed["site"] == "second"]["minutes_low"].sum()
    likely, least, most = (
        float(sum(minutes) + whole) / 60 for minutes in (times.likely, times.earliest, times.latest)
    )
    return Exposure(likely, least, most, fixed=float(fixed) / 60)


def version_matrix() -> pd.DataFrame:
    """What was published for which version: one row an experiment, one column a protocol.

    A cell names the rows that exist, or is missing where the source has none.
    """
    race = load_published("race_microbenchmark").dropna(subset=["trials"])
    points, scores = load_published("agentx"), load_published("gsm8k")
    crashes, tests = load_published("crash_history"), load_published("test_counts")
    controls = load_published("lifetime_controls")
    # a control is no measurement of the version whose holds it takes away
    controls = controls[controls["arm"] != "control"]
    lifetime = tests["suite"] == "lifetime"
    passes = tests[lifetime].loc[lambda table: table.index.repeat(table["repeats"])]
    caught = crashes["outcome"] == "caught"
    scores = scores[scores["source_place"].str.contains("table")]
    parts = {
        "race micro-benchmark": (race, "row"),
        "lifetime test, trials": (controls, "path"),
        "lifetime test, passes": (passes, "run"),
        "unit test files": (tests[~lifetime], "run"),
        "accuracy without offload": (scores[~scores["offload"]], "run"),
        "accuracy with offload": (scores[scores["offload"]], "run"),
        "AgentX throughput without offload": (points[~points["offload"]], "point"),
        "AgentX throughput with offload": (points[points["offload"]], "point"),
        "offload hours, crash or not": (crashes[~caught], "run"),
        "debug build with host-side checks": (crashes[caught], "run"),
    }
    cells: list[dict[str, str | None]] = []
    for name, (table, unit) in parts.items():
        counts = table["protocol"].value_counts()
        cells.append({"experiment": name, **{p: _cell(counts.get(p), unit) for p in _VERSIONS}})
    return pd.DataFrame(cells)


def _cell(count: int | None, unit: str) -> str | None:
    return None if count is None else f"{count} {unit}{'s' if count != 1 else ''}"

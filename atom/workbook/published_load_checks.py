"""Checks of throughput, crashes and state loads, from the published tables alone."""

from __future__ import annotations

from itertools import combinations

import pandas as pd

from atom.workbook.finding import Checks, Finding
from atom.workbook.published_derived import (
    agentx_derived,
    crash_exposure,
    environment_text,
    environment_value,
    rises_without_overlap,
    state_loads_by_pool,
)
from atom.workbook.published_tables import load_published
from atom.workbook.statistics import exact_interval, fisher_exact

CHECKS = Checks()


# -- throughput


def _gains() -> list[float]:
    return sorted(agentx_derived()["gain_over_no_offload"].dropna())


def _repeat_spread() -> float:
    """Ratio of the two runs of one point, less 1."""
    table = load_published("agentx").set_index("point")["throughput_tok_s_per_gpu"]
    return float(table["c64-288-repeat"] / table["c64-288"] - 1)


@CHECKS.of("thr-10")
def _thr_10() -> Finding:
    gains = _gains()
    return {
        "holds": round(gains[0], 1) == 1.2 and round(gains[-1], 1) == 2.6,
        "value": ", ".join(f"{gain:.2f}" for gain in gains),
        "detail": f"one run a point; repeating one moved it by {_repeat_spread():.1%}",
    }


@CHECKS.of("thr-11")
def _thr_11() -> Finding:
    table = load_published("agentx")
    rates = table[~table["offload"]]["throughput_tok_s_per_gpu"]
    spread = float(rates.max() / rates.min() - 1)
    return {
        "holds": spread < _repeat_spread(),
        "value": f"spread {spread:.1%}",
        "detail": f"a repeated point moved by {_repeat_spread():.1%}",
    }


@CHECKS.of("thr-12")
def _thr_12() -> Finding:
    table = load_published("agentx")
    # one size of pool a session count is compared: the largest
    table = table[table["offload"]].sort_values(["concurrency_sessions"], ascending=False)
    largest = table.groupby("concurrency_sessions")["cpu_pool_gib"].transform("max")
    main = table[table["cpu_pool_gib"] == largest].groupby("concurrency_sessions", sort=False)
    groups = [sorted(rates) for _, rates in main["throughput_tok_s_per_gpu"]]
    return {
        "value": [rate for rates in groups for rate in rates],
        "detail": "from 64 sessions down to 32, lowest first within a count",
    }


@CHECKS.of("thr-13")
def _thr_13() -> Finding:
    spread = _repeat_spread()
    return {
        "value": round(100 * spread, 2),
        "detail": f"of the lower run; {100 * spread / (1 + spread):.1f}% of the higher",
    }


@CHECKS.of("thr-15")
def _thr_15() -> Finding:
    tokens = agentx_derived()["tokens_per_request"]
    low, high = tokens.min(), tokens.max()
    return {
        "holds": (round(low / 1000), round(high / 1000)) == (88, 105),
        "value": f"{low:,.0f} to {high:,.0f} tokens a request",
        "detail": f"the largest is {high / low - 1:.0%} above the smallest",
    }


@CHECKS.of("thr-16")
def _thr_16() -> Finding:
    table = agentx_derived().dropna(subset=["ttft_share"])
    share, cycle = table["ttft_share"], table["cycle_s"]
    return {
        "holds": bool((share < 1).all()),
        "value": f"cycle {cycle.min():.0f} to {cycle.max():.0f} s, "
        f"wait {share.min():.0%} to {share.max():.0%} of it",
    }


@CHECKS.of("thr-20")
def _thr_20() -> Finding:
    table = load_published("agentx").set_index("point")["throughput_tok_s_per_gpu"]
    gain = float(table["c32-160-with-2562"] / table["c32-160"] - 1)
    return {
        "holds": abs(gain) < _repeat_spread(),
        "value": f"{gain:+.1%}",
        "detail": f"a repeated point moved by {_repeat_spread():.1%}",
    }


def _settings() -> pd.DataFrame:
    table = load_published("agentx")
    return table[table["offload"]][["concurrency_sessions", "cpu_pool_gib"]].drop_duplicates()


@CHECKS.of("thr-25")
def _thr_25() -> Finding:
    return {"value": len(_settings()), "detail": "sessions and pool size taken together"}


@CHECKS.of("thr-26")
def _thr_26() -> Finding:
    pairs = list(combinations(_settings().itertuples(index=False, name=None), 2))
    pool_alone = [pair for pair in pairs if pair[0][0] == pair[1][0]]
    sessions_alone = [pair for pair in pairs if pair[0][1] == pair[1][1]]
    return {
        "value": len(pool_alone),
        "detail": f"{len(sessions_alone)} pairs vary the sessions alone, of {len(pairs)}",
    }


@CHECKS.of("thr-27")
def _thr_27() -> Finding:
    table = load_published("agentx").set_index("point")["throughput_tok_s_per_gpu"]
    runs = [round(float(table[point]), -3) for point in ("c64-288", "c64-288-repeat")]
    told = [environment_value("agentx", f"stated {end} end at c64") for end in ("low", "high")]
    return {"holds": runs == told, "value": f"{runs[0]:,.0f} to {runs[1]:,.0f} tok/s/GPU"}


# -- crashes


def _hours(site: str) -> pd.DataFrame:
    table = load_published("crash_history")
    return table[(table["site"] == site) & table["outcome"].isin(["crashed", "completed"])]


@CHECKS.of("crash-01")
def _crash_01() -> Finding:
    runs = _hours("first")
    crashed = int((runs["outcome"] == "crashed").sum())
    told = (
        environment_value("fault", "runs that crashed"),
        environment_value("fault", "runs without the fix"),
    )
    low, high = exact_interval(crashed, len(runs))
    return {
        "holds": (crashed, len(runs)) == told,
        "value": f"{crashed} of {len(runs)}",
        "detail": f"a risk in [{low:.1%}, {high:.1%}] (exact 95%)",
    }


@CHECKS.of("crash-03")
def _crash_03() -> Finding:
    runs = _hours("first")
    known = runs[runs["minutes_basis"] == "about"]["minutes_low"]
    low = environment_value("fault", "shortest time to a crash")
    high = environment_value("fault", "longest time to a crash")
    times = ", ".join(f"{minutes:.0f}" for minutes in known)
    return {
        "holds": bool(known.between(low, high).all()),
        "value": f"{times} within {low:.0f} to {high:.0f} min",
    }


@CHECKS.of("crash-05")
def _crash_05() -> Finding:
    unfixed, fixed = _hours("first"), _hours("second")
    crashed = [int((runs["outcome"] == "crashed").sum()) for runs in (unfixed, fixed)]
    p = fisher_exact(crashed[0], len(unfixed), crashed[1], len(fixed))
    _, high = exact_interval(crashed[1], len(fixed))
    return {
        "holds": crashed[1] == 0,
        "value": f"{crashed[1]} of {len(fixed)}",
        "detail": f"risk of a run at most {high:.0%} (exact 95%); against {crashed[0]} of "
        f"{len(unfixed)} Fisher p = {p:.3f}, with the machine changed too",
    }


@CHECKS.of("crash-06")
def _crash_06() -> Finding:
    table = load_published("crash_history")
    hours = table[table["outcome"].isin(["crashed", "completed"])]
    sites = hours.groupby("protocol")["site"].agg(lambda values: sorted(set(values)))
    alone = all(len(values) == 1 for values in sites)
    return {
        "holds": alone and len({tuple(values) for values in sites}) == len(sites),
        "value": "; ".join(
            f"{name}: {', '.join(values)} machine" for name, values in sites.items()
        ),
    }


@CHECKS.of("crash-07")
def _crash_07() -> Finding:
    hours = crash_exposure()
    return {
        "holds": hours.unfixed_high < hours.fixed,
        "value": f"{hours.unfixed:.1f} h ({hours.unfixed_low:.1f} to {hours.unfixed_high:.1f}) "
        f"against {hours.fixed:.0f} h",
    }


# -- state loads and settings


@CHECKS.of("limit-09")
def _limit_09() -> Finding:
    table = state_loads_by_pool()
    ends = table[["failed_percent_low", "failed_percent_high"]].to_numpy()
    pools = ", ".join(f"{pool:.2f}" for pool in table["pool_per_session_gib"])
    return {
        "value": list(dict.fromkeys(float(end) for pair in ends for end in pair)),
        "detail": f"at {pools} GiB a session",
    }


@CHECKS.of("limit-11")
def _limit_11() -> Finding:
    table = state_loads_by_pool()
    rest = ", ".join(f"{pool:.2f}" for pool in table["pool_less_bracket_gib"])
    ordered = rises_without_overlap(table, "pool_less_bracket_gib")
    return {"holds": not ordered, "value": f"{rest} GiB a session in the order of limit-09"}


@CHECKS.of("env-02")
def _env_02() -> Finding:
    table = agentx_derived()
    told = {
        "gpus": environment_value("agentx", "GPUs a point"),
        "seed": environment_value("agentx", "seed"),
        "duration_s": environment_value("agentx", "profiling"),
    }
    same = all(set(table[column]) == {value} for column, value in told.items())
    return {
        "holds": same,
        "value": f"{len(table)} points of {environment_text('agentx', 'scenario')}",
        "detail": f"with one seed a repeat still moved by {_repeat_spread():.1%}",
    }

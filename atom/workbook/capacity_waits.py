"""Where sessions of the published hours spend their time, and what a slower host link would do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from atom.benchmarks.capacity_fit import Observation, Prediction, Setup
from atom.workbook.capacity_analysis import Study, observations, setup_text
from atom.workbook.published_tables import load_published

#: rates of loads that are tried, as shares of the fitted one
_SHARES = np.linspace(1.0, 0.25, 76)


def waits_table() -> pd.DataFrame:
    """The published hours by Little's law: who waits, who does not, and the wait over the pool.

    Sessions that wait for a first token are requests a second times mean TTFT; the rest decode or
    pause. Runs of one setup are averaged.
    """
    hours = load_published("agentx").dropna(subset=["cpu_pool_gib", "ttft_mean_s"])
    failed = {one.setup: one.middle_failed for one in observations()[1]}
    lines = []
    for setup in failed:
        own = [
            row
            for row in hours.to_dict("records")
            if (int(row["concurrency_sessions"]), float(row["cpu_pool_gib"])) == setup
        ]
        rates = [row["requests"] / row["duration_s"] for row in own]
        waits = [row["ttft_mean_s"] for row in own]
        waiting = sum(r * w for r, w in zip(rates, waits, strict=True)) / len(own)
        wait = sum(waits) / len(own)
        lines.append(
            {
                "sessions": setup[0],
                "pool_gib": setup[1],
                "cycle_s": setup[0] * len(own) / sum(rates),
                "ttft_s": wait,
                "waiting": waiting,
                "not_waiting": setup[0] - waiting,
                "wait_s_per_gib": wait / (setup[1] or 1.0),
                "failed_percent": 100 * failed[setup],
            }
        )
    return pd.DataFrame(lines).sort_values("wait_s_per_gib", ignore_index=True)


def waits_sentences(table: pd.DataFrame) -> list[str]:
    """What the table says of the device's memory, and of when states are lost."""
    few = min(table.to_dict("records"), key=lambda row: float(row["not_waiting"]))
    line = float(np.corrcoef(table["wait_s_per_gib"], table["failed_percent"])[0, 1])
    said = [
        f"At {few['sessions']} sessions and {few['pool_gib']:g} GiB all but "
        f"{few['not_waiting']:.1f} sessions wait for a first token: the device serves few requests "
        "at a time, so its own KV pool is small, whatever the card has."
    ]
    if table["failed_percent"].is_monotonic_increasing:
        said.append(
            "Failures rise with the wait for a first token over the pool, and nearly on a line "
            f"(correlation {line:.3f} over {len(table)} setups): as if a state grew old in the "
            "pool while its request waits. The KV of that request was found, so something kept it "
            "young: a look-up when the request came."
        )
    return said


def brackets_table() -> pd.DataFrame:
    """Readings of the figure in brackets behind each pool, and what speaks for or against each."""
    hours = load_published("agentx").dropna(subset=["cpu_pool_gib"])
    pairs = sorted(
        {
            (int(row["concurrency_sessions"]), float(row["cpu_pool_gib"]), int(figure))
            for row in hours.to_dict("records")
            if not pd.isna(figure := row["state_figure_no_unit"])
        }
    )
    _, offload = observations()
    failed = {one.setup: one.middle_failed for one in offload}

    def in_order(size: Any) -> bool:
        ordered = sorted(pairs, key=lambda one: -size(*one))
        shares = [failed[c, pool] for c, pool, _ in ordered]
        return shares == sorted(shares)

    slots = all(figure == 1 << (c - 1).bit_length() for c, _, figure in pairs)
    return pd.DataFrame(
        [
            {
                "reading": "nothing of the pool: pool per session counts",
                "test": "failures rise as pool over sessions falls",
                "fits": in_order(lambda c, pool, _: pool / c),
            },
            {
                "reading": "GiB taken off the pool for states",
                "test": "failures rise as the rest over sessions falls",
                "fits": in_order(lambda c, pool, figure: (pool - figure) / c),
            },
            {
                "reading": "GiB for states beside the pool",
                "test": "failures rise as the figure over sessions falls",
                "fits": in_order(lambda c, _, figure: figure / c)
                and len({figure / c for c, _, figure in pairs}) == len(pairs),
            },
            {
                "reading": "slots for requests: the least power of two that holds the sessions",
                "test": "the figure equals it at every setup",
                "fits": slots,
            },
        ]
    )


def shown_brackets(table: pd.DataFrame) -> pd.DataFrame:
    """The readings with words in place of truth values."""
    return table.assign(fits=table["fits"].map({True: "yes", False: "no"}))


def shown_loads(loads: pd.DataFrame) -> pd.DataFrame:
    """Failed state loads a setup, as a reader wants them.

    Args:
        loads: of :func:`atom.workbook.published_derived.state_loads_by_pool`.
    """
    return pd.DataFrame(
        {
            "setup": setup_text((int(row["concurrency_sessions"]), float(row["cpu_pool_gib"]))),
            "pool of a session, GiB": f"{row['pool_per_session_gib']:.2f}",
            "state loads failed": f"{row['failed_percent_low']:g}%"
            if row["failed_percent_low"] == row["failed_percent_high"]
            else f"{row['failed_percent_low']:g}% to {row['failed_percent_high']:g}%",
            "printed as": "about" if row["approximate"] else "exact",
            "figure in brackets": f"{row['state_figure_no_unit']:g}",
            "pool less the figure, GiB a session": f"{row['pool_less_bracket_gib']:.2f}",
        }
        for row in loads.to_dict("records")
    )


def shown_waits(table: pd.DataFrame) -> pd.DataFrame:
    """The table of waits, rounded, with units."""
    return pd.DataFrame(
        {
            "setup": setup_text((int(row["sessions"]), float(row["pool_gib"]))),
            "a request a session each, s": f"{row['cycle_s']:.1f}",
            "TTFT mean, s": f"{row['ttft_s']:.1f}",
            "sessions that wait for a first token": f"{row['waiting']:.1f}",
            "sessions that do not": f"{row['not_waiting']:.1f}",
            "TTFT over pool, s/GiB": f"{row['wait_s_per_gib']:.3f}",
            "state loads failed": f"{row['failed_percent']:.1f}%",
        }
        for row in table.to_dict("records")
    )


def requests_table(found: Study) -> pd.DataFrame:
    """Tokens of a request and waits, published and by the frozen fit, a row a setup."""
    lines = []
    for one in sorted([*found.bare, *found.offload], key=lambda one: one.mean_throughput):
        ours = found.predicted[one.setup]
        waits = one.ttft_seconds is not None and one.setup[1] is not None
        lines.append(
            {
                "setup": setup_text(one.setup),
                "tokens a request, published": f"{one.tokens_per_request or 0:,.0f}",
                "tokens a request, frozen fit": f"{ours.tokens_per_request or 0:,.0f}",
                "TTFT mean, s, published / frozen fit": ""
                if not waits
                else f"{one.ttft_seconds or 0:.0f} / {ours.ttft_seconds or 0:.0f}",
                "TTFT for 1,000 tokens, s, published / frozen fit": ""
                if not waits
                else f"{_wait_for_tokens(one):.2f} / {_wait_for_tokens(ours):.2f}",
            }
        )
    return pd.DataFrame(lines)


def _wait_for_tokens(one: Observation | Prediction) -> float:
    """Seconds to the first token for 1,000 tokens of a request."""
    return 1e3 * (one.ttft_seconds or 0.0) / (one.tokens_per_request or math.nan)


def requests_sentences(found: Study) -> list[str]:
    """What the model says, and does not say, of the tokens of a request; and of the waits."""
    both = [*found.bare, *found.offload]
    published = [one.tokens_per_request or 0.0 for one in both]
    ours = [found.predicted[one.setup].tokens_per_request or 0.0 for one in both]
    speeds = [one.mean_throughput for one in both]
    rise = float(spearmanr(speeds, published).statistic)
    said = [
        f"Published tokens a request go from {min(published):,.0f} to {max(published):,.0f} "
        f"({max(published) / min(published) - 1:.0%}), and up with throughput (rank correlation "
        f"{rise:.2f} over {len(both)} setups)."
    ]
    if max(ours) / min(ours) < 1 + (max(published) / min(published) - 1) / 2:
        said.append(
            f"In the model they stay between {min(ours):,.0f} and {max(ours):,.0f} "
            f"({max(ours) / min(ours) - 1:.0%}): the same sessions serve requests of "
            "about the same length, whatever the pool. So the model has no cause for the published "
            "rise, and it stays an open question of the source: how far into its sessions an hour "
            "comes, subagents, or how unfinished requests are counted could all make it. The fit "
            "is of tokens a second alone; requests an hour are not predicted."
        )
    ratios = [
        (
            (found.predicted[one.setup].ttft_seconds or 0.0) / one.ttft_seconds,
            _wait_for_tokens(found.predicted[one.setup]) / _wait_for_tokens(one),
        )
        for one in found.offload
        if one.ttft_seconds
    ]
    whole, each = zip(*ratios, strict=True)
    said.append(
        f"Waits for the first token, not fitted, come out at {min(whole):.2f} to {max(whole):.2f} "
        f"of the published ones, and at {min(each):.2f} to {max(each):.2f} for the same tokens a "
        "request: shorter requests are "
        + (
            "most of the difference."
            if min(each) - min(whole) > (1 - min(whole)) / 2
            else "a part."
        )
    )
    return said


def slower_loads(found: Study, setup: Setup) -> list[tuple[float, Prediction]]:
    """Figures of a setup by the frozen fit at loads that are slower by a share, the fastest first.

    The slowest is the slowest simulated, or a quarter of the fitted rate.
    """
    lowest = found.surface.axes[2][0]
    shares = [float(s) for s in _SHARES if s * found.fitted.load_gb_per_second >= lowest]
    rates = [share * found.fitted.load_gb_per_second for share in shares or [1.0]]
    fits = [replace(found.fitted, load_gb_per_second=rate) for rate in rates]
    return [
        (share, found.surface.predict(setup, one))
        for share, one in zip(shares or [1.0], fits, strict=True)
    ]


def _slow_enough(
    found: Study, setup: Setup
) -> tuple[float, Prediction, tuple[float, Prediction], bool]:
    """Ratio of the two published runs; the fit; the first rate that makes it; whether one does."""
    (values,) = [one.throughput for one in found.offload if one.setup == setup]
    ratio = min(values) / max(values)
    loads = slower_loads(found, setup)
    fast = loads[0][1]
    fallen = [one for one in loads if one[1].throughput <= ratio * fast.throughput]
    return ratio, fast, (fallen or loads[-1:])[0], bool(fallen)


def spread_table(found: Study, setup: Setup) -> pd.DataFrame:
    """The slower of two published runs over the faster, and slower loads over the fitted ones."""
    _, fast, (_, slow), _ = _slow_enough(found, setup)
    runs = [
        row
        for row in load_published("agentx").to_dict("records")
        if (row["concurrency_sessions"], row["cpu_pool_gib"]) == setup
    ]
    runs.sort(key=lambda row: float(row["throughput_tok_s_per_gpu"]))
    low, high = runs[0], runs[-1]
    names = {
        "tok/s": ("throughput_tok_s_per_gpu", "throughput"),
        "TTFT mean": ("ttft_mean_s", "ttft_seconds"),
        "ITL p90": ("itl_p90_ms", "itl_p90_seconds"),
    }
    lines = [
        {
            "figure": name,
            "published: slower run over the faster": f"{low[column] / high[column]:.3f}",
            "frozen fit: slower loads over the fitted": (
                f"{getattr(slow, field) / getattr(fast, field):.3f}"
            ),
        }
        for name, (column, field) in names.items()
    ]
    return pd.DataFrame(lines)


def spread_sentences(found: Study, setup: Setup) -> list[str]:
    """How much slower loads would have to be for the published difference."""
    ratio, fast, (share, slow), enough = _slow_enough(found, setup)
    where = f"{setup_text(setup)}, frozen fit: loads at {share:.0%} of the fitted rate"
    if not enough:
        return [
            f"{where}, the slowest simulated, cost {1 - slow.throughput / fast.throughput:.1%} of "
            f"the throughput, less than the published {1 - ratio:.1%}: in the model slower copies "
            "alone do not explain the difference."
        ]
    return [
        f"{where} cost the published {1 - ratio:.1%} of the throughput. So neighbours that take "
        f"{1 - share:.0%} of the host's copy bandwidth are enough: the source's guess is "
        "consistent with the model, which proves it no more than the source did."
    ]

"""Remedies beside each other, pools without failures, and claims that capacity rows settle."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from atom.benchmarks.capacity_fit import Prediction, Setup
from atom.benchmarks.capacity_rows import CapacityRow
from atom.workbook.capacity_analysis import (
    PLACE,
    Study,
    in_order,
    observations,
    range_text,
    setup_text,
    share_text,
)
from atom.workbook.claim_model import Claim
from atom.workbook.throughput_claims import open_claims as open_in_throughput

#: claim to the setup whose prediction settles it
_THROUGHPUT: Mapping[str, Setup] = {
    "thr-01": (32, 160.0),
    "thr-02": (48, 224.0),
    "thr-03": (64, 288.0),
    "thr-04": (64, 288.0),
    "thr-05": (32, 96.0),
    "thr-06": (32, 160.0),
}
_FAILURES: Mapping[str, Setup] = {
    "limit-03": (32, 160.0),
    "limit-04": (48, 224.0),
    "limit-05": (64, 288.0),
    "limit-06": (32, 96.0),
}
_MODEL = "capacity model"
#: fewer failures than this share count as none
NO_FAILURES = 0.01
#: what claims wait for that no row here settles
_NEEDS = {
    "limit-10": "the engine's rows under each copy protocol: the model has none",
}


def of_setup(rows: Sequence[CapacityRow], setup: Setup) -> dict[str, CapacityRow]:
    """Rows of a setup by arm."""
    return {row.arm: row for row in rows if (row.concurrency, row.pool_gib) == setup}


def remedies_table(rows: Sequence[CapacityRow]) -> pd.DataFrame:
    """Every arm at every setup: failures, throughput over the shared pool's, hits, and waiting."""
    lines = []
    for setup in dict.fromkeys((row.concurrency, row.pool_gib) for row in rows):
        arms = of_setup(rows, setup)
        base = arms.get("shared_lru")
        for name, row in arms.items():
            rate = row.state_failure_rate
            lines.append(
                {
                    "setup": setup_text(setup),
                    "remedy": name,
                    "state loads": row.state_pairs,
                    "failed": "" if rate is None else f"{rate:.1%}",
                    "KV loads cut short": row.kv_load_failures,
                    "prompt tokens found": ""
                    if row.cached_share is None
                    else f"{row.cached_share:.0%}",
                    "tok/s": f"{row.effective_total_throughput:,.0f}",
                    "over shared_lru": "" if base is None else f"{_over(row, base):.2f}",
                    "TTFT mean, s": ""
                    if row.ttft_mean_seconds is None
                    else f"{row.ttft_mean_seconds:.1f}",
                    "served at a time": row.served_sessions,
                }
            )
    return pd.DataFrame(lines)


def _over(row: CapacityRow, base: CapacityRow) -> float:
    return row.effective_total_throughput / base.effective_total_throughput


def direct_table(found: Study, rows: Sequence[CapacityRow]) -> pd.DataFrame:
    """The frozen fit between the grid's places, and simulated at its own place (to rounding)."""
    own = _at_the_fit(found, rows)
    return pd.DataFrame(
        {
            "setup": setup_text(one.setup),
            "interpolated, tok/s": f"{found.predicted[one.setup].throughput:,.0f}",
            "simulated, tok/s": (
                f"{own[one.setup].effective_total_throughput / found.fitted.slowness:,.0f}"
            ),
            "published, tok/s": f"{one.mean_throughput:,.0f}",
            "interpolated failures": share_text(found.predicted[one.setup].failed),
            "simulated failures": share_text(own[one.setup].state_failure_rate),
            "published failures": range_text(one),
        }
        for one in found.offload
        if one.setup in own
    )


def _at_the_fit(found: Study, rows: Sequence[CapacityRow]) -> dict[Setup, CapacityRow]:
    """Rows as published that were simulated at the fitted place, to a twentieth."""
    place = (found.fitted.byte_scale, found.fitted.device_gb, found.fitted.load_gb_per_second)
    return {
        (row.concurrency, row.pool_gib): row
        for row in rows
        if row.arm == "shared_lru"
        and all(
            got is not None and math.isclose(got, wanted, rel_tol=0.05)
            for got, wanted in zip((getattr(row, name) for name in PLACE), place, strict=True)
        )
    }


def direct_sentences(found: Study, rows: Sequence[CapacityRow]) -> list[str]:
    """How far the frozen fit lies from what was published when it is simulated at its own place."""
    own = _at_the_fit(found, rows)
    if any(one.setup not in own for one in found.offload):
        return ["The remedies were not simulated at the place of the frozen fit."]
    predicted = {
        setup: Prediction(
            row.effective_total_throughput / found.fitted.slowness, row.state_failure_rate
        )
        for setup, row in own.items()
    }
    score = found.errors(predicted, found.unseen)
    ordered = in_order({setup: one.failed for setup, one in predicted.items()})
    return [
        "Simulated at its own place, the frozen fit misses unseen setups by "
        f"{score.throughput:.0%} in throughput (rms) and {100 * (score.failed or 0):.1f} points in "
        "failures, which come "
        + ("in the published order." if ordered else "in another order than the published one.")
    ]


def recommendation(rows: Sequence[CapacityRow]) -> pd.DataFrame:
    """Each remedy over the published setups: worst failure rate, throughput ratios, waiting."""
    _, offload = observations()
    setups = [one.setup for one in offload]
    lines = []
    for name in dict.fromkeys(row.arm for row in rows):
        pairs = [
            (arms[name], arms["shared_lru"])
            for arms in (of_setup(rows, setup) for setup in setups)
            if name in arms and "shared_lru" in arms
        ]
        if not pairs:
            continue
        ratios = [_over(row, base) for row, base in pairs]
        waits = [
            (row.ttft_mean_seconds or 0) / base.ttft_mean_seconds
            for row, base in pairs
            if base.ttft_mean_seconds
        ]
        product = 1.0
        for ratio in ratios:
            product *= ratio
        lines.append(
            {
                "remedy": name,
                "setups": len(pairs),
                "worst failure rate": max(row.state_failure_rate or 0.0 for row, _ in pairs),
                "throughput over shared_lru, mean": product ** (1 / len(ratios)),
                "least": min(ratios),
                "most": max(ratios),
                "TTFT over shared_lru, mean": sum(waits) / max(len(waits), 1),
            }
        )
    return pd.DataFrame(lines)


def shown_advice(advice: pd.DataFrame) -> pd.DataFrame:
    """The remedies over the published setups, rounded, with shares in percent."""
    shown = advice.copy()
    for name in shown.columns[2:]:
        form = "{:.1%}" if name == "worst failure rate" else "{:.2f}"
        shown[name] = [form.format(value) for value in shown[name]]
    return shown


def advice_sentences(advice: pd.DataFrame) -> list[str]:
    """The remedy without failures that serves most, what it costs, and what serves most of all."""
    clean = advice[advice["worst failure rate"] < NO_FAILURES]
    if clean.empty:
        return ["No simulated remedy removes the failures at every published setup."]
    mean = "throughput over shared_lru, mean"
    best = clean.sort_values(mean, ascending=False).iloc[0]
    most = advice.sort_values(mean, ascending=False).iloc[0]
    said = [
        f"Without failed state loads, {best['remedy']} serves most: {best[mean]:.2f} of the shared "
        f"pool's throughput in the mean ({best['least']:.2f} to {best['most']:.2f}), and "
        f"{best['TTFT over shared_lru, mean']:.2f} of its wait for the first token."
    ]
    if free := _free_remedy(advice):
        said.append(free)
    if most["remedy"] != best["remedy"]:
        said.append(
            f"{most['remedy']} serves most of all ({most[mean]:.2f}), with up to "
            f"{most['worst failure rate']:.0%} of the state loads failing: a failure is a cost "
            "only as far as it makes tokens be computed again."
        )
    if str(most["remedy"]).startswith("admission-"):
        held = 1 - float(str(most["remedy"]).partition("-")[2])
        said.append(
            f"{most['remedy']} has a cost that no figure here counts: {held:.0%} of the sessions "
            "are held back until another ends."
        )
    return said


def _free_remedy(advice: pd.DataFrame) -> str | None:
    """The remedy that leaves fewest failures of those that cost nothing, if any leaves fewer."""
    base = advice[advice["remedy"] == "shared_lru"]
    free = advice[
        (advice["remedy"] != "shared_lru")
        & (advice["least"] >= 0.99)
        & (advice["TTFT over shared_lru, mean"] <= 1.01)
    ]
    if base.empty or free.empty:
        return None
    best = free.sort_values("worst failure rate").iloc[0]
    worst = float(base["worst failure rate"].iloc[0])
    if best["worst failure rate"] >= worst:
        return None
    return (
        f"Recommended first, for it costs nothing in the model: {best['remedy']}. At the worst "
        f"setup {best['worst failure rate']:.0%} of the state loads fail in place of {worst:.0%}, "
        f"at {best['throughput over shared_lru, mean']:.2f} of the throughput in the mean "
        f"({best['least']:.2f} at least) and {best['TTFT over shared_lru, mean']:.2f} of the wait."
        + (
            " It helps as far as the published engine looks KV up at arrival, which is inferred."
            if best["remedy"] == "late_lookup"
            else ""
        )
    )


def pool_sentences(rows: Sequence[CapacityRow]) -> list[str]:
    """What pool of a session leaves the shared LRU, as it is, without failures."""
    table = pools_without_failures([row for row in rows if row.arm == "shared_lru"])
    sizes = [str(text) for text in table["a session"]]
    if not sizes or "" in sizes:
        return ["No simulated pool leaves the shared LRU without failures at every session count."]
    return [
        "Nothing changed but the pool: "
        + ", ".join(
            f"{line['smallest without failures']} at {line['sessions']} sessions ({size} each)"
            for line, size in zip(table.to_dict("records"), sizes, strict=True)
        )
        + " are the smallest simulated with fewer than one failure in a hundred. The cost is host "
        "memory."
    ]


def pools_without_failures(rows: Sequence[CapacityRow]) -> pd.DataFrame:
    """Smallest simulated pool at which fewer than one in a hundred state loads fail."""
    lines = []
    for arm in dict.fromkeys(row.arm for row in rows):
        for count in sorted({row.concurrency for row in rows}):
            own = sorted(
                (
                    row
                    for row in rows
                    if row.arm == arm and row.concurrency == count and row.pool_gib is not None
                ),
                key=lambda row: row.pool_gib or 0.0,
            )
            if not own:
                continue
            clean = [row for row in own if (row.state_failure_rate or 0.0) < NO_FAILURES]
            pools = ", ".join(f"{row.pool_gib:g}" for row in own)
            lines.append(
                {
                    "remedy": arm,
                    "sessions": count,
                    "pools simulated, GiB": pools,
                    "smallest without failures": f"{clean[0].pool_gib:g} GiB"
                    if clean
                    else "none of these",
                    "a session": f"{(clean[0].pool_gib or 0) / count:.1f} GiB" if clean else "",
                    "prompt tokens found there": f"{clean[0].cached_share or 0:.0%}"
                    if clean
                    else "",
                }
            )
    return pd.DataFrame(lines)


def study_arguments(found: Study, run_id: str) -> dict[str, dict[str, Any]]:
    """Arguments of ``judge`` by claim: each setup is predicted by a fit that has not seen it."""
    same: dict[str, Any] = {
        "machine": _MODEL,
        "run_ids": (run_id,),
        "detail": "by a fit that has seen the other three offload setups and not this one",
    }
    arguments: dict[str, dict[str, Any]] = {}
    for claim, setup in _THROUGHPUT.items():
        arguments[claim] = {"value": round(found.left_out[setup].throughput), **same}
    for claim, setup in _FAILURES.items():
        failed = found.left_out[setup].failed
        assert failed is not None
        arguments[claim] = {"value": round(100 * failed, 1), **same}
    return arguments


def remedy_arguments(rows: Sequence[CapacityRow], run_id: str) -> dict[str, dict[str, Any]]:
    """Arguments of the claims on the cause: the policy is changed, and nothing else."""
    same: dict[str, Any] = {"machine": _MODEL, "run_ids": (run_id,)}
    _, offload = observations()
    shared, paired, evicted = [], [], 0
    for one in offload:
        arms = of_setup(rows, one.setup)
        if "shared_lru" in arms and "paired" in arms:
            shared.append(arms["shared_lru"])
            paired.append(arms["paired"])
            evicted += arms["shared_lru"].states_evicted
    if not shared:
        return {}
    failed = sum(row.state_pairs_failed for row in shared)
    asked = sum(row.state_pairs for row in shared)
    other = sum(row.state_pairs_failed for row in paired)
    text = (
        f"{failed} of {asked} state loads fail in one LRU, {other} where a state goes with its KV"
    )
    return {
        "limit-07": {
            "holds": failed > 0 and other == 0 and evicted > 0,
            "value": text,
            "detail": f"{len(shared)} published setups, equal bytes; {evicted} states evicted",
            **same,
        },
        "limit-08": {
            "holds": failed > 0,
            "value": f"{failed} requests whose KV was there and whose state was not",
            "detail": "KV reaches a place whose state the pool had evicted; what lies behind the "
            "next lower state, or all of it, is computed again",
            **same,
        },
    }


def open_claims(
    claims: Mapping[str, Claim], notebook: str, settled: Collection[str]
) -> pd.DataFrame:
    """Claims of this notebook without a verdict, and what each needs."""
    otherwise = "a recorded run: sweep capacity, or sweep throughput on a GPU"
    return open_in_throughput(claims, notebook, settled, _NEEDS, otherwise)

"""Remedies beside each other, pools without failures, and claims that capacity rows settle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from atom.benchmarks.capacity_fit import Setup
from atom.benchmarks.capacity_rows import CapacityRow
from atom.workbook.capacity_analysis import (
    Study,
    observations,
    setup_text,
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
    if shares := _shares_sentence(advice):
        said.append(shares)
    return said


def _shares_sentence(advice: pd.DataFrame) -> str | None:
    """Which share of a pool that is parted serves most, and what a wrong one costs."""
    own = advice[advice["remedy"].str.startswith("isolated-")]
    if len(own) < 2:
        return None
    mean = "throughput over shared_lru, mean"
    ordered = own.sort_values(mean)
    worst, best = ordered.iloc[0], ordered.iloc[-1]
    shares = [float(name.partition("-")[2]) for name in own["remedy"]]
    verdict = (
        "no share comes up to one LRU"
        if best[mean] < 1
        else f"{best['remedy']} serves more than one LRU"
    )
    return (
        f"A pool parted in two, states having {min(shares):.0%} to {max(shares):.0%} of it: "
        f"{verdict}. {best['remedy']} serves most of them ({best[mean]:.2f}; up to "
        f"{best['worst failure rate']:.0%} of the state loads fail), {worst['remedy']} least "
        f"({worst[mean]:.2f}): what one part lacks the other cannot lend."
    )


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
        + " are the smallest simulated with fewer than one failure in a hundred. "
        + _memory_sentence(rows, table)
    ]


def _memory_sentence(rows: Sequence[CapacityRow], table: pd.DataFrame) -> str:
    """What those pools cost over the largest published ones, and what they serve."""
    base = {
        (row.concurrency, row.pool_gib): row
        for row in rows
        if row.arm == "shared_lru" and row.pool_gib is not None
    }
    parts = []
    for line in table.to_dict("records"):
        count = int(line["sessions"])
        size = float(str(line["smallest without failures"]).partition(" ")[0])
        known = [one.setup for one in observations()[1] if one.setup[0] == count]
        largest = max((setup for setup in known if setup in base), default=None)
        if largest is None or size <= (largest[1] or 0.0):
            continue
        ratio = _over(base[count, size], base[largest])
        parts.append(f"{size - (largest[1] or 0.0):g} GiB more at {count} sessions ({ratio:.2f})")
    if not parts:
        return "The cost is host memory."
    return (
        "The cost is host memory over the largest published pool, and what it serves over that: "
        + ", ".join(parts)
        + "."
    )


def pools_without_failures(rows: Sequence[CapacityRow]) -> pd.DataFrame:
    """Smallest simulated pool at which, as at all larger ones, fewer than one in a hundred fail.

    A pool in which next to nothing is found has next to no loads that could fail: so the share of
    the prompts that is found there stands beside it.
    """
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
            bad = [n for n, row in enumerate(own) if (row.state_failure_rate or 0.0) >= NO_FAILURES]
            clean = own[bad[-1] + 1 :] if bad else own
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
        "detail": "by a fit that has seen the other three offload setups and not this one, over "
        "one order of the sessions; section 3 says what another does",
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

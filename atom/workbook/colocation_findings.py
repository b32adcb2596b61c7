"""What the rows beside neighbours show, in sentences: what changed, what is open, what follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atom.benchmarks.colocation_settings import MemoryNode, Neighbour
from atom.workbook.colocation_analysis import (
    ALONE,
    METRICS,
    THROUGHPUT,
    TOLERANCE,
    Cost,
    condition_column,
    costs,
    is_undisturbed,
    observed_rows,
    side_by_side,
)
from atom.workbook.colocation_race import stale_rates, widened_arms
from atom.workbook.records import Run
from atom.workbook.throughput_analysis import Row
from atom.workbook.throughput_points import published_points, ratio_text

#: times of steps, by the host's clock
_DECODE, _PREFILL, _A_TOKEN = "decode_step_p50_ms", "prefill_step_p50_ms", "prefill_us_per_token"
#: the two published runs of one setting
_PAIR = ("c64-288", "c64-288-repeat")


def is_apart(one: Cost) -> bool:
    """Whether a 95% interval does not hold 1."""
    _, low, high = one.ratio
    return one.is_interval and not low <= 1 <= high


def over_alone(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, Cost]]:
    """Every figure over alone, by column, for each subject, memory node and condition."""
    found: dict[tuple[str, str, str], dict[str, Cost]] = {}
    for metric in METRICS:
        for one in costs(rows, metric):
            if one.against == ALONE:
                found.setdefault((one.subject, one.node, one.condition), {})[metric] = one
    return found


def changed_sentences(rows: Sequence[Row]) -> list[str]:
    """Which figures differ from alone, intervals apart, and how many intervals that is one of."""
    whole = over_alone(rows)
    sure = [one for own in whole.values() for one in own.values() if one.is_interval]
    if not sure:
        return ["No condition was repeated often enough for an interval: nothing is shown."]
    apart = [one for one in sure if is_apart(one)]
    found = []
    for (subject, node, condition), own in whole.items():
        parts = [
            f"{METRICS[metric]} {ratio_text(one.ratio)}"
            for metric, one in own.items()
            if is_apart(one)
        ]
        if parts:
            where = "" if node == MemoryNode.ANY else f", {node} node"
            found.append(f"{subject} beside {condition}{where}, over alone: {', '.join(parts)}.")
    head = (
        f"Of {len(sure)} intervals of 95% {len(apart)} do not hold 1; {0.05 * len(sure):.1f} would "
        "not on average if neighbours changed nothing."
    )
    ranges = sorted({key[0] for key, own in whole.items() if not own[THROUGHPUT].is_interval})
    if ranges:
        head += f" {', '.join(ranges)}: repeated too seldom; its ends are a range, no interval."
    return [*found, head]


def alone_sentences(rows: Sequence[Row]) -> list[str]:
    """How much the observed engine's repeats differ without a neighbour: it widens intervals."""
    found = []
    for subject in dict.fromkeys(row["subject"] for row in rows):
        rates = [
            float(row[THROUGHPUT])
            for row in rows
            if row["subject"] == subject
            and row["condition"] == ALONE
            and not row["observed"]
            and is_undisturbed(row)
        ]
        if len(rates) > 1:
            found.append(
                f"{subject} alone: {len(rates)} repeats from {min(rates):,.0f} to "
                f"{max(rates):,.0f} tok/s, a factor of {max(rates) / min(rates):.2f}."
            )
        elif rates:
            found.append(f"{subject} alone: one run, {rates[0]:,.0f} tok/s.")
    return found


def copy_costs(rows: Sequence[Row]) -> list[dict[str, Cost]]:
    """Conditions whose neighbours only copy."""
    return [own for key, own in over_alone(rows).items() if key[2].startswith(Neighbour.COPY)]


def copy_sentences(rows: Sequence[Row]) -> list[str]:
    """Beside a neighbour that only copies: throughput, prefill, decode, and what could be why."""
    found = []
    longer = False
    for own in copy_costs(rows):
        if not {THROUGHPUT, _DECODE, _PREFILL, _A_TOKEN} <= set(own):
            continue
        one = own[THROUGHPUT]
        longer |= own[_PREFILL].ratio[1] > 1
        ends = "" if one.is_interval else " (the ends are a range, no interval)"
        parts = [
            f"{words} {ratio_text(own[metric].ratio)}"
            for metric, words in (
                (THROUGHPUT, "throughput"),
                (_PREFILL, "prefill step p50"),
                (_A_TOKEN, "prefill time a computed token"),
                (_DECODE, "decode step p50"),
            )
        ]
        found.append(
            f"A neighbour that only copies, {one.subject} beside {one.condition}, over alone: "
            f"{', '.join(parts)}{ends}."
        )
    if longer:
        found.append(
            "Why prefill gets longer is open. Steps are timed on the host, from launch to launch; "
            "a prefill step is launched kernel by kernel, a decode step replays a graph. So a "
            "host that a neighbour's copies slow would slow prefill first, with a pool or without: "
            "a hypothesis, since device time was not recorded beside neighbours."
        )
    return found


def host_copy_sentences(run: Run) -> list[str]:
    """Rate of the copy inside the host's memory, alone and beside neighbours that copy."""
    table = condition_column(run, "bandwidth")
    if table.empty:
        return []
    host = table[(table["what"] == "host copy") & table["gpu_index"].isna()]
    found = []
    for observed, own in host.groupby("observed", sort=False):
        medians = own.groupby("condition")["bytes_per_second"].median() / 1e9
        beside = [name for name in medians.index if name.startswith(Neighbour.COPY)]
        if ALONE in medians.index and beside:
            texts = ", ".join(f"{medians[name]:.3g} ({name})" for name in beside)
            found.append(f"{observed}: {medians[ALONE]:.3g} alone, {texts}")
    return [f"A copy within the host's memory, median GB/s: {'; '.join(found)}."] if found else []


def node_sentences(run: Run) -> list[str]:
    """That near and far memory nodes were not compared, where they were not."""
    if set(run.tables["points"]["memory_node"]) - {MemoryNode.ANY.value}:
        return []
    named = run.provenance.facts.get("numa_node") is not None
    why = "" if named else ": the machine names no memory node for its GPU"
    return [f"Near and far memory nodes were not compared{why}."]


def _published_pair() -> tuple[float, float]:
    """The lower and the higher throughput of the published setting that was run twice."""
    rates = {one.name: one.throughput for one in published_points()}
    low, high = sorted(rates[name] for name in _PAIR)
    return low, high


def published_ratio() -> float:
    """The lower over the higher throughput of that setting."""
    low, high = _published_pair()
    return low / high


def published_sentence() -> str:
    """The published difference that neighbours are held likely for, labelled."""
    low, high = _published_pair()
    return (
        f"Beside these, published (another machine and model, neighbours not told): two runs of "
        f"one setting at {low:,.0f} and {high:,.0f} tok/s, a ratio of {low / high:.3f}."
    )


def consequence_sentences(rows: Sequence[Row], runs: Sequence[Run]) -> list[str]:
    """What may run beside others by these rows, and what not until more is shown."""
    sweeps = [
        side_by_side(own[THROUGHPUT])
        for key, own in over_alone(rows).items()
        if key[2].startswith(Neighbour.SWEEP)
    ]
    found = []
    if not sweeps or any(text.startswith("open") for text in sweeps):
        found.append(
            f"Whether points of a throughput sweep stay within {TOLERANCE:.0%} of alone is open. "
            "Until it is shown, points whose times are compared must not run side by side."
        )
    elif "no" in sweeps:
        found.append("Points whose times are compared must not run side by side here.")
    else:
        found.append("Points of a throughput sweep may run side by side here.")
    rates = stale_rates(runs)
    alone = [own for (_, _, condition), own in rates.items() if condition == ALONE]
    if alone:
        widened = widened_arms(runs)
        between = sum(0 < stale < trials for stale, trials, *_ in alone)
        most = max((own[4] for own in rates.values() if not own[0]), default=None)
        text = "The race: "
        text += (
            f"{len(widened)} rates lie higher beside neighbours: it needs its host to itself."
            if widened
            else "no stale rate lies higher beside neighbours"
            + (
                f", but no arm is stale in a part of its trials alone, where a shift would show "
                f"best, and without a stale trial a rate may still be up to {most:.1%}."
                if not between and most is not None
                else "."
            )
        )
        found.append(text)
    return found


# -- the claim about neighbours


def copy_arguments(runs: Sequence[Run]) -> dict[str, Any]:
    """Arguments of ``judge`` for the claim that neighbours' copies explain the published pair.

    The newest run with a copying neighbour beside an engine with a pool, and an interval, decides.
    """
    for run in reversed(runs):
        rows = observed_rows([run])
        for own in copy_costs(rows):
            one = own.get(THROUGHPUT)
            pooled = any(
                row["pool_gib"] is not None
                for row in rows
                if one is not None and row["subject"] == one.subject
            )
            if one is None or not one.is_interval or not pooled:
                continue
            return _explains(one, run)
    return {
        "reason": "needs repeated points with a pool beside neighbours that only copy, and alone"
    }


def _explains(one: Cost, run: Run) -> dict[str, Any]:
    """Copies without a pause are the most that a neighbour can do: less than that is possible."""
    gap = published_ratio()
    value = f"{ratio_text(one.ratio)} of alone beside {one.condition}"
    detail = f"{one.subject}, 95%; published pair {gap:.3f}"
    same = {"machine": run.provenance.machine, "run_ids": (run.provenance.run_id,), "value": value}
    if one.ratio[1] > gap:
        return {"holds": False, "detail": f"copies cost less than that; {detail}", **same}
    if one.ratio[2] < 1:
        text = "neighbours that copy without a pause cost throughput, and may cost as much"
    else:
        text = "the interval holds no cost at all and that difference"
    return {
        "undecided": f"{text}; what the neighbours of the published runs did is not told; {detail}",
        **same,
    }

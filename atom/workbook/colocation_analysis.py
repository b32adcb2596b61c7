"""What neighbours cost, from recorded rows: ratios to alone, stale rates, bandwidths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from atom.benchmarks.colocation_rows import EXPERIMENT
from atom.benchmarks.colocation_settings import MemoryNode, Neighbour, condition_text
from atom.config import CopyProtocol
from atom.evidence import Evidence
from atom.workbook.colocation_race import race_table, stale_rates, widened_arms
from atom.workbook.records import Run, existing, load_runs
from atom.workbook.throughput_analysis import NOTHING, Row, is_ok, mean_of, rows_of
from atom.workbook.throughput_points import Ratio, Spread, pooled_spread
from atom.workbook.throughput_results import unexpected as unexpected_points

ALONE = Neighbour.NONE.value
#: points of a sweep may run side by side where each is within so much of alone
TOLERANCE = 0.01
THROUGHPUT = "effective_total_throughput"
#: prompt and output tokens a second of steps, from the first request on: no pause and no edge of a
#: window is in it, so that it repeats better than throughput does
STEP_RATE = "tokens_per_step_second"
#: time of prefill steps by the tokens they computed: no mix of short and long steps is in it
PREFILL_RATE = "prefill_us_per_token"
#: what is divided by its value alone, in words
METRICS = {
    THROUGHPUT: "throughput",
    STEP_RATE: "tokens a second of steps",
    "decode_step_p50_ms": "decode step, p50",
    "prefill_step_p50_ms": "prefill step, p50",
    PREFILL_RATE: "prefill time a computed token",
    "ttft_mean_seconds": "time to first token",
    "status_latency_p50_us": "status latency, p50",
}
UNREPEATED = "no interval: nothing was repeated"


@dataclass(frozen=True)
class Cost:
    """A figure beside neighbours over the same alone.

    Attributes:
        subject: what was observed.
        condition: who was beside it.
        against: what it is compared with.
        node: where the observed process ran.
        ratio: over the repeats, with its ends; all three the same where nothing was repeated.
        runs: repeats of both sides.
        is_interval: whether the ends are those of a 95% interval.
    """

    subject: str
    condition: str
    against: str
    node: str
    ratio: Ratio
    runs: tuple[int, int]
    is_interval: bool


def observed_rows(runs: Iterable[Run]) -> list[Row]:
    """Rows of observed engines, with ``condition`` and their step rate beside their columns.

    Of a run that went on on another host, those of the host with most of them: hosts differ more
    than neighbours cost.
    """
    return [
        {
            **row,
            "condition": condition_text(row["neighbour"], row["neighbours"]),
            STEP_RATE: step_rate(row),
            PREFILL_RATE: prefill_rate(row),
        }
        for run in runs
        for row in _of_one_host(run)[0]
    ]


def _of_one_host(run: Run) -> tuple[list[Row], int]:
    """Rows of the host that has most of them, and how many are of others."""
    rows = rows_of([run])
    sizes = Counter(row["sitting"] for row in rows)
    kept = [row for row in rows if row["sitting"] == max(sizes, key=lambda one: sizes[one])]
    return kept, len(rows) - len(kept)


def step_rate(row: Row) -> float | None:
    """Prompt and output tokens a second of steps; ``None`` where they were not counted."""
    seconds = [row["decode_seconds"], row["prefill_seconds"]]
    tokens = [row["lookup_tokens"], row["generated_tokens"]]
    if None in seconds + tokens or not sum(seconds):
        return None
    return float(sum(tokens) / sum(seconds))


def prefill_rate(row: Row) -> float | None:
    """Microseconds of prefill steps a computed prompt token; ``None`` where not counted."""
    seconds, tokens = row["prefill_seconds"], row["prompt_tokens_computed"]
    return float(seconds / tokens * 1e6) if seconds and tokens else None


def is_undisturbed(row: Row) -> bool:
    """Whether the load ran to its end, and all neighbours did."""
    return is_ok(row) and row["neighbours_at_end"] == row["neighbours"]


def _groups(rows: Sequence[Row], metric: str) -> dict[tuple[str, str, str], list[float]]:
    """Values of the observed engine by subject, memory node and condition."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        # of a sweep's engines, the one on the GPU that was observed alone
        if is_undisturbed(row) and row[metric] and not row["observed"]:
            key = (row["subject"], row["memory_node"], row["condition"])
            found.setdefault(key, []).append(float(row[metric]))
    return found


def _spreads(groups: dict[tuple[str, str, str], list[float]]) -> dict[str, Spread | None]:
    """Spread of each subject's repeats, over its conditions: one may repeat worse than another."""
    repeated: dict[str, list[list[float]]] = {}
    for (subject, _, _), values in groups.items():
        repeated.setdefault(subject, []).extend([values] if len(values) > 1 else [])
    return {
        subject: pooled_spread(
            own,
            f"the repeats of {len(own)} condition{'s' * (len(own) > 1)} of the same engine",
        )
        for subject, own in repeated.items()
    }


def costs(rows: Sequence[Row], metric: str = THROUGHPUT) -> list[Cost]:
    """Each condition over alone, and the far memory node over the near one.

    Args:
        rows: of one run.
        metric: column.
    """
    groups = _groups(rows, metric)
    spreads = _spreads(groups)
    near, far = MemoryNode.NEAR.value, MemoryNode.FAR.value
    found = []
    for (subject, node, condition), values in sorted(groups.items()):
        base = groups.get((subject, node, ALONE))
        if condition != ALONE and base:
            found.append(_cost(subject, condition, ALONE, node, values, base, spreads[subject]))
    for (subject, node, condition), values in sorted(groups.items()):
        base = groups.get((subject, near, condition))
        if node == far and base:
            found.append(
                _cost(subject, condition, "the near node", node, values, base, spreads[subject])
            )
    return found


def _cost(
    subject: str,
    condition: str,
    against: str,
    node: str,
    values: Sequence[float],
    base: Sequence[float],
    spread: Spread | None,
) -> Cost:
    if spread is None:
        middle = math.exp(float(np.mean(np.log(values)) - np.mean(np.log(base))))
        ratio = (middle, middle, middle)
    else:
        ratio = spread.of(values, base)
    sure = spread is not None and spread.is_interval
    return Cost(subject, condition, against, node, ratio, (len(values), len(base)), sure)


def ends_text(rows: Sequence[Row]) -> str:
    """What the ends of the ratios of throughput are."""
    spreads = _spreads(_groups(rows, THROUGHPUT))
    kinds = {name: one.kind if one else UNREPEATED for name, one in spreads.items()}
    if len(set(kinds.values())) > 1:
        return "; ".join(f"{name}: {kind}" for name, kind in kinds.items())
    return next(iter(kinds.values()), UNREPEATED)


def _ratio_text(one: Cost) -> str:
    middle, low, high = one.ratio
    return f"{middle:.3f}" if low == high else f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def _ends_word(one: Cost) -> str:
    _, low, high = one.ratio
    return "95%" if one.is_interval else NOTHING if low == high else "a range, no interval"


def costs_table(rows: Sequence[Row]) -> pd.DataFrame:
    """A row a condition: each figure over that alone."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for metric, words in METRICS.items():
        for one in costs(rows, metric):
            key = (one.subject, one.condition, one.node, one.against)
            line = lines.setdefault(
                key,
                {
                    "observed": one.subject,
                    "beside it": one.condition,
                    "node": one.node,
                    "over": one.against,
                    "runs": f"{one.runs[0]} and {one.runs[1]}",
                    "ends": _ends_word(one),
                    **dict.fromkeys(METRICS.values(), NOTHING),
                },
            )
            line[words] = _ratio_text(one)
    return pd.DataFrame(lines.values())


# -- may a sweep run side by side?


def side_by_side(one: Cost) -> str:
    """``yes``, ``no``, or that the interval is too wide to tell."""
    _, low, high = one.ratio
    if not one.is_interval:
        return "open: too few repeats for an interval"
    if low >= 1 - TOLERANCE and high <= 1 + TOLERANCE:
        return "yes"
    if high < 1 - TOLERANCE or low > 1 + TOLERANCE:
        return "no"
    return f"open: the interval is not within {TOLERANCE:.0%} of alone, nor outside"


def side_by_side_table(rows: Sequence[Row]) -> pd.DataFrame:
    """A row a subject and figure that was run on all GPUs at once: may its sweep run so?

    Throughput decides. The step rate beside it may tell where throughput repeats too badly.
    """
    lines = []
    steps = {(one.subject, one.condition): one for one in costs(rows, STEP_RATE)}
    for one in costs(rows):
        if not one.condition.startswith(Neighbour.SWEEP):
            continue
        own = [row for row in rows if row["subject"] == one.subject and is_undisturbed(row)]
        alone = mean_of(row[THROUGHPUT] for row in own if row["condition"] == ALONE)
        every = [row[THROUGHPUT] / alone for row in own if row["condition"] == one.condition]
        step = steps.get((one.subject, one.condition))
        lines.append(
            {
                "points of": one.subject,
                "at once": f"{own_gpus(one)} GPUs",
                "throughput over alone": _ratio_text(one),
                "on every GPU": f"{min(every):.3f} to {max(every):.3f}",
                "may run side by side": side_by_side(one),
                "tokens a second of steps": NOTHING if step is None else _ratio_text(step),
                "by that": NOTHING if step is None else side_by_side(step),
            }
        )
    return pd.DataFrame(lines)


def own_gpus(one: Cost) -> int:
    """GPUs that a ``sweep`` condition takes."""
    return 1 + int(one.condition.rpartition("x")[2])


# -- who was beside it, and what they took


def neighbours_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a condition: what one neighbour did a second, medians."""
    frames = [condition_column(run, "neighbours") for run in runs]
    table = pd.concat(frames) if frames else pd.DataFrame()
    if table.empty:
        return table
    lines = []
    for (observed, condition), own in table.groupby(["observed", "condition"]):
        medians = own.select_dtypes("number").median()
        lines.append(
            {
                "observed": observed,
                "beside it": condition,
                "copies to the device, GB/s": _giga(medians["h2d_bytes_per_second"]),
                "copies from the device, GB/s": _giga(medians["d2h_bytes_per_second"]),
                "matrix products a second": _count(medians["matmuls_per_second"]),
                "tokens a second": _count(medians["tokens_per_second"]),
            }
        )
    return pd.DataFrame(lines)


def bandwidth_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a condition and bandwidth: its median and its most while a point was observed."""
    frames = [condition_column(run, "bandwidth") for run in runs]
    table = pd.concat(frames) if frames else pd.DataFrame()
    if table.empty:
        return table
    where = table["gpu_index"].map(lambda gpu: "host" if pd.isna(gpu) else f"GPU {int(gpu)}")
    lines = []
    for (observed, condition, what, place), own in table.groupby(
        ["observed", "condition", "what", where], sort=True
    ):
        rates = own["bytes_per_second"]
        lines.append(
            {
                "observed": observed,
                "beside it": condition,
                "bandwidth": what,
                "of": place,
                "median, GB/s": _giga(float(rates.median())),
                "most, GB/s": _giga(float(rates.max())),
                "samples": len(own),
            }
        )
    return pd.DataFrame(lines)


def condition_column(run: Run, name: str) -> pd.DataFrame:
    """A table with what was observed and beside whom, from the identity of its points."""
    table = run.tables[name].copy()
    parts = [str(point_id).rsplit("/", 3) for point_id in table["point_id"]]
    table["observed"] = [one[0] for one in parts]
    table["condition"] = [one[1] for one in parts]
    return table


def bandwidth_series(run: Run, subject: str) -> dict[str, pd.DataFrame]:
    """Samples of the first point of each condition of one subject, by condition."""
    table = condition_column(run, "bandwidth")
    own = table[table["observed"] == subject]
    first = own.groupby("condition")["point_id"].transform("first")
    own = own[own["point_id"] == first]
    # alone stands first
    return {str(name): group for name, group in own.groupby("condition", sort=True)}


def _giga(value: float) -> str:
    return NOTHING if pd.isna(value) else f"{value / 1e9:.3g}"


def _count(value: float) -> str:
    return NOTHING if pd.isna(value) else f"{value:,.0f}"


# -- a run as text


def result_text(run: Run) -> str:
    """Ratios to alone, stale rates and bandwidths, as a terminal shows them."""
    rows = observed_rows([run])
    parts = []
    for title, table in (
        (f"over alone; {ends_text(rows)}", costs_table(rows)),
        (f"within {TOLERANCE:.0%} of alone?", side_by_side_table(rows)),
        ("stale statuses of the race", race_table([run])),
        ("what one neighbour did", neighbours_table([run])),
        ("bandwidths", bandwidth_table([run])),
    ):
        if not table.empty:
            parts.append(f"{title}\n{table.to_string(index=False)}")
    return "\n\n".join(parts) or "no condition has a point alone beside it yet"


def unexpected(run: Run) -> list[str]:
    """Protected engines and arms that were not clean, and neighbours that did not last."""
    found = unexpected_points(run.tables["points"])
    for table in (run.tables["points"], run.tables["race"]):
        for row in table.to_dict("records"):
            if row["neighbours_at_end"] != row["neighbours"]:
                name: Any = row.get("colocation_id", row["point_id"])
                found.append(
                    f"{name}: {row['neighbours_at_end']} of {row['neighbours']} neighbours lasted"
                )
    for row in run.tables["race"].to_dict("records"):
        stale = int(row["trials"]) - int(row["clean"])
        if stale and str(row["protocol"]) != CopyProtocol.UNPATCHED.value:
            found.append(f"{row['colocation_id']}: {row['arm']}: {stale} stale statuses")
    return list(dict.fromkeys(found))


# -- what a notebook shows


def measured_runs(folders: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Hardware runs of this experiment, oldest first, and what is wrong with others.

    One that ended early has whole points, and is named.
    """
    runs, problems = load_runs(existing(folders), EXPERIMENT)
    kept = []
    for run in runs:
        state = run.provenance.exit_state
        if run.provenance.evidence is Evidence.MEASURED and state != "running":
            kept.append(run)
            if state != "finished":
                problems.append(f"{run.provenance.run_id} is {state}: its points are shown")
            if others := _of_one_host(run)[1]:
                problems.append(
                    f"{run.provenance.run_id}: {others} points ran on another host and are left out"
                )
    return kept, problems


def setting_text(run: Run) -> str:
    """How many GPUs a run had, and whether neighbours shared one."""
    settings = run.provenance.settings
    gpus = run.provenance.facts.get("gpus", 1)
    if settings["shared_gpu"]:
        return "neighbours on the observed engine's GPU"
    return f"a GPU each, of {gpus} on one host"


def cost_sentences(rows: Sequence[Row]) -> list[str]:
    """Ratios of throughput by subject and what was beside it, and those of the memory nodes."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in costs(rows):
        kind = one.condition.partition(" ")[0]
        what = f"beside {kind}: throughput over alone"
        node = "" if one.node == MemoryNode.ANY else f", {one.node} node"
        if one.against != ALONE:
            what, node = "far memory node: throughput over the near one", ""
        text = f"{_ratio_text(one)} ({one.condition}{node})"
        found.setdefault((one.subject, what), []).append(text)
    return [f"{subject}, {what} {', '.join(own)}." for (subject, what), own in found.items()]


def race_sentences(runs: Sequence[Run]) -> list[str]:
    """Which windows of the fault neighbours widen, and which cannot be told."""
    rates = stale_rates(runs)
    if not rates:
        return ["the race was not run beside neighbours."]
    found = [
        f"{arm}: staler beside {beside} than alone, intervals apart."
        for arm, beside in widened_arms(runs)
    ] or ["no arm's stale rate beside neighbours lies above that alone, intervals apart."]
    alone = {arm: own for (arm, _, condition), own in rates.items() if condition == ALONE}
    full = [arm for arm, (stale, trials, *_) in alone.items() if stale == trials]
    if full:
        found.append(
            f"{len(full)} of {len(alone)} arms are stale in every trial alone: they cannot show "
            f"more ({', '.join(full)})."
        )
    return found

"""Analysis of race runs, from their rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from atom.benchmarks.race_plan import DEFAULT_QUEUES
from atom.benchmarks.race_rows import ProducerEdge
from atom.config import AllocatorBackend, CopyPath, CopyProtocol, Front, Source
from atom.evidence import Evidence
from atom.workbook.records import Run
from atom.workbook.statistics import (
    clustered_interval,
    fisher_exact,
    process_interval,
)

#: columns that say what an arm is
ARM_COLUMNS = (
    "arm",
    "grid",
    "protocol",
    "is_null",
    "front",
    "copy_path",
    "source",
    "queue_setting",
    "allocator",
    "batch_size",
    "source_bytes",
    "next_bytes",
)
COUNTS = (
    "trials",
    "clean",
    "overwritten",
    "partial",
    "torn",
    "address_reused",
    "tag_caught",
    "tag_missed",
    "in_range",
)


def text_of(frame: pd.DataFrame) -> pd.DataFrame:
    """A copy with enum members as plain text, so that rows compare alike however they were made."""
    plain = frame.copy()
    enums = ("protocol", "front", "copy_path", "source", "allocator", "producer_edge", "outcome")
    for column in enums:
        if column in plain:
            plain[column] = [str(value) for value in plain[column]]
    if "queue_setting" in plain:
        plain["queue_setting"] = [str(value) for value in plain["queue_setting"]]
    return plain


def with_stale(trials: pd.DataFrame) -> pd.DataFrame:
    """Rows of the trials table with a ``stale`` column: overwritten, partial or torn."""
    rows = text_of(trials)
    rows["stale"] = rows["overwritten"] + rows["partial"] + rows["torn"]
    return rows


def summarise(trials: pd.DataFrame) -> pd.DataFrame:
    """One row an arm: counts over all its processes, and intervals.

    Returns:
        The arm's columns and counts; ``rate``; ``low`` and ``high``, the two-sided 95% interval
        clustered by process; ``effect``, its design effect; ``processes``; ``processes_hit``, those
        with a stale trial; ``send_us``, the median of the processes' medians.
    """
    rows = with_stale(trials)
    summaries: list[dict[str, Any]] = []
    for _, group in rows.groupby("arm", sort=False):
        first = group.iloc[0]
        stale, counts = group["stale"].tolist(), group["trials"].tolist()
        low, high, effect = clustered_interval(stale, counts)
        hit, processes, _, _ = process_interval(stale, counts)
        summary = {name: first[name] for name in ARM_COLUMNS}
        summary |= {name: int(group[name].sum()) for name in COUNTS}
        summary |= {
            "stale": sum(stale),
            "rate": sum(stale) / sum(counts),
            "low": low,
            "high": high,
            "effect": effect,
            "processes": processes,
            "processes_hit": hit,
            "send_us": float(group["send_us_median"].median()),
            "receive_us": float(group["receive_us_median"].median()),
        }
        summaries.append(summary)
    return pd.DataFrame(summaries)


def select(
    trials: pd.DataFrame,
    *,
    protocol: CopyProtocol | str,
    front: Front | str,
    copy_path: CopyPath | str | None = None,
    queue_setting: str = DEFAULT_QUEUES,
    grids: Sequence[str] = ("main", "queue"),
    null: bool | None = False,
) -> pd.DataFrame:
    """Rows of the published case (native allocator, source from it) with that front and protocol.

    Args:
        trials: rows of the trials table.
        protocol, front, queue_setting: of the arm.
        copy_path: ``None`` takes all.
        grids: where to look.
        null: ``False`` leaves the null arm out, ``True`` takes it alone, ``None`` takes both.
    """
    rows = with_stale(trials)
    keep = (
        (rows["protocol"] == str(protocol))
        & (rows["front"] == str(front))
        & (rows["queue_setting"] == queue_setting)
        & (rows["source"] == str(Source.ALLOCATOR))
        & (rows["allocator"] == str(AllocatorBackend.NATIVE))
        & rows["grid"].isin(list(grids))
    )
    if copy_path is not None:
        keep &= rows["copy_path"] == str(copy_path)
    if null is not None:
        keep &= rows["is_null"].astype(bool) == null
    return rows[keep]


def per_process(rows: pd.DataFrame) -> tuple[list[int], list[int]]:
    """Stale trials and trials of each process, for an interval clustered by process."""
    if "stale" not in rows:
        rows = with_stale(rows)
    grouped = rows.groupby(["queue_setting", "allocator", "process"], sort=True)
    sums = grouped[["stale", "trials"]].sum()
    return [int(n) for n in sums["stale"]], [int(n) for n in sums["trials"]]


def label_of(run: Run) -> str:
    """``NVIDIA H200, 2026-01-31, run 3fa2c1``: where a run's numbers come from."""
    provenance = run.provenance
    tail = provenance.run_id.rsplit("-", 1)[-1]
    return f"{provenance.device}, {provenance.started[:10]}, run {tail}"


def count_text(rows: pd.DataFrame) -> str:
    """``6/100 [0.8%, 19.9%]``: stale reads in rows of the trials table, clustered by process."""
    stale, trials = per_process(rows)
    low, high, _ = clustered_interval(stale, trials)
    return interval_text(sum(stale), sum(trials), low, high)


def interval_text(stale: int, trials: int, low: float, high: float) -> str:
    """A count with the interval that its design gives."""
    return f"{stale}/{trials} [{low:.1%}, {high:.1%}]"


def queues_text(setting: str) -> str:
    """``default queues``, ``1 queue`` or ``4 queues``."""
    return f"{setting} queue" + ("" if setting == "1" else "s")


def most_complete(runs: Sequence[Run]) -> Run | None:
    """The run that verdicts are drawn from: of the runs with most arms, the newest."""
    if not runs:
        return None
    return max(
        runs,
        key=lambda run: (run.tables["trials"]["arm"].nunique(), run.provenance.run_id),
    )


def null_arm_difference(trials: pd.DataFrame) -> pd.DataFrame:
    """Unpatched against unpatched-again, cell by cell: how much two equal arms differ.

    Returns:
        front, copy_path, stale and trials of both, and Fisher's two-sided p-value.
    """
    rows = with_stale(trials)
    main = rows[(rows["grid"] == "main") & (rows["protocol"] == str(CopyProtocol.UNPATCHED))]
    found = []
    for (front, path), group in main.groupby(["front", "copy_path"], sort=False):
        null = group["is_null"].astype(bool)
        a, b = group[~null], group[null]
        if a.empty or b.empty:
            continue
        counts = [int(n) for half in (a, b) for n in (half["stale"].sum(), half["trials"].sum())]
        found.append(
            {
                "front": front,
                "copy path": path,
                "unpatched": f"{counts[0]}/{counts[1]}",
                "null arm": f"{counts[2]}/{counts[3]}",
                "p": round(fisher_exact(*counts), 3),
            }
        )
    return pd.DataFrame(found)


def queue_rates(
    trials: pd.DataFrame,
    front: Front | str,
    edge: ProducerEdge = ProducerEdge.AT_SEND,
    grids: Sequence[str] = ("main", "queue"),
) -> pd.DataFrame:
    """Unpatched stale rates by queue setting and copy path.

    Args:
        trials: rows of the trials table.
        front: what is queued in front.
        edge: when the producer's event was queued; the engine does it at the send.
        grids: whose rows count; ``("edge",)`` for an edge that is early.

    Returns:
        queues (text; ``default`` first), copy_path, stale, trials, rate, low, high, processes,
        processes_hit.
    """
    rows = with_stale(trials)
    rows = rows[
        rows["grid"].isin(list(grids))
        & (rows["producer_edge"] == str(edge))
        & (rows["protocol"] == str(CopyProtocol.UNPATCHED))
        & ~rows["is_null"].astype(bool)
        & (rows["front"] == str(front))
    ]
    found = []
    for (queues, path), group in rows.groupby(["queue_setting", "copy_path"], sort=False):
        stale, counts = per_process(group)
        low, high, _ = clustered_interval(stale, counts)
        found.append(
            {
                "queues": queues,
                "copy_path": path,
                "stale": sum(stale),
                "trials": sum(counts),
                "rate": sum(stale) / sum(counts),
                "low": low,
                "high": high,
                "processes": len(stale),
                "processes_hit": sum(count > 0 for count in stale),
            }
        )
    frame = pd.DataFrame(found)
    if frame.empty:
        return frame
    order = frame["queues"].map(lambda text: 0 if text == DEFAULT_QUEUES else int(text))
    return frame.assign(order=order).sort_values(["order", "copy_path"]).drop(columns="order")


def lateness(timeline: pd.DataFrame) -> pd.DataFrame:
    """Per traced trial: when the copy and the next step's write ended, and what was in front.

    Returns:
        arm, process, trial, outcome, copy_end_us, write_end_us, front_end_us (latest lane, NaN
        without work in front), margin_us: copy end minus write end; above 0 the copy ended
        later, and may have read before the write or after it: ``outcome`` tells.
    """
    rows = text_of(timeline)
    found = []
    for (arm, process, trial), group in rows.groupby(["arm", "process", "trial"], sort=False):
        ends = group.groupby("label")["end_us"].max()
        if "copy" not in ends or "next write" not in ends:
            continue
        found.append(
            {
                "arm": arm,
                "process": process,
                "trial": trial,
                "outcome": group["outcome"].iloc[0],
                "copy_end_us": float(ends["copy"]),
                "write_end_us": float(ends["next write"]),
                "front_end_us": float(ends.get("front", float("nan"))),
                "margin_us": float(ends["copy"] - ends["next write"]),
            }
        )
    return pd.DataFrame(found)


def side_arms(trials: pd.DataFrame, grid: str) -> pd.DataFrame:
    """Arms of a small grid as a stale-rate plot takes them, in plan order.

    Args:
        trials: rows of the trials table.
        grid: batch, allocator, source or cut (the edge grid has :func:`queue_rates`).
            The native allocator's arms are the main grid's.
    """
    summary = summarise(trials)
    rows = summary[summary["grid"] == grid]
    if grid == "allocator" and not rows.empty:
        main = summary[
            (summary["grid"] == "main")
            & (summary["front"] == str(Front.STORE_ON_COPY_STREAM))
            & (summary["copy_path"] == str(CopyPath.ENGINE))
            & summary["protocol"].isin(rows["protocol"])
            & ~summary["is_null"].astype(bool)
        ]
        rows = pd.concat([main, rows])
    if rows.empty:
        return rows
    label = {
        "batch": lambda row: f"batch {row['batch_size']}",
        "allocator": lambda row: row["allocator"],
        "source": lambda row: row["source"].replace("_", " "),
        "cut": lambda row: row["arm"].split("/")[1].replace("_", " "),
    }[grid]
    rows = rows.assign(label=[label(row) for _, row in rows.iterrows()])
    if grid == "batch":
        rows = rows.sort_values("batch_size", kind="stable")
    order = {name: place for place, name in enumerate(dict.fromkeys(rows["label"]))}
    protocols = [str(protocol) for protocol in CopyProtocol]
    keys = [
        order[name] * len(protocols) + protocols.index(protocol)
        for name, protocol in zip(rows["label"], rows["protocol"], strict=True)
    ]
    return rows.assign(key=np.array(keys)).sort_values("key").drop(columns="key")


def tag_coverage(trials: pd.DataFrame) -> pd.DataFrame:
    """Stale trials by outcome and what would have noticed them, over all unpatched arms.

    Returns:
        source (allocator or a graph's), outcome, stale, tag caught, tag missed (where a row's
        outcomes are of one kind), in range: those that no bounds guard can see.
    """
    rows = with_stale(trials)
    rows = rows[rows["stale"] > 0]
    found = []
    for grid, group in rows.groupby("grid", sort=False):
        found.append(
            {
                "grid": grid,
                "stale": int(group["stale"].sum()),
                "overwritten": int(group["overwritten"].sum()),
                "partial": int(group["partial"].sum()),
                "torn": int(group["torn"].sum()),
                "tag caught": int(group["tag_caught"].sum()),
                "tag missed": int(group["tag_missed"].sum()),
                "all counts in range": int(group["in_range"].sum()),
            }
        )
    return pd.DataFrame(found)


def send_costs(trials: pd.DataFrame, evidence: Evidence) -> pd.DataFrame:
    """Host time of a send with nothing in front, by engine where there is a copy, a row a process.

    Returns:
        protocol (``null`` for the null arm), process, send_us, evidence.
    """
    rows = text_of(trials)
    rows = rows[(rows["grid"] == "main") & (rows["front"] == str(Front.NOTHING))]
    path = rows["copy_path"] == str(CopyPath.ENGINE)
    rows = rows[path | (rows["protocol"] == str(CopyProtocol.ZERO_COPY))]
    names = [
        "null" if null else protocol
        for null, protocol in zip(rows["is_null"], rows["protocol"], strict=True)
    ]
    costs = pd.DataFrame(
        {
            "protocol": names,
            "process": rows["process"].to_numpy(),
            "send_us": rows["send_us_median"].to_numpy(),
            "evidence": str(evidence),
        }
    )
    order = ["unpatched", "null", *(str(protocol) for protocol in CopyProtocol)]
    places = np.array([order.index(name) for name in costs["protocol"]])
    costs = costs.assign(place=places).sort_values(["place", "process"])
    return costs.drop(columns="place").reset_index(drop=True)


def facts_table(run: Run) -> pd.DataFrame:
    """What is known of a run's machine and software, one line a fact; unknown facts say so."""
    provenance = run.provenance
    facts = {
        "device": provenance.device,
        "driver": provenance.driver,
        "runtime": provenance.runtime,
        "torch": provenance.torch,
        "commit": provenance.commit,
        "started": provenance.started,
        "ended": provenance.ended,
        **{
            name: value
            for name, value in provenance.facts.items()
            if not isinstance(value, dict | list)
        },
        **provenance.environment,
    }
    return pd.DataFrame(
        {
            "fact": list(facts),
            "value": ["unknown" if value is None else str(value) for value in facts.values()],
        }
    )

"""Analysis of race runs, from their rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from atom.benchmarks.race_plan import DEFAULT_QUEUES
from atom.config import AllocatorBackend, CopyProtocol, Front, Source
from atom.device.interface import CopyPath
from atom.evidence import Evidence
from atom.workbook.records import Run
from atom.workbook.statistics import clustered_interval, exact_interval, process_interval

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
    for column in ("protocol", "front", "copy_path", "source", "allocator", "outcome"):
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


def newest_by_device(runs: Sequence[Run], evidence: Evidence) -> list[Run]:
    """The newest finished run of each device, of one kind of evidence."""
    newest: dict[str, Run] = {}
    for run in runs:
        provenance = run.provenance
        if provenance.evidence is evidence and provenance.exit_state == "finished":
            newest[provenance.device] = run
    return list(newest.values())


def count_text(stale: int, trials: int) -> str:
    """``3/200 [0.3%, 4.3%]`` with the exact two-sided 95% interval of independent trials."""
    low, high = exact_interval(stale, trials)
    return f"{stale}/{trials} [{low:.1%}, {high:.1%}]"

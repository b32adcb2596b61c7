"""How the points of a load ended, arm by arm, and how long their statuses were on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from atom.benchmarks.throughput_rows import Outcome
from atom.workbook.statistics import exact_interval, poisson_interval
from atom.workbook.throughput_analysis import NOTHING, Row, shows_fault, value_text


@dataclass(frozen=True)
class ArmOutcomes:
    """How the points of one arm ended.

    Attributes:
        protection, drafts, offload: what the arm is.
        ends: points by outcome.
        faults: points that died, hung, or read a status that no step wrote.
        hours: under load, until each point's own end.
        stale: statuses that were stale, where a net counts them; ``None`` without a net.
    """

    protection: str
    drafts: str
    offload: bool
    ends: dict[str, int]
    faults: int
    hours: float
    stale: int | None

    @property
    def points(self) -> int:
        """All of them."""
        return sum(self.ends.values())

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.protection}; {self.drafts}; {'offload' if self.offload else 'no offload'}"


def outcomes(rows: Sequence[Row]) -> list[ArmOutcomes]:
    """Points by protection, drafts and offload, in the order of these words.

    Points that never came under load say nothing about an arm and are left out.
    """
    groups: dict[tuple[str, str, bool], list[Row]] = {}
    for row in rows:
        if row["outcome"] == Outcome.START_FAILED or row["protocol"] is None:
            continue
        key = (row["protection"], str(row["drafts"]), row["pool_gib"] is not None)
        groups.setdefault(key, []).append(row)
    found = []
    for (protection, drafts, offload), own in sorted(groups.items()):
        counted = [row["stale_statuses"] for row in own if row["stale_statuses"] is not None]
        found.append(
            ArmOutcomes(
                protection,
                drafts,
                offload,
                dict(Counter(row["outcome"] for row in own)),
                sum(shows_fault(row) for row in own),
                sum(row["exposure_seconds"] or 0.0 for row in own) / 3600,
                sum(counted) if counted else None,
            )
        )
    return found


def outcomes_table(found: Sequence[ArmOutcomes]) -> pd.DataFrame:
    """A row an arm: how its points ended, and the exact intervals of its fault."""
    lines = []
    for one in found:
        low, high = exact_interval(one.faults, one.points)
        line = {
            "protection": one.protection,
            "drafts": one.drafts,
            "offload": "yes" if one.offload else "no",
            "ended": ", ".join(f"{count} {end}" for end, count in one.ends.items()),
            "with a fault": f"{one.faults} of {one.points} [{low:.0%}, {high:.0%}]",
            "stale statuses": NOTHING if one.stale is None else f"{one.stale:,}",
            "minutes under load": f"{one.hours * 60:.1f}",
            "faulty points an hour": NOTHING,
        }
        if one.hours > 0:
            rate = poisson_interval(one.faults, one.hours)
            line["faulty points an hour"] = f"{rate[0]:.2g} to {rate[1]:.2g}"
        lines.append(line)
    return pd.DataFrame(lines)


# -- status latency


def latency_table(rows: Sequence[Row]) -> pd.DataFrame:
    """A row a setting and arm that timed its statuses: medians over repeats, in microseconds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["status_latency_p50_us"] is not None:
            key = tuple(
                row[name] for name in ("concurrency", "pool_gib", "protection", "chunk_tokens")
            )
            groups.setdefault(key, []).append(row)
    lines = []
    order = sorted(groups, key=lambda key: tuple(str(part).rjust(8) for part in key))
    for key in order:
        own = groups[key]
        line: Row = {
            "sessions": key[0],
            "pool": value_text("pool_gib", key[1]),
            "protection": key[2],
            "chunk, tokens": NOTHING if key[1] is None else key[3],
        }
        for name, column in (
            ("landed, p50 us", "status_latency_p50_us"),
            ("landed, p99 us", "status_latency_p99_us"),
            ("most, us", "status_latency_max_us"),
            ("host waited, p50 us", "status_wait_p50_us"),
            ("host waited, p99 us", "status_wait_p99_us"),
        ):
            known = [row[column] for row in own if row[column] is not None]
            line[name] = f"{np.median(known):,.0f}" if known else NOTHING
        lines.append(line)
    return pd.DataFrame(lines)

"""How the points of a load ended, arm by arm, and how long their statuses were on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from atom.benchmarks.throughput_rows import Outcome
from atom.workbook.records import Run
from atom.workbook.statistics import exact_interval, poisson_interval
from atom.workbook.throughput_analysis import (
    NOTHING,
    Row,
    failed_share,
    is_cut_short,
    is_ok,
    place_in_sitting,
    shows_fault,
    value_text,
)
from atom.workbook.throughput_bounds import size_text

#: how the rows name this engine
OURS = "atom"
#: end of a point that was killed for its time limit, most of which its start had taken
CUT_SHORT = "cut short by a slow start"
#: latencies with these in common are one line
_LATENCY_KEY = (
    "concurrency",
    "pool_gib",
    "protection",
    "chunk_tokens",
    "offload_policy",
    "sitting",
)


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
    def time_text(self) -> str:
        """Time under load in words."""
        minutes = 60 * self.hours
        return f"{minutes:.1f} min" if minutes >= 1 else f"{60 * minutes:.1f} s"

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.protection}; {self.drafts}; {'offload' if self.offload else 'no offload'}"


def _end(row: Row) -> str:
    return CUT_SHORT if is_cut_short(row) else str(row["outcome"])


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
                dict(Counter(_end(row) for row in own)),
                sum(shows_fault(row) for row in own),
                sum(row["exposure_seconds"] or 0.0 for row in own) / 3600,
                sum(counted) if counted else None,
            )
        )
    return found


def outcomes_table(found: Sequence[ArmOutcomes], *, rates: bool) -> pd.DataFrame:
    """A row an arm: how its points ended, and the exact intervals of its fault.

    Args:
        found: of :func:`outcomes`.
        rates: also events an hour; an hour of a simulation is none.
    """
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
            "under load": one.time_text,
        }
        if rates:
            rate = poisson_interval(one.faults, one.hours) if one.hours > 0 else None
            text = f"{rate[0]:.3g} to {rate[1]:.3g}" if rate else NOTHING
            line["faulty points an hour"] = text
        lines.append(line)
    return pd.DataFrame(lines)


# -- status latency


def latency_table(rows: Sequence[Row]) -> pd.DataFrame:
    """A row a setting and arm that timed its statuses: medians over repeats, in microseconds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["status_latency_p50_us"] is not None:
            key = tuple(row[name] for name in _LATENCY_KEY)
            groups.setdefault(key, []).append(row)
    several = len({key[-1] for key in groups}) > 1
    policies = len({key[4] for key in groups if key[1] is not None}) > 1
    lines = []
    order = sorted(groups, key=lambda key: tuple(str(part).rjust(8) for part in key))
    for key in order:
        own = groups[key]
        line: Row = {
            "sessions": key[0],
            "pool": value_text("pool_gib", key[1]),
            "protection": key[2],
            "chunk, tokens": NOTHING if key[1] is None else key[3],
            **({"policy": NOTHING if key[1] is None else key[4]} if policies else {}),
            **({"sitting": key[-1]} if several else {}),
        }
        for name, column in (
            ("landed, p50 us", "status_latency_p50_us"),
            ("landed, p99 us", "status_latency_p99_us"),
            ("most, us", "status_latency_max_us"),
            ("host waited, p50 us", "status_wait_p50_us"),
            ("host waited, p99 us", "status_wait_p99_us"),
        ):
            known = [row[column] for row in own if row[column] is not None]
            line[name] = _microseconds(float(np.median(known))) if known else NOTHING
        lines.append(line)
    return pd.DataFrame(lines)


def _arm(row: Row) -> tuple[str, int | None, str]:
    return str(row["protection"]), row["chunk_tokens"], str(row["offload_policy"] or "")


def heavy_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows that timed statuses, where more than one arm with drafts did in one sitting."""
    arms: dict[tuple[int, float | None, str], set[tuple[str, int | None, str]]] = {}
    timed = [row for row in rows if row["status_latency_p50_us"] is not None]
    for row in timed:
        arms.setdefault(place_in_sitting(row), set()).add(_arm(row))
    return [row for row in timed if len(arms[place_in_sitting(row)]) > 1]


def latency_sentences(rows: Sequence[Row]) -> list[str]:
    """What a pool does to the landing of a status under ``hold``, and other arms beside it."""
    timed = [row for row in rows if row["status_latency_p99_us"] is not None]
    held = [row for row in timed if row["protection"] == "hold"]
    found = []
    sides = [[row for row in held if (row["pool_gib"] is None) is bare] for bare in (True, False)]
    if all(sides):
        texts = [
            f"p50 {_range(own, 'p50')}, p99 {_range(own, 'p99')} us {where}"
            for own, where in zip(sides, ("without offload", "with a pool"), strict=True)
        ]
        found.append(f"a status lands under hold after {'; '.join(texts)}.")
    groups: dict[tuple[int, float | None, str], dict[tuple[Any, ...], list[Row]]] = {}
    heavy = heavy_rows(rows)
    for row in heavy:
        groups.setdefault(place_in_sitting(row), {}).setdefault(_arm(row), []).append(row)
    policies = len({row["offload_policy"] for row in heavy if row["pool_gib"] is not None}) > 1
    sittings = Counter((sessions, pool) for sessions, pool, _ in groups)
    for (sessions, pool, sitting), arms in sorted(
        groups.items(), key=lambda item: (item[0][0], item[0][1] or 0.0, item[0][2])
    ):
        if pool is not None:
            parts = [
                f"{arm[0]}{', ' + arm[2] if policies else ''}, chunk {arm[1]}: {_latency(own)}"
                for arm, own in sorted(arms.items())
            ]
            where = f"{sessions} sessions, {pool:g} GiB"
            where += f" ({sitting})" if sittings[sessions, pool] > 1 else ""
            found.append(f"{where}, p50 / p99 in us: {'; '.join(parts)}.")
    return found


def _range(rows: Sequence[Row], name: str) -> str:
    values = [row[f"status_latency_{name}_us"] for row in rows]
    ends = [_microseconds(float(end)) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def _latency(rows: Sequence[Row]) -> str:
    ends = [
        float(np.median([row[f"status_latency_{name}_us"] for row in rows]))
        for name in ("p50", "p99")
    ]
    return " / ".join(_microseconds(end) for end in ends)


def _microseconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def deaths(rows: Sequence[Row]) -> list[str]:
    """Points that did not end well, in words."""
    return [
        f"{row['point_id']}: {_end(row)}"
        + (
            ""
            if row["exposure_seconds"] is None
            else f" after {row['exposure_seconds']:.1f} s under load"
        )
        + (f"; {row['stale_statuses']:,} stale statuses" if row["stale_statuses"] else "")
        + (f"; {row['outcome_detail']}" if row["outcome_detail"] else "")
        + "."
        for row in rows
        if row["outcome"] != Outcome.OK
    ]


def hits_table(rows: Sequence[Row]) -> pd.DataFrame:
    """A row a point that ended well: prompt tokens by where they came from, and the pool's use."""
    lines = []
    for row in rows:
        asked = row["lookup_tokens"]
        if not is_ok(row) or not asked:
            continue
        pool = row["pool_hit_tokens"] or 0
        lines.append(
            {
                "sessions": row["concurrency"],
                "pool": value_text("pool_gib", row["pool_gib"]),
                "prompt tokens": f"{asked:,}",
                "device cache, at least": f"{max(row['hit_tokens'] - pool, 0) / asked:.0%}",
                "brought from the CPU pool": NOTHING
                if row["pool_gib"] is None
                else f"{pool / asked:.0%}",
                "computed": f"{1 - row['hit_tokens'] / asked:.0%}",
                "stored": size_text(row["stored_bytes"]),
                "loaded": size_text(row["loaded_bytes"]),
                "KV evicted": _count(row["kv_evicted"]),
                "states evicted": _count(row["states_evicted"]),
                "state loads failed": NOTHING
                if failed_share(row) is None
                else f"{failed_share(row):.1%}",
                "preemptions": _count(row["preemptions"]),
            }
        )
    return pd.DataFrame(lines)


def computed_sentences(rows: Sequence[Row]) -> list[str]:
    """Share of the prompt tokens that had to be computed, by pool: a count, whatever the clock."""
    shares: dict[int, dict[float | None, list[float]]] = {}
    for row in rows:
        if is_ok(row) and row["lookup_tokens"]:
            share = 1 - row["hit_tokens"] / row["lookup_tokens"]
            by_pool = shares.setdefault(row["concurrency"], {})
            by_pool.setdefault(row["pool_gib"], []).append(share)
    return [
        f"{sessions} sessions: of the prompt tokens "
        + ", ".join(
            f"{np.mean(values):.0%} "
            + ("without offload" if pool is None else f"with {pool:g} GiB")
            for pool, values in sorted(by_pool.items(), key=lambda item: item[0] or 0.0)
        )
        + " are computed."
        for sessions, by_pool in sorted(shares.items())
    ]


def _count(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def causes_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Loads and stores that were not made, summed over all points: a row a cause."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for run in runs:
        for row in run.tables["causes"].to_dict("records"):
            counts[str(row["what"]), str(row["kind"]), str(row["cause"])] += int(row["count"])
    return pd.DataFrame(
        {"what": what, "kind": kind, "cause": cause, "times": f"{count:,}"}
        for (what, kind, cause), count in sorted(counts.items())
    )


def clients_table(rows: Sequence[Row]) -> pd.DataFrame:
    """A row a point of a server that is not ours: what its client saw, and how it started."""
    return pd.DataFrame(
        {
            "server": row["system"],
            "sessions": row["concurrency"],
            "pool": value_text("pool_gib", row["pool_gib"]),
            "ended": row["outcome"],
            "tok/s": _count_of(row["effective_total_throughput"], ",.0f"),
            "requests": _count(row["requests"]),
            "errors": _count(row["errors"]),
            "TTFT mean, s": _count_of(row["ttft_mean_seconds"], ".3g"),
            "prompt tokens cached": "not reported"
            if row["cached_share"] is None
            else f"{row['cached_share']:.0%}",
            "started cold by": row["cold_start"],
            "traces left out": _count(row["traces_dropped"]),
            "client CPU, s": _count_of(row["client_cpu_seconds"], ".1f"),
        }
        for row in rows
        if row["system"] != OURS
    )


def _count_of(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)

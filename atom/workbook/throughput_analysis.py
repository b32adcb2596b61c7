"""Rows of the throughput experiment: the main grid, and its points in the terms of a load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from atom.benchmarks.throughput_rows import Outcome
from atom.evidence import Evidence
from atom.model_engine.engine_settings import StatusCheck
from atom.workbook.race_analysis import label_of
from atom.workbook.records import Run
from atom.workbook.throughput_points import (
    LoadPoint,
    Spread,
    pool_text,
    pooled_spread,
    published_spread,
    with_ratios,
)

NOTHING = "–"
Row = dict[str, Any]

#: what a point may vary beside its sessions and its pool; the offload's only with a pool
ENGINE_FACTORS = ("system", "protection", "drafts")
OFFLOAD_FACTORS = ("offload_backend", "offload_policy", "chunk_tokens")
FACTORS = (*ENGINE_FACTORS, *OFFLOAD_FACTORS)
#: what makes it another setting
SETTING = (*FACTORS, "concurrency", "pool_gib")
FACTOR_NAMES = {
    "system": "server",
    "protection": "copy protocol and nets",
    "drafts": "drafts",
    "offload_backend": "who keeps the pool",
    "offload_policy": "policy of the pool",
    "chunk_tokens": "tokens of a stored chunk",
    "concurrency": "sessions",
    "pool_gib": "pool",
}
#: ends of a point that the fault, or anything like it, may cause
FAULTS = (Outcome.CRASH, Outcome.GUARD_ERROR, Outcome.HANG)


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """Rows of the points of all runs, enum members as text and blanks as ``None``.

    Each has three columns more: ``run_id``; ``protection``, the copy protocol, with its nets where
    they are not all there; and ``drafts``, whether and how it drafts. ``sitting`` names what was
    run together, a run on one host: hosts of one kind of machine differ more in speed than repeats
    do, so that times are compared within it alone.
    """
    found = []
    for run in runs:
        for row in run.tables["points"].to_dict("records"):
            plain: Row = {str(name): _plain(value) for name, value in row.items()}
            plain |= {"protection": _protection(plain), "drafts": _drafts(plain)}
            more = {"run_id": run.provenance.run_id, "sitting": _sitting(run, plain)}
            found.append({**plain, **more})
    return found


def _sitting(run: Run, row: Row) -> str:
    tail = run.provenance.run_id.rsplit("-", 1)[-1]
    if row.get("host") is not None:
        return f"{tail}, host {row['host'][:4]}"
    # a record of before says which points were left when it first ended
    stopped = run.provenance.facts.get("stopped_early", {}).get("not_run", {})
    return f"{tail}, resumed" if row["point_id"] in stopped else tail


def _protection(row: Row) -> str | None:
    if row["protocol"] is None:
        return None
    nets = {
        "guard": row["guard"] not in (None, "none"),
        "host check": row["status_check"] == StatusCheck.RAISE,
        "epoch tag": bool(row["epoch_tag"]),
    }
    if all(nets.values()):
        return str(row["protocol"])
    kept = [name for name, there in nets.items() if there]
    return (
        f"{row['protocol']}, {' and '.join(kept)} alone" if kept else f"{row['protocol']}, no net"
    )


def _drafts(row: Row) -> str | None:
    if row["mtp"] is None:
        return None
    if not row["mtp"]:
        return "no MTP"
    forced = row["forced_acceptance_length"]
    return f"MTP {row['draft_tokens']}, " + ("verified" if forced is None else f"forced {forced:g}")


@dataclass(frozen=True)
class LoadSet:
    """Everything of one kind of evidence that a page shows.

    Attributes:
        kind: of evidence.
        source: machine or profile, with date and run.
        runs: where it comes from.
        rows: all points.
        main: those of the main grid.
        points: the main grid's settings, over their repeats.
        spread: how much repeats differ.
    """

    kind: Evidence
    source: str
    runs: tuple[Run, ...]
    rows: list[Row]
    main: list[Row]
    points: list[LoadPoint]
    spread: Spread

    @property
    def run_ids(self) -> list[str]:
        """Identities of the runs."""
        return [run.provenance.run_id for run in self.runs]

    @property
    def main_run_ids(self) -> list[str]:
        """Identities of the runs that the main grid's points are of."""
        kept = {row["run_id"] for row in self.main}
        return [name for name in self.run_ids if name in kept]

    @property
    def main_source(self) -> str:
        """``source``, of the runs that the main grid's points are of."""
        names = self.main_run_ids
        if names == self.run_ids or not names:
            return self.source
        return source_of([run for run in self.runs if run.provenance.run_id in names])


def source_of(runs: Sequence[Run]) -> str:
    """``NVIDIA H200, 2026-01-31, run 3fa2c1; 2026-02-01, run 80cd11``: runs of one machine."""
    first, *others = runs
    device = f"{first.provenance.device}, "
    return "; ".join([label_of(first), *(label_of(run).removeprefix(device) for run in others)])


def load_set(kind: Evidence, source: str, runs: Sequence[Run]) -> LoadSet:
    """The rows of ``runs``, with what follows from them at once."""
    rows = rows_of(runs)
    main = main_rows(rows)
    return LoadSet(kind, source, tuple(runs), rows, main, load_points(main, kind), spread_of(rows))


def _plain(value: Any) -> Any:
    if value is None or (not isinstance(value, str) and pd.isna(value)):
        return None
    if isinstance(value, str):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def is_ok(row: Row) -> bool:
    """Whether the load ran to its end and something was served."""
    return row["outcome"] == Outcome.OK and bool(row["effective_total_throughput"])


def is_cut_short(row: Row) -> bool:
    """Whether the point was killed for its time limit, most of which its start had taken.

    Its load had no time to end in, so this is no hang of it. Records of today have a limit of the
    load alone, which no start can take from.
    """
    cut = (row["setup_seconds"] or 0) > row["wall_seconds"] / 2
    return row["outcome"] == Outcome.HANG and row["limit_seconds"] is None and cut


def shows_fault(row: Row) -> bool:
    """Whether the point died, hung, or read a status that its step never wrote."""
    caught = any(row[name] for name in ("stale_statuses", "guard_errors"))
    return (row["outcome"] in FAULTS and not is_cut_short(row)) or caught


# -- the main grid


def main_factors(rows: Sequence[Row]) -> Row:
    """The values of the factors that most points under ``hold`` with a pool have."""
    held = [row for row in rows if row["protocol"] == "hold" and row["pool_gib"] is not None]
    counts = Counter(tuple(row[name] for name in FACTORS) for row in held)
    if not counts:
        return {}
    return dict(zip(FACTORS, counts.most_common(1)[0][0], strict=True))


def agrees(row: Row, factors: Row, but: Sequence[str] = ()) -> bool:
    """Whether a row has these factors, save those in ``but``; without a pool, the engine's."""
    names = ENGINE_FACTORS if row["pool_gib"] is None else FACTORS
    return bool(factors) and all(row[name] == factors[name] for name in names if name not in but)


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of the main grid, in order of sessions and pool, without offload first.

    A setting that several sittings have is taken from the one that has most of the grid: the others
    ran it beside arms that are compared with it there.
    """
    factors = main_factors(rows)
    own = [row for row in rows if agrees(row, factors)]
    sizes = Counter(row["sitting"] for row in own if is_ok(row))
    best: dict[tuple[Any, ...], str] = {}
    for sitting in sorted({row["sitting"] for row in own}, key=lambda name: (sizes[name], name)):
        here = [row for row in own if row["sitting"] == sitting]
        best |= {_place(row): sitting for row in here if is_ok(row) or _place(row) not in best}
    kept = [row for row in own if best[_place(row)] == row["sitting"]]
    return sorted(kept, key=lambda row: (row["concurrency"], row["pool_gib"] or 0.0))


def _place(row: Row) -> tuple[int, float | None]:
    return row["concurrency"], row["pool_gib"]


def place_in_sitting(row: Row) -> tuple[int, float | None, str]:
    """Sessions, pool and sitting: what arms have in common that may be compared."""
    return (*_place(row), row["sitting"])


def spread_of(rows: Sequence[Row]) -> Spread:
    """Spread of repeats over all arms; of the published pair where nothing was repeated."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if is_ok(row):
            key = tuple(row[name] for name in (*SETTING, "sitting"))
            groups.setdefault(key, []).append(row["effective_total_throughput"])
    repeated = [values for values in groups.values() if len(values) > 1]
    text = f"the repeats of {len(repeated)} settings"
    return pooled_spread(repeated, text) or published_spread()


def sitting_sentences(rows: Sequence[Row]) -> list[str]:
    """Sittings, if there are several, and what they differ by where they ran the same setting."""
    sizes = Counter(row["sitting"] for row in rows)
    if len(sizes) < 2:
        return []
    groups: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        if is_ok(row):
            own = groups.setdefault(tuple(row[name] for name in SETTING), {})
            own.setdefault(row["sitting"], []).append(math.log(row["effective_total_throughput"]))
    shared = {key: [float(np.mean(one)) for one in own.values()] for key, own in groups.items()}
    apart = [math.exp(max(means) - min(means)) for means in shared.values() if len(means) > 1]
    counts = ", ".join(f"{count} in {name}" for name, count in sorted(sizes.items()))
    text = "no setting was run in two of them"
    if apart:
        text = f"the same setting differs by a factor of {min(apart):.2f} to {max(apart):.2f}"
        text += f" between them ({len(apart)} such)"
    return [
        f"points of {len(sizes)} sittings, a run on one host each ({counts}); {text}. "
        "Throughputs and latencies are compared within a sitting alone."
    ]


def load_points(rows: Sequence[Row], evidence: Evidence) -> list[LoadPoint]:
    """One point a setting of ``rows``, over its repeats that ended well, with ratios.

    Args:
        rows: of one arm, e.g. the main grid.
        evidence: kind of the rows.
    """
    groups: dict[tuple[int, float | None, str], list[Row]] = {}
    for row in rows:
        if is_ok(row):
            groups.setdefault((*_place(row), row["sitting"]), []).append(row)
    points = []
    for (concurrency, pool, sitting), own in groups.items():
        rates = [float(row["effective_total_throughput"]) for row in own]
        points.append(
            LoadPoint(
                name=f"c{concurrency}-{'none' if pool is None else f'{pool:g}'}",
                evidence=evidence,
                concurrency=concurrency,
                pool_gib=pool,
                runs=len(own),
                throughput=float(np.exp(np.mean(np.log(rates)))),
                rates=tuple(rates),
                requests_per_hour=mean_of(
                    _per_hour(row["requests"], row["window_seconds"]) for row in own
                ),
                ttft_s=mean_of(row["ttft_mean_seconds"] for row in own),
                itl_p90_ms=mean_of(_times(row["itl_p90_seconds"], 1e3) for row in own),
                cached_share=mean_of(hit_share(row) for row in own),
                failed_loads=mean_of(failed_share(row) for row in own),
                sitting=sitting,
            )
        )
    return with_ratios(points, spread_of(rows))


def hit_share(row: Row) -> float | None:
    """Share of prompt tokens that were not computed again: by the engine, else by the client."""
    if row["lookup_tokens"]:
        return float((row["hit_tokens"] or 0) / row["lookup_tokens"])
    return row["cached_share"]


def failed_share(row: Row) -> float | None:
    """Share of state loads that failed; ``None`` where none was tried or counted."""
    done, failed = row["states_loaded"], row["state_load_failures"]
    if done is None or failed is None or done + failed == 0:
        return None
    return float(failed / (done + failed))


def _per_hour(requests: int | None, seconds: float | None) -> float | None:
    return None if requests is None or not seconds else requests * 3600 / seconds


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of what is known; ``None`` of nothing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def value_text(name: str, value: Any) -> str:
    """A value of a column in words: ``32 sessions``, ``no offload``, ``256``."""
    if name == "pool_gib":
        return pool_text(value)
    if name == "concurrency":
        return f"{value} sessions"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

"""From what a throughput point told to its rows, and from rows to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from pydantic import BaseModel

from atom.benchmarks.throughput_process import (
    DIED,
    GUARD_ERROR,
    LOAD,
    LOAD_FAILED,
    OUT_OF_MEMORY,
    START_FAILED,
    exit_text,
)
from atom.benchmarks.throughput_rows import (
    Outcome,
    ThroughputRequestRow,
    ThroughputRow,
    TierCauseRow,
)
from atom.benchmarks.throughput_settings import ThroughputPoint, ThroughputSettings
from atom.config import CopyProtocol
from atom.workbook.provenance import redact

#: outcome of a process that could not tell it, by exit code
_BY_CODE = {
    DIED: Outcome.CRASH,
    OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY,
    START_FAILED: Outcome.START_FAILED,
    LOAD_FAILED: Outcome.LOAD_FAILED,
    GUARD_ERROR: Outcome.GUARD_ERROR,
}


#: fields of an engine of this package: a server's stay blank
_OWN = (
    "protocol",
    "offload_backend",
    "offload_policy",
    "chunk_tokens",
    "mtp",
    "draft_tokens",
    "forced_acceptance_length",
    "guard",
    "status_check",
    "epoch_tag",
)


def tables_of(
    settings: ThroughputSettings, point: ThroughputPoint, end: Mapping[str, Any], limit: float
) -> dict[str, Sequence[BaseModel]]:
    """Rows of a point by table.

    Args:
        settings: of the sweep.
        point: which.
        end: of ``throughput_process.run_point``.
        limit: seconds that its load was given.
    """
    told = dict(end["told"])
    requests = told.pop("requests_table", [])
    causes = told.pop("causes_table", [])
    outcome, detail = outcome_of(told, end, limit)
    arm = point.arm
    offload = point.pool_gib is not None
    drafts = settings.draft_tokens if arm.mtp else 0
    row = ThroughputRow(
        **{
            **dict.fromkeys(ThroughputRow.model_fields),
            **told,
            "point_id": point.point_id,
            "arm": arm.name,
            "system": settings.server_label or "atom",
            "repeat": point.repeat,
            "order": point.order,
            "concurrency": point.concurrency,
            "pool_gib": point.pool_gib,
            "protocol": arm.protocol,
            "offload_backend": arm.backend if offload else None,
            "offload_policy": arm.policy if offload else None,
            "chunk_tokens": arm.chunk_tokens if offload else None,
            "mtp": arm.mtp,
            "draft_tokens": drafts,
            "forced_acceptance_length": settings.forced_acceptance_length if drafts else None,
            "guard": arm.guard,
            "status_check": arm.status_check,
            "epoch_tag": arm.epoch_tag,
            "outcome": outcome,
            # an error of a foreign library may name a file or a host
            "outcome_detail": None if detail is None else redact(detail),
            "exit_code": end["exit_code"],
            "wall_seconds": round(end["wall_seconds"], 3),
            "limit_seconds": limit,
            "host": end.get("host"),
            "cold_start": told.get("cold_start", "process"),
            "gpu_index": _gpu(end.get("gpu")),
            "worker": end.get("worker", ""),
            **(dict.fromkeys(_OWN) if settings.serves else {}),
        }
    )
    return {
        "points": [row],
        "requests": [ThroughputRequestRow(point_id=point.point_id, **one) for one in requests],
        "causes": [TierCauseRow(point_id=point.point_id, **one) for one in causes],
    }


def outcome_of(
    told: Mapping[str, Any], end: Mapping[str, Any], limit: float
) -> tuple[Outcome, str | None]:
    """How a point ended: by its own word if it could say it, else by how its process did."""
    if end["timed_out"] == LOAD:
        return Outcome.HANG, f"its load did not end within {limit:.0f} s and it was killed"
    if end["timed_out"] is not None:
        waited = f"it had no request within {end['wall_seconds']:.0f} s and was killed"
        return Outcome.START_FAILED, waited
    if told.get("outcome") is not None:
        return Outcome(told["outcome"]), told.get("outcome_detail")
    code = end["exit_code"]
    said = exit_text(code)
    if end["last_words"]:
        said += f": {end['last_words'][:300]}"
    if "setup_seconds" not in told:
        # nothing was asked of it yet
        full = Outcome.OUT_OF_MEMORY if code == OUT_OF_MEMORY else Outcome.START_FAILED
        return full, said
    return _BY_CODE.get(code, Outcome.CRASH), said


def _gpu(shown: str | None) -> int | None:
    return int(shown) if shown is not None and shown.isdecimal() else None


def result_text(table: pd.DataFrame) -> str:
    """A point a line: how it ended, throughput, latencies, hits, and bytes of the CPU pool."""
    lines = [
        f"{'arm/concurrency/pool/repeat':38} {'outcome':13} {'tok/s':>9} {'out/s':>7} {'req':>5} "
        f"{'err':>4} {'TTFT s':>7} {'ITL ms':>7} {'hit':>5} {'pool':>5} {'stored':>7} "
        f"{'loaded':>7} {'status us':>10} {'stale':>5}"
    ]
    ordered = table.sort_values(["arm", "concurrency", "pool_gib", "repeat"], kind="stable")
    for row in ordered.to_dict("records"):
        hits = _share(row["hit_tokens"], row["lookup_tokens"])
        if hits is None:
            # a server's own word
            hits = row["cached_share"]
        pool = _share(row["pool_hit_tokens"], row["lookup_tokens"])
        lines.append(
            f"{row['point_id']:38} {row['outcome']:13} "
            f"{_number(row['effective_total_throughput'], 0, ','):>9} "
            f"{_number(row['output_throughput'], 0, ','):>7} {_number(row['requests'], 0):>5} "
            f"{_number(row['errors'], 0):>4} {_number(row['ttft_mean_seconds'], 3):>7} "
            f"{_number(row['itl_p90_seconds'], 2, scale=1e3):>7} {_number(hits, 2):>5} "
            f"{_number(pool, 2):>5} {_number(row['stored_bytes'], 2, scale=2**-30):>7} "
            f"{_number(row['loaded_bytes'], 2, scale=2**-30):>7} "
            f"{_number(row['status_latency_p99_us'], 0):>10} {_number(row['stale_statuses'], 0):>5}"
        )
    lines.append("")
    lines.append(
        "tok/s: effective total throughput; hit, pool: share of the prompt tokens found, and "
        "brought from the CPU pool; stored, loaded: GiB; status: p99 until landed"
    )
    return "\n".join(lines)


def unexpected(table: pd.DataFrame) -> list[str]:
    """Points with a protected engine that did not end well, or were stale."""
    found = []
    protected = table[table["protocol"].astype(str) != CopyProtocol.UNPATCHED.value]
    for row in protected.to_dict("records"):
        stale = 0 if pd.isna(row["stale_statuses"]) else int(row["stale_statuses"])
        if row["outcome"] != Outcome.OK.value or stale:
            detail = "" if pd.isna(row["outcome_detail"]) else f": {row['outcome_detail']}"
            found.append(f"{row['point_id']}: {row['outcome']}, {stale} stale statuses{detail}")
    return found


def _share(part: Any, whole: Any) -> float | None:
    return None if pd.isna(part) or pd.isna(whole) or not whole else float(part) / float(whole)


def _number(value: Any, digits: int, separator: str = "", scale: float = 1.0) -> str:
    return "-" if value is None or pd.isna(value) else f"{value * scale:{separator}.{digits}f}"

"""Made-up rows of the throughput experiment, for tests of their analysis."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cost_rows import PROPERTIES
from pydantic import BaseModel

from atom.benchmarks.throughput_rows import Outcome, ThroughputRow, TierCauseRow
from atom.benchmarks.throughput_settings import (
    ThroughputPoint,
    ThroughputSettings,
    build_points,
)
from atom.config import CopyProtocol
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter

GIB = 2**30
KV_BYTES = 8192
#: a sweep with the arms of the hardware run, at two numbers of sessions
SWEEP: dict[str, Any] = {
    "concurrency": [32, 64],
    "pool_gib": [4.0, 16.0],
    "special": ["repeats", "unpatched", "guard", "factorial", "zero_copy", "chunks"],
    "central_concurrency": [32, 64],
    "crash_points": [[32, 16.0], [64, 16.0]],
}


def row(settings: ThroughputSettings, point: ThroughputPoint, **more: Any) -> ThroughputRow:
    """A plausible row: pools help, most the large one, and less with more sessions."""
    noise = random.Random(point.point_id)
    arm, pool = point.arm, point.pool_gib
    gain = 1.0 if pool is None else 1 + pool / 16 * 32 / point.concurrency
    rate = 20_000 * gain * (1 + noise.gauss(0, 0.01))
    hits = 0 if pool is None else int(100_000 * pool / 32)
    drafts = settings.draft_tokens if arm.mtp else 0
    tier: dict[str, Any] = {}
    if pool is not None:
        tier = {
            "pool_hit_tokens": hits,
            "states_loaded": 90,
            "state_load_failures": 10 if pool < 8 else 0,
            "stored_bytes": 40 * GIB,
            "loaded_bytes": 10 * GIB,
            "kv_evicted": 5,
            "states_evicted": 1,
        }
    values: dict[str, Any] = {
        **dict.fromkeys(ThroughputRow.model_fields),
        "point_id": point.point_id,
        "arm": arm.name,
        "system": "atom",
        "repeat": point.repeat,
        "order": point.order,
        "concurrency": point.concurrency,
        "pool_gib": pool,
        "protocol": arm.protocol,
        "offload_policy": None if pool is None else arm.policy,
        "chunk_tokens": None if pool is None else arm.chunk_tokens,
        "mtp": arm.mtp,
        "draft_tokens": drafts,
        "forced_acceptance_length": 2.32 if drafts else None,
        "guard": arm.guard,
        "status_check": arm.status_check,
        "epoch_tag": arm.epoch_tag,
        "outcome": Outcome.OK,
        "wall_seconds": 80.0,
        "exposure_seconds": 70.0,
        "requests": 600,
        "errors": 0,
        "window_seconds": 60.0,
        "effective_total_throughput": rate,
        "total_throughput": rate,
        "output_throughput": rate / 50,
        "ttft_mean_seconds": 1.5 / gain,
        "itl_p90_seconds": 0.02,
        "cold_start": "process",
        "lookup_tokens": 100_000,
        "hit_tokens": 10_000 + hits,
        "preemptions": 0,
        "stale_statuses": 0,
        "guard_errors": 0,
        "status_latency_p50_us": 12.0 if pool is None else 400.0,
        "status_latency_p99_us": 90.0 if pool is None else 900.0,
        "status_latency_max_us": 1200.0,
        "status_wait_p50_us": 300.0,
        "status_wait_p99_us": 900.0,
        "decode_seconds": 20.0,
        "prefill_seconds": 45.0,
        "kv_bytes_per_token": KV_BYTES,
        "state_image_bytes": 2**20,
        "hbm_kv_bytes": 4 * GIB,
        "working_set_bytes": point.concurrency * GIB // 4,
        "worker": "",
        **tier,
    }
    if arm.protocol is CopyProtocol.ZERO_COPY:
        values |= {"status_latency_p50_us": 0.0, "status_latency_p99_us": 1.2}
    if arm.protocol is CopyProtocol.UNPATCHED and pool is not None and arm.mtp:
        guarded = arm.guard != "none"
        ended = Outcome.GUARD_ERROR if guarded else Outcome.CRASH
        dead = {"effective_total_throughput": 0.0, "requests": 0}
        values |= {"outcome": ended, "stale_statuses": 40, "outcome_detail": "illegal access"}
        values |= {"guard_errors": 1} if guarded else dead
    return ThroughputRow(**{**values, **more})


def record(
    root: Path,
    settings: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    speed: float = 1.0,
    **more: Any,
) -> Run:
    """Write made-up rows as a finished hardware run below ``root``.

    Args:
        root: folder of runs.
        settings: beside those of :data:`SWEEP`.
        facts: of the record.
        speed: of its host: throughputs are so many times the made-up ones.
        **more: fields that all rows have in place of the made-up ones.
    """
    given = {**SWEEP, **(settings or {})}
    central = [one for one in given["central_concurrency"] if one in given["concurrency"]]
    parsed = ThroughputSettings.parse({**given, "central_concurrency": central})
    plain = parsed.model_dump(mode="json")
    provenance = collect_provenance(PROPERTIES, "throughput", plain, facts or {})
    writer = RunWriter(root, PROPERTIES.machine, "throughput", provenance)
    for point in build_points(parsed):
        cause = TierCauseRow(
            point_id=point.point_id, what="load", kind="state", cause="evicted", count=10
        )
        one = row(parsed, point, **more)
        rate = (one.effective_total_throughput or 0.0) * speed
        one = one.model_copy(update={"effective_total_throughput": rate})
        tables: dict[str, Sequence[BaseModel]] = {"points": [one]}
        if point.pool_gib:
            tables["causes"] = [cause]
        writer.write_point(point.point_id, tables)
    writer.finish("finished")
    return load_run(writer.path)

"""Co-location rows that nobody measured: neighbours that copy cost a tenth, and open a window."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import throughput_points_made_up as made_up

from atom.benchmarks.colocation_point import race_settings
from atom.benchmarks.colocation_rows import BandwidthRow, ColocationRaceRow, ColocationRow
from atom.benchmarks.colocation_settings import (
    ColocationPoint,
    ColocationSettings,
    Neighbour,
    build_colocation,
)
from atom.benchmarks.race_plan import build_arms
from atom.config import CopyProtocol
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter

SETTINGS: dict[str, Any] = {
    "concurrency": [32],
    "pool_gib": [4.0],
    "neighbours": ["copy", "compute", "sweep"],
    "neighbour_counts": [1, 3],
    "shared_gpu": False,
    "repeats": 3,
}
#: throughput beside neighbours over that alone, and the stale rate of the open window
SLOWER = {"copy": 0.9, "compute": 1.0, "sweep": 0.97, "alone": 1.0}
STALE = {"copy": 30, "compute": 0, "alone": 0}


def beside(settings: ColocationSettings, point: ColocationPoint) -> dict[str, Any]:
    return {
        "subject": point.subject,
        "neighbour": point.neighbour,
        "neighbours": point.count,
        "neighbours_at_end": point.count,
        "shared_gpu": settings.shared_gpu,
        "memory_node": point.node,
    }


def race_rows(settings: ColocationSettings, point: ColocationPoint) -> list[ColocationRaceRow]:
    rows = []
    for arm in build_arms(race_settings(settings, point.repeat)):
        shown = arm.protocol is CopyProtocol.UNPATCHED and arm.front == "nothing"
        stale = STALE[point.neighbour] if shown else 0
        values: dict[str, Any] = {
            **dict.fromkeys(ColocationRaceRow.model_fields, 0),
            **{
                name: getattr(arm, name)
                for name in (
                    *("grid", "protocol", "is_null", "front", "copy_path", "source"),
                    *("queue_setting", "allocator", "producer_edge", "batch_size"),
                )
            },
            **beside(settings, point),
            "point_id": f"{arm.name}@0",
            "colocation_id": point.point_id,
            "arm": arm.name,
            "repeat": point.repeat,
            "source_bytes": 8,
            "next_bytes": 8,
            "trials": 40,
            "clean": 40 - stale,
            "overwritten": stale,
            "address_reused": 40,
            "tag_caught": stale,
            "in_range": 0,
            "shares_default_queue": None,
        }
        rows.append(ColocationRaceRow(**values))
    return rows


def record(root: Path, noise: float = 0.001, **given: Any) -> Run:
    """Write made-up rows as a finished hardware run."""
    settings = ColocationSettings.parse({**SETTINGS, **given})
    plain = settings.model_dump(mode="json")
    machine = made_up.PROPERTIES
    writer = RunWriter(
        root, machine.machine, "colocation", collect_provenance(machine, "colocation", plain, {})
    )
    draws = random.Random(1)
    for point in build_colocation(settings):
        tables: dict[str, Any] = {
            "bandwidth": [
                BandwidthRow(
                    point_id=point.point_id,
                    second=second / 2,
                    what="pcie to device",
                    gpu_index=0,
                    bytes_per_second=1e9 * (1 + second),
                )
                for second in range(4)
            ]
        }
        if point.engine is None:
            tables["race"] = race_rows(settings, point)
        else:
            count = point.count + 1 if point.neighbour is Neighbour.SWEEP else 1
            rows = []
            for number in range(count):
                rate = 1e4 * SLOWER[point.neighbour] * (1 + draws.gauss(0, noise))
                row = made_up.row(
                    settings.engine, point.engine, effective_total_throughput=rate
                ).model_dump()
                own = {"point_id": point.point_id, "repeat": point.repeat, "observed": number}
                rows.append(ColocationRow(**{**row, **beside(settings, point), **own}))
            tables["points"] = rows
        writer.write_point(point.point_id, tables)
    writer.finish("finished")
    return load_run(writer.path)

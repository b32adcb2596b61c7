"""Made-up rows of the protocol-cost experiment, for tests of its analysis."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from cost_rows import PROPERTIES
from pydantic import BaseModel

from atom.benchmarks.protocol_cost_rows import (
    BARE_ARMS,
    ENGINE_ARMS,
    GUARD_ARMS,
    Clock,
    CostArm,
    CostRow,
    HeldRow,
    LimitRow,
    Loop,
    Pressure,
)
from atom.benchmarks.protocol_cost_settings import (
    PointKind,
    ProtocolSweepSettings,
    build_points,
)
from atom.workbook.host_cost_fit import FIELDS, LIMITS, SECTIONS, call_counts
from atom.workbook.protocol_cost_paired import SEND_ALONE
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter

#: host costs that the made-up rows come from, microseconds by field
COSTS = dict(zip(FIELDS, (4.0, 6.0, 1.5, 1.2, 0.8, 3.0, 2.5), strict=True))
_PLAIN_SEND = 60.0


def section_us(arm: CostArm, lead: int, section: str) -> float:
    """Host time of a section under those costs."""
    counts = call_counts(lead)[arm, section]
    return sum(n * COSTS[name] for n, name in zip(counts, FIELDS, strict=True))


def record_cost_run(
    root: Path, *, hold_step: float = 1.0, hold_send_more: float = 0.0, agreement: float = 1.0
) -> Run:
    """A made-up run of a machine.

    Args:
        root: folder of runs.
        hold_step: hold's step over unpatched's.
        hold_send_more: microseconds of hold's send beyond the model.
        agreement: share of tokens that are unpatched's, under hold.
    """
    noise = random.Random(3)
    settings = ProtocolSweepSettings(batch_sizes=(32,), engine_batch_sizes=(32,), leads=(1, 4))
    plain = settings.model_dump(mode="json")
    provenance = collect_provenance(PROPERTIES, "protocol_cost", plain, {})
    writer = RunWriter(root, PROPERTIES.machine, "protocol_cost", provenance)

    def near(value: float) -> float:
        return value * (1 + noise.gauss(0, 0.001))

    for point in build_points(settings):
        same: dict[str, Any] = {"point_id": point.point_id, "clock": Clock.ACCELERATOR}
        rows: list[BaseModel] = []
        if point.kind is PointKind.LIMITS:
            rows = [
                LimitRow(
                    **same,
                    limit=name,
                    repeat=r,
                    calls=9,
                    median_us=us,
                    p99_us=us,
                )
                for name, us in (
                    *((name, COSTS[field]) for name, field in LIMITS.items()),
                    (SEND_ALONE, 10.2),
                )
                for r in range(3)
            ]
            writer.write_point(point.point_id, {"limits": rows})
            continue
        if point.kind is PointKind.MEMORY:
            for arm, held in ((CostArm.HOLD, 4096), (CostArm.RECORD_STREAM, 512)):
                rows += [
                    HeldRow(
                        **same,
                        arm=arm,
                        lead=point.lead,
                        step=step,
                        at_us=100.0 * step,
                        stuck=step == 8,
                        held_bytes=held,
                        reserved_bytes=2**21,
                        segments=1,
                    )
                    for step in range(16)
                ]
            writer.write_point(point.point_id, {"held": rows})
            continue
        bare = point.kind is PointKind.BARE
        guards = () if bare or point.pressure is not Pressure.IDLE else GUARD_ARMS
        for repeat in range(5):
            for position, arm in enumerate((*(BARE_ARMS if bare else ENGINE_ARMS), *guards)):
                sections = {
                    name: section_us(arm, point.lead, name) if arm in BARE_ARMS else 9.0
                    for name in SECTIONS
                }
                if arm is CostArm.PLAIN:
                    sections["send"] = _PLAIN_SEND
                more = hold_send_more if arm is CostArm.HOLD else 0.0
                slow = {CostArm.HOLD: hold_step, CostArm.BLOCKING: 1.3, CostArm.HOST_CHECK: 1.02}
                step = (100.0 if bare else 2000.0) * slow.get(arm, 1.0)
                stale = arm in (CostArm.UNPATCHED, CostArm.NULL, CostArm.PLAIN)
                rows.append(
                    CostRow(
                        **same,
                        loop=Loop.BARE if bare else Loop.ENGINE,
                        arm=arm,
                        batch=point.batch,
                        lead=point.lead,
                        pressure=point.pressure,
                        repeat=repeat,
                        position=position,
                        steps=100,
                        step_us=near(step),
                        step_p99_us=near(1.2 * step),
                        make_us=near(sections["make"]) if bare else None,
                        send_us=near(sections["send"] + more),
                        send_p99_us=near(2 * sections["send"]),
                        wait_us=1.0,
                        receive_us=near(sections["receive"]),
                        receive_p99_us=near(2 * sections["receive"]),
                        stale=9 if stale and point.pressure is not Pressure.IDLE else 0,
                        events_created=40 if arm is CostArm.PLAIN else 0,
                        counted_steps=20,
                        held_peak_bytes=1024 if arm is CostArm.HOLD else 0,
                        held_steady_bytes=512.0 if arm is CostArm.HOLD else 0.0,
                        kept_us=110.0 if arm is CostArm.HOLD else 100.0,
                        new_segments=0,
                        retries=0,
                        agreement=None if bare else agreement if arm is CostArm.HOLD else 1.0,
                    )
                )
        writer.write_point(point.point_id, {"samples": rows})
    writer.finish("finished")
    return load_run(writer.path)

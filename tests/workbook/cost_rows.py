"""Made-up rows of the kernel-speed and engine-speed experiments, for tests of their analysis."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from atom.benchmarks.engine_speed_rows import (
    Category,
    Clock,
    DeviceTimeRow,
    FloorRow,
    Job,
    MemoryRow,
    SpeedArm,
    SpeedRow,
)
from atom.benchmarks.engine_speed_settings import EngineSpeedSettings, PointKind
from atom.benchmarks.engine_speed_settings import build_points as speed_points
from atom.benchmarks.kernel_rows import KernelArm, KernelRow, Question
from atom.benchmarks.kernel_speed import KernelSpeedSettings, build_points
from atom.device.interface import DeviceKind, DeviceProperties
from atom.evidence import Evidence
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter

PROPERTIES = DeviceProperties(
    name="NVIDIA H200",
    kind=DeviceKind.CUDA,
    evidence=Evidence.MEASURED,
    machine="h200",
    memory_bytes=140 * 2**30,
    hardware_queues=None,
    queue_variable=None,
    driver="580.1",
    runtime="CUDA 13.0",
)
_FACTORS = {
    KernelArm.REPORT: 1.0,
    KernelArm.NONE: 1.0,
    KernelArm.NULL: 1.001,
    KernelArm.TRAP: 1.002,
    KernelArm.UNPACKED: 1.2,
    KernelArm.FLA: 3.0,
    KernelArm.TRANSFORMERS: 5.0,
    KernelArm.COPY: 0.9,
    KernelArm.COPY_KERNEL: 0.95,
}


def kernel_rows(guard: float = 1.003) -> dict[str, list[BaseModel]]:
    """Rows by point; ``guard`` is the reporting kernel's time over the unguarded one's."""
    noise = random.Random(1)
    found: dict[str, list[BaseModel]] = {}
    settings = KernelSpeedSettings()
    for point in build_points(settings):
        names = ("point_id", "operator", "question", "batch", "channels", "queries", "cache")
        same: dict[str, Any] = {name: getattr(point, name) for name in names}
        same["bytes_moved"] = point.batch * point.channels * 24
        rows: list[BaseModel] = []
        for position, arm in enumerate(point.arms):
            if arm is KernelArm.TRANSFORMERS:
                rows.append(KernelRow(**same, arm=arm, left_out="not installed"))
                continue
            factor = _FACTORS[arm]
            if point.question is Question.GUARD and arm is KernelArm.REPORT:
                factor = guard
            for repeat in range(settings.repeats):
                time = point.batch * 0.05 * factor * (1 + noise.gauss(0, 0.001))
                rows.append(
                    KernelRow(
                        **same,
                        arm=arm,
                        launches=settings.guard_launches,
                        buffers=4,
                        repeat=repeat,
                        position=position,
                        microseconds=time,
                    )
                )
        found[point.point_id] = rows
    return found


def speed_tables(clock: Clock = Clock.ACCELERATOR) -> dict[str, dict[str, list[BaseModel]]]:
    """Tables by point."""
    noise = random.Random(2)
    settings = EngineSpeedSettings()
    pace = {
        SpeedArm.OURS: (1.0, 1.0),
        SpeedArm.NULL: (1.0, 1.0),
        SpeedArm.MTP: (1.6, 1.9),
        SpeedArm.FORCED: (1.3, 2.32),
        SpeedArm.REPLAY: (1.5, 1.9),
        SpeedArm.REPLAY_FORCED: (1.2, 2.32),
        SpeedArm.TRANSFORMERS: (35.0, 1.0),
    }
    found: dict[str, dict[str, list[BaseModel]]] = {}
    for point in speed_points(settings):
        tables: dict[str, list[BaseModel]] = {}
        if point.kind is PointKind.MEMORY:
            tables["memory"] = [
                MemoryRow(
                    point_id=point.point_id, part=part, planned_bytes=size, measured_bytes=size - 9
                )
                for part, size in (("weights", 2**30), ("all, at its peak", 2**33))
            ]
            found[point.point_id] = tables
            continue
        decode = point.kind is PointKind.DECODE
        arms = list(pace) if decode else [SpeedArm.OURS, SpeedArm.NULL, SpeedArm.TRANSFORMERS]
        samples: list[BaseModel] = []
        for repeat in range(settings.repeats):
            for position, arm in enumerate(arms):
                slow, tokens = pace[arm]
                step = (2.0 if decode else 40.0) * slow * (1 + noise.gauss(0, 0.004))
                count = int(100 * tokens * point.batch) if decode else point.prompt_tokens
                seconds = step * (100 if decode else 1) / 1e3
                samples.append(
                    SpeedRow(
                        point_id=point.point_id,
                        job=Job.DECODE if decode else Job.PREFILL,
                        arm=arm,
                        clock=clock,
                        batch=point.batch,
                        prompt_tokens=point.prompt_tokens,
                        repeat=repeat,
                        position=position,
                        steps=100 if decode else 1,
                        tokens=count,
                        seconds=seconds,
                        tokens_per_s=count / seconds,
                        step_ms=step,
                        step_p99_ms=step * 1.1,
                        host_ms=0.6 if decode else None,
                        gap_ms=0.05 if decode else None,
                        agreement=1.0,
                    )
                )
        tables["samples"] = samples
        if decode:
            tables["device_time"] = [
                DeviceTimeRow(
                    point_id=point.point_id,
                    arm=arm,
                    category=category,
                    steps=10,
                    ms_per_step=0.15 * (1 + number % 3),
                    launches_per_step=3.0,
                )
                for arm in (SpeedArm.OURS, SpeedArm.MTP)
                for number, category in enumerate(Category)
            ]
            tables["floors"] = [
                FloorRow(
                    point_id=point.point_id,
                    arm=arm,
                    part="weights",
                    read_bytes=10**9,
                    written_bytes=10**6,
                    copy_bytes_per_s=1.5e12,
                )
                for arm in pace
                if arm not in (SpeedArm.NULL, SpeedArm.TRANSFORMERS)
            ]
        found[point.point_id] = tables
    return found


def record(root: Path, experiment: str, points: dict[str, dict[str, list[BaseModel]]]) -> Run:
    """Write made-up rows as a run of a machine below ``root``."""
    settings = {"kernels": KernelSpeedSettings(), "engine_speed": EngineSpeedSettings()}
    plain = settings[experiment].model_dump(mode="json")
    provenance = collect_provenance(PROPERTIES, experiment, plain, {})
    writer = RunWriter(root, PROPERTIES.machine, experiment, provenance)
    for point, tables in points.items():
        writer.write_point(point, tables)
    writer.finish("finished")
    return load_run(writer.path)


def record_kernel_run(root: Path, guard: float = 1.003) -> Run:
    """A made-up run of the kernel-speed experiment."""
    rows = kernel_rows(guard)
    return record(root, "kernels", {point: {"samples": found} for point, found in rows.items()})


def record_speed_run(root: Path) -> Run:
    """A made-up run of the engine-speed experiment."""
    return record(root, "engine_speed", speed_tables())

"""``python -m atom sweep engine-speed``: time the engine beside transformers, and record it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from atom.benchmarks.engine_speed import run_points
from atom.benchmarks.engine_speed_settings import (
    EXPERIMENT,
    EngineSpeedSettings,
    PointKind,
    SpeedPoint,
    build_points,
    sized,
)
from atom.benchmarks.race_environment import look_around
from atom.config import DeviceChoice
from atom.device import DeviceKind, open_device
from atom.errors import BadInput
from atom.workbook.engine_speed_analysis import ArmSpeed, Goal, Ratio, goals, summarise
from atom.workbook.kernels import refuse_unwritable
from atom.workbook.parameters import read_given
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter, read_provenance
from atom.workbook.sweep_progress import NoProgress, SweepProgress, TerminalProgress
from atom.workbook.tables import shown_path

_PEERS = ("transformers", "flash-linear-attention", "fla-core", "causal-conv1d", "kernels")
#: seconds of a point apart from its repeats: engines, compilation, warming up
_SETUP_SECONDS = {PointKind.MEMORY: 20.0, PointKind.DECODE: 15.0, PointKind.PREFILL: 15.0}
_REPEAT_SECONDS = {PointKind.MEMORY: 0.0, PointKind.DECODE: 4.5, PointKind.PREFILL: 0.5}


def record_engine_speed(
    settings: EngineSpeedSettings,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run the experiment in this process and record it below ``root``.

    Args:
        settings: what to run.
        root: folder of runs, e.g. ``data/runs``.
        progress: told what happens; ``None`` is silent.
        resume: folder of an unfinished run with the same settings.

    Raises:
        BadInput: a run that cannot be resumed, or an engine that does not fit.
        DeviceError: no accelerator, or arms that disagree.
    """
    progress = progress or NoProgress()
    virtual = settings.device is DeviceChoice.VIRTUAL
    kind = DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA
    # the facts are read before this process is one of those that use the GPU
    around = look_around(DeviceKind.VIRTUAL if virtual else kind)
    device = open_device(settings.device, profile=settings.device_profile)
    for warning in around.warnings:
        progress.note(f"warning: {warning}")
    plain = settings.model_dump(mode="json")
    if resume is None:
        facts = {**around.facts, "peers": _peers()}
        provenance = collect_provenance(device.properties, EXPERIMENT, plain, facts)
        writer = RunWriter(root, device.properties.machine, EXPERIMENT, provenance)
    else:
        writer = RunWriter.resume(resume, plain)
    left = [point for point in build_points(settings) if not writer.has(point.point_id)]
    progress.start(len(left), _seconds(left, settings))
    try:
        for point, tables in run_points(settings, device, writer.points):
            writer.write_point(point.point_id, tables)
            progress.advance(1)
    except KeyboardInterrupt:
        writer.finish("interrupted", "interrupted by the user")
        raise
    except BaseException as error:
        writer.finish("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        progress.stop()
    writer.finish("finished")
    return load_run(writer.path)


def _peers() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in _PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _seconds(points: Sequence[SpeedPoint], settings: EngineSpeedSettings) -> float:
    return sum(
        _SETUP_SECONDS[point.kind] + settings.repeats * _REPEAT_SECONDS[point.kind]
        for point in points
    )


def settings_from(
    arguments: argparse.Namespace, device: DeviceChoice | None = None
) -> EngineSpeedSettings:
    """Settings of a command line; those of a resumed run come from its record.

    Args:
        arguments: of ``sweep engine-speed``.
        device: used if the command line names none.

    Raises:
        BadInput: unknown names, wrong values, or options that only other sweeps have.
    """
    for name in ("processes", "trials"):
        if getattr(arguments, name) is not None:
            raise BadInput(f"sweep engine-speed has no --{name}: see -p repeats N and -p steps N")
    if arguments.only:
        raise BadInput("sweep engine-speed has no --only; narrow it with -p batch_sizes '[32]'")
    given: dict[str, Any] = read_given(arguments.parameters, None)
    if arguments.device is not None:
        given["device"] = arguments.device
    if arguments.seed is not None:
        given["seed"] = arguments.seed
    if arguments.resume is not None:
        if given or arguments.quick:
            names = ", ".join([*given, *(["quick"] if arguments.quick else [])])
            raise BadInput(f"--resume takes the recorded settings; leave out: {names}")
        recorded = read_provenance(Path(arguments.resume))
        if recorded.experiment != EXPERIMENT:
            raise BadInput(f"{arguments.resume} is a run of {recorded.experiment}")
        return EngineSpeedSettings.parse(recorded.settings, where=f"settings of {arguments.resume}")
    if device is not None:
        given.setdefault("device", device.value)
    return sized(given, quick=arguments.quick)


def sweep(arguments: argparse.Namespace, device: DeviceChoice | None = None) -> int:
    """Run the command. Returns its exit code.

    Args:
        arguments: of the command line.
        device: used if the command line names none.

    Raises:
        BadInput, DeviceError: see :func:`record_engine_speed`.
    """
    settings = settings_from(arguments, device)
    if arguments.dry_run:
        points = build_points(settings)
        for point in points:
            print(f"{point.point_id:24} {_setup_text(point, settings)}")
        print(
            f"{len(points)} points, {settings.repeats} repeats each, preset {settings.preset} on "
            f"the {settings.device} device: about {_seconds(points, settings):.0f} s"
        )
        return 0
    refuse_unwritable(Path(arguments.resume or arguments.out), "folder of runs")
    run = record_engine_speed(settings, arguments.out, TerminalProgress(), arguments.resume)
    summaries = summarise(run.tables["samples"], run.tables["floors"])
    reached = goals(summaries, run.tables["samples"])
    shown = shown_path(run.path)
    if arguments.json:
        content = {
            "format": 1,
            "run": str(shown),
            "arms": [asdict(summary) for summary in summaries],
            "goals": [asdict(goal) for goal in reached],
        }
        print(json.dumps(content, indent=1))
    else:
        print(result_text(run, summaries, reached))
        print(f"\n{run.provenance.evidence} on {run.provenance.device}: {shown}")
    return 0


def _setup_text(point: SpeedPoint, settings: EngineSpeedSettings) -> str:
    if point.kind is PointKind.MEMORY:
        return f"plan and peak of an engine with {settings.draft_tokens} drafts"
    if point.kind is PointKind.PREFILL:
        return f"a prompt of {point.prompt_tokens:,} tokens: ours, null, transformers"
    return (
        f"{settings.steps} steps of ours, null, MTP-{settings.draft_tokens} real and forced to "
        f"{settings.forced_acceptance_length}, {settings.peer_steps} of transformers"
    )


def result_text(run: Run, summaries: Sequence[ArmSpeed], reached: Sequence[Goal]) -> str:
    """Arms, where the device's time goes, memory, and goals, as text."""
    lines = []
    last = None
    for arm in summaries:
        if arm.point_id != last:
            last = arm.point_id
            lines += [
                "",
                f"{last:20} {'tokens/s':>24} {'step ms':>9} {'p99':>8} {'x floor':>8} "
                f"{'x ours':>7} {'x peer':>7} {'tok/row':>7} {'host':>6} {'gap':>6} {'agree':>6}",
            ]
        if arm.left_out is not None or arm.tokens_per_s is None:
            lines.append(f"  {arm.arm:18} left out: {arm.left_out}")
            continue
        rate, low, high = arm.tokens_per_s
        parts = arm.parts or {}
        lines.append(
            f"  {arm.arm:18} {rate:9,.0f} [{low:,.0f}, {high:,.0f}]".ljust(45)
            + f" {_number(arm.step_ms, 3):>9} {_number(arm.step_p99_ms, 3):>8}"
            + f" {_number(_middle(arm.over_floor), 2):>8} {_number(_middle(arm.over_ours), 2):>7}"
            + f" {_number(_middle(arm.over_transformers), 1):>7}"
            + f" {_number(arm.tokens_per_row, 2):>7} {_number(parts.get('host_ms'), 3):>6}"
            + f" {_number(parts.get('gap_ms'), 3):>6} {_number(arm.agreement, 2):>6}"
        )
        if arm.kernels:
            lines.append(f"  {'':18} ({arm.kernels})")
    lines += _device_time_lines(run.tables["device_time"])
    lines += ["", f"{'memory, MiB':28} {'planned':>12} {'measured':>12}"]
    memory = run.tables["memory"]
    planned = memory["planned_bytes"].astype(float) / 2**20
    measured = memory["measured_bytes"].astype(float) / 2**20
    for part, plan, found in zip(memory["part"], planned, measured, strict=True):
        shown = _number(None if np.isnan(found) else found, 1, ",")
        lines.append(f"  {part:26} {plan:12,.1f} {shown:>12}")
    lines += ["", "goals"]
    for goal in reached:
        sign = ">=" if goal.at_least else "<="
        value = "no value" if goal.value is None else _interval(goal.value)
        bound = f"{sign} {goal.wanted:g}"
        lines.append(f"  {goal.point_id:20} {goal.name:38} {value:26} {bound:8} {goal.outcome}")
    return "\n".join(lines).lstrip("\n")


def _device_time_lines(table: pd.DataFrame) -> list[str]:
    lines = []
    for (point_id, arm), rows in table.groupby(["point_id", "arm"], sort=False):
        reasons = rows["left_out"].dropna()
        if len(reasons):
            lines.append(f"{point_id} {arm}: no device times: {reasons.iloc[0]}")
            continue
        found = rows.sort_values("ms_per_step", ascending=False)
        text = ", ".join(f"{row.category} {row.ms_per_step:.3f}" for row in found.itertuples())
        lines.append(f"{point_id} {arm}: ms a step: {text}")
    return ["", *lines] if lines else []


def _middle(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio[0]


def _interval(ratio: Ratio) -> str:
    return f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]"


def _number(value: float | None, digits: int, separator: str = "") -> str:
    return "-" if value is None else f"{value:{separator}.{digits}f}"

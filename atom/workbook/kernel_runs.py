"""``python -m atom sweep kernels``: time the state kernels on an accelerator, and record it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from atom.benchmarks.kernel_rows import Question
from atom.benchmarks.kernel_speed import (
    EXPERIMENT,
    GraphBench,
    KernelSpeedSettings,
    build_points,
    quick,
    run_points,
)
from atom.benchmarks.race_environment import look_around
from atom.config import DeviceChoice
from atom.device import DeviceKind, open_device
from atom.errors import BadInput
from atom.workbook.kernel_analysis import ArmSummary, summarise
from atom.workbook.kernels import refuse_unwritable
from atom.workbook.parameters import read_given
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter
from atom.workbook.sweep_progress import NoProgress, SweepProgress, TerminalProgress
from atom.workbook.tables import shown_path

#: seconds of a point (compilation of the peers' kernels included), for the estimate
_POINT_SECONDS = 1.6


def record_kernels(
    settings: KernelSpeedSettings, root: str | Path, progress: SweepProgress | None = None
) -> Run:
    """Run the experiment in this process and record it below ``root``.

    Args:
        settings: what to run.
        root: folder of runs, e.g. ``data/runs``.
        progress: told what happens; ``None`` is silent.

    Raises:
        DeviceError: no accelerator, or a kernel whose outputs are wrong.
    """
    progress = progress or NoProgress()
    # the facts are read before this process is one of those that use the GPU
    around = look_around(DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA)
    device = open_device(DeviceChoice.ACCELERATOR)
    for warning in around.warnings:
        progress.note(f"warning: {warning}")
    bench = GraphBench(device)
    facts = {**around.facts, "kernels": {"cold_bytes": bench.cold_bytes, **_peers()}}
    plain = settings.model_dump(mode="json")
    provenance = collect_provenance(device.properties, EXPERIMENT, plain, facts)
    writer = RunWriter(root, device.properties.machine, EXPERIMENT, provenance)
    points = len(build_points(settings))
    progress.start(points, points * _POINT_SECONDS)
    try:
        for point, rows in run_points(settings, bench):
            writer.write_point(point.point_id, {"samples": rows})
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
    """Versions of the libraries that are compared with, where installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("flash-linear-attention", "fla-core", "transformers", "causal-conv1d"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def settings_from(arguments: argparse.Namespace) -> KernelSpeedSettings:
    """Settings of a command line of ``sweep kernels``.

    Raises:
        BadInput: unknown names, wrong values, or options that only other sweeps have.
    """
    for name in ("processes", "resume", "trials"):
        if getattr(arguments, name) is not None:
            raise BadInput(f"sweep kernels has no --{name}: it is one process; see -p repeats N")
    if arguments.only:
        raise BadInput("sweep kernels has no --only; narrow it with -p batch_sizes '[256]'")
    if arguments.device == DeviceChoice.VIRTUAL:
        raise BadInput("sweep kernels needs an accelerator: a virtual device has no kernel speed")
    given: dict[str, Any] = read_given(arguments.parameters, None)
    if arguments.seed is not None:
        given["seed"] = arguments.seed
    settings = KernelSpeedSettings.parse(given, where="sweep kernels")
    return quick(settings) if arguments.quick else settings


def sweep(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code.

    Raises:
        BadInput, DeviceError: see :func:`record_kernels`.
    """
    settings = settings_from(arguments)
    if arguments.dry_run:
        points = build_points(settings)
        for point in points:
            print(f"{point.point_id:60} {len(point.arms)} arms")
        print(
            f"{len(points)} points x {settings.repeats} repeats on an accelerator: about "
            f"{len(points) * _POINT_SECONDS:.0f} s"
        )
        return 0
    refuse_unwritable(Path(arguments.out), "folder of runs")
    run = record_kernels(settings, arguments.out, TerminalProgress())
    summaries = summarise(run.tables["samples"])
    shown = shown_path(run.path)
    if arguments.json:
        rows = [asdict(summary) for summary in summaries]
        print(json.dumps({"format": 1, "run": str(shown), "rows": rows}, indent=1))
    else:
        print(result_text(summaries))
        print(f"\n{run.provenance.evidence} on {run.provenance.device}: {shown}")
    return 0


def result_text(summaries: Sequence[ArmSummary]) -> str:
    """A table a point: median, rate and ratio with its interval."""
    lines = []
    last = None
    for summary in summaries:
        if summary.point_id != last:
            last = summary.point_id
            guard = summary.question == Question.GUARD
            base = "unguarded" if guard else "copy_"
            lines += ["", f"{last:50} {'us':>9} {'TB/s':>6}   time over {base}"]
        if summary.microseconds is None:
            lines.append(f"  {summary.arm:48} left out: {summary.left_out}")
            continue
        line = f"  {summary.arm:48} {summary.microseconds:9.2f} {summary.terabytes_per_s:6.2f}"
        if summary.ratio is not None:
            line += f"   {summary.ratio:.3f} [{summary.low:.3f}, {summary.high:.3f}]"
        lines.append(line)
    lines += ["", "TB/s: bytes of our kernel over the arm's time. 95% bootstrap intervals."]
    return "\n".join(lines).lstrip("\n")

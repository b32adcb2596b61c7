"""``python -m atom sweep lifetime``: run the seven paths with and without protection; record."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from atom.benchmarks.lifetime_paths import own_queue_stream
from atom.benchmarks.race_environment import look_around, refuse_hiding_settings
from atom.benchmarks.source_lifetime import EXPERIMENT, build_points, run_point
from atom.config import DeviceChoice, LifetimeSettings
from atom.device import DeviceKind, open_device
from atom.errors import BadInput
from atom.workbook.parameters import read_given
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter
from atom.workbook.sweep_progress import NoProgress, SweepProgress, TerminalProgress
from atom.workbook.tables import shown_path

QUICK_TRIALS = 10
#: host seconds of a trial beyond its parked time, for the estimate
_TRIAL_SECONDS = 0.002


def record_lifetime(
    settings: LifetimeSettings, root: str | Path, progress: SweepProgress | None = None
) -> Run:
    """Run the experiment in this process and record it below ``root``.

    Args:
        settings: what to run.
        root: folder of runs, e.g. ``data/runs``.
        progress: told what happens; ``None`` is silent.

    Raises:
        BadInput: an unknown path, or an environment that hides the race.
        DeviceError: no accelerator, or no stream that can be parked.
    """
    progress = progress or NoProgress()
    points = build_points(settings)
    if settings.device is DeviceChoice.ACCELERATOR:
        refuse_hiding_settings(os.environ)
    kind = DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA
    # the facts are read before this process is one of those that use the GPU
    around = look_around(DeviceKind.VIRTUAL if settings.device is DeviceChoice.VIRTUAL else kind)
    device = open_device(settings.device, profile=settings.device_profile, seed=settings.seed)
    for warning in around.warnings:
        progress.note(f"warning: {warning}")
    plain = settings.model_dump(mode="json")
    stream = own_queue_stream(device, settings.park_seconds)
    planned = {"trials": len(points)}
    provenance = collect_provenance(device.properties, EXPERIMENT, plain, around.facts, planned)
    writer = RunWriter(root, device.properties.machine, EXPERIMENT, provenance)
    trials = settings.trials
    parked = settings.park_seconds if settings.device is DeviceChoice.ACCELERATOR else 0.0
    progress.start(len(points) * trials, len(points) * trials * (parked + _TRIAL_SECONDS))
    try:
        for point in points:
            row = run_point(device, stream, point, trials, settings.park_seconds)
            writer.write_point(point.point_id.replace("/", "-"), {"trials": [row]})
            progress.advance(trials)
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


def settings_from(arguments: argparse.Namespace, present: DeviceChoice | None) -> LifetimeSettings:
    """Settings of a command line of ``sweep lifetime``.

    Args:
        arguments: parsed options of ``sweep``.
        present: device of this machine, used where none is named.

    Raises:
        BadInput: unknown names, wrong values, or options that only other sweeps have.
    """
    for name in ("processes", "resume"):
        if getattr(arguments, name) is not None:
            raise BadInput(f"sweep lifetime has no --{name}: it is one process and a minute")
    given: dict[str, Any] = read_given(arguments.parameters, None)
    if arguments.device is not None or present is not None:
        given.setdefault("device", arguments.device or str(present))
    for name in ("trials", "seed"):
        if getattr(arguments, name) is not None:
            given[name] = getattr(arguments, name)
    if arguments.only:
        given["paths"] = list(arguments.only)
    if arguments.quick:
        given.setdefault("trials", QUICK_TRIALS)
    return LifetimeSettings.parse(given, where="sweep lifetime")


def sweep(arguments: argparse.Namespace, present: DeviceChoice | None) -> int:
    """Run the command. Returns its exit code.

    Raises:
        BadInput, DeviceError: see :func:`record_lifetime`.
    """
    settings = settings_from(arguments, present)
    if arguments.dry_run:
        points = build_points(settings)
        print("\n".join(point.point_id for point in points))
        print(f"{len(points)} points x {settings.trials} trials on {settings.device.value}")
        return 0
    run = record_lifetime(settings, arguments.out, TerminalProgress())
    table = run.tables["trials"]
    shown = shown_path(run.path)
    if arguments.json:
        rows = json.loads(table.to_json(orient="records"))
        print(json.dumps({"format": 1, "run": str(shown), "rows": rows}, indent=1))
    else:
        print(result_text(table))
        print(f"\n{run.provenance.evidence} on {run.provenance.device}: {shown}")
    surprises = unexpected(table)
    for surprise in surprises:
        print(f"unexpected: {surprise}", file=sys.stderr)
    return 1 if surprises else 0


def unexpected(table: pd.DataFrame) -> list[str]:
    """Points that are not as the fix says: protected never stale, controls always."""
    expected = table["trials"].where(table["arm"] == "control", 0)
    return [
        f"{row.point_id}: {row.stale} of {row.trials} trials were stale"
        for row in table[table["stale"] != expected].itertuples()
    ]


def result_text(table: pd.DataFrame) -> str:
    """Stale of trials: a row a path, two columns a protocol."""
    protocols: Sequence[str] = list(dict.fromkeys(table["protocol"]))
    lines = ["stale trials with the protocol in force / with its protection taken away"]
    lines.append(f"{'':14}" + "".join(f"{name:>18}" for name in protocols))
    for path, group in table.groupby("path", sort=False):
        cells = []
        for protocol in protocols:
            counts = {}
            for row in group[group["protocol"] == protocol].itertuples():
                counts[row.arm] = f"{row.stale}/{row.trials}"
            both = [counts.get(arm, "-") for arm in ("protected", "control")]
            cells.append(" / ".join(both) if counts else "")
        lines.append(f"{path:14}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)

"""``python -m atom sweep engine-fault``: the fault in a whole engine, arm by arm; recorded."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from atom.benchmarks.engine_fault import (
    EXPERIMENT,
    load_fault_model,
    measure_engine_fault,
)
from atom.benchmarks.engine_fault_arms import EngineFaultSettings, build_points, point_id, quick
from atom.benchmarks.engine_fault_child import run_in_child
from atom.benchmarks.race_environment import look_around, refuse_hiding_settings
from atom.config import DeviceChoice
from atom.device import DeviceKind, open_device
from atom.errors import BadInput
from atom.transfer.copy_protocol import UnpatchedWarning
from atom.workbook.kernels import refuse_unwritable
from atom.workbook.parameters import read_given
from atom.workbook.provenance import collect_provenance, redact
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter
from atom.workbook.sweep_progress import NoProgress, SweepProgress, TerminalProgress
from atom.workbook.tables import shown_path

#: budgets and model on an accelerator, where the defaults would be over before the store is
ACCELERATOR: dict[str, Any] = {"token_budgets": (8192, 16384), "model": "preset:m395"}
#: seconds of an arm, for the estimate
_ARM_SECONDS = 4.0


def record_engine_fault(
    settings: EngineFaultSettings, root: str | Path, progress: SweepProgress | None = None
) -> Run:
    """Run the experiment in this process and record it below ``root``.

    On an accelerator the arms that may end their process run in one of their own.

    Args:
        settings: what to run.
        root: folder of runs, e.g. ``data/runs``.
        progress: told what happens; ``None`` is silent.

    Raises:
        BadInput: an unknown arm, or an environment that hides the race.
        DeviceError: no accelerator, or the reference arm failed.
    """
    progress = progress or NoProgress()
    points = len(build_points(settings))
    hardware = settings.device is DeviceChoice.ACCELERATOR
    if hardware:
        refuse_hiding_settings(os.environ)
    kind = DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA
    # the facts are read before this process is one of those that use the GPU
    around = look_around(kind if hardware else DeviceKind.VIRTUAL)
    device = open_device(settings.device, profile=settings.device_profile, seed=settings.seed)
    for warning in around.warnings:
        progress.note(f"warning: {warning}")
    loaded = load_fault_model(settings, device)
    plain = settings.model_dump(mode="json")
    provenance = collect_provenance(
        device.properties, EXPERIMENT, plain, around.facts, {"arms": points}
    )
    writer = RunWriter(root, device.properties.machine, EXPERIMENT, provenance)
    progress.start(points, points * _ARM_SECONDS)
    child = run_in_child if hardware else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnpatchedWarning)
            for row in measure_engine_fault(device, loaded, settings, child):
                # an error of a foreign library may name a file or a host
                clean = row.model_copy(update={"error": redact(row.error)})
                writer.write_point(row.point_id.replace("/", "-"), {"arms": [clean]})
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


def settings_from(
    arguments: argparse.Namespace, present: DeviceChoice | None
) -> EngineFaultSettings:
    """Settings of a command line of ``sweep engine-fault``.

    Args:
        arguments: parsed options of ``sweep``.
        present: device of this machine, used where none is named.

    Raises:
        BadInput: unknown names, wrong values, or options that only other sweeps have.
    """
    for name in ("processes", "resume", "trials"):
        if getattr(arguments, name) is not None:
            raise BadInput(f"sweep engine-fault has no --{name}: an arm is one engine, run once")
    given: dict[str, Any] = read_given(arguments.parameters, None)
    if arguments.device is not None or present is not None:
        given.setdefault("device", arguments.device or str(present))
    if arguments.seed is not None:
        given["seed"] = arguments.seed
    if arguments.only:
        given["only"] = list(arguments.only)
    settings = EngineFaultSettings.parse(given, where="sweep engine-fault")
    if settings.device is DeviceChoice.ACCELERATOR:
        more = {k: v for k, v in ACCELERATOR.items() if k not in settings.model_fields_set}
        return settings.model_copy(update=more)
    return quick(settings) if arguments.quick else settings


def sweep(arguments: argparse.Namespace, present: DeviceChoice | None) -> int:
    """Run the command. Returns its exit code: 1 if a protected arm was stale or changed.

    Raises:
        BadInput, DeviceError: see :func:`record_engine_fault`.
    """
    settings = settings_from(arguments, present)
    points = build_points(settings)
    if arguments.dry_run:
        print("\n".join(point_id(arm, budget) for budget, arm in points))
        seconds = len(points) * _ARM_SECONDS
        print(f"{len(points)} engines on {settings.device.value}: about {seconds:.0f} s")
        return 0
    refuse_unwritable(Path(arguments.out), "folder of runs")
    run = record_engine_fault(settings, arguments.out, TerminalProgress())
    table = run.tables["arms"]
    shown = shown_path(run.path)
    if arguments.json:
        rows = json.loads(table.to_json(orient="records"))
        print(json.dumps({"format": 1, "run": str(shown), "rows": rows}, indent=1))
    else:
        print(result_text(table))
        print(f"\n{run.provenance.evidence} on {run.provenance.device}: {shown}")
    surprises = unexpected(table)
    for surprise in surprises:
        print(f"unexpected: {surprise}")
    return 1 if surprises else 0


def unexpected(table: pd.DataFrame) -> list[str]:
    """Protected arms that were stale, failed a request, or died."""
    found = []
    for row in table[[str(name) != "unpatched" for name in table["protocol"]]].itertuples():
        if row.stale_statuses or row.guard_errors or row.failed_requests or row.crashed:
            found.append(
                f"{row.point_id}: {row.stale_statuses} stale statuses, {row.guard_errors} guard "
                f"errors, {row.failed_requests} failed requests; {row.error}"
            )
    return found


def result_text(table: pd.DataFrame) -> str:
    """An arm a line: statuses, the value found, what caught it, and what became of the requests."""
    lines = [
        f"{'arm/token budget':32} {'stale':>9} {'largest':>8} {'tag':>4} {'guard':>6} "
        f"{'failed':>7} {'changed':>8}  first wrong status; end"
    ]
    for row in table.to_dict("records"):
        guard = "-" if pd.isna(row["guard_value"]) else str(int(row["guard_value"]))
        end = "died" if row["crashed"] else ""
        if end and not pd.isna(row["exit_code"]):
            end += f" (exit code {int(row['exit_code'])})"
        wrong = "" if pd.isna(row["first_wrong_status"]) else row["first_wrong_status"]
        stale = f"{row['stale_statuses']}/{row['statuses']}"
        changed = f"{row['changed_requests']}/{row['compared_requests']}"
        lines.append(
            f"{row['point_id']:32} {stale:>9} {row['largest_bonus']:>8} "
            f"{row['stale_payloads']:>4} {guard:>6} {row['failed_requests']:>7} {changed:>8}  "
            f"{wrong} {end}".rstrip()
        )
    return "\n".join(lines)

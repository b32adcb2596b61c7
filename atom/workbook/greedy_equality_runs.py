"""``python -m atom sweep greedy-equality``: greedy tokens of many engines, compared; recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from atom.benchmarks.greedy_equality import load_models, measure_greedy_equality
from atom.benchmarks.greedy_equality_rows import (
    EXPERIMENT,
    GreedyEqualitySettings,
    Precision,
    build_arms,
    quick,
)
from atom.benchmarks.race_environment import look_around
from atom.config import DeviceChoice
from atom.device import DeviceKind, open_device
from atom.errors import BadInput
from atom.workbook.kernels import refuse_unwritable
from atom.workbook.parameters import read_given
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter
from atom.workbook.sweep_progress import NoProgress, SweepProgress, TerminalProgress
from atom.workbook.tables import shown_path

#: model and precision on an accelerator
ACCELERATOR: dict[str, Any] = {"model": "preset:m395", "precision": Precision.BFLOAT16}
#: seconds of an arm, for the estimate
_ARM_SECONDS = 4.0


def record_greedy_equality(
    settings: GreedyEqualitySettings, root: str | Path, progress: SweepProgress | None = None
) -> Run:
    """Run the experiment in this process and record it below ``root``.

    Args:
        settings: what to run.
        root: folder of runs, e.g. ``data/runs``.
        progress: told what happens; ``None`` is silent.

    Raises:
        BadInput: an unknown arm or model, or an engine that does not fit.
        DeviceError: no accelerator.
    """
    progress = progress or NoProgress()
    points = len(build_arms(settings))
    kind = DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA
    hardware = settings.device is DeviceChoice.ACCELERATOR
    # the facts are read before this process is one of those that use the GPU
    around = look_around(kind if hardware else DeviceKind.VIRTUAL)
    device = open_device(settings.device, profile=settings.device_profile, seed=settings.seed)
    for warning in around.warnings:
        progress.note(f"warning: {warning}")
    models = load_models(settings, device)
    plain = settings.model_dump(mode="json")
    provenance = collect_provenance(
        device.properties, EXPERIMENT, plain, around.facts, {"arms": points}
    )
    writer = RunWriter(root, device.properties.machine, EXPERIMENT, provenance)
    progress.start(points, points * _ARM_SECONDS)
    try:
        for row in measure_greedy_equality(device, models, settings):
            writer.write_point(row.point_id, {"arms": [row]})
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
) -> GreedyEqualitySettings:
    """Settings of a command line of ``sweep greedy-equality``.

    Args:
        arguments: parsed options of ``sweep``.
        present: device of this machine, used where none is named.

    Raises:
        BadInput: unknown names, wrong values, or options that only other sweeps have.
    """
    for name in ("processes", "resume", "trials"):
        if getattr(arguments, name) is not None:
            raise BadInput(f"sweep greedy-equality has no --{name}: an arm is one engine, run once")
    given: dict[str, Any] = read_given(arguments.parameters, None)
    if arguments.device is not None or present is not None:
        given.setdefault("device", arguments.device or str(present))
    if arguments.seed is not None:
        given["seed"] = arguments.seed
    if arguments.only:
        given["only"] = list(arguments.only)
    settings = GreedyEqualitySettings.parse(given, where="sweep greedy-equality")
    if settings.device is DeviceChoice.ACCELERATOR:
        more = {k: v for k, v in ACCELERATOR.items() if k not in settings.model_fields_set}
        settings = settings.model_copy(update=more)
    return quick(settings) if arguments.quick else settings


def sweep(arguments: argparse.Namespace, present: DeviceChoice | None) -> int:
    """Run the command. Returns its exit code: 1 if an arm differs by more than rounding.

    Raises:
        BadInput, DeviceError: see :func:`record_greedy_equality`.
    """
    settings = settings_from(arguments, present)
    arms = build_arms(settings)
    if arguments.dry_run:
        print("\n".join(arm.name for arm in arms))
        seconds = len(arms) * _ARM_SECONDS
        print(f"{len(arms)} engines on {settings.device.value}: about {seconds:.0f} s")
        return 0
    refuse_unwritable(Path(arguments.out), "folder of runs")
    run = record_greedy_equality(settings, arguments.out, TerminalProgress())
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
    """Arms that differ by more than rounding, and a control that does not."""
    found = []
    for row in _rows(table):
        if row.control and not row.above_bound:
            found.append(f"{row.arm}: wrong on purpose, yet no token differs by more than rounding")
        if not row.control and row.above_bound:
            found.append(
                f"{row.arm}: {row.above_bound} requests differ by more than the rounding error "
                f"of {row.bound:.4f}, up to {row.largest_shortfall:.4f}"
            )
    return found


def _rows(table: pd.DataFrame) -> list[Any]:
    return list(table.itertuples())


def result_text(table: pd.DataFrame) -> str:
    """An arm a line: what was compared, what differs, and by how much."""
    lines = [
        f"{'arm':30} {'tokens':>7} {'accepted':>9} {'differ':>8} {'above':>6} {'shortfall':>10}"
    ]
    rows = _rows(table)
    for row in rows:
        share = f"{row.accepted_tokens / row.drafted_tokens:.0%}" if row.drafted_tokens else "-"
        shortfall = "-" if pd.isna(row.largest_shortfall) else f"{row.largest_shortfall:.4f}"
        lines.append(
            f"{row.arm:30} {row.tokens_compared:>7} {share:>9} "
            f"{f'{row.first_differences}/{row.requests}':>8} {row.above_bound:>6} {shortfall:>10}"
        )
    first = rows[0]
    lines += [
        "",
        f"{first.precision}: rounding moves the gap between the two likeliest tokens by "
        f"{first.bound:.4f} at most;",
        f"the gap's median is {first.median_margin:.4f}, and at {first.places_above_bound:.0%} of "
        "the places it is larger than that",
    ]
    return "\n".join(lines)

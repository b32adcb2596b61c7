"""A sweep of points in one process: plan, pre-flight, record, go on where it stopped.

An experiment takes part by a :class:`PointSweep`. Each point is recorded when it is finished, so a
kill loses the point in progress only; the race has a driver of its own, a process a job.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from pydantic import BaseModel

from atom.benchmarks.race_environment import look_around, refuse_hiding_settings
from atom.config import DeviceChoice, Settings
from atom.device import Device, DeviceKind, open_device
from atom.errors import AtomError, BadInput
from atom.options import refuse_named_twice
from atom.workbook.kernels import refuse_unwritable
from atom.workbook.parameters import read_given
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter, read_provenance
from atom.workbook.sweep_control import (
    INTERRUPTED,
    SweepInterrupted,
    began_with_ctrl_c,
    name_what_spoils,
    refuse_no_accelerator,
    refuse_other_device,
    resume_text,
    terminated_like_interrupted,
    this_kind,
)
from atom.workbook.sweep_progress import NoProgress, SweepProgress, TerminalProgress
from atom.workbook.tables import shown_path

S = TypeVar("S", bound=Settings)

#: identity of a point in its record, and its rows by table
Measured = Generator[tuple[str, Mapping[str, Sequence[BaseModel]]], None, None]


#: options of the command line that not every experiment has
OPTIONS = (
    *("processes", "trials", "gpus", "scheduler", "traces", "gsm8k"),
    *("server_command", "base_url", "client"),
)


@dataclass(frozen=True)
class PlannedPoint:
    """A point that a sweep will run.

    Attributes:
        record_id: identity in the record.
        text: for people.
        seconds: how long it takes on an accelerator, roughly.
    """

    record_id: str
    text: str
    seconds: float


class SweepOver(AtomError):
    """A sweep ends before its plan does, as it was told to; what is left can be resumed.

    Args:
        reasons: why, by record identity of each point that did not run.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(f"{len(reasons)} points did not run: {next(iter(reasons.values()))}")
        self.reasons = dict(reasons)


class PointSweep(ABC, Generic[S]):
    """How one experiment is swept. One object an experiment, without state."""

    #: the word behind ``sweep``
    command: ClassVar[str]
    #: key of the record tables
    experiment: ClassVar[str]
    #: class of its settings
    settings: ClassVar[type[Settings]]
    #: its rows' table
    table: ClassVar[str] = "arms"
    #: whether every point gives that table one row
    row_a_point: ClassVar[bool] = False
    #: of the options of some experiments (``OPTIONS``), those that it takes
    takes: ClassVar[frozenset[str]] = frozenset()
    #: why it takes no other
    why_not: ClassVar[str]
    #: setting that ``--only`` fills
    only: ClassVar[str] = "only"
    #: whether it runs on either device, so that the one that is present is looked up
    asks_for_device: ClassVar[bool] = True

    @abstractmethod
    def parse(self, given: dict[str, Any], quick: bool) -> S:
        """Settings from those that were given. Raises ``BadInput``."""

    def recorded(self, settings: dict[str, Any], where: str) -> S:
        """Settings of a record. Raises ``BadInput``."""
        return cast(S, self.settings.parse(settings, where=where))

    @abstractmethod
    def plan(self, settings: S) -> list[PlannedPoint]:
        """All points, in the order in which they run. Raises ``BadInput``."""

    @abstractmethod
    def measure(self, settings: S, device: Device, ready: Any, done: Collection[str]) -> Measured:
        """Run the points whose record identity is not in ``done``."""

    def refuse_missing(self, settings: S) -> None:
        """Raise ``BadInput`` unless the folders that the settings name are here."""
        from atom.model_engine.engine_builder import PRESET
        from atom.models.model_config import ModelConfig

        named: dict[str, Any] = settings.model_dump()
        traces, model = named.get("traces"), named.get("model")
        if traces is not None and not any(Path(traces).glob("*.json")):
            raise BadInput(f"--traces {traces}: no trace there; expected one .json a session")
        # a server's model is the server's, and a cluster's workers have their own
        ours = not getattr(settings, "serves", False) and self.is_here(settings)
        if not ours or model is None or model == type(settings).model_fields["model"].default:
            return
        if not model.startswith(PRESET):
            ModelConfig.from_pretrained(model)

    def side_by_side(self, settings: S) -> int:
        """Points that run at once."""
        return 1

    def is_here(self, settings: S) -> bool:
        """Whether the points run on this machine."""
        return True

    def results(self, run: Run) -> dict[str, Any]:
        """What ``--json`` prints besides the run's folder: the rows, unless there is more."""
        return {"rows": json.loads(run.tables[self.table].to_json(orient="records"))}

    @abstractmethod
    def text(self, run: Run) -> str:
        """What is printed without ``--json``."""

    def device_of(self, settings: S) -> DeviceChoice:
        """Where the settings run."""
        return DeviceChoice(getattr(settings, "device", DeviceChoice.ACCELERATOR))

    def where(self, settings: S) -> str:
        """What runs the points, in words."""
        accelerator = self.device_of(settings) is DeviceChoice.ACCELERATOR
        return "an accelerator" if accelerator else "the virtual device"

    def open(self, settings: S) -> Device:
        """The device of the settings."""
        values = settings.model_dump()
        named = {"profile": "device_profile", "seed": "seed"}
        given = {name: values[field] for name, field in named.items() if field in values}
        return open_device(self.device_of(settings), **given)

    def prepare(self, settings: S, device: Device) -> Any:
        """What all points need: made before anything is recorded."""
        return None

    def facts(self, ready: Any) -> dict[str, Any]:
        """More facts for the record."""
        return {}

    def planned_rows(self, points: int) -> dict[str, int] | None:
        """Rows of a finished record by table, where the plan says how many."""
        return {self.table: points} if self.row_a_point else None

    def unexpected(self, run: Run) -> list[str]:
        """What is not as it must be: each is printed, and the exit code is 1."""
        return []

    def settings_from(
        self, arguments: argparse.Namespace, present: DeviceChoice | None = None
    ) -> S:
        """Settings of a command line; those of a resumed run come from its record.

        Args:
            arguments: parsed options of ``sweep``.
            present: device of this machine, used where none is named.

        Raises:
            BadInput: unknown names, wrong values, options that this sweep has not, or options that
                contradict ``--resume``.
        """
        given, known = given_settings(
            arguments, self.command, self.experiment, self.takes, self.why_not, self.only
        )
        if known is not None:
            return self.recorded(known, f"settings of {arguments.resume}")
        if present is not None:
            given.setdefault("device", present.value)
        return self.parse(given, arguments.quick)


def given_settings(
    arguments: argparse.Namespace,
    command: str,
    experiment: str,
    takes: Collection[str],
    why_not: str,
    only: str = "only",
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What a command line says of settings.

    Args:
        arguments: parsed options of ``sweep``.
        command: the word behind it.
        experiment: key of its records.
        takes: of ``OPTIONS``, those that it takes.
        why_not: why it takes no other.
        only: setting that ``--only`` fills.

    Returns:
        Values that were given, and those of the record that ``--resume`` names, or ``None``.

    Raises:
        BadInput: unknown names, options that this sweep has not, or ones that contradict
            ``--resume``.
    """
    for name in OPTIONS:
        if getattr(arguments, name, None) is not None and name not in takes:
            raise BadInput(f"sweep {command} has no --{name.replace('_', '-')}: {why_not}")
    given: dict[str, Any] = read_given(arguments.parameters, None)
    named = ("device", "seed", *sorted(takes))
    options = {name: getattr(arguments, name) for name in named}
    options = {name: value for name, value in options.items() if value is not None}
    flags = {name: f"--{name.replace('_', '-')}" for name in options}
    if arguments.only:
        options[only], flags[only] = list(arguments.only), "--only"
    refuse_named_twice(flags, arguments.parameters)
    given |= options
    if arguments.resume is None:
        return given, None
    if given or arguments.quick:
        names = ", ".join([*given, *(["quick"] if arguments.quick else [])])
        raise BadInput(f"--resume takes the recorded settings; leave out: {names}")
    known = read_provenance(Path(arguments.resume))
    if known.experiment != experiment:
        raise BadInput(f"{arguments.resume} is a run of {known.experiment}")
    return given, known.settings


def record_points(
    sweep: PointSweep[S],
    settings: S,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run an experiment in this process and record it below ``root``.

    Args:
        sweep: which experiment.
        settings: what to run.
        root: folder of runs, e.g. ``data/runs``.
        progress: told what happens; ``None`` is silent.
        resume: folder of an unfinished run with the same settings.

    Raises:
        BadInput: settings that cannot run, surroundings that spoil it, or a run that cannot be
            resumed: finished, or of other settings, another device or other software.
        DeviceError: no accelerator, or what the experiment raises.
        SweepInterrupted: Ctrl-C; what was finished is recorded.
    """
    progress = progress or NoProgress()
    points = sweep.plan(settings)
    sweep.refuse_missing(settings)
    kind = DeviceKind.VIRTUAL
    if sweep.device_of(settings) is DeviceChoice.ACCELERATOR and sweep.is_here(settings):
        kind = this_kind()
        refuse_hiding_settings(os.environ)
        refuse_no_accelerator(or_virtual=sweep.asks_for_device)
    # the facts are read before this process is one of those that use the GPU
    around = look_around(kind)
    device = sweep.open(settings)
    for warning in around.warnings:
        progress.note(f"warning: {warning}")
    plain = settings.model_dump(mode="json")
    if resume is not None:
        refuse_other_device(read_provenance(Path(resume)), Path(resume), device.properties)
    ready = sweep.prepare(settings, device)
    if resume is None:
        facts = {**around.facts, **sweep.facts(ready)}
        planned = sweep.planned_rows(len(points))
        provenance = collect_provenance(device.properties, sweep.experiment, plain, facts, planned)
        writer = RunWriter(root, device.properties.machine, sweep.experiment, provenance)
    else:
        writer = RunWriter.resume(resume, plain)
    left = [point for point in points if not writer.has(point.record_id)]
    seconds = sum(point.seconds for point in left)
    measured = sweep.measure(settings, device, ready, frozenset(writer.points))
    progress.start(len(left), seconds / sweep.side_by_side(settings))
    if len(left) < len(points):
        progress.note(f"{len(points) - len(left)} of {len(points)} points are recorded already")
    try:
        if left:
            for record_id, tables in measured:
                writer.write_point(record_id, tables)
                progress.advance(1)
    except KeyboardInterrupt:
        # a second Ctrl-C leaves the record unsealed, which can be resumed as well
        with suppress(KeyboardInterrupt):
            writer.finish("interrupted", "interrupted by the user")
        raise SweepInterrupted(writer.path) from None
    except SweepOver as over:
        writer.add_fact("stopped_early", "not_run", over.reasons)
        writer.finish("interrupted", str(over))
        progress.note(f"{over}; go on with: {resume_text(sweep.command, writer.path)}")
        return load_run(writer.path)
    except BaseException as error:
        if began_with_ctrl_c(error):
            writer.finish("interrupted", "interrupted by the user")
            raise SweepInterrupted(writer.path) from error
        # a disk that is full is one, and takes no more of this either: then it counts as killed
        with suppress(OSError):
            writer.finish("failed", f"{type(error).__name__}: {error}")
        progress.note(
            f"failed; {len(writer.points)} finished points are kept; go on with: "
            + resume_text(sweep.command, writer.path)
        )
        raise
    finally:
        # a second Ctrl-C may strike in the first of them
        try:
            progress.stop()
        finally:
            measured.close()
    writer.finish("finished")
    return load_run(writer.path)


def run_sweep(
    sweep: PointSweep[S], arguments: argparse.Namespace, present: DeviceChoice | None = None
) -> int:
    """Run ``python -m atom sweep <experiment>``.

    Args:
        sweep: which experiment.
        arguments: parsed options.
        present: device of this machine, used where none is named.

    Returns:
        Exit code: 0 fine, 1 something was not as it must be, 130 interrupted.

    Raises:
        BadInput, DeviceError: see :func:`record_points`.
    """
    settings = sweep.settings_from(arguments, present)
    if arguments.dry_run:
        _dry_run(sweep, settings, arguments)
        return 0
    refuse_unwritable(Path(arguments.resume or arguments.out), "folder of runs")
    try:
        with terminated_like_interrupted():
            progress = TerminalProgress(name=sweep.command, unit="points")
            run = record_points(sweep, settings, arguments.out, progress, arguments.resume)
    except KeyboardInterrupt as interrupt:
        earlier = interrupt.__context__
        known = [one for one in (interrupt, earlier) if isinstance(one, SweepInterrupted)]
        stop = known[0] if known else SweepInterrupted(None)
        if stop.path is None:
            print("interrupted before anything was recorded", file=sys.stderr)
        else:
            print(
                f"interrupted; finished points are kept in {shown_path(stop.path)}\n"
                f"go on with: {resume_text(sweep.command, stop.path)}",
                file=sys.stderr,
            )
        return INTERRUPTED
    shown = shown_path(run.path)
    if arguments.json:
        print(json.dumps({"format": 1, "run": str(shown), **sweep.results(run)}, indent=1))
    else:
        print(sweep.text(run))
        print(f"\n{run.provenance.evidence} on {run.provenance.device}: {shown}")
    surprises = sweep.unexpected(run)
    for surprise in surprises:
        print(f"unexpected: {surprise}", file=sys.stderr)
    return 1 if surprises else 0


def _dry_run(sweep: PointSweep[S], settings: S, arguments: argparse.Namespace) -> None:
    points = sweep.plan(settings)
    sweep.refuse_missing(settings)
    device = sweep.device_of(settings)
    if device is DeviceChoice.ACCELERATOR:
        name_what_spoils(or_virtual=sweep.asks_for_device)
    if arguments.resume is not None:
        done = RunWriter.finished_points(arguments.resume)
        points = [point for point in points if point.record_id not in done]
    total = sum(point.seconds for point in points)
    seconds = total / sweep.side_by_side(settings)
    minutes = total / 60 if device is DeviceChoice.ACCELERATOR else 0.0
    if arguments.json:
        values = {
            "format": 1,
            "experiment": sweep.experiment,
            "settings": settings.model_dump(mode="json"),
            "seconds": round(seconds, 1),
            "device_minutes": round(minutes, 2),
            "points": [{"point": p.record_id, "seconds": round(p.seconds, 2)} for p in points],
        }
        print(json.dumps(values, indent=1))
        return
    for point in points:
        print(point.text)
    where = sweep.where(settings)
    print(f"{len(points)} points on {where}: about {seconds:.0f} s ({minutes:.1f} device minutes)")

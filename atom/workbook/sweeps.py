"""``python -m atom sweep race``: run a sweep, record it, and go on where it stopped."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from atom.benchmarks.race import (
    WORKER_COMMAND,
    DeviceSeen,
    JobDone,
    JobFailed,
    accelerator_kind,
    measure,
)
from atom.benchmarks.race_environment import look_around, refuse_hiding_settings
from atom.benchmarks.race_estimate import estimate_seconds
from atom.benchmarks.race_plan import build_jobs, quick
from atom.config import DeviceChoice, RaceSettings
from atom.errors import DeviceError
from atom.options import add_setting
from atom.workbook.kernels import refuse_unwritable
from atom.workbook.point_sweep import PointSweep, given_settings, run_sweep
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter
from atom.workbook.sweep_control import (
    INTERRUPTED,
    SweepInterrupted,
    name_what_spoils,
    refuse_no_accelerator,
    refuse_other_device,
    resume_text,
    terminated_like_interrupted,
)
from atom.workbook.sweep_output import plan_json, plan_text, result_json, result_text
from atom.workbook.sweep_progress import NoProgress, SweepProgress, TerminalProgress
from atom.workbook.tables import shown_path

EXPERIMENT = "race"
DEFAULT_ROOT = "data/runs"

#: processes that failed before any reached the device: the others would do the same
HOPELESS_FAILURES = 3


@dataclass(frozen=True)
class SweepResult:
    """How a sweep ended.

    Attributes:
        run: the recorded run.
        failures: why jobs failed, one text a job; their points do not count.
    """

    run: Run
    failures: tuple[str, ...]


def run_race(
    settings: RaceSettings,
    root: str | Path,
    progress: SweepProgress | None = None,
) -> Run:
    """Run the race micro-benchmark and record it below ``root``.

    Args:
        settings: what to run.
        root: folder of runs, e.g. ``data/runs``.
        progress: told what happens; ``None`` is silent.

    Returns:
        The finished run.

    Raises:
        BadInput: settings or an environment that cannot show the race.
        DeviceError: no device, or a worker failed; the message names the run folder.
    """
    result = sweep_race(settings, root=root, progress=progress)
    if result.failures:
        raise DeviceError(
            f"{len(result.failures)} process(es) of the sweep failed; the others are recorded in "
            f"{shown_path(result.run.path)}:\n" + "\n".join(result.failures)
        )
    return result.run


def sweep_race(
    settings: RaceSettings,
    *,
    root: str | Path,
    resume: str | Path | None = None,
    progress: SweepProgress | None = None,
    subprocesses: bool | None = None,
    command: Sequence[str] = WORKER_COMMAND,
) -> SweepResult:
    """Run a sweep, or what is left of it. A process's points are recorded together or not at all.

    Args:
        settings: what to run.
        root: folder of runs.
        resume: folder of an unfinished run with the same settings.
        progress: told what happens; ``None`` is silent.
        subprocesses: a process a job; by default on an accelerator only.
        command: starts a worker process.

    Raises:
        BadInput, DeviceError: see :func:`run_race`; a failed worker is no error here.
        SweepInterrupted: Ctrl-C; what was finished is recorded.
    """
    progress = progress or NoProgress()
    if settings.device is DeviceChoice.ACCELERATOR:
        refuse_hiding_settings(os.environ)
        refuse_no_accelerator()
    jobs = build_jobs(settings)
    plain = settings.model_dump(mode="json")
    writer = None if resume is None else RunWriter.resume(resume, plain)
    left = [job for job in jobs if writer is None or not writer.has(job.name)]
    if writer is not None and not left:
        writer.finish("finished")
        return SweepResult(load_run(writer.path), ())
    around = look_around(accelerator_kind(settings))
    for warning in around.warnings:
        progress.note(f"warning: {warning}")
    trials = sum(point.arm.trials for job in left for point in job.points)
    progress.start(trials, estimate_seconds(left, settings))
    if len(left) < len(jobs):
        progress.note(f"{len(jobs) - len(left)} of {len(jobs)} processes are recorded already")
    failures: list[str] = []
    events = measure(settings, left, subprocesses=subprocesses, command=command)
    try:
        for event in events:
            if isinstance(event, DeviceSeen):
                if writer is None:
                    planned = {"trials": sum(len(job.points) for job in jobs)}
                    provenance = collect_provenance(
                        event.properties, EXPERIMENT, plain, around.facts, planned
                    )
                    writer = RunWriter(root, event.properties.machine, EXPERIMENT, provenance)
                else:
                    refuse_other_device(writer.provenance, writer.path, event.properties)
                # each setting has workers with an environment and an allocator of their own
                writer.add_fact("in_workers", event.job.setting, event.facts)
            elif isinstance(event, JobDone):
                assert writer is not None
                tables: dict[str, Sequence[BaseModel]] = {
                    "trials": event.rows,
                    "timeline": event.timeline,
                }
                writer.write_point(event.job.name, tables)
            elif isinstance(event, JobFailed):
                failures.append(f"{event.job.name}: {event.reason}")
                progress.note(f"failed: {failures[-1]}")
                if writer is None and len(failures) == HOPELESS_FAILURES:
                    break
            else:
                progress.advance(event.count)
    except KeyboardInterrupt:
        if writer is not None:
            writer.finish("interrupted", "interrupted by the user")
        raise SweepInterrupted(None if writer is None else writer.path) from None
    except BaseException as error:
        if writer is not None:
            writer.finish("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        # a second Ctrl-C may strike in the first of them
        try:
            progress.stop()
        finally:
            events.close()  # type: ignore[attr-defined]
    if writer is None:
        raise DeviceError("no worker process reached the device:\n" + "\n".join(failures))
    if failures:
        writer.finish("failed", f"{len(failures)} process(es) failed:\n" + "\n".join(failures))
    else:
        writer.finish("finished")
    return SweepResult(load_run(writer.path), tuple(failures))


# -- command line


#: experiment to the module with its sweep, imported when it is asked for
_POINT_SWEEPS = {
    "lifetime": "lifetime_runs",
    "kernels": "kernel_runs",
    "engine-fault": "engine_fault_runs",
    "engine-speed": "engine_speed_runs",
    "protocol-cost": "protocol_cost_runs",
    "greedy-equality": "greedy_equality_runs",
    "detectors": "detector_runs",
    "foreign": "foreign_runs",
    "throughput": "throughput_runs",
    "colocation": "colocation_runs",
    "capacity": "capacity_runs",
    "accuracy": "accuracy_runs",
}


def _point_sweep(name: str) -> PointSweep[Any]:
    found: PointSweep[Any] = import_module(f"atom.workbook.{_POINT_SWEEPS[name]}").SWEEP
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m atom sweep``."""
    parser.add_argument(
        "experiment",
        choices=[EXPERIMENT, *_POINT_SWEEPS],
        help="what to sweep",
    )
    parser.add_argument(
        "--device",
        choices=[choice.value for choice in DeviceChoice],
        help="default: the accelerator if there is one, else the virtual device",
    )
    parser.add_argument("--quick", action="store_true", help="a small sweep, at most a minute")
    parser.add_argument("--dry-run", action="store_true", help="list arms and time, run nothing")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ARM",
        help="arm name or shell pattern, e.g. 'main/*/matmul/*'; may be repeated",
    )
    parser.add_argument("--trials", type=int, metavar="N", help="trials of an arm in a process")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes an arm; capacity: points at a time"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the order of arms")
    parser.add_argument("--traces", metavar="DIR", help="recorded sessions (throughput, capacity)")
    parser.add_argument(
        "--gpus",
        type=_numbers,
        metavar="0,1,2",
        help="a point on each, side by side; accuracy: 0,0,1,1 has two on each, where timing "
        "decides nothing",
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="Dask scheduler whose workers announce GPU=1 (throughput)",
    )
    parser.add_argument(
        "--server-command",
        metavar="TEMPLATE",
        help="start an OpenAI-compatible server for each point, e.g. 'env "
        "LMCACHE_MAX_LOCAL_CPU_SIZE={pool_gib} vllm serve NAME --port {port}'; also {concurrency}; "
        "-p server_label says what it is (throughput)",
    )
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="put the load on a server that runs already; -p server_label says what it is "
        "(throughput, accuracy)",
    )
    parser.add_argument(
        "--client",
        choices=["http", "agentx", "lm-eval"],
        help="who puts the load on a server: our own client, the AgentX harness (throughput; with "
        "-p server_tokenizer DIR), or lm-eval (accuracy)",
    )
    parser.add_argument(
        "--gsm8k", metavar="DIR", help="GSM8K's train.jsonl and test.jsonl (accuracy)"
    )
    add_setting(parser, "any other setting, as YAML, e.g. -p hardware_queues '[1, 4]'")
    parser.add_argument(
        "--out", default=DEFAULT_ROOT, metavar="DIR", help=f"folder of runs ({DEFAULT_ROOT})"
    )
    parser.add_argument("--resume", metavar="DIR", help="continue this unfinished run")
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")


def _numbers(text: str) -> list[int]:
    """``0,1,2`` as numbers."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 0,1,2, got {text!r}") from None


def settings_from(arguments: argparse.Namespace) -> RaceSettings:
    """Settings of a command line; those of a resumed run come from its record.

    Raises:
        BadInput: unknown names, wrong values, or options that contradict ``--resume``.
    """
    given, known = given_settings(
        *(arguments, "race", EXPERIMENT, ("processes", "trials")),
        "its processes share one GPU in turn",
    )
    if known is not None:
        return RaceSettings.parse(known, where=f"settings of {arguments.resume}")
    if "device" not in given:
        given["device"] = _present_device().value
    settings = RaceSettings.parse(given, where="sweep race")
    return quick(settings) if arguments.quick else settings


def _present_device(*, served: bool = False) -> DeviceChoice:
    """What this machine has; that it simulates is said unless a server does the work."""
    from atom.device.accelerator import why_no_accelerator

    reason = why_no_accelerator()
    if reason is None:
        return DeviceChoice.ACCELERATOR
    if not served:
        print(f"no accelerator ({reason}): simulating on the virtual device", file=sys.stderr)
    return DeviceChoice.VIRTUAL


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code: 0 fine, 3 a worker failed, 130 interrupted.

    Raises:
        BadInput, DeviceError: see :func:`sweep_race`.
    """
    if arguments.experiment != EXPERIMENT:
        named = arguments.device is not None or any(n == "device" for n, _ in arguments.parameters)
        ask = not named and arguments.resume is None
        sweep = _point_sweep(arguments.experiment)
        served = arguments.base_url is not None or arguments.server_command is not None
        present = _present_device(served=served) if ask and sweep.asks_for_device else None
        return run_sweep(sweep, arguments, present)
    settings = settings_from(arguments)
    if arguments.dry_run:
        if settings.device is DeviceChoice.ACCELERATOR:
            name_what_spoils(accelerator_kind(settings))
        show = plan_json if arguments.json else plan_text
        jobs = build_jobs(settings)
        if arguments.resume is not None:
            done = RunWriter.finished_points(arguments.resume)
            jobs = [job for job in jobs if job.name not in done]
        print(show(settings, jobs))
        return 0
    refuse_unwritable(Path(arguments.resume or arguments.out), "folder of runs")
    progress = TerminalProgress()
    try:
        with terminated_like_interrupted():
            result = sweep_race(
                settings, root=arguments.out, resume=arguments.resume, progress=progress
            )
    except SweepInterrupted as stop:
        if stop.path is None:
            print("interrupted before anything was measured", file=sys.stderr)
        else:
            shown = shown_path(stop.path)
            print(
                f"interrupted; finished processes are kept in {shown}\n"
                f"go on with: {resume_text(EXPERIMENT, stop.path)}",
                file=sys.stderr,
            )
        return INTERRUPTED
    shown = shown_path(result.run.path)
    if arguments.json:
        print(result_json(result.run, result.failures))
    else:
        print(result_text(result.run.tables["trials"]))
        print(f"\n{result.run.provenance.evidence} on {result.run.provenance.device}: {shown}")
    if result.failures:
        print(
            f"{len(result.failures)} process(es) failed and do not count; run them again with: "
            f"python -m atom sweep race --resume {shown}",
            file=sys.stderr,
        )
        return DeviceError.exit_code
    return 0

"""One process of a race sweep: one draw of the stream-to-queue mapping.

``python -m atom.benchmarks.race_worker`` imports torch, says ``imported`` and waits: no device is
touched before the line ``go`` arrives, so that the next worker can be warm while this one measures.
One JSON object a line both ways:

====== ============ ==========================================================================
to     ``go``       ``settings``, ``queue_setting``, ``allocator``, ``process``, ``seed``, ``arms``
from   ``imported`` ready; nothing has been opened
from   ``device``   ``properties`` of the opened device, ``facts`` seen from inside
from   ``trials``   ``count`` more trials are done
from   ``point``    one finished point: ``row`` and its ``timeline`` rows
from   ``done``     all points were sent
====== ============ ==========================================================================

A failure is a traceback on standard error and exit code 3 (2 for a bad job).
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from typing import IO, Any

from atom.benchmarks.race_environment import relevant_environment
from atom.benchmarks.race_plan import DEFAULT_QUEUES, Job, Point, blocks, build_arms
from atom.benchmarks.race_rows import Outcome, RaceRow, TimelineRow
from atom.benchmarks.race_trial import Trial, TrialBench
from atom.config import AllocatorBackend, DeviceChoice, RaceSettings
from atom.device import Device, open_device
from atom.errors import AtomError, BadInput, DeviceError


@dataclasses.dataclass(frozen=True)
class TrialsDone:
    """``count`` more trials have run."""

    count: int


@dataclasses.dataclass(frozen=True)
class PointDone:
    """All trials of a point have run."""

    row: RaceRow
    timeline: tuple[TimelineRow, ...]


@dataclasses.dataclass
class _Tally:
    """Trials of one point so far."""

    trials: list[Trial] = dataclasses.field(default_factory=list)
    timeline: list[TimelineRow] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def open_job_device(settings: RaceSettings, job: Job) -> Device:
    """The device that a job runs on; a virtual one draws its mapping and jitter from the seed."""
    queues = None if job.queue_setting == DEFAULT_QUEUES else int(job.queue_setting)
    return open_device(
        settings.device,
        profile=settings.device_profile,
        seed=job.seed,
        hardware_queues=queues,
    )


def run_job(device: Device, settings: RaceSettings, job: Job) -> Iterator[TrialsDone | PointDone]:
    """Run a job's trials, interleaved, and yield each point when its last trial has run.

    Args:
        device: freshly opened for this job.
        settings: of the sweep.
        job: its points and seed.
    """
    bench = TrialBench(device, settings, job.seed, streams_before=job.process)
    tallies: dict[Point, _Tally] = {}
    for point, count in blocks(job):
        began = time.perf_counter()
        tally = tallies.get(point)
        if tally is None:
            tally = tallies[point] = _Tally()
            bench.warm_up(point.arm)
        tally.trials += [bench.run(point.arm) for _ in range(count)]
        finished = len(tally.trials) == point.arm.trials
        if finished:
            for number in range(point.arm.traced):
                tally.timeline += _timeline(point, number, bench.run(point.arm, traced=True))
        tally.seconds += time.perf_counter() - began
        yield TrialsDone(count)
        if finished:
            row = _row(point, job, tally, bench)
            yield PointDone(row, tuple(tally.timeline))
            del tallies[point]
    bench.close()


def _timeline(point: Point, number: int, trial: Trial) -> list[TimelineRow]:
    return [
        TimelineRow(
            point_id=point.point_id,
            arm=point.arm.name,
            process=point.process,
            trial=number,
            lane=span.lane,
            label=span.label,
            start_us=span.start_us,
            end_us=span.end_us,
            outcome=trial.outcome,
        )
        for span in trial.spans
    ]


def _row(point: Point, job: Job, tally: _Tally, bench: TrialBench) -> RaceRow:
    arm = point.arm
    trials = tally.trials
    outcomes = [trial.outcome for trial in trials]
    stale = [trial for trial in trials if trial.outcome is not Outcome.CLEAN]
    source_bytes, next_bytes = bench.sizes(arm)
    return RaceRow(
        point_id=point.point_id,
        grid=arm.grid,
        arm=arm.name,
        process=point.process,
        protocol=arm.protocol,
        is_null=arm.is_null,
        front=arm.front,
        copy_path=arm.copy_path,
        source=arm.source,
        queue_setting=arm.queue_setting,
        allocator=arm.allocator,
        producer_edge=arm.producer_edge,
        batch_size=arm.batch_size,
        source_bytes=source_bytes,
        next_bytes=next_bytes,
        trials=len(trials),
        clean=outcomes.count(Outcome.CLEAN),
        overwritten=outcomes.count(Outcome.OVERWRITTEN),
        partial=outcomes.count(Outcome.PARTIAL),
        torn=outcomes.count(Outcome.TORN),
        address_reused=sum(trial.address_reused for trial in trials),
        tag_caught=sum(trial.tag_caught for trial in stale),
        tag_missed=sum(not trial.tag_caught for trial in stale),
        in_range=sum(trial.in_range for trial in stale),
        send_us_median=round(statistics.median(trial.send_us for trial in trials), 3),
        receive_us_median=round(statistics.median(trial.receive_us for trial in trials), 3),
        shares_default_queue=bench.shares_default_queue,
        seed=job.seed,
        elapsed_s=round(tally.seconds, 4),
    )


def job_message(settings: RaceSettings, job: Job) -> dict[str, Any]:
    """The ``go`` line of a job."""
    return {
        "type": "go",
        "settings": settings.model_dump(mode="json"),
        "queue_setting": job.queue_setting,
        "allocator": job.allocator.value,
        "process": job.process,
        "seed": job.seed,
        "arms": [point.arm.name for point in job.points],
    }


def read_job(message: dict[str, Any]) -> tuple[RaceSettings, Job]:
    """Settings and job of a ``go`` line.

    Raises:
        BadInput: not such a line, or an arm that its settings do not plan.
    """
    try:
        settings = RaceSettings.parse(message["settings"], where="race worker")
        arms = {arm.name: arm for arm in build_arms(settings)}
        process = int(message["process"])
        job = Job(
            queue_setting=str(message["queue_setting"]),
            allocator=AllocatorBackend(message["allocator"]),
            process=process,
            points=tuple(Point(arms[name], process) for name in message["arms"]),
            seed=int(message["seed"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise BadInput(f"race worker: no usable job: {type(error).__name__}: {error}") from None
    if message.get("type") != "go":
        raise BadInput(f"race worker: expected a 'go' line, got {message.get('type')!r}")
    return settings, job


def facts_from_inside(settings: RaceSettings, job: Job) -> dict[str, Any]:
    """What only this process can tell: the allocator in force, and the variables it started with.

    Raises:
        DeviceError: the allocator in force is not the job's.
    """
    facts: dict[str, Any] = {"environment": relevant_environment(os.environ)}
    if settings.device is DeviceChoice.VIRTUAL:
        return facts
    import torch

    backend = torch.cuda.get_allocator_backend()
    facts["allocator_backend"] = backend
    wanted = "cudaMallocAsync" if job.allocator is AllocatorBackend.CUDA_MALLOC_ASYNC else "native"
    if backend != wanted:
        raise DeviceError(f"{job.name}: torch runs allocator backend {backend}, not {wanted}")
    if wanted == "native":
        in_force = torch.cuda.memory._snapshot().get("allocator_settings", {})
        expandable = in_force.get("expandable_segments")
        facts["expandable_segments"] = expandable
        # A torch that does not tell cannot be checked.
        if expandable is not None and bool(expandable) != (
            job.allocator is AllocatorBackend.EXPANDABLE_SEGMENTS
        ):
            raise DeviceError(f"{job.name}: torch says expandable_segments is {expandable}")
    return facts


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Say ``imported``, wait for one ``go`` line and run it. Returns at end of input."""

    def say(kind: str, **content: Any) -> None:
        answers.write(json.dumps({"type": kind, **content}) + "\n")
        answers.flush()

    say("imported")
    line = requests.readline()
    if not line.strip():
        return
    try:
        message = json.loads(line)
    except ValueError as error:
        raise BadInput(f"race worker: the job is no JSON: {error}") from None
    settings, job = read_job(message)
    device = open_job_device(settings, job)
    properties = dataclasses.asdict(device.properties)
    say("device", properties=properties, facts=facts_from_inside(settings, job))
    for event in run_job(device, settings, job):
        if isinstance(event, TrialsDone):
            say("trials", count=event.count)
        else:
            say(
                "point",
                row=event.row.model_dump(mode="json"),
                timeline=[row.model_dump(mode="json") for row in event.timeline],
            )
    say("done")


def main() -> int:
    """Entry point of a worker process."""
    # Libraries print to descriptor 1 too: keep a private copy for the protocol.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, answers)
    except BrokenPipeError:
        # The parent is gone: nobody counts what this process measures.
        return 3
    except AtomError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 3
    return 0


if __name__ == "__main__":
    # Tensors of a broken context raise while they are torn down: leave without teardown.
    code = main()
    sys.stderr.flush()
    os._exit(code)

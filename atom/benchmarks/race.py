"""The race micro-benchmark: how often the host reads the next step's bytes as this step's.

Method. One trial fills a status payload on the default stream, queues work that goes ahead of the
copy, sends the payload through the engine's own status queue, drops the source, lets the next step
allocate and write its tensor, receives, and tells from the bytes what arrived. One point is an arm
in one process; a process is one draw of the stream-to-queue mapping, so its points are recorded
together or not at all. Arms of a process are interleaved in small blocks in a seeded order.

On an accelerator each job has a process of its own: queue and allocator variables are read once,
before the context exists. The next process imports torch while the present one measures.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from atom.benchmarks.race_environment import worker_environment
from atom.benchmarks.race_plan import Job
from atom.benchmarks.race_rows import RaceRow, TimelineRow
from atom.benchmarks.race_worker import (
    PointDone,
    TrialsDone,
    facts_from_inside,
    job_message,
    open_job_device,
    run_job,
)
from atom.config import DeviceChoice, RaceSettings
from atom.device.interface import DeviceKind, DeviceProperties
from atom.errors import AtomError, DeviceError
from atom.evidence import Evidence

#: a worker that says nothing for so long hangs
SILENCE_SECONDS = 180.0
_STDERR_LINES = 30

WORKER_COMMAND = (sys.executable, "-m", "atom.benchmarks.race_worker")


@dataclass(frozen=True)
class DeviceSeen:
    """A job has opened the device. ``facts`` hold for the job's setting, not for the sweep."""

    job: Job
    properties: DeviceProperties
    facts: dict[str, Any]


@dataclass(frozen=True)
class JobDone:
    """A job has ended well: the rows of all its points."""

    job: Job
    rows: tuple[RaceRow, ...]
    timeline: tuple[TimelineRow, ...]


@dataclass(frozen=True)
class JobFailed:
    """A job has failed; none of its points counts."""

    job: Job
    reason: str


SweepEvent = DeviceSeen | TrialsDone | JobDone | JobFailed


def measure(
    settings: RaceSettings,
    jobs: Sequence[Job],
    *,
    subprocesses: bool | None = None,
    command: Sequence[str] = WORKER_COMMAND,
    variables: Mapping[str, str] | None = None,
) -> Iterator[SweepEvent]:
    """Run jobs one after the other and yield what happens. Close the iterator to stop workers.

    Args:
        settings: of the sweep.
        jobs: from :func:`atom.benchmarks.race_plan.build_jobs`.
        subprocesses: a process a job; by default on an accelerator only.
        command: starts a worker (see :mod:`atom.benchmarks.race_worker`).
        variables: of its environment, beside this process's, e.g. the GPU that it sees.

    Raises:
        DeviceError: no accelerator.
    """
    if subprocesses is None:
        subprocesses = settings.device is DeviceChoice.ACCELERATOR
    if subprocesses:
        yield from _in_workers(settings, jobs, command, variables or {})
    else:
        yield from _in_process(settings, jobs)


def accelerator_kind(settings: RaceSettings) -> DeviceKind:
    """Kind of the device that a sweep will run on, without opening it."""
    if settings.device is DeviceChoice.VIRTUAL:
        return DeviceKind.VIRTUAL
    import torch

    return DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA


def _in_process(settings: RaceSettings, jobs: Sequence[Job]) -> Iterator[SweepEvent]:
    for job in jobs:
        device = open_job_device(settings, job)
        yield DeviceSeen(job, device.properties, facts_from_inside(settings, job))
        rows: list[RaceRow] = []
        timeline: list[TimelineRow] = []
        try:
            for event in run_job(device, settings, job):
                if isinstance(event, PointDone):
                    rows.append(event.row)
                    timeline.extend(event.timeline)
                else:
                    yield event
        except AtomError as error:
            yield JobFailed(job, f"{type(error).__name__}: {error}")
            continue
        yield JobDone(job, tuple(rows), tuple(timeline))


def _in_workers(
    settings: RaceSettings,
    jobs: Sequence[Job],
    command: Sequence[str],
    variables: Mapping[str, str],
) -> Iterator[SweepEvent]:
    kind = accelerator_kind(settings)
    waiting = list(jobs)

    def start() -> tuple[Job, Worker] | None:
        if not waiting:
            return None
        job = waiting.pop(0)
        base = {**os.environ, **variables}
        environment = worker_environment(base, kind, job.queue_setting, job.allocator)
        return job, Worker(command, environment)

    running = start()
    following: tuple[Job, Worker] | None = None
    try:
        while running is not None:
            job, worker = running
            try:
                worker.expect("imported")
                worker.send(job_message(settings, job))
                following = start()
                yield from _listen(job, worker)
            except WorkerFailed as error:
                yield JobFailed(job, str(error))
                if following is None:
                    following = start()
            worker.stop(grace_seconds=10.0)
            running, following = following, None
    finally:
        for pair in (running, following):
            if pair is not None:
                pair[1].stop()


def _listen(job: Job, worker: Worker) -> Iterator[SweepEvent]:
    rows: list[RaceRow] = []
    timeline: list[TimelineRow] = []
    while True:
        message = worker.receive()
        kind = message.get("type")
        if kind == "device":
            yield DeviceSeen(job, properties_from(message["properties"]), message["facts"])
        elif kind == "trials":
            yield TrialsDone(int(message["count"]))
        elif kind == "point":
            rows.append(RaceRow.model_validate(message["row"]))
            timeline += [TimelineRow.model_validate(row) for row in message["timeline"]]
        elif kind == "done":
            break
        else:
            raise WorkerFailed(f"{job.name}: the worker said {message!r}")
    expected = {point.point_id for point in job.points}
    found = {row.point_id for row in rows}
    if found != expected:
        missing = ", ".join(sorted(expected - found)) or "none"
        raise WorkerFailed(f"{job.name}: the worker ended without these points: {missing}")
    yield JobDone(job, tuple(rows), tuple(timeline))


def properties_from(values: Mapping[str, Any]) -> DeviceProperties:
    """Device properties from their JSON form."""
    known = {field.name: values[field.name] for field in fields(DeviceProperties)}
    known["kind"] = DeviceKind(known["kind"])
    known["evidence"] = Evidence(known["evidence"])
    return DeviceProperties(**known)


class WorkerFailed(DeviceError):
    """A worker process died, hung or broke its protocol; the message ends with its last words."""


class Worker:
    """The parent's end of one worker process.

    Args:
        command: what to start.
        environment: its whole environment.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        variables = dict(environment)
        root = str(Path(__file__).resolve().parents[2])
        variables["PYTHONPATH"] = os.pathsep.join(
            part for part in (root, variables.get("PYTHONPATH", "")) if part
        )
        # A session of its own: Ctrl-C reaches the parent alone, which then stops its workers.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last_words: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._threads = [
            threading.Thread(target=self._read_answers, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_words.append(line.rstrip())

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line to the worker.

        Raises:
            WorkerFailed: it is gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, OSError):
            raise self._failure("closed its input") from None

    def receive(self) -> dict[str, Any]:
        """The worker's next line.

        Raises:
            WorkerFailed: it ended, hangs, or wrote no JSON object.
        """
        try:
            line = self._lines.get(timeout=SILENCE_SECONDS)
        except queue.Empty:
            raise self._failure(f"said nothing for {SILENCE_SECONDS:.0f} s", 0.2) from None
        if line is None:
            raise self._failure("ended early")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise self._failure(f"wrote {line.strip()[:200]!r} in place of a message")
        return message

    def expect(self, kind: str) -> None:
        """Receive one message of that type.

        Raises:
            WorkerFailed: see :meth:`receive`, or another type came.
        """
        message = self.receive()
        if message.get("type") != kind:
            raise self._failure(f"said {message!r} where {kind!r} was expected")

    def _failure(self, what: str, grace_seconds: float = 5.0) -> WorkerFailed:
        # Its own exit code and last words are worth the wait; a kill would hide them.
        self.stop(grace_seconds)
        code = self._process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        words = "\n".join(f"    {line}" for line in self._last_words)
        return WorkerFailed(
            f"a worker process {what} ({how})"
            + (f"; its last words:\n{words}" if words else "; it wrote nothing to standard error")
        )

    def stop(self, grace_seconds: float = 0.2) -> None:
        """End the process, by force if it does not go by itself in time. Safe to call again."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(timeout=2.0)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None and not any(thread.is_alive() for thread in self._threads):
                pipe.close()

"""One observation of the co-location experiment: something measured while neighbours work.

Method. Neighbours are processes: engines under the load of the observed one with other sessions'
order, or processes that copy or compute (``colocation_neighbour``). All start together. The
observed engine begins its load when every neighbour is at work, and the neighbours work until it
has ended; then they are killed. The race's arms begin when all are at work, too. What is observed
is a throughput point as it is, or a race job as it is.
"""

from __future__ import annotations

import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from atom.benchmarks.colocation_bandwidth import Bandwidths, Sample, between
from atom.benchmarks.colocation_rows import NeighbourRow
from atom.benchmarks.colocation_settings import ColocationPoint, ColocationSettings, Neighbour
from atom.benchmarks.race import JobDone, JobFailed, measure
from atom.benchmarks.race_plan import build_jobs
from atom.benchmarks.race_rows import RaceRow
from atom.benchmarks.throughput_process import COMMAND, end_all, run_point
from atom.config import RaceSettings
from atom.device.host_room import on_processors
from atom.errors import DeviceError

_LOOK_SECONDS = 0.02
#: a neighbour's work ends when it is killed; this is longer than any observation
_FOREVER_SECONDS = 7 * 86400.0
#: arms of the race: unpatched behind each kind of work, and protected ones, which must stay clean
RACE_ARMS = ("main/unpatched/*/engine", "main/hold/store_on_copy_stream/engine")

T = TypeVar("T")


class NeighbourFailed(DeviceError):
    """A neighbour ended before the observation began: there is nothing to observe."""


@dataclass(frozen=True)
class NeighbourJob:
    """A neighbour's process.

    Attributes:
        kind: what it does.
        job: of ``throughput_process.run_point``.
        command: starts it.
        gpu: index of its GPU, if that is known.
    """

    kind: Neighbour
    job: Mapping[str, Any]
    command: Sequence[str]
    gpu: int | None


@dataclass(frozen=True)
class Seen(Generic[T]):
    """What was observed.

    Attributes:
        found: the observed engine's end, as ``throughput_process.run_point`` returns it, or rows
            of the race.
        alive: neighbours that still worked when it ended.
        neighbours: how each neighbour ended.
        samples: bandwidths meanwhile.
    """

    found: T
    alive: int
    neighbours: tuple[dict[str, Any], ...]
    samples: tuple[Sample, ...]


class _Group:
    """Processes that end together."""

    def __init__(self, pool: ThreadPoolExecutor, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._name = secrets.token_hex(4)
        self.futures: list[Future[dict[str, Any]]] = []
        self._ready: list[Path] = []

    def start(
        self,
        job: Mapping[str, Any],
        command: Sequence[str],
        processors: frozenset[int] = frozenset(),
        gate: Path | None = None,
    ) -> Future[dict[str, Any]]:
        """Start a process; it says when it is ready, and waits for its gate if it has one."""
        ready = self._folder / f"ready-{len(self.futures)}"
        values = {**job, "sweep": self._name, "ready": str(ready)}
        values["gate"] = None if gate is None else str(gate)

        def run() -> dict[str, Any]:
            # a process takes over where its thread may run
            with on_processors(processors):
                return run_point(values, command)

        future = self._pool.submit(run)
        self.futures.append(future)
        self._ready.append(ready)
        return future

    def wait_until_ready(self) -> list[Future[dict[str, Any]]]:
        """Wait until all are ready. Returns those that ended before."""
        while not all(ready.exists() for ready in self._ready):
            ended = [future for future in self.futures if future.done()]
            if ended:
                return ended
            time.sleep(_LOOK_SECONDS)
        return []

    def end(self) -> None:
        """Kill what still runs. One may start just now: until none does, and a Ctrl-C waits."""
        interrupt: KeyboardInterrupt | None = None
        while not all(future.done() for future in self.futures):
            try:
                # pinned memory and a GPU may take their time to be given back
                with suppress(subprocess.TimeoutExpired):
                    end_all(self._name)
                time.sleep(_LOOK_SECONDS)
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class StartTogether:
    """Lets processes of this host begin their loads at one moment, when all of them are ready.

    Args:
        folder: for their signs.
        count: processes.

    Attributes:
        moment: when they were let, by ``time.monotonic``.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.moment: float | None = None
        self._ready = [folder / f"ready-{number}" for number in range(count)]
        self._gate = folder / "go"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody waits any more."""
        self.let_go()
        self._thread.join()

    def signs(self, number: int) -> dict[str, str]:
        """Fields of a process's job: see ``throughput_process.pass_gate``."""
        return {"ready": str(self._ready[number]), "gate": str(self._gate)}

    def let_go(self) -> None:
        """Let those begin that are ready, e.g. when one of them will not be."""
        self._over.set()
        if not self._gate.exists():
            self.moment = time.monotonic()
            self._gate.touch()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            if all(ready.exists() for ready in self._ready):
                self.let_go()


@contextmanager
def _group(most: int) -> Iterator[tuple[_Group, Path]]:
    with (
        tempfile.TemporaryDirectory(prefix="atom-colocation-") as folder,
        ThreadPoolExecutor(most) as pool,
    ):
        group = _Group(pool, Path(folder))
        try:
            yield group, Path(folder)
        finally:
            group.end()


def observe_engine(
    job: Mapping[str, Any],
    neighbours: Sequence[NeighbourJob],
    bandwidths: Bandwidths,
    *,
    processors: frozenset[int] = frozenset(),
    command: Sequence[str] = COMMAND,
) -> Seen[dict[str, Any]]:
    """Run a throughput point beside neighbours.

    Args:
        job: of the point, for ``throughput_process.run_point``.
        neighbours: what works beside it.
        bandwidths: not yet begun.
        processors: where the observed process runs; empty: anywhere.
        command: starts the point's process.

    Raises:
        NeighbourFailed: one ended before the load began.
    """
    with _group(len(neighbours) + 1) as (group, folder):
        gate = folder / "go"
        beside = [group.start(one.job, one.command) for one in neighbours]
        observed = group.start(job, command, processors, gate)
        early = group.wait_until_ready()
        _refuse_dead(early, beside, neighbours)
        gate.touch()
        with bandwidths:
            end = observed.result()
        alive = sum(not future.done() for future in beside)
        group.end()
        ends = tuple(future.result() for future in beside)
    # while its process ends nothing is asked of it any more
    exposure = end["told"].get("exposure_seconds") or 0.0
    return Seen(end, alive, ends, between(bandwidths.samples, 0.0, exposure))


def observe(
    work: Callable[[], T],
    neighbours: Sequence[NeighbourJob],
    bandwidths: Bandwidths,
    processors: frozenset[int] = frozenset(),
) -> Seen[T]:
    """Do anything in this thread while neighbours work; see :func:`observe_engine`."""
    with _group(max(1, len(neighbours))) as (group, _):
        beside = [group.start(one.job, one.command) for one in neighbours]
        _refuse_dead(group.wait_until_ready(), beside, neighbours)
        with bandwidths, on_processors(processors):
            found = work()
        alive = sum(not future.done() for future in beside)
        group.end()
        ends = tuple(future.result() for future in beside)
    return Seen(found, alive, ends, tuple(bandwidths.samples))


def _refuse_dead(
    early: Sequence[Future[dict[str, Any]]],
    beside: Sequence[Future[dict[str, Any]]],
    neighbours: Sequence[NeighbourJob],
) -> None:
    for future, one in zip(beside, neighbours, strict=True):
        if future in early:
            said = future.result()["last_words"] or "it said nothing"
            raise NeighbourFailed(f"a neighbour ({one.kind}) ended before it worked: {said[:300]}")


def neighbour_jobs(
    settings: ColocationSettings,
    point: ColocationPoint,
    serving: Mapping[str, Any],
    places: Sequence[tuple[int | None, Mapping[str, str]]],
    command: Sequence[str],
    working: Sequence[str],
) -> list[NeighbourJob]:
    """The processes beside a point; those of ``sweep`` are observed themselves and none of them.

    Args:
        settings: of the sweep.
        point: what is observed.
        serving: job of an engine, for those that serve.
        places: GPU and environment of each neighbour.
        command: starts an engine's process.
        working: starts one that copies or computes.
    """
    if point.neighbour in (Neighbour.NONE, Neighbour.SWEEP):
        return []
    found = []
    for number, (gpu, variables) in enumerate(places):
        job: dict[str, Any] = {
            "environment": dict(variables),
            "limit_seconds": _FOREVER_SECONDS,
            "start_limit_seconds": serving["start_limit_seconds"],
            "log": None,
        }
        if point.neighbour is Neighbour.SERVE:
            # the same sessions in another order, so that no two engines walk in step
            own = {"seed": settings.seed + 1 + number, "duration_seconds": _FOREVER_SECONDS}
            job |= {"point_id": serving["point_id"], "settings": {**serving["settings"], **own}}
        else:
            job |= {
                "neighbour": point.neighbour.value,
                "device": settings.device.value,
                "device_profile": settings.device_profile,
                "copy_bytes": settings.copy_bytes,
                "matmul_size": settings.matmul_size,
            }
        serves = point.neighbour is Neighbour.SERVE
        found.append(NeighbourJob(point.neighbour, job, command if serves else working, gpu))
    return found


def neighbour_rows(
    point: ColocationPoint, jobs: Sequence[NeighbourJob], ends: Sequence[Mapping[str, Any]]
) -> list[NeighbourRow]:
    """What each neighbour did, from what it told."""
    rows = []
    for number, (one, end) in enumerate(zip(jobs, ends, strict=True)):
        told = end["told"]
        copies = one.kind is Neighbour.COPY
        serves = one.kind is Neighbour.SERVE
        seconds = float(told.get("exposure_seconds" if serves else "seconds") or 0.0)
        tokens = sum(int(told.get(name) or 0) for name in ("lookup_tokens", "generated_tokens"))
        rows.append(
            NeighbourRow(
                point_id=point.point_id,
                number=number,
                kind=one.kind,
                gpu_index=one.gpu,
                seconds=round(seconds, 3),
                h2d_bytes_per_second=_rate(told.get("h2d_bytes"), seconds) if copies else None,
                d2h_bytes_per_second=_rate(told.get("d2h_bytes"), seconds) if copies else None,
                matmuls_per_second=_rate(told.get("matmuls"), seconds)
                if one.kind is Neighbour.COMPUTE
                else None,
                tokens_per_second=_rate(tokens, seconds) if serves else None,
            )
        )
    return rows


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else amount / seconds


def race_settings(settings: ColocationSettings, repeat: int) -> RaceSettings:
    """The race that is observed in a round: a process of its own, with its own draw of queues."""
    return RaceSettings.parse(
        {
            "device": settings.device.value,
            "device_profile": settings.device_profile,
            "trials": settings.race_trials,
            "processes": 1,
            "only": list(RACE_ARMS),
            "seed": settings.seed + repeat,
        },
        where="sweep colocation, race",
    )


def run_race(settings: RaceSettings, variables: Mapping[str, str]) -> tuple[RaceRow, ...]:
    """The race's arms in one process.

    Raises:
        DeviceError: the process failed.
    """
    rows: tuple[RaceRow, ...] = ()
    for event in measure(settings, build_jobs(settings), variables=variables):
        if isinstance(event, JobFailed):
            raise DeviceError(f"the race failed: {event.reason}")
        if isinstance(event, JobDone):
            rows += event.rows
    return rows

"""``python -m atom sweep colocation``: what neighbours on the same host cost an engine."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from atom.benchmarks.colocation_bandwidth import (
    NO_COUNTERS,
    Bandwidths,
    Sample,
    between,
    why_none,
)
from atom.benchmarks.colocation_neighbour import COMMAND as NEIGHBOUR_COMMAND
from atom.benchmarks.colocation_point import (
    Seen,
    StartTogether,
    neighbour_jobs,
    neighbour_rows,
    observe,
    observe_engine,
    race_settings,
    run_race,
)
from atom.benchmarks.colocation_rows import (
    EXPERIMENT,
    BandwidthRow,
    ColocationRaceRow,
    ColocationRow,
)
from atom.benchmarks.colocation_settings import (
    ColocationPoint,
    ColocationSettings,
    MemoryNode,
    Neighbour,
    build_colocation,
)
from atom.benchmarks.race_environment import look_around, sysfs_address
from atom.benchmarks.throughput_process import run_point
from atom.benchmarks.throughput_rows import Outcome
from atom.benchmarks.throughput_settings import ThroughputPoint, ThroughputSettings, build_points
from atom.config import DeviceChoice
from atom.device import Device
from atom.device.host_room import processors_apart
from atom.device.interface import DeviceKind
from atom.errors import BadInput, DeviceError
from atom.workbook.colocation_analysis import result_text, unexpected
from atom.workbook.point_sweep import Measured, PlannedPoint, SweepOver
from atom.workbook.records import Run
from atom.workbook.sweep_control import began_with_ctrl_c, this_kind
from atom.workbook.throughput_dask import Lost, local_cluster, run_jobs, visible
from atom.workbook.throughput_queue import Queue, TimeBudget, estimate_seconds, limit_seconds
from atom.workbook.throughput_results import tables_of
from atom.workbook.throughput_runs import ACCELERATOR, Ready, ThroughputSweep, environments

#: what an accelerator takes where a value is not given: the throughput sweep's scale. Live sessions
#: are more than the device holds, not more than its pool does: prefixes come back over the link and
#: none is lost by chance. Nobody pauses: an engine with nothing to do hides what neighbours cost
OBSERVED: dict[str, Any] = {
    **{
        name: ACCELERATOR[name]
        for name in (
            *("model", "block_tokens", "max_context_tokens", "chunk_tokens"),
            *("max_num_batched_tokens", "block_size", "num_kv_blocks", "state_checkpoint_tokens"),
            *("num_state_checkpoints", "warm_up"),
        )
    },
    "duration_seconds": 10.0,
    "think_cap_seconds": 0.0,
    "concurrency": [16],
    "pool_gib": [6.0],
    "copy_bytes": 256 * 2**20,
    "matmul_size": 8192,
    "race_trials": 80,
}
VIRTUAL: dict[str, Any] = {"concurrency": [4], "pool_gib": [0.002], "race": False}
QUICK: dict[str, Any] = {"duration_seconds": 1.0, "no_offload": False, "repeats": 1}
QUICK_ACCELERATOR: dict[str, Any] = {
    **QUICK,
    "duration_seconds": 4.0,
    "warm_up": False,
    "neighbours": [Neighbour.COPY.value],
    "race": False,
}
#: start of the race's process, and a trial of each of its arms
_RACE_START_SECONDS = 9.0
_RACE_TRIAL_SECONDS = 0.055
#: start and end of a local cluster
_CLUSTER_SECONDS = 5.0
#: how long it may take until all of its workers are there
_WORKERS_SECONDS = 60.0
#: start of neighbours beside that of the engine, and their end
_NEIGHBOUR_SECONDS = 2.0


@dataclass
class Observed(Ready):
    """What all points need, and facts that were found out on the way."""

    found: dict[str, Any] = field(default_factory=dict)


class ColocationSweep(ThroughputSweep):
    """A point a subject, condition, memory node and round, one after the other."""

    command = "colocation"
    experiment = EXPERIMENT
    settings = ColocationSettings
    row_a_point = False
    takes = frozenset({"gpus", "traces"})
    why_not = "a point is an engine and its neighbours; see -p repeats N"
    #: starts a neighbour that copies or computes
    working: tuple[str, ...] = NEIGHBOUR_COMMAND

    def parse(self, given: dict[str, Any], quick: bool) -> ColocationSettings:
        """See :class:`PointSweep`."""
        accelerator = given.get("device") == DeviceChoice.ACCELERATOR.value
        defaults = dict(OBSERVED) if accelerator else dict(VIRTUAL)
        if quick:
            defaults |= QUICK_ACCELERATOR if accelerator else QUICK
        others = len(given.get("gpus") or (0,)) - 1
        defaults["shared_gpu"] = others == 0
        shared = given.get("shared_gpu", defaults["shared_gpu"])
        most = others or (3 if accelerator else 1)
        defaults["neighbour_counts"] = [most] if quick else sorted({1, most})
        if not shared:
            named = ColocationSettings.model_fields["neighbours"].default
            every = [*(one.value for one in named), Neighbour.SWEEP.value]
            defaults.setdefault("neighbours", every)
        return ColocationSettings.parse({**defaults, **given}, where="sweep colocation")

    def plan(self, settings: ThroughputSettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        own = _own(settings)
        return [
            PlannedPoint(
                point.point_id,
                f"{point.point_id:52} {_estimate(own, point):6.1f} s",
                _estimate(own, point),
            )
            for point in build_colocation(own)
        ]

    def side_by_side(self, settings: ThroughputSettings) -> int:
        """See :class:`PointSweep`. The GPUs of a point are busy together."""
        return 1

    def prepare(self, settings: ThroughputSettings, device: Device) -> Ready:
        """See :class:`PointSweep`."""
        own = _own(settings)
        others = len(own.gpus or (0,)) - 1
        most = max(own.neighbour_counts)
        if not own.shared_gpu and most > others and own.device is DeviceChoice.ACCELERATOR:
            raise BadInput(
                f"neighbour_counts: {most} neighbours with a GPU each need --gpus with "
                f"{most + 1} of them, got {others + 1}; or -p shared_gpu true"
            )
        if set(own.memory_nodes) != {MemoryNode.ANY}:
            near, far = _processors(own)
            for node, processors in ((MemoryNode.NEAR, near), (MemoryNode.FAR, far)):
                if node in own.memory_nodes and not processors:
                    raise BadInput(
                        f"memory_nodes: {node}: this host names no memory node of the GPU, or has "
                        "no other with processors that this process may use; leave it out"
                    )
        ready = super().prepare(settings, device)
        reason = why_none(device.properties.kind, list(_nvml_names(own).values()))
        found = {
            "bandwidth": {
                "pcie": reason or "NVML's counters",
                "host": f"a copy of our own; {NO_COUNTERS}",
            },
            "gpus": max(1, len(own.gpus)),
        }
        return Observed(ready.traces, ready.model, ready.keep, found)

    def needs_dask(self, settings: ThroughputSettings) -> bool:
        """See :class:`ThroughputSweep`."""
        return Neighbour.SWEEP in _own(settings).neighbours

    def facts(self, ready: Ready) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        assert isinstance(ready, Observed)
        return {**super().facts(ready), **ready.found}

    def measure(
        self,
        settings: ThroughputSettings,
        device: Device,
        ready: Ready,
        done: Collection[str],
    ) -> Measured:
        """See :class:`PointSweep`."""
        own = _own(settings)
        points = [point for point in build_colocation(own) if point.point_id not in done]
        observer = _Observer(own, ready.model, device.properties.kind, self.process, self.working)
        budget = TimeBudget(own.budget_seconds)
        not_run: dict[str, str] = {}
        with ready.keep:
            observer.warm_up(points)
            for point in points:
                if not budget.allows(planned := _estimate(own, point)):
                    not_run[point.point_id] = "no time was left"
                    continue
                began = time.monotonic()
                try:
                    tables = observer.observe(point)
                except DeviceError as error:
                    # a neighbour or the race's process: nothing is said about the point
                    not_run[point.point_id] = str(error)
                    continue
                budget.took(planned, time.monotonic() - began)
                yield point.point_id, tables
        if not_run:
            raise SweepOver(not_run)

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return result_text(run)

    def unexpected(self, run: Run) -> list[str]:
        """See :class:`PointSweep`."""
        return unexpected(run)


class _Observer:
    """Observes points one after the other."""

    def __init__(
        self,
        settings: ColocationSettings,
        model: str,
        kind: DeviceKind,
        process: tuple[str, ...],
        working: tuple[str, ...],
    ) -> None:
        self._settings = settings
        self._engine = settings.engine
        self._queue = Queue(self._engine.model_copy(update={"warm_up": False}), [], model)
        self._model = model
        self._kind = kind
        self._process, self._working = process, working
        gpus = settings.gpus or (0,)
        shown = environments(settings) * (1 + max(settings.neighbour_counts))
        self._places: list[tuple[int | None, Mapping[str, str]]] = [
            (gpus[number % len(gpus)], variables) for number, variables in enumerate(shown)
        ]
        if settings.shared_gpu:
            self._places = [self._places[0]] * len(shown)
        self._nodes = dict.fromkeys(MemoryNode, frozenset[int]())
        if set(settings.memory_nodes) != {MemoryNode.ANY}:
            near, far = _processors(settings)
            self._nodes |= {MemoryNode.NEAR: near, MemoryNode.FAR: far}

    def warm_up(self, points: Sequence[ColocationPoint]) -> None:
        """Run what compiles the kernels, where the settings want it; nobody records it."""
        engines = [point.engine for point in points if point.engine is not None]
        for job in Queue(self._engine, engines, self._model).warm_ups[:1]:
            run_point({**job, "environment": dict(self._places[0][1])}, self._process)

    def observe(self, point: ColocationPoint) -> dict[str, Sequence[BaseModel]]:
        """Rows of a point by table.

        Raises:
            DeviceError: a neighbour ended before the observation began, or the race's process
                failed.
        """
        engine = point.engine or build_points(self._engine)[0]
        places = self._places[1 : 1 + point.count]
        neighbours = neighbour_jobs(
            self._settings, point, self._queue.job(engine), places, self._process, self._working
        )
        processors = self._nodes[point.node]
        if point.neighbour is Neighbour.SWEEP:
            return self._sweep(point, engine)
        variables = self._places[0][1]
        if point.engine is None:
            settings = race_settings(self._settings, point.repeat)
            seen = observe(
                lambda: run_race(settings, variables), neighbours, self._bandwidths(), processors
            )
            race = [
                ColocationRaceRow(
                    **{
                        **row.model_dump(),
                        **_beside(self._settings, point, seen),
                        "repeat": point.repeat,
                        "colocation_id": point.point_id,
                    }
                )
                for row in seen.found
            ]
            rows = neighbour_rows(point, neighbours, seen.neighbours)
            return {"race": race, "neighbours": rows, "bandwidth": _samples(point, seen.samples)}
        job = {**self._queue.job(engine), "environment": dict(variables)}
        job["log"] = _log(job, str(point.order))
        ended = observe_engine(
            job, neighbours, self._bandwidths(), processors=processors, command=self._process
        )
        beside = _beside(self._settings, point, ended)
        return {
            "points": [self._row(point, engine, ended.found, beside, 0)],
            "neighbours": neighbour_rows(point, neighbours, ended.neighbours),
            "bandwidth": _samples(point, ended.samples),
        }

    def _sweep(
        self, point: ColocationPoint, engine: ThroughputPoint
    ) -> dict[str, Sequence[BaseModel]]:
        """The same point on every GPU, as a sweep over several GPUs runs it; all begin at once."""
        sweep = secrets.token_hex(4)
        one, count = self._queue.job(engine), 1 + point.count
        shown = [variables for _, variables in self._places[:count]]
        bandwidths = self._bandwidths()
        ends = []
        with (
            tempfile.TemporaryDirectory(prefix="atom-colocation-") as folder,
            StartTogether(Path(folder), count) as together,
        ):
            jobs = iter(
                {
                    **one,
                    **together.signs(number),
                    "log": _log(one, f"{point.order}-{number}"),
                    "key": f"{point.point_id}/{number}",
                }
                for number in range(count)
            )
            try:
                with local_cluster(shown) as client, bandwidths:
                    client.wait_for_workers(count, timeout=_WORKERS_SECONDS)
                    for _, end in run_jobs(client, lambda: next(jobs, None), sweep, self._process):
                        # nobody waits for one that did not start
                        together.let_go()
                        if isinstance(end, Lost):
                            raise DeviceError(f"an engine of the sweep was lost: {end.reason}")
                        ends.append(end)
            except (OSError, TimeoutError) as error:
                if began_with_ctrl_c(error):
                    raise
                raise DeviceError(f"Dask: {type(error).__name__}: {error}"[:300]) from None
        if len({end["worker"] for end in ends}) < len(ends):
            raise DeviceError("a worker took two of the engines, one after the other")
        # workers are named by the place of their GPU
        ends.sort(key=lambda end: int(end["worker"]))
        served = [end["told"].get("outcome") == Outcome.OK for end in ends]
        rows = []
        for number, end in enumerate(ends):
            lasted = {"neighbours_at_end": sum(served) - served[number]}
            beside = {**_beside(self._settings, point, None), **lasted}
            rows.append(self._row(point, engine, end, beside, number))
        start = (together.moment or bandwidths.began) - bandwidths.began
        exposed = max(row.exposure_seconds or 0.0 for row in rows)
        samples = between(bandwidths.samples, start, start + exposed)
        return {"points": rows, "bandwidth": _samples(point, samples)}

    def _row(
        self,
        point: ColocationPoint,
        engine: ThroughputPoint,
        end: Mapping[str, Any],
        beside: Mapping[str, Any],
        observed: int,
    ) -> ColocationRow:
        [row] = tables_of(self._engine, engine, end, limit_seconds(self._engine))["points"]
        own = {
            "point_id": point.point_id,
            "repeat": point.repeat,
            "order": point.order,
            "observed": observed,
        }
        return ColocationRow(**{**row.model_dump(), **beside, **own})

    def _bandwidths(self) -> Bandwidths:
        settings = self._settings
        return Bandwidths(self._kind, _nvml_names(settings), settings.sample_seconds)


def _log(job: Mapping[str, Any], name: str) -> str | None:
    """Log of one of the processes that run a job."""
    return None if job["log"] is None else f"{job['log']}.{name}"


def _beside(
    settings: ColocationSettings, point: ColocationPoint, seen: Seen[Any] | None
) -> dict[str, Any]:
    return {
        "subject": point.subject,
        "neighbour": point.neighbour,
        "neighbours": point.count,
        "neighbours_at_end": 0 if seen is None else seen.alive,
        "shared_gpu": settings.shared_gpu,
        "memory_node": point.node,
    }


def _samples(point: ColocationPoint, samples: Sequence[Sample]) -> list[BandwidthRow]:
    return [
        BandwidthRow(
            point_id=point.point_id,
            second=round(one.second, 3),
            what=one.what,
            gpu_index=one.gpu_index,
            bytes_per_second=one.bytes_per_second,
        )
        for one in samples
    ]


def _own(settings: ThroughputSettings) -> ColocationSettings:
    return cast(ColocationSettings, settings)


def _nvml_names(settings: ThroughputSettings) -> dict[int, str]:
    """How NVML finds each GPU, by its place among those that this process sees."""
    gpus = settings.gpus or (0,)
    found = {}
    for gpu, variables in zip(gpus, environments(settings), strict=False):
        # where none is named, it is the first of those that this process may see
        found[gpu] = next(iter((variables or visible(0, "CUDA_VISIBLE_DEVICES")).values()))
    return found


def _processors(settings: ThroughputSettings) -> tuple[frozenset[int], frozenset[int]]:
    """Processors near the observed engine's GPU, and those of other memory nodes."""
    address = None
    if settings.device is DeviceChoice.ACCELERATOR:
        address = look_around(this_kind(), (settings.gpus or (0,))[0]).facts["pci_address"]
    return processors_apart(sysfs_address(address)) if address else (frozenset(), frozenset())


def _estimate(settings: ColocationSettings, point: ColocationPoint) -> float:
    if point.engine is None:
        race = _RACE_START_SECONDS + _RACE_TRIAL_SECONDS * settings.race_trials
        return race + (_NEIGHBOUR_SECONDS if point.count else 0.0)
    seconds = estimate_seconds(settings, point.engine)
    if point.neighbour is Neighbour.SWEEP:
        return seconds + _CLUSTER_SECONDS
    return seconds + (_NEIGHBOUR_SECONDS if point.count else 0.0)


SWEEP = ColocationSweep()

"""``python -m atom sweep throughput``: agentic load across concurrency and CPU-pool sizes."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from atom.benchmarks.accuracy_settings import AccuracySettings
from atom.benchmarks.agentic_sessions import Traces
from atom.benchmarks.server_settings import UNRECORDED
from atom.benchmarks.throughput_point import read_sessions
from atom.benchmarks.throughput_process import COMMAND
from atom.benchmarks.throughput_rows import EXPERIMENT
from atom.benchmarks.throughput_settings import Special, ThroughputSettings, build_points
from atom.config import DeviceChoice
from atom.device import Device
from atom.device.interface import DeviceKind
from atom.device.profiles import find_profile
from atom.errors import BadInput
from atom.kv_transfer.lmcache_backend import import_lmcache
from atom.model_engine.engine_builder import PRESET
from atom.models.model_config import ModelConfig
from atom.models.presets import EMBEDDING_SCALES, preset, random_checkpoint
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep, SweepOver, record_points
from atom.workbook.records import Run
from atom.workbook.sweep_control import this_kind
from atom.workbook.sweep_progress import SweepProgress
from atom.workbook.throughput_dask import (
    Lost,
    connected,
    refuse_no_dask,
    run_jobs,
    run_on_host,
    visible,
)
from atom.workbook.throughput_queue import Queue, estimate_seconds
from atom.workbook.throughput_remote import (
    Elsewhere,
    describe_workers,
    refuse_no_server,
    server_properties,
)
from atom.workbook.throughput_results import result_text, tables_of, unexpected

#: what an accelerator takes where a value is not given. The scale is one H200's: sessions of half
#: the recorded lengths, whose mean one grows to 0.27 GiB of KV; 3 GiB of them on the device; pools
#: from 0.2 to 1.2 times what 64 of them hold, around the sizes where 32, 48 and 64 begin to fit
ACCELERATOR: dict[str, Any] = {
    "model": "preset:m395",
    "block_tokens": 32,
    "max_context_tokens": 32000,
    "think_cap_seconds": 1.0,
    "duration_seconds": 60.0,
    "concurrency": [8, 16, 32, 48, 64],
    "pool_gib": [3.0, 6.0, 10.0, 14.0, 20.0],
    "chunk_tokens": [256],
    "other_chunk_tokens": [64, 2048],
    "special": ["repeats", "unpatched", "guard", "factorial", "zero_copy", "chunks", "policies"],
    "central_concurrency": [32],
    "crash_points": [[32, 10.0], [64, 14.0], [32, 6.0]],
    "heavy_points": [[64, 14.0], [48, 10.0]],
    "max_num_batched_tokens": 8192,
    "block_size": 64,
    "num_kv_blocks": 4915,
    "state_checkpoint_tokens": 256,
    "num_state_checkpoints": 32,
    "warm_up": True,
}
#: names of it that are points of its grid
_OF_THE_GRID = ("central_concurrency", "crash_points", "heavy_points")
#: what ``--quick`` takes there
QUICK_ACCELERATOR: dict[str, Any] = {
    "warm_up": False,
    "duration_seconds": 3.0,
    "concurrency": [32],
    "pool_gib": [10.0],
    "special": [],
}
QUICK: dict[str, Any] = {"duration_seconds": 1.0, "concurrency": [4], "pool_gib": [0.002]}


@dataclass
class Ready:
    """What all points need.

    Attributes:
        traces: the sessions.
        model: what the points load: made once where the settings name a preset.
        keep: ends with the sweep.
    """

    traces: Traces
    model: str
    keep: ExitStack = field(default_factory=ExitStack)


class ThroughputSweep(PointSweep[ThroughputSettings]):
    """A process and an engine a point."""

    command = "throughput"
    experiment = EXPERIMENT
    settings = ThroughputSettings
    row_a_point = True
    table = "points"
    takes = frozenset({"gpus", "scheduler", "traces", "client", *UNRECORDED})
    why_not = "a point is one process; see -p repeats N"
    #: starts a point's process
    process: tuple[str, ...] = COMMAND

    def parse(self, given: dict[str, Any], quick: bool) -> ThroughputSettings:
        """See :class:`PointSweep`."""
        accelerator = given.get("device") == DeviceChoice.ACCELERATOR.value
        defaults = dict(ACCELERATOR) if accelerator else {}
        if quick:
            defaults |= QUICK_ACCELERATOR if accelerator else QUICK
        if not set(UNRECORDED).isdisjoint(given):
            # those points are of this package's engine
            for name in ("special", "crash_points", "model"):
                defaults.pop(name, None)
        if quick or not {"concurrency", "pool_gib"}.isdisjoint(given):
            for name in _OF_THE_GRID:
                defaults.pop(name, None)
        return ThroughputSettings.parse({**defaults, **given}, where="sweep throughput")

    def settings_from(
        self, arguments: argparse.Namespace, present: DeviceChoice | None = None
    ) -> ThroughputSettings:
        """See :class:`PointSweep`. A resumed run may go on elsewhere, and with its traces moved."""
        logs = new_logs(arguments.out)
        if arguments.resume is None:
            settings = super().settings_from(arguments, present)
            return settings.model_copy(update={"logs": settings.logs or logs})
        moved = {name: getattr(arguments, name) for name in sorted(self.takes)}
        plain = argparse.Namespace(**{**vars(arguments), **dict.fromkeys(self.takes)})
        settings = super().settings_from(plain, present)
        values = settings.model_dump(mode="json") | {"logs": logs}
        values |= {name: value for name, value in moved.items() if value is not None}
        _refuse_other_traces(settings.traces, values["traces"])
        return self.recorded(values, f"settings of {arguments.resume}")

    def plan(self, settings: ThroughputSettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        return [
            PlannedPoint(
                point.point_id,
                f"{point.point_id:44} {estimate_seconds(settings, point):6.1f} s",
                estimate_seconds(settings, point),
            )
            for point in build_points(settings)
        ]

    def side_by_side(self, settings: ThroughputSettings) -> int:
        """See :class:`PointSweep`."""
        return max(1, len(settings.gpus))

    def is_here(self, settings: ThroughputSettings) -> bool:
        """See :class:`PointSweep`."""
        return settings.scheduler is None

    def where(self, settings: ThroughputSettings) -> str:
        """See :class:`PointSweep`."""
        return settings.server_label or super().where(settings)

    def open(self, settings: ThroughputSettings) -> Device:
        """See :class:`PointSweep`. Nothing runs in this process: it takes no memory of the GPU."""
        if settings.scheduler is not None:
            with connected(settings.scheduler) as client:
                return cast(Device, Elsewhere(describe_workers(client, settings, self.process)))
        if settings.device is DeviceChoice.ACCELERATOR and settings.base_url is None:
            from atom.device.accelerator import accelerator_properties

            return cast(Device, Elsewhere(accelerator_properties(0)))
        if settings.serves:
            return cast(Device, Elsewhere(server_properties()))
        return super().open(settings)

    def refuse_missing(self, settings: ThroughputSettings) -> None:
        """See :class:`PointSweep`. Damaged traces and what no machine has are refused here; what
        this one lacks is named, since a plan may be for another."""
        read_sessions(settings)
        if self.is_here(settings) and not settings.serves:
            self.refuse_no_model(settings)
            if settings.device is DeviceChoice.VIRTUAL:
                find_profile(settings.device_profile)
        try:
            self.refuse_lacking(settings)
        except BadInput as error:
            print(f"the sweep would be refused: {error}", file=sys.stderr)

    def refuse_lacking(self, settings: ThroughputSettings) -> None:
        """Raise ``BadInput`` where this machine lacks a library that the settings need."""
        if Special.BACKENDS in settings.special and self.is_here(settings):
            import_lmcache()
        if self.needs_dask(settings) or settings.scheduler is not None:
            refuse_no_dask()
        environments(settings)

    def prepare(self, settings: ThroughputSettings, device: Device) -> Ready:
        """See :class:`PointSweep`."""
        if settings.serves:
            refuse_no_server(settings)
        elif self.is_here(settings):
            self.refuse_no_model(settings)
        self.refuse_lacking(settings)
        ready = Ready(read_sessions(settings), settings.model)
        name = settings.model.removeprefix(PRESET)
        here = settings.scheduler is None and device.properties.kind is not DeviceKind.VIRTUAL
        if here and not settings.serves and name != settings.model:
            # drawn once: that takes longer than to load it
            folder = ready.keep.enter_context(tempfile.TemporaryDirectory(prefix="atom-model-"))
            scale = EMBEDDING_SCALES[name]
            random_checkpoint(folder, preset(name), settings.seed, embedding_scale=scale)
            ready.model = folder
        return ready

    def needs_dask(self, settings: ThroughputSettings) -> bool:
        """Whether points go to the workers of a cluster on this host."""
        return len(settings.gpus) > 1

    @staticmethod
    def refuse_no_model(settings: ThroughputSettings) -> None:
        """Raise ``BadInput`` here, before each point would, unless there is such a model.

        A preset's weights are drawn: it may be given any length.
        """
        name = settings.model
        if name.startswith(PRESET):
            preset(name.removeprefix(PRESET))
        else:
            config = ModelConfig.from_pretrained(name)
            config.refuse_longer(settings.max_context_tokens, "max_context_tokens")

    def facts(self, ready: Ready) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        return {
            "traces": {
                "source": ready.traces.source,
                "sessions": len(ready.traces.sessions),
                "dropped": dict(ready.traces.dropped),
                "block_tokens": ready.traces.block_tokens,
            }
        }

    def measure(
        self,
        settings: ThroughputSettings,
        device: Device,
        ready: Ready,
        done: Collection[str],
    ) -> Measured:
        """See :class:`PointSweep`."""
        points = {p.point_id: p for p in build_points(settings) if p.point_id not in done}
        queue = Queue(settings, list(points.values()), ready.model)
        lost: dict[str, str] = {}
        with ready.keep:
            for job, end in self._ends(settings, queue):
                point = points[job["point_id"]]
                if job.get("warm_up"):
                    continue
                if isinstance(end, Lost):
                    lost[point.point_id] = end.reason
                    continue
                queue.took(point, end["wall_seconds"])
                yield point.point_id, tables_of(settings, point, end, job["limit_seconds"])
        reasons = dict.fromkeys(queue.left, "no time was left") | lost
        if reasons:
            raise SweepOver(reasons)

    def _ends(
        self, settings: ThroughputSettings, queue: Queue
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any] | Lost]]:
        sweep = queue.sweep
        if settings.scheduler is not None:
            with connected(settings.scheduler) as client:
                yield from run_jobs(client, queue.next, sweep, self.process)
        else:
            yield from run_on_host(environments(settings), queue.next, sweep, self.process)

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return result_text(run.tables["points"])

    def unexpected(self, run: Run) -> list[str]:
        """See :class:`PointSweep`."""
        return unexpected(run.tables["points"])


def new_logs(root: str | Path) -> str:
    """Folder for the logs of a sweep's points below where its runs go.

    Two sweeps that start together get one each: none reads a log of the other's servers.
    """
    stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
    return str(Path(root) / ".logs" / stamp)


def environments(settings: ThroughputSettings | AccuracySettings) -> list[Mapping[str, str]]:
    """What shows a process each of the GPUs that are named, and it alone."""
    if not settings.gpus:
        return [{}]
    if settings.device is DeviceChoice.VIRTUAL:
        return [{} for _ in settings.gpus]
    hip = this_kind() is DeviceKind.HIP
    variable = "HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES"
    return [visible(gpu, variable) for gpu in settings.gpus]


def _refuse_other_traces(recorded: str | None, given: str | None) -> None:
    """A record has the last part of a folder's path alone."""
    if recorded is None and given is None:
        return
    if recorded is None or given is None or Path(recorded).name != Path(given).name:
        raise BadInput(f"--traces {given}: the run was started with traces of {recorded}")
    if not Path(given).is_dir():
        raise BadInput(f"no folder {given}: name the traces of this run with --traces DIR")


SWEEP = ThroughputSweep()


def record_throughput(
    settings: ThroughputSettings,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run the experiment and record it; see :func:`record_points`."""
    return record_points(SWEEP, settings, root, progress, resume)

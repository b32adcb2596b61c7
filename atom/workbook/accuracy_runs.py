"""``python -m atom sweep accuracy``: GSM8K's task put to arms of the engine, item by item."""

from __future__ import annotations

import argparse
import json
import math
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from atom.benchmarks.accuracy_point import Task, task_hash
from atom.benchmarks.accuracy_rows import (
    EXPERIMENT,
    AccuracyItemRow,
    AccuracyRow,
    AccuracyTextRow,
)
from atom.benchmarks.accuracy_settings import (
    SHIPPED,
    UNRECORDED,
    AccuracyPoint,
    AccuracySettings,
    build_points,
)
from atom.benchmarks.gsm8k_task import load_items, prompts_of_test
from atom.benchmarks.seeded_model import SEEDED, make_seeded_model, shipped_model
from atom.config import DeviceChoice
from atom.device import Device
from atom.models.model_config import ModelConfig
from atom.models.weights import check_checkpoint
from atom.workbook.accuracy_analysis import STALE, load_set
from atom.workbook.accuracy_refusals import refuse_no_server, refuse_other_tokenizer
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep, SweepOver, record_points
from atom.workbook.provenance import redact
from atom.workbook.records import Run
from atom.workbook.sweep_progress import SweepProgress
from atom.workbook.throughput_dask import Lost, refuse_no_dask, run_on_host
from atom.workbook.throughput_remote import Elsewhere, server_properties
from atom.workbook.throughput_results import outcome_of
from atom.workbook.throughput_runs import environments, new_logs

#: what an accelerator takes where a value is not given: all items of the model that is shipped,
#: answers of any length that the task allows, prefixes that leave the device, and a pool that holds
#: a part of them
ACCELERATOR: dict[str, Any] = {
    "max_model_len": 16000,
    "max_num_batched_tokens": 16384,
    "num_kv_blocks": 8192,
    "state_checkpoint_tokens": 128,
    "num_state_checkpoints": 64,
    "pool_gib": 0.5,
    "pressure": [[64, 1], [256, 64], [256, 16], [256, 4], [256, 1]],
    "point_seconds": 90.0,
}
QUICK: dict[str, Any] = {
    "items": 12,
    "max_tokens": 24,
    "concurrency": 12,
    "protocol": ["hold", "unpatched"],
    "offload": False,
    "twin": False,
    "pressure": [[8, 16]],
}
#: a minute: the reference, and both protocols under the strongest pressure
QUICK_ACCELERATOR: dict[str, Any] = {
    "items": 96,
    "protocol": ["hold", "unpatched"],
    "offload": False,
    "twin": False,
    "pressure": [[256, 1]],
    "only": ["hold/no-pool/plain", "*-every-1"],
}
#: items of the virtual device, whose answers are computed on a CPU
VIRTUAL: dict[str, Any] = {"items": 48, "max_tokens": 48, "concurrency": 16}
#: of a point's start: process and libraries, weights, graphs
_START_SECONDS = {DeviceChoice.VIRTUAL: 6.0, DeviceChoice.ACCELERATOR: 17.0}
#: seconds an item: of the seeded model on one core; of the shipped one beside an H200, where a
#: prompt takes seven prefill steps (one a state checkpoint) of 6 ms, most of it the host's
_ITEM_SECONDS = {DeviceChoice.VIRTUAL: 0.25, DeviceChoice.ACCELERATOR: 0.022}
_HANG_SECONDS = 120.0


@dataclass
class Ready:
    """What all points need.

    Attributes:
        model: checkpoint folder.
        name: of the model, for the rows.
        task: items and chats.
        keep: ends with the sweep.
    """

    model: str
    name: str
    task: Task
    keep: ExitStack = field(default_factory=ExitStack)


class AccuracySweep(PointSweep[AccuracySettings]):
    """A process and an engine a point."""

    command = "accuracy"
    experiment = EXPERIMENT
    settings = AccuracySettings
    row_a_point = True
    table = "points"
    takes = frozenset({"gpus", "client", *UNRECORDED})
    why_not = "a point is one process that asks every item once"
    #: starts a point's process
    process: tuple[str, ...] = ()

    def parse(self, given: dict[str, Any], quick: bool) -> AccuracySettings:
        """See :class:`PointSweep`."""
        accelerator = given.get("device") == DeviceChoice.ACCELERATOR.value
        serves = "base_url" in given
        defaults: dict[str, Any] = {}
        if not serves:
            defaults = dict(ACCELERATOR if accelerator else VIRTUAL)
            if quick:
                defaults |= QUICK_ACCELERATOR if accelerator else QUICK
        elif quick:
            defaults["items"] = QUICK["items"]
        if serves:
            defaults["client"] = "http"
        return AccuracySettings.parse({**defaults, **given}, where="sweep accuracy")

    def settings_from(
        self, arguments: argparse.Namespace, present: DeviceChoice | None = None
    ) -> AccuracySettings:
        """See :class:`PointSweep`. A resumed run is told again what no record has."""
        logs = new_logs(arguments.out)
        if arguments.resume is None:
            settings = super().settings_from(arguments, present)
            return settings.model_copy(update={"logs": settings.logs or logs})
        again = {name: getattr(arguments, name) for name in (*UNRECORDED, "gpus")}
        plain = argparse.Namespace(**{**vars(arguments), **dict.fromkeys(self.takes)})
        recorded = super().settings_from(plain, present)
        values = recorded.model_dump(mode="json") | {"logs": logs}
        values |= {name: value for name, value in again.items() if value is not None}
        return AccuracySettings.parse(values, where=f"settings of {arguments.resume}")

    def plan(self, settings: AccuracySettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        seconds = estimate_seconds(settings)
        if settings.gsm8k is not None:
            # a dry run says so, too
            load_items(settings)
        return [
            PlannedPoint(point.point_id, f"{point.point_id:48} {seconds:6.1f} s", seconds)
            for point in build_points(settings)
        ]

    def side_by_side(self, settings: AccuracySettings) -> int:
        """See :class:`PointSweep`."""
        return max(1, len(settings.gpus))

    def where(self, settings: AccuracySettings) -> str:
        """See :class:`PointSweep`."""
        return settings.server_label or super().where(settings)

    def open(self, settings: AccuracySettings) -> Device:
        """See :class:`PointSweep`. Nothing runs in this process: it takes no memory of the GPU."""
        if settings.serves:
            return cast(Device, Elsewhere(server_properties()))
        if settings.device is DeviceChoice.ACCELERATOR:
            from atom.device.accelerator import accelerator_properties

            return cast(Device, Elsewhere(accelerator_properties(0)))
        return super().open(settings)

    def prepare(self, settings: AccuracySettings, device: Device) -> Ready:
        """See :class:`PointSweep`."""
        if settings.gpus:
            refuse_no_dask()
            environments(settings)
        task = prompts_of_test(settings)
        if settings.serves:
            refuse_no_server(settings)
            return Ready("", settings.server_model, task)
        keep = ExitStack()
        folder, name = resolve_model(settings, keep)
        config = ModelConfig.from_pretrained(folder)
        config.refuse_longer(settings.max_model_len, "max_model_len")
        check_checkpoint(folder)
        refuse_other_tokenizer(folder, config.vocab_size, task)
        return Ready(folder, name, task, keep)

    def facts(self, ready: Ready) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        return {"task": {"prompts": len(ready.task[1]), "hash": task_hash(ready.task)}}

    def measure(
        self, settings: AccuracySettings, device: Device, ready: Ready, done: Collection[str]
    ) -> Measured:
        """See :class:`PointSweep`."""
        points = {p.point_id: p for p in build_points(settings) if p.point_id not in done}
        queue = _Queue(settings, list(points.values()), ready)
        lost: dict[str, str] = {}
        with ready.keep:
            for job, end in self._ends(settings, queue):
                point = points[job["point_id"]]
                if isinstance(end, Lost):
                    lost[point.point_id] = end.reason
                    continue
                limit, beside = job["limit_seconds"], job["beside"]
                tables = tables_of(settings, point, ready, end, limit, beside)
                if point.is_reference:
                    queue.took_reference(tables["items"])
                yield point.point_id, tables
        reasons = dict.fromkeys(queue.left, "no time was left") | lost
        if reasons:
            raise SweepOver(reasons)

    def _ends(
        self, settings: AccuracySettings, queue: _Queue
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any] | Lost]]:
        command = self.process or point_command()
        alone = settings.model_copy(update={"gpus": tuple(dict.fromkeys(settings.gpus))})
        if alone.gpus != settings.gpus:
            queue.beside = max(Counter(settings.gpus).values()) - 1
            yield from run_on_host(environments(settings), queue.next, queue.sweep, command)
            queue.beside = 0
        yield from run_on_host(environments(alone), queue.next, queue.sweep, command)

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return result_text(run)

    def unexpected(self, run: Run) -> list[str]:
        """See :class:`PointSweep`."""
        return unexpected(run)


class _Queue:
    """Points that are left, as jobs, while there is time for them.

    Attributes:
        beside: most other points on the same GPU; above 0 only those are given that allow it.
    """

    def __init__(
        self, settings: AccuracySettings, points: list[AccuracyPoint], ready: Ready
    ) -> None:
        self.sweep = secrets.token_hex(4)
        self.left: list[str] = []
        self.beside = 0
        self._settings, self._points, self._ready = settings, points, ready
        self._reference: list[str] | None = None
        self._began = time.monotonic()

    def took_reference(self, items: Sequence[BaseModel]) -> None:
        """The reference's answers are known: points that come now tell what differs from them."""
        hashes = [row.answer_hash for row in items if isinstance(row, AccuracyItemRow)]
        self._reference = hashes or None

    def next(self) -> dict[str, Any] | None:
        """The next point's job; ``None``: no more, or no time for them."""
        settings = self._settings
        for point in [p for p in self._points if not (self.beside and p.needs_gpu_alone)]:
            self._points.remove(point)
            needed = time.monotonic() - self._began + estimate_seconds(settings)
            if settings.budget_seconds is not None and needed > settings.budget_seconds:
                self.left.append(point.point_id)
                continue
            return self._job(point)
        return None

    def _job(self, point: AccuracyPoint) -> dict[str, Any]:
        settings = self._settings
        unrecorded = {name: getattr(settings, name) for name in UNRECORDED}
        log = None
        if settings.logs is not None:
            name = "".join(c if c.isalnum() or c in ".-" else "_" for c in point.point_id)
            log = str(Path(settings.logs) / f"{name}.log")
        limit = settings.time_limit_seconds or settings.point_seconds + _HANG_SECONDS
        if settings.client == "lm-eval":
            # it keeps to no limit of a point
            limit = math.ceil(settings.items / settings.concurrency) * settings.request_seconds
        return {
            "point_id": point.point_id,
            "settings": settings.model_dump(mode="json") | unrecorded,
            "model": self._ready.model,
            "reference": self._reference,
            "limit_seconds": limit,
            "beside": self.beside,
            # kernels that are compiled for the first time take their time
            "start_limit_seconds": _HANG_SECONDS + 3 * _START_SECONDS[settings.device],
            "log": log,
            "sweep": self.sweep,
        }


def point_command() -> tuple[str, ...]:
    """Starts a point's process."""
    return (sys.executable, "-m", "atom.benchmarks.accuracy_point")


def resolve_model(settings: AccuracySettings, keep: ExitStack) -> tuple[str, str]:
    """Folder and name of the model to ask. A seeded one lives as long as ``keep``."""
    if settings.model != SHIPPED:
        return settings.model, Path(settings.model).resolve().name
    folder = shipped_model()
    if folder is not None:
        return str(folder), folder.name
    made = keep.enter_context(tempfile.TemporaryDirectory(prefix="atom-model-"))
    return str(make_seeded_model(made, settings.seed)), SEEDED


def estimate_seconds(settings: AccuracySettings) -> float:
    """How long a point takes, roughly."""
    each = _ITEM_SECONDS[settings.device]
    return _START_SECONDS[settings.device] + min(settings.items * each, settings.point_seconds)


def tables_of(
    settings: AccuracySettings,
    point: AccuracyPoint,
    ready: Ready,
    end: Mapping[str, Any],
    limit: float,
    beside: int = 0,
) -> dict[str, Sequence[BaseModel]]:
    """Rows of a point by table.

    Args:
        settings: of the sweep.
        point: which.
        ready: what it asked, and of which model.
        end: of ``throughput_process.run_point``, or the like of a point of this process.
        limit: seconds that its items were given.
        beside: most other points that had its GPU.
    """
    told = dict(end["told"])
    items, texts = told.pop("items_table", []), told.pop("texts_table", [])
    outcome, detail = outcome_of(told, end, limit)
    ours = point.protocol is not None
    row = AccuracyRow(
        **{
            **dict.fromkeys(AccuracyRow.model_fields),
            **told,
            "point_id": point.point_id,
            "arm": point.arm,
            "system": settings.server_label or "atom",
            "client": settings.client,
            "order": point.order,
            "model": ready.name,
            "dataset": "words" if settings.gsm8k is None else "gsm8k",
            "task_hash": task_hash(ready.task),
            "protocol": point.protocol,
            "believes": point.believes if ours else None,
            "pool_gib": settings.pool_gib if point.offload else None,
            "draft_tokens": (settings.draft_tokens if point.drafts else 0) if ours else None,
            "pressure_mib": point.pressure_mib if ours else None,
            "pressure_every": point.pressure_every if ours else None,
            "concurrency": settings.concurrency,
            "shots": settings.shots,
            "items": settings.items,
            "outcome": outcome,
            # an error of a foreign library may name a file or a host
            "outcome_detail": None if detail is None else redact(detail),
            "exit_code": end["exit_code"],
            "wall_seconds": round(end["wall_seconds"], 3),
            "worker": end.get("worker"),
            "beside": beside,
        }
    )
    name = {"point_id": point.point_id}
    return {
        "points": [row],
        "items": [AccuracyItemRow(**name, **one) for one in items],
        "texts": [
            AccuracyTextRow(**name, item=one["item"], text=json.dumps(one["text"])) for one in texts
        ],
    }


SWEEP = AccuracySweep()


def record_accuracy(
    settings: AccuracySettings,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run the experiment and record it; see :func:`record_points`."""
    return record_points(SWEEP, settings, root, progress, resume)


def unexpected(run: Run) -> list[str]:
    """Protected points and servers that did not end well, were stale, or failed a request."""
    found = []
    for point in load_set(run, "").points:
        row = point.row
        if row["believes"]:
            continue
        counts = (*STALE, "guard_errors", "failed_requests")
        wrong = [f"{row[name]} {name.replace('_', ' ')}" for name in counts if row[name]]
        if row["outcome"] != "ok" or wrong:
            said = f": {row['outcome_detail']}" if row["outcome_detail"] else ""
            found.append(f"{point.name}: {row['outcome']}, {', '.join(wrong) or 'none'}{said}")
    return found


def result_text(run: Run) -> str:
    """A point a line: score with its interval, acceptance, stale reads, and changed answers."""
    lines = [
        f"{'arm/pool/drafts':44} {'outcome':9} {'strict':>7} {'95%':>15} {'accept':>7} "
        f"{'stale':>6} {'guard':>6} {'failed':>7} {'changed':>9}"
    ]
    for point in load_set(run, "").points:
        row, score, against = point.row, point.score, point.against
        lines.append(
            f"{point.name:44} {row['outcome']:9} "
            f"{'-' if score is None else f'{score[0]:.4f}':>7} "
            f"{'-' if score is None else f'{score[1]:.4f}-{score[2]:.4f}':>15} "
            f"{'-' if point.acceptance is None else f'{point.acceptance:.1%}':>7} "
            f"{_count(point.stale):>6} {_count(row['guard_errors']):>6} "
            f"{_count(row['failed_requests']):>7} "
            f"{'-' if against is None else f'{against.changed}/{against.compared}':>9}"
        )
    lines += ["", "changed: answers that differ from the reference's (hold, no pool, no drafts)"]
    return "\n".join(lines)


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)

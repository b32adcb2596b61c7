"""``python -m atom sweep capacity``: simulate hours of serving, points side by side; recorded."""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import pandas as pd

from atom.benchmarks.capacity_check import simulate_like
from atom.benchmarks.capacity_points import (
    CapacitySettings,
    build_points,
    check_fits,
    read_sessions,
    run_point,
)
from atom.benchmarks.capacity_rows import EXPERIMENT, CapacityRow
from atom.benchmarks.session_model import Session
from atom.config import DeviceChoice
from atom.device import Device, DeviceKind
from atom.device.interface import DeviceProperties
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook.capacity_measured import like_plan, like_sessions, like_tasks
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep, record_points
from atom.workbook.records import Run
from atom.workbook.sweep_progress import SweepProgress
from atom.workbook.throughput_remote import Elsewhere

MODEL = "capacity model"
#: the published setups in less than a minute
_QUICK: dict[str, Any] = {"duration_seconds": 120.0, "sessions": 48}
#: processor seconds of a simulated second, and of a point's start
_SECONDS_A_SECOND, _START_SECONDS = 0.012, 1.0
#: of a point of a throughput run
_LIKE_SECONDS = 0.8


class CapacitySweep(PointSweep[CapacitySettings]):
    """Each point in one of as many processes as there are cores."""

    command = "capacity"
    experiment = EXPERIMENT
    settings = CapacitySettings
    row_a_point = True
    table = "points"
    takes = frozenset({"processes", "traces"})
    why_not = "it simulates; see -p duration_seconds S and -p repeats N"
    asks_for_device = False

    def parse(self, given: dict[str, Any], quick: bool) -> CapacitySettings:
        """See :class:`PointSweep`."""
        if given.pop("device", DeviceChoice.VIRTUAL) != DeviceChoice.VIRTUAL:
            raise BadInput("sweep capacity is a model and runs on no accelerator")
        settings = CapacitySettings.parse(given, where="sweep capacity")
        return settings.with_defaults(_QUICK) if quick else settings

    def settings_from(
        self, arguments: argparse.Namespace, present: DeviceChoice | None = None
    ) -> CapacitySettings:
        """See :class:`PointSweep`. A resumed run is told where its traces lie now."""
        if arguments.resume is None:
            return super().settings_from(arguments, present)
        moved, processes = arguments.traces, arguments.processes
        plain = argparse.Namespace(**{**vars(arguments), "traces": None, "processes": None})
        settings = super().settings_from(plain, present)
        if (moved is None) is not (settings.traces is None) or (
            moved is not None and Path(moved).name != Path(settings.traces or "").name
        ):
            raise BadInput(
                f"--traces {moved}: the run was started with traces of {settings.traces}"
            )
        changed = {"traces": moved} | ({} if processes is None else {"processes": processes})
        return settings.model_copy(update=changed)

    def plan(self, settings: CapacitySettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        if settings.like is not None:
            return [
                PlannedPoint(name, f"{name:48} {_LIKE_SECONDS:6.1f} s", _LIKE_SECONDS)
                for name in like_plan(settings.like)
            ]
        seconds = _START_SECONDS + _SECONDS_A_SECOND * settings.duration_seconds
        return [
            PlannedPoint(point.point_id, f"{point.point_id:48} {seconds:6.1f} s", seconds)
            for point in build_points(settings)
        ]

    def side_by_side(self, settings: CapacitySettings) -> int:
        """See :class:`PointSweep`."""
        return settings.processes or len(os.sched_getaffinity(0))

    def device_of(self, settings: CapacitySettings) -> DeviceChoice:
        """See :class:`PointSweep`."""
        return DeviceChoice.VIRTUAL

    def where(self, settings: CapacitySettings) -> str:
        """See :class:`PointSweep`."""
        return f"{self.side_by_side(settings)} processes"

    def open(self, settings: CapacitySettings) -> Device:
        """See :class:`PointSweep`. A model, not a device: only its properties are asked for."""
        return cast(Device, Elsewhere(model_properties()))

    def prepare(self, settings: CapacitySettings, device: Device) -> tuple[Session, ...]:
        """See :class:`PointSweep`."""
        if settings.like is not None:
            return like_sessions(settings.like, settings.traces)
        sessions = read_sessions(settings)
        check_fits(settings, build_points(settings), sessions)
        return sessions

    def facts(self, ready: tuple[Session, ...]) -> dict[str, Any]:
        """See :class:`PointSweep`."""
        turns = [turn for session in ready for turn in session.turns]
        return {
            "load": {
                "sessions": len(ready),
                "requests": len(turns),
                "prompt_tokens_mean": round(sum(t.input_tokens for t in turns) / len(turns)),
                "output_tokens_mean": round(sum(t.output_tokens for t in turns) / len(turns)),
            }
        }

    def measure(
        self,
        settings: CapacitySettings,
        device: Device,
        ready: tuple[Session, ...],
        done: Collection[str],
    ) -> Measured:
        """See :class:`PointSweep`."""
        count = self.side_by_side(settings)
        if settings.like is not None:
            measured, tasks = like_tasks(settings.like, done)
            rows = simulated(simulate_like, (measured, ready), tasks, count)
        else:
            left = [point for point in build_points(settings) if point.point_id not in done]
            rows = simulated(run_point, (settings, ready), [(point,) for point in left], count)
        for row in rows:
            yield row.point_id, {"points": [row]}

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return result_text(run.tables["points"])


def simulated(
    run: Callable[..., CapacityRow],
    common: tuple[Any, tuple[Session, ...]],
    tasks: Sequence[tuple[Any, ...]],
    processes: int,
) -> Iterator[CapacityRow]:
    """Rows as they end, each simulated in one of ``processes`` processes.

    Args:
        run: called with what is common and with a task; of a module, for another process.
        common: settings and sessions.
        tasks: what else ``run`` takes, a row each.
        processes: how many.
    """
    if min(processes, len(tasks)) <= 1:
        for task in tasks:
            yield run(*common, *task)
        return
    with _workers(run, common, min(processes, len(tasks))) as pool:
        futures = [pool.submit(_in_worker, task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()


@contextmanager
def _workers(
    run: Callable[..., CapacityRow], common: tuple[Any, tuple[Session, ...]], count: int
) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(
        count,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        # a session has long lists: they are written out once, not for each process
        initargs=(run, pickle.dumps(common)),
    )
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        # an interrupted sweep does not wait for hours that nobody will see
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise


_worker: dict[str, Any] = {}


def _start_worker(run: Callable[..., CapacityRow], common: bytes) -> None:
    # Ctrl-C reaches all processes of a terminal; it is for the first, which ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # entries of a pool are many and form no cycles: looking through them takes a tenth of the time
    gc.disable()
    _worker.update(run=run, common=pickle.loads(common))


def _in_worker(task: tuple[Any, ...]) -> CapacityRow:
    row: CapacityRow = _worker["run"](*_worker["common"], *task)
    gc.collect()
    return row


def model_properties() -> DeviceProperties:
    """What the model's records name as their device."""
    return DeviceProperties(
        name=MODEL,
        kind=DeviceKind.VIRTUAL,
        evidence=Evidence.SIMULATED,
        machine="model",
        memory_bytes=0,
        hardware_queues=None,
        queue_variable=None,
        driver=None,
        runtime="virtual",
    )


SWEEP = CapacitySweep()


def record_capacity(
    settings: CapacitySettings,
    root: str | Path,
    progress: SweepProgress | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Run the experiment and record it; see :func:`record_points`."""
    return record_points(SWEEP, settings, root, progress, resume)


def failure_rate(rows: pd.DataFrame) -> pd.Series:
    """Share of the state loads that failed, by request; missing where none was asked for."""
    return rows["state_pairs_failed"] / rows["state_pairs"].where(rows["state_pairs"] > 0)


def result_text(rows: pd.DataFrame) -> str:
    """A line a point."""
    lines = [f"{'point':48} {'tok/s':>8} {'hits':>6} {'TTFT s':>7} {'ITL p90':>8} {'failed':>7}"]
    rates = failure_rate(rows)
    for row, rate in zip(rows.to_dict("records"), rates, strict=True):
        failed = "" if pd.isna(rate) else f"{rate:.1%}"
        itl = 1e3 * row["itl_p90_seconds"]
        lines.append(
            f"{row['point_id']:48} {row['effective_total_throughput']:8,.0f} "
            f"{row['cached_share']:6.1%} {row['ttft_mean_seconds']:7.1f} {itl:6.1f}ms {failed:>7}"
        )
    return "\n".join(lines)

"""Points of a throughput sweep as jobs of processes: their limits, and while there is time."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from atom.benchmarks.throughput_settings import ThroughputPoint, ThroughputSettings
from atom.config import DeviceChoice

#: window of a point that is not recorded
_WARM_UP_SECONDS = 2.0
#: a load's time beyond its window: the last answers, and each lane's requests before it
_AROUND_SECONDS = 3.0
_LANE_SECONDS = {DeviceChoice.VIRTUAL: 0.05, DeviceChoice.ACCELERATOR: 0.25}
_HANG_SECONDS = 120.0
#: of a point's start: process and libraries, weights and graphs; pinning a GiB
_START_SECONDS = {DeviceChoice.VIRTUAL: 5.0, DeviceChoice.ACCELERATOR: 14.0}
_PIN_SECONDS_PER_GIB = 0.35


class TimeBudget:
    """Whether there is time for one more point, by how long the latest ones took.

    Args:
        seconds: from now on; ``None``: as long as it takes.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._began = time.monotonic()
        self._factors: list[float] = []

    def took(self, planned: float, seconds: float) -> None:
        """A point took so long: the next estimates know."""
        self._factors.append(seconds / planned)

    def allows(self, planned: float) -> bool:
        """Whether a point would end within it that is planned to take so many seconds."""
        if self._seconds is None:
            return True
        needed = max(self._factors[-6:], default=1.0) * planned
        return time.monotonic() - self._began + needed <= self._seconds


class Queue:
    """Points that are left, as jobs, while there is time for them.

    Attributes:
        sweep: identity of the jobs' sweep.
        left: identities of the points for which no time was left.
        warm_ups: jobs that come first and are not recorded.
    """

    def __init__(
        self, settings: ThroughputSettings, points: list[ThroughputPoint], model: str
    ) -> None:
        self.sweep = secrets.token_hex(4)
        self.left: list[str] = []
        self._settings = settings
        self._points = points
        self._model = model
        self._budget = TimeBudget(settings.budget_seconds)
        self.warm_ups = self._build_warm_ups() if settings.warm_up else []

    def took(self, point: ThroughputPoint, seconds: float) -> None:
        """A point took so long: the next estimates know."""
        self._budget.took(estimate_seconds(self._settings, point), seconds)

    def next(self) -> dict[str, Any] | None:
        """The next point's job; those for which no time is left are passed over."""
        if self.warm_ups:
            return self.warm_ups.pop(0)
        while self._points:
            point = self._points.pop(0)
            if self._budget.allows(estimate_seconds(self._settings, point)):
                return self.job(point)
            self.left.append(point.point_id)
        return None

    def _build_warm_ups(self) -> list[dict[str, Any]]:
        """A job for each set of kernels that the points have, no more than run side by side."""
        largest: dict[tuple[Any, ...], ThroughputPoint] = {}
        for point in self._points:
            kernels = (point.arm.mtp, point.arm.guard)
            best = largest.setdefault(kernels, point)
            if (point.concurrency, point.pool_gib or 0) > (best.concurrency, best.pool_gib or 0):
                largest[kernels] = point
        jobs = []
        for point in list(largest.values())[: max(1, len(self._settings.gpus))]:
            job = self.job(point)
            job["settings"] |= {"duration_seconds": _WARM_UP_SECONDS}
            job["key"] = f"warm-up/{point.point_id}"
            # a cold compilation is no hang
            job["start_limit_seconds"] += _HANG_SECONDS
            if job["log"] is not None:
                # the point itself comes later, and has a log of its own
                job["log"] = f"{job['log']}.warm-up"
            jobs.append(job | {"warm_up": True})
        return jobs

    def job(self, point: ThroughputPoint) -> dict[str, Any]:
        """A point as a job of ``throughput_process.run_point``."""
        settings = self._settings
        values = settings.model_dump(mode="json") | settings.unrecorded() | {"model": self._model}
        log = None
        if settings.logs is not None and settings.scheduler is None:
            name = "".join(c if c.isalnum() or c in ".-" else "_" for c in point.point_id)
            log = str(Path(settings.logs) / f"{name}.log")
        return {
            "point_id": point.point_id,
            "settings": values,
            "start_limit_seconds": start_limit_seconds(settings, point),
            "limit_seconds": limit_seconds(settings),
            "log": log,
            "sweep": self.sweep,
        }


def estimate_seconds(settings: ThroughputSettings, point: ThroughputPoint) -> float:
    """How long a point takes, roughly."""
    lanes = point.concurrency * settings.warmup_requests * _LANE_SECONDS[settings.device]
    load = settings.duration_seconds + _AROUND_SECONDS + lanes
    return _setup_seconds(settings, point) + load


def limit_seconds(settings: ThroughputSettings) -> float:
    """How long after its first request a point counts as hung."""
    whole = settings.duration_seconds + _AROUND_SECONDS
    return settings.time_limit_seconds or whole + _HANG_SECONDS


def start_limit_seconds(settings: ThroughputSettings, point: ThroughputPoint) -> float:
    """After how long a point that has had no request counts as one that did not start."""
    patience = _HANG_SECONDS
    if settings.server_command is not None:
        # weights of another server's may take long to load
        patience += settings.server_start_seconds
    return settings.start_limit_seconds or _setup_seconds(settings, point) + patience


def _setup_seconds(settings: ThroughputSettings, point: ThroughputPoint) -> float:
    if settings.setup_seconds is not None:
        return settings.setup_seconds
    pinned = 0.0
    if settings.device is DeviceChoice.ACCELERATOR:
        pinned = _PIN_SECONDS_PER_GIB * (point.pool_gib or 0.0)
    return _START_SECONDS[settings.device] + pinned

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
#: a load's time beyond its window: warm-up and the last answers
_AROUND_SECONDS = 3.0
_HANG_SECONDS = 120.0
#: of a point's start: process and libraries, weights and graphs; pinning a GiB
_START_SECONDS = {DeviceChoice.VIRTUAL: 5.0, DeviceChoice.ACCELERATOR: 14.0}
_PIN_SECONDS_PER_GIB = 0.35


class Queue:
    """Points that are left, as jobs, while there is time for them."""

    def __init__(
        self, settings: ThroughputSettings, points: list[ThroughputPoint], model: str
    ) -> None:
        self.sweep = secrets.token_hex(4)
        self.left: list[str] = []
        self._settings = settings
        self._points = points
        self._model = model
        self._warm_ups = self._build_warm_ups() if settings.warm_up else []
        self._began = time.monotonic()
        self._took: list[float] = []

    def took(self, point: ThroughputPoint, seconds: float) -> None:
        """A point took so long: the next estimates know."""
        self._took.append(seconds / estimate_seconds(self._settings, point))

    def next(self) -> dict[str, Any] | None:
        """The next point's job; those for which no time is left are passed over."""
        if self._warm_ups:
            return self._warm_ups.pop(0)
        while self._points:
            point = self._points.pop(0)
            if self._has_time(point):
                return self._job(point)
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
            job = self._job(point)
            job["settings"] |= {"duration_seconds": _WARM_UP_SECONDS}
            job["key"] = f"warm-up/{point.point_id}"
            # a cold compilation is no hang
            job["start_limit_seconds"] += _HANG_SECONDS
            if job["log"] is not None:
                # the point itself comes later, and has a log of its own
                job["log"] = f"{job['log']}.warm-up"
            jobs.append(job | {"warm_up": True})
        return jobs

    def _has_time(self, point: ThroughputPoint) -> bool:
        budget = self._settings.budget_seconds
        if budget is None:
            return True
        recent = self._took[-6:]
        factor = max(recent, default=1.0)
        needed = factor * estimate_seconds(self._settings, point)
        return time.monotonic() - self._began + needed <= budget

    def _job(self, point: ThroughputPoint) -> dict[str, Any]:
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
    return _setup_seconds(settings, point) + settings.duration_seconds + _AROUND_SECONDS


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

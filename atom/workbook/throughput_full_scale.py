"""The sweep at the source's length, as one command, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atom.benchmarks.throughput_settings import build_points
from atom.workbook.published_derived import environment_value
from atom.workbook.throughput_queue import estimate_seconds
from atom.workbook.throughput_runs import SWEEP

GPUS = tuple(range(8))


@dataclass(frozen=True)
class FullScale:
    """A sweep that somebody with the machines may run.

    Attributes:
        command: as a shell takes it.
        points: how many it runs.
        seconds: window of each.
        hours: until it ends, with a point a GPU side by side.
        largest_pool_gib: host memory that one point pins.
    """

    command: str
    points: int
    seconds: float
    hours: float
    largest_pool_gib: float


def full_scale(gpus: Sequence[int] = GPUS) -> FullScale:
    """The whole sweep on one host with the published window.

    Raises:
        BadInput: the sweep does not take these parameters.
    """
    seconds = environment_value("agentx", "profiling")
    given: dict[str, Any] = {
        "device": "accelerator",
        "duration_seconds": seconds,
        "gpus": list(gpus),
    }
    settings = SWEEP.parse(given, quick=False)
    points = build_points(settings)
    spent = sum(estimate_seconds(settings, point) for point in points)
    numbers = ",".join(map(str, gpus))
    return FullScale(
        f"python -m atom sweep throughput --device accelerator --gpus {numbers} "
        f"-p duration_seconds {seconds:g}",
        len(points),
        seconds,
        spent / len(gpus) / 3600,
        max(settings.pool_gib),
    )

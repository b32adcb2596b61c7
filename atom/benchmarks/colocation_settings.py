"""Settings and points of the co-location experiment: one engine, and who works beside it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from atom.benchmarks.arms import is_wanted
from atom.benchmarks.place_settings import Once
from atom.benchmarks.throughput_settings import (
    ThroughputPoint,
    ThroughputSettings,
    build_points,
)
from atom.errors import BadInput

#: what is observed where it is no engine
RACE = "race"


class Neighbour(StrEnum):
    """What the processes beside the observed one do."""

    NONE = "alone"  #: there are none
    SERVE = "serve"  #: each is an engine under the same load
    COPY = "copy"  #: host to device and device to host at full rate, from pinned memory
    COMPUTE = "compute"  #: matrix products without a pause
    SWEEP = "sweep"  #: the same point on every GPU at once, as a sweep over several GPUs runs it


class MemoryNode(StrEnum):
    """Where the observed process may run, and so where its host memory comes from."""

    ANY = "any"  #: wherever the system puts it
    NEAR = "near"  #: on the memory node that its GPU hangs on
    FAR = "far"  #: on the others


class ColocationSettings(ThroughputSettings):
    """Settings of the co-location experiment; see ``colocation_point``.

    The engines are those of the throughput grid (concurrency x pool_gib, no_offload); ``repeats``
    is how often each is run beside each neighbour. Arms beside the grid have no place here.
    """

    repeats: int = Field(2, ge=1, le=100)
    """Rounds: each has every point once, in an order of its own."""

    neighbours: Annotated[tuple[Neighbour, ...], Field(min_length=1), Once] = (
        Neighbour.SERVE,
        Neighbour.COPY,
        Neighbour.COMPUTE,
    )
    """What works beside the observed engine; alone is always run too."""

    neighbour_counts: Annotated[
        tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1), Once
    ] = (1,)
    """How many of them."""

    shared_gpu: bool = True
    """Whether they use the observed engine's GPU; else each has one of its own."""

    memory_nodes: Annotated[tuple[MemoryNode, ...], Field(min_length=1), Once] = (MemoryNode.ANY,)
    """Memory nodes to keep the observed process on: any, near, far."""

    copy_bytes: int = Field(64 * 2**20, ge=4096, le=2**36)
    """Bytes of a copy of the neighbours that copy."""

    matmul_size: int = Field(4096, ge=16, le=65536)
    """Rows and columns of the matrices of the neighbours that compute."""

    race: bool = True
    """Whether the race's unpatched arms are observed beside the neighbours too."""

    race_trials: int = Field(40, ge=1, le=100_000)
    """Trials of each of them."""

    sample_seconds: float = Field(0.5, ge=0.05, le=60)
    """From one sample of the bandwidths to the next."""

    @model_validator(mode="after")
    def _can_be_observed(self) -> ColocationSettings:
        if self.special or self.serves or self.scheduler is not None:
            raise ValueError(
                "engines of this host's grid are observed: leave out special, servers and scheduler"
            )
        if Neighbour.NONE in self.neighbours:
            raise ValueError("neighbours: alone is always run; leave it out")
        if Neighbour.SWEEP in self.neighbours and self.shared_gpu:
            raise ValueError("neighbours: a sweep runs a point a GPU; name several with --gpus")
        return self

    @property
    def engine(self) -> ThroughputSettings:
        """Settings of the engines alone, one repeat of each."""
        values = {name: getattr(self, name) for name in ThroughputSettings.model_fields}
        return ThroughputSettings(**{**values, "only": (), "repeats": 1})


@dataclass(frozen=True)
class ColocationPoint:
    """Something observed beside neighbours.

    Attributes:
        engine: the observed engine's point; ``None``: the race's arms.
        neighbour: what works beside it.
        count: how many of them.
        node: where the observed process runs.
        repeat: which round, from 0.
        order: place in the plan.
    """

    engine: ThroughputPoint | None
    neighbour: Neighbour
    count: int
    node: MemoryNode
    repeat: int
    order: int = 0

    @property
    def subject(self) -> str:
        """What is observed: ``<arm>/c<concurrency>/<pool>``, or ``race``."""
        return RACE if self.engine is None else self.engine.point_id.rsplit("/", 1)[0]

    @property
    def condition(self) -> str:
        """``alone`` or ``copy x3``."""
        return condition_text(self.neighbour, self.count)

    @property
    def point_id(self) -> str:
        """``<subject>/<condition>/<node>/<repeat>``."""
        return f"{self.subject}/{self.condition}/{self.node}/{self.repeat}"


def condition_text(neighbour: str, count: int) -> str:
    """``alone`` or ``copy x3``."""
    return str(neighbour) if neighbour == Neighbour.NONE else f"{neighbour} x{count}"


def build_colocation(settings: ColocationSettings) -> list[ColocationPoint]:
    """All points in the order in which they run: round by round, each in an order drawn anew.

    Raises:
        BadInput: ``only`` fits no point.
    """
    conditions = [(Neighbour.NONE, 0)]
    for kind in settings.neighbours:
        # a sweep takes all the GPUs that there are
        counts = settings.neighbour_counts
        wanted = [max(counts)] if kind is Neighbour.SWEEP else sorted(counts)
        conditions += [(kind, count) for count in wanted]
    subjects: list[ThroughputPoint | None] = [*build_points(settings.engine)]
    if settings.race:
        subjects.append(None)
    generator = random.Random(settings.seed)
    points: list[ColocationPoint] = []
    for repeat in range(settings.repeats):
        drawn = [
            ColocationPoint(subject, kind, count, node, repeat)
            for subject in subjects
            for kind, count in conditions
            for node in settings.memory_nodes
            # a sweep pins nothing, and runs no race
            if kind is not Neighbour.SWEEP or (subject is not None and node is MemoryNode.ANY)
        ]
        generator.shuffle(drawn)
        points += drawn
    chosen = [point for point in points if _wanted(settings.only, point)]
    for pattern in settings.only:
        if not any(_wanted((pattern,), point) for point in chosen):
            known = ", ".join(condition_text(*one) for one in conditions)
            raise BadInput(
                f"only: {pattern!r} fits no point; conditions: {known}; points look like "
                f"{points[0].point_id}"
            )
    return [replace(point, order=order) for order, point in enumerate(chosen)]


def _wanted(only: tuple[str, ...], point: ColocationPoint) -> bool:
    return is_wanted(only, point.condition, point.subject, point.point_id)

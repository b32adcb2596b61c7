"""The kernel-speed experiment: the state kernels beside their peers, and what the guard costs.

Method. A point is one job (operator, batch, channels, tokens a row, cache state) with several arms.
Each arm's output of a first launch is held against a float32 reference before anything is timed;
then a graph of many launches of it is captured. The graphs are replayed once each a repeat, in an
order drawn from the seed, between two device events. A launch's time is the replay's divided by its
launches, so host time does not count.

Cache. ``cold``: the launches go round buffer sets that together are at least four times the L2
cache, so that inputs and states come from memory. ``warm``: one set. The recurrent update's states
alone exceed the cache, so it is always cold.

Peers. flash-linear-attention's convolution takes one token a row, so a step of several tokens is so
many launches of it. Both peers keep one state a row, where ours keeps what any number of accepted
tokens may need: with one token a row the jobs are the same. ``copy_`` moves the bytes of ours.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from pydantic import AfterValidator, Field, model_validator

from atom.benchmarks.kernel_arms import Arm, Job, conv_job, outputs_of, recurrent_job
from atom.benchmarks.kernel_rows import CacheState, KernelArm, KernelRow, Operator, Question
from atom.config import Settings
from atom.device.interface import Device
from atom.errors import BadInput, DeviceError
from atom.model_ops.guard import parse_record

EXPERIMENT = "kernels"

CONV_SPEED = (
    KernelArm.REPORT,
    KernelArm.UNPACKED,
    KernelArm.FLA,
    KernelArm.TRANSFORMERS,
    KernelArm.COPY,
    KernelArm.COPY_KERNEL,
)
RECURRENT_SPEED = tuple(arm for arm in CONV_SPEED if arm is not KernelArm.UNPACKED)
GUARD_ARMS = (KernelArm.NONE, KernelArm.NULL, KernelArm.REPORT, KernelArm.TRAP)

#: outputs further than this from the float32 reference, as a share of its largest, stop the run
WRONG_BY = 0.01
_LEAST_SET_BYTES = 256 * 2**20
_MOST_LAUNCHES = 1000
_QUICK: dict[str, Any] = {
    "batch_sizes": (32, 256),
    "channels": (8192,),
    "queries": (4,),
    "repeats": 7,
}


def _distinct(values: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(values)) != len(values):
        raise ValueError("a value stands twice")
    return values


Numbers = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65536)], ...],
    Field(min_length=1),
    AfterValidator(_distinct),
]


class KernelSpeedSettings(Settings):
    """Settings of the kernel-speed experiment; see the module's text."""

    batch_sizes: Numbers = (32, 128, 256, 512)
    """Rows of the decode batch."""

    channels: Numbers = (8192, 4096)
    """Channels of the convolution. The guard is timed with the first."""

    queries: Numbers = (4, 1)
    """Tokens a row. The guard is timed with the first."""

    draft_tokens: int = Field(3, ge=0, le=15)
    """Draft tokens that the states have room for."""

    key_heads: int = Field(16, ge=1, le=256)
    """Heads of queries and keys of the recurrent update."""

    value_heads: int = Field(32, ge=1, le=256)
    """Heads of values and states of the recurrent update."""

    head_size: int = Field(128, ge=16, le=256)
    """Size of keys and values of the recurrent update."""

    repeats: int = Field(11, ge=3, le=1000)
    """Timed replays of each arm."""

    guard_launches: int = Field(1000, ge=1, le=10_000)
    """Launches in a graph of the guard's question, for the convolution."""

    replay_ms: float = Field(3.0, gt=0, le=1000)
    """Length that a replay of the speed question is to have at least, in milliseconds."""

    only: tuple[KernelArm, ...] = ()
    """Arms to time, by name; empty times all. What an arm is compared with is timed in any case."""

    seed: int = Field(42, ge=0, le=2**32 - 1)
    """Seed of the order of arms."""

    @model_validator(mode="after")
    def _fits(self) -> KernelSpeedSettings:
        if max(self.queries) > 1 + self.draft_tokens:
            raise ValueError(
                f"queries {max(self.queries)}: a row's states have room for "
                f"{1 + self.draft_tokens} tokens; raise draft_tokens"
            )
        if self.value_heads % self.key_heads:
            raise ValueError("value_heads must be a multiple of key_heads")
        return self


def quick(settings: KernelSpeedSettings) -> KernelSpeedSettings:
    """A small version of the experiment; values that were given stay."""
    return settings.with_defaults(_QUICK)


@dataclass(frozen=True)
class KernelPoint:
    """One job, the question that it answers, and its arms. Fields as in :class:`KernelRow`."""

    operator: Operator
    question: Question
    batch: int
    channels: int
    queries: int
    cache: CacheState
    arms: tuple[KernelArm, ...]

    @property
    def point_id(self) -> str:
        """``<operator>-<question>-b<batch>-c<channels>-q<queries>-<cache>``."""
        return (
            f"{self.operator}-{self.question}-b{self.batch}-c{self.channels}-q{self.queries}"
            f"-{self.cache}"
        )


def build_points(settings: KernelSpeedSettings) -> list[KernelPoint]:
    """The points of the settings, in the order in which they run.

    The warm cache is timed with the first number of queries only. flash-linear-attention tunes its
    convolution for each number of channels, which takes long: it is timed with the first only.
    """
    points = []
    heads = settings.value_heads * settings.head_size
    conv, recurrent = Operator.CONV_UPDATE, Operator.RECURRENT_UPDATE
    speed, guard = Question.SPEED, Question.GUARD
    cold, warm = CacheState.COLD, CacheState.WARM
    first, main = settings.queries[0], settings.channels[0]
    untuned = tuple(arm for arm in CONV_SPEED if arm is not KernelArm.FLA)
    for batch in settings.batch_sizes:
        for queries in settings.queries:
            for channels in settings.channels:
                arms = CONV_SPEED if channels == main else untuned
                for cache in (cold, warm) if queries == first else (cold,):
                    points.append(KernelPoint(conv, speed, batch, channels, queries, cache, arms))
            points.append(
                KernelPoint(recurrent, speed, batch, heads, queries, cold, RECURRENT_SPEED)
            )
        points.append(KernelPoint(conv, guard, batch, main, first, cold, GUARD_ARMS))
        points.append(KernelPoint(recurrent, guard, batch, heads, first, cold, GUARD_ARMS))
    return [point for point in (_narrowed(point, settings.only) for point in points) if point.arms]


def _narrowed(point: KernelPoint, only: Collection[KernelArm]) -> KernelPoint:
    """The point with the arms of ``only`` and its base; with no arms if it has none of them."""
    wanted = {arm for arm in point.arms if arm in only}
    if not only:
        return point
    base = KernelArm.COPY if point.question is Question.SPEED else KernelArm.NONE
    arms = tuple(arm for arm in point.arms if arm in wanted or (wanted and arm is base))
    return replace(point, arms=arms)


class Bench(Protocol):
    """Captures an arm's launches, and times their replay."""

    #: bytes that buffer sets have to have together to be cold
    cold_bytes: int
    device: torch.device

    def capture(self, launch: Callable[[int], Any], buffers: int, launches: int) -> Any:
        """A graph of ``launches`` launches that go round ``buffers`` sets."""

    def milliseconds(self, graph: Any) -> float:
        """Device time of one replay."""


class GraphBench:
    """A :class:`Bench` on an accelerator."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.device = torch.device("cuda", torch.cuda.current_device())
        cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0)
        self.cold_bytes = max(4 * int(cache), _LEAST_SET_BYTES)
        self._start = device.new_event(timing=True)
        self._end = device.new_event(timing=True)

    def capture(self, launch: Callable[[int], Any], buffers: int, launches: int) -> Any:
        """See :class:`Bench`. ``launch`` has run before, so that nothing is compiled here."""
        # freed outputs would be reused at once, and be warm
        kept: deque[Any] = deque(maxlen=buffers)
        self._device.synchronize()
        with self._device.capture() as graph:
            for number in range(launches):
                kept.append(launch(number % buffers))
        return graph

    def milliseconds(self, graph: Any) -> float:
        """See :class:`Bench`."""
        self._start.record()
        graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end)


def build_job(point: KernelPoint, settings: KernelSpeedSettings, bench: Bench) -> Job:
    """The point's job, with its tensors on the bench's device."""
    if point.operator is Operator.RECURRENT_UPDATE:
        return recurrent_job(
            point.arms,
            batch=point.batch,
            key_heads=settings.key_heads,
            value_heads=settings.value_heads,
            head_size=settings.head_size,
            queries=point.queries,
            draft_tokens=settings.draft_tokens,
            device=bench.device,
        )
    warm = point.cache is CacheState.WARM
    return conv_job(
        point.arms,
        batch=point.batch,
        channels=point.channels,
        queries=point.queries,
        draft_tokens=settings.draft_tokens,
        buffers=lambda nbytes: 1 if warm else max(1, math.ceil(bench.cold_bytes / nbytes)),
        device=bench.device,
    )


def check(arm: Arm, job: Job) -> None:
    """Launch an arm once and compare its outputs.

    Raises:
        DeviceError: they are wrong; a wrong kernel is not timed.
    """
    assert arm.launch is not None
    job.reset()
    outputs = outputs_of(arm.launch(0))
    if outputs is None:
        return
    found = outputs[job.checked].float()
    error = float((found - job.expected).abs().max()) if found.shape == job.expected.shape else None
    allowed = WRONG_BY * float(job.expected.abs().max())
    # a NaN is no number below the limit
    if error is None or not error <= allowed:
        raise DeviceError(
            f"{arm.name}: outputs {tuple(found.shape)} differ from the float32 reference "
            f"{tuple(job.expected.shape)} by {error}; allowed: {allowed:.3g}. It is not timed"
        )


def _launches(point: KernelPoint, settings: KernelSpeedSettings, arm: Arm, bench: Bench) -> int:
    """How many launches the arm's graph gets."""
    if point.question is Question.GUARD:
        if point.operator is Operator.CONV_UPDATE:
            return settings.guard_launches
        # its launches are long: as many rows are moved at each batch size
        return max(1, settings.guard_launches * min(settings.batch_sizes) // point.batch)
    assert arm.launch is not None
    few = min(4, arm.buffers)
    graph = bench.capture(arm.launch, arm.buffers, few)
    # a first replay also uploads the graph
    bench.milliseconds(graph)
    wanted = math.ceil(settings.replay_ms / (bench.milliseconds(graph) / few))
    # once round all sets at least, else they are not cold
    return max(arm.buffers, min(wanted, _MOST_LAUNCHES))


def run_point(
    point: KernelPoint, settings: KernelSpeedSettings, bench: Bench, number: int = 0
) -> list[KernelRow]:
    """Time the arms of one point.

    Args:
        point: what to run.
        settings: of the experiment.
        bench: where.
        number: of the point, so that each has an order of its own.

    Raises:
        DeviceError: an arm's outputs are wrong, or the guard stopped a valid batch.
    """
    job = build_job(point, settings, bench)
    graphs: dict[KernelArm, tuple[Arm, int, Any]] = {}
    same: dict[str, Any] = {
        name: getattr(point, name)
        for name in ("point_id", "operator", "question", "batch", "channels", "queries", "cache")
    }
    same["bytes_moved"] = job.bytes_moved
    rows = []
    for arm in job.arms:
        if arm.launch is None:
            rows.append(KernelRow(**same, arm=arm.name, left_out=arm.left_out))
            continue
        check(arm, job)
        launches = _launches(point, settings, arm, bench)
        graph = bench.capture(arm.launch, arm.buffers, launches)
        bench.milliseconds(graph)
        graphs[arm.name] = (arm, launches, graph)
    for repeat, position, name in order(list(graphs), settings, number):
        arm, launches, graph = graphs[name]
        rows.append(
            KernelRow(
                **same,
                arm=name,
                launches=launches,
                buffers=arm.buffers,
                repeat=repeat,
                position=position,
                microseconds=bench.milliseconds(graph) * 1e3 / launches,
            )
        )
    fault = parse_record(job.record.cpu())
    if fault is not None:
        raise DeviceError(f"the guard stopped a valid batch: {fault.words()}")
    return rows


def order(
    arms: Sequence[KernelArm], settings: KernelSpeedSettings, number: int
) -> Iterator[tuple[int, int, KernelArm]]:
    """Repeat, place in the repeat, and arm: each arm once a repeat, in drawn order."""
    random = np.random.default_rng([settings.seed, number])
    for repeat in range(settings.repeats):
        for position, index in enumerate(random.permutation(len(arms))):
            yield repeat, position, arms[index]


def run_points(
    settings: KernelSpeedSettings, bench: Bench, done: Collection[str] = ()
) -> Iterator[tuple[KernelPoint, list[KernelRow]]]:
    """Run the points, one after the other; the memory of each is given back before the next.

    Args:
        settings: of the experiment.
        bench: where.
        done: identities of points to leave out.

    Raises:
        BadInput: no points.
        DeviceError: see :func:`run_point`.
    """
    points = build_points(settings)
    if not points:
        raise BadInput("kernels: no points")
    for number, point in enumerate(points):
        if point.point_id in done:
            continue
        yield point, run_point(point, settings, bench, number)
        # graphs and their pools are freed before the next point's tensors are made
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()

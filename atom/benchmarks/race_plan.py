"""Which arms a race sweep runs, in which process, and about how long that takes.

The plan is no full factorial. Each grid varies what its question needs and keeps the rest at the
published case (batch 32, default queues, native allocator, a source from the allocator):

========= ===============================================================================
main      protocol x front x copy path
queue     hardware-queue setting x protocol x front x copy path (default: the main grid)
batch     batch size x protocol, behind a bulk store
allocator PyTorch allocator backend x protocol, behind a bulk store (native: the main grid)
source    a captured graph's static output, with and without the default stream's wait
cut       the next tensor is smaller than the source, or is written in the middle of the copy
edge      when the producer's event is recorded and waited for, behind matmuls, by queue setting
alias     the copy stream is one of the matmul streams, as the 33rd stream of a pool of 32 is
========= ===============================================================================
"""

from __future__ import annotations

import difflib
import fnmatch
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from atom.benchmarks.race_rows import ProducerEdge
from atom.config import (
    AllocatorBackend,
    CopyPath,
    CopyProtocol,
    DeviceChoice,
    Front,
    RaceSettings,
    Source,
)
from atom.errors import BadInput

DEFAULT_QUEUES = "default"

#: trials of an arm between two turns of other arms
BLOCK_TRIALS = 5
#: traced trials of an arm in one process
TRACED_TRIALS = 3

PROTOCOLS: tuple[tuple[CopyProtocol, bool], ...] = (
    (CopyProtocol.UNPATCHED, False),
    (CopyProtocol.UNPATCHED, True),
    (CopyProtocol.RECORD_STREAM, False),
    (CopyProtocol.HOLD, False),
    (CopyProtocol.BLOCKING, False),
    (CopyProtocol.ZERO_COPY, False),
)
FIXED = (CopyProtocol.UNPATCHED, CopyProtocol.HOLD, CopyProtocol.RECORD_STREAM)
QUEUE_FRONTS = (
    Front.NOTHING,
    Front.STORE_ON_COPY_STREAM,
    Front.STORE_ON_OTHER_STREAMS,
    Front.MATMUL,
    Front.SPIN,
)
#: settings at which the source publishes matmul rows: as many trials as it has
PUBLISHED_QUEUES = (1, 4)
#: settings of the edge and alias grids, beside the default
EDGE_QUEUES = (1, 4, 32)
#: requests of the arm that is cut in the middle of its copy: long enough for a write to fall inside
CUT_BATCH_SIZE = 65536 * 4


class NextStep(StrEnum):
    """What the next step allocates, and when it writes it."""

    SAME = "same"  #: the same size, written at once
    HALF = "half"  #: half the size, written at once
    FEW = "few"  #: four elements, written at once
    MID_COPY = "mid_copy"  #: the same size, written when half of the copy has run


@dataclass(frozen=True)
class Arm:
    """One cell of a grid.

    Attributes:
        name: readable and stable, starts with the grid; what ``--only`` patterns match.
        queue_setting: ``default`` or the value of the hardware-queue variable.
        trials: trials in one process.
        aliased: whether the copy stream is the first matmul stream, and not one of its own.
        traced: how many of a process's arms trials are repeated with timing events.
    """

    name: str
    grid: str
    protocol: CopyProtocol
    is_null: bool
    front: Front
    copy_path: CopyPath
    trials: int
    source: Source = Source.ALLOCATOR
    queue_setting: str = DEFAULT_QUEUES
    allocator: AllocatorBackend = AllocatorBackend.NATIVE
    batch_size: int = 32
    next_step: NextStep = NextStep.SAME
    producer_edge: ProducerEdge = ProducerEdge.AT_SEND
    aliased: bool = False
    traced: int = 0


@dataclass(frozen=True)
class Point:
    """An arm in one process."""

    arm: Arm
    process: int

    @property
    def point_id(self) -> str:
        """``<arm>@<process>``, unique within a run."""
        return f"{self.arm.name}@{self.process}"


@dataclass(frozen=True)
class Job:
    """Everything that one worker process runs: one draw of the stream-to-queue mapping."""

    queue_setting: str
    allocator: AllocatorBackend
    process: int
    points: tuple[Point, ...]
    seed: int

    @property
    def setting(self) -> str:
        """What its process is started with, e.g. ``queues=4 allocator=native``."""
        return f"queues={self.queue_setting} allocator={self.allocator.value}"

    @property
    def name(self) -> str:
        """For messages, e.g. ``queues=4 allocator=native process=0``."""
        return f"{self.setting} process={self.process}"


def build_arms(settings: RaceSettings) -> list[Arm]:
    """All arms of ``settings``, selected by its ``only`` patterns.

    On a virtual device the allocator grid is left out: its allocator follows the native rules only.

    Raises:
        BadInput: a pattern that matches no arm; the message names the nearest ones.
    """
    arms = [*_main(settings), *_queues(settings), *_batches(settings)]
    if settings.device is DeviceChoice.ACCELERATOR:
        arms += _allocators(settings)
    arms += [*_sources(settings), *_cuts(settings), *_edges(settings), *_aliases(settings)]
    return select(arms, settings.only)


def select(arms: list[Arm], patterns: Iterable[str]) -> list[Arm]:
    """The arms whose name equals or matches one of ``patterns``; all of them if there is none.

    A pattern without wildcards also selects everything below it (``main/hold``).

    Raises:
        BadInput: a pattern that matches nothing.
    """
    patterns = tuple(patterns)
    if not patterns:
        return arms
    names = [arm.name for arm in arms]
    chosen: set[str] = set()
    for pattern in patterns:
        below = pattern.rstrip("/") + "/*"
        hits = {
            name
            for name in names
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, below)
        }
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            shown = ", ".join(near) if near else ", ".join(sorted({arm.grid for arm in arms}))
            raise BadInput(
                f"only: no arm matches {pattern!r}; nearest: {shown} "
                "(--dry-run lists all arms; shell patterns such as 'main/hold/*' are allowed)"
            )
        chosen |= hits
    return [arm for arm in arms if arm.name in chosen]


def build_jobs(settings: RaceSettings, arms: list[Arm] | None = None) -> list[Job]:
    """Group the points by process. Processes of the settings are interleaved in seeded order."""
    arms = build_arms(settings) if arms is None else arms
    groups: dict[tuple[str, AllocatorBackend, int], list[Point]] = {}
    for arm in arms:
        for process in range(settings.processes):
            key = (arm.queue_setting, arm.allocator, process)
            groups.setdefault(key, []).append(Point(arm, process))
    jobs = []
    # Round by round, so that an interrupted sweep has whole rounds of every setting.
    for process in range(settings.processes):
        keys = sorted(key for key in groups if key[2] == process)
        random.Random(f"{settings.seed}/round/{process}").shuffle(keys)
        for queue_setting, allocator, _ in keys:
            seed = random.Random(
                f"{settings.seed}/{queue_setting}/{allocator.value}/{process}"
            ).getrandbits(31)
            points = tuple(groups[queue_setting, allocator, process])
            jobs.append(Job(queue_setting, allocator, process, points, seed))
    return jobs


def blocks(job: Job) -> list[tuple[Point, int]]:
    """The job's trials in small blocks ``(point, trials)``, in seeded random order.

    No arm is ahead of another by more than a round: block k of every arm comes before any k + 1.
    """
    generator = random.Random(job.seed)
    left = {point: point.arm.trials for point in job.points}
    order: list[tuple[Point, int]] = []
    while left:
        turn = list(left)
        generator.shuffle(turn)
        for point in turn:
            size = min(BLOCK_TRIALS, left[point])
            order.append((point, size))
            left[point] -= size
            if not left[point]:
                del left[point]
    return order


def quick(settings: RaceSettings) -> RaceSettings:
    """Fewer trials and processes, and one queue setting beside the default: at most a minute."""
    return settings.model_copy(
        update={
            "trials": min(settings.trials, 10),
            "processes": min(settings.processes, 2),
            "hardware_queues": settings.hardware_queues[:1],
            "batch_sizes": tuple(sorted({min(settings.batch_sizes), max(settings.batch_sizes)})),
        }
    )


def _trials(settings: RaceSettings, front: Front, share: float = 1.0) -> int:
    # A matmul trial costs about six stores: half the trials, as the published row has half too.
    if front is Front.MATMUL:
        share /= 2
    return max(1, round(settings.trials * share))


def _protocol_name(protocol: CopyProtocol, is_null: bool) -> str:
    return "null" if is_null else protocol.value


def _main(settings: RaceSettings) -> list[Arm]:
    arms = []
    for protocol, is_null in PROTOCOLS:
        for front in Front:
            for path in CopyPath:
                # zero_copy has no copy: its producing kernel writes the host slot.
                if protocol is CopyProtocol.ZERO_COPY and path is CopyPath.ENGINE:
                    continue
                traced = protocol in FIXED and not is_null
                # The virtual device repeats itself: whole counts where a claim needs them.
                virtual = settings.device is DeviceChoice.VIRTUAL
                few = virtual and not (traced and path is CopyPath.ENGINE)
                arms.append(
                    Arm(
                        f"main/{_protocol_name(protocol, is_null)}/{front.value}/{path.value}",
                        "main",
                        protocol,
                        is_null,
                        front,
                        path,
                        _trials(settings, front, 0.25 if few else 1.0),
                        batch_size=settings.batch_size,
                        traced=min(TRACED_TRIALS, settings.trials) if traced else 0,
                    )
                )
    return arms


def _queue_share(settings: RaceSettings, queues: int, front: Front) -> float:
    if front is Front.MATMUL and queues in PUBLISHED_QUEUES:
        return 1.0
    # The virtual device repeats itself but for jitter.
    return 0.2 if settings.device is DeviceChoice.VIRTUAL else 0.5


def _queues(settings: RaceSettings) -> list[Arm]:
    return [
        Arm(
            f"queue/{queues}/{protocol.value}/{front.value}/{path.value}",
            "queue",
            protocol,
            False,
            front,
            path,
            _trials(settings, front, _queue_share(settings, queues, front)),
            queue_setting=str(queues),
            batch_size=settings.batch_size,
            traced=min(TRACED_TRIALS, settings.trials)
            if protocol is CopyProtocol.UNPATCHED and front is Front.MATMUL
            else 0,
        )
        for queues in settings.hardware_queues
        for protocol in FIXED
        for front in QUEUE_FRONTS
        for path in CopyPath
    ]


def _behind_store(
    settings: RaceSettings, grid: str, label: str, protocol: CopyProtocol, **varied: object
) -> Arm:
    front = Front.STORE_ON_COPY_STREAM
    values = {"batch_size": settings.batch_size, **varied}
    return Arm(
        f"{grid}/{label}/{protocol.value}",
        grid,
        protocol,
        False,
        front,
        CopyPath.ENGINE,
        _trials(settings, front, 0.5),
        **values,  # type: ignore[arg-type]
    )


def _batches(settings: RaceSettings) -> list[Arm]:
    return [
        _behind_store(settings, "batch", str(size), protocol, batch_size=size)
        for size in settings.batch_sizes
        for protocol in FIXED
    ]


def _allocators(settings: RaceSettings) -> list[Arm]:
    return [
        _behind_store(settings, "allocator", backend.value, protocol, allocator=backend)
        for backend in (AllocatorBackend.EXPANDABLE_SEGMENTS, AllocatorBackend.CUDA_MALLOC_ASYNC)
        for protocol in FIXED
    ]


def _sources(settings: RaceSettings) -> list[Arm]:
    return [
        _behind_store(settings, "source", source.value, protocol, source=source)
        for source in (Source.GRAPH_OUTPUT, Source.GRAPH_OUTPUT_WAIT)
        for protocol in FIXED
    ]


def _cuts(settings: RaceSettings) -> list[Arm]:
    arms = [
        _behind_store(settings, "cut", step.value, protocol, next_step=step)
        for step in (NextStep.HALF, NextStep.FEW)
        for protocol in FIXED
    ]
    for protocol in FIXED:
        arms.append(
            Arm(
                f"cut/{NextStep.MID_COPY.value}/{protocol.value}",
                "cut",
                protocol,
                False,
                # A spin parks the copy until all work is queued: the write's delay counts from it.
                Front.SPIN,
                CopyPath.ENGINE,
                # its large payload costs the host most, and the virtual device repeats itself
                _trials(
                    settings,
                    Front.SPIN,
                    0.05 if settings.device is DeviceChoice.VIRTUAL else 0.25,
                ),
                batch_size=CUT_BATCH_SIZE,
                next_step=NextStep.MID_COPY,
            )
        )
    return arms


def _edges(settings: RaceSettings) -> list[Arm]:
    """At the send (the main and queue grids), the record stands behind what goes in front.

    A hardware queue that the default stream shares with that work then holds the record back too.
    """
    early = (ProducerEdge.RECORDED_FIRST, ProducerEdge.WAITED_FIRST)
    return [
        arm
        for edge in early
        for arm in _behind_matmuls(settings, "edge", f"{edge.value}/", producer_edge=edge)
    ]


def _aliases(settings: RaceSettings) -> list[Arm]:
    """PyTorch's pool has 32 streams a priority: one more is the first again, with its work."""
    return _behind_matmuls(settings, "alias", "", aliased=True)


def _behind_matmuls(settings: RaceSettings, grid: str, label: str, **varied: object) -> list[Arm]:
    """Arms behind matmuls by queue setting and copy path; hold at the default setting alone."""
    queues = [DEFAULT_QUEUES, *(str(n) for n in settings.hardware_queues if n in EDGE_QUEUES)]
    return [
        Arm(
            f"{grid}/{label}{setting}/{protocol.value}/{path.value}",
            grid,
            protocol,
            False,
            Front.MATMUL,
            path,
            _trials(settings, Front.MATMUL, 0.8 * _queue_share(settings, 0, Front.MATMUL)),
            queue_setting=setting,
            batch_size=settings.batch_size,
            traced=min(TRACED_TRIALS, settings.trials) if protocol is CopyProtocol.UNPATCHED else 0,
            **varied,  # type: ignore[arg-type]
        )
        for setting in queues
        for protocol in (CopyProtocol.UNPATCHED, CopyProtocol.HOLD)
        if protocol is CopyProtocol.UNPATCHED or setting == DEFAULT_QUEUES
        for path in CopyPath
    ]

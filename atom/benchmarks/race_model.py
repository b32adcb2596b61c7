"""Which queue models are consistent with a set of observed stale rates.

Nothing here is looked up: each combination of stream-to-queue mapping, path of the status copy,
queue order, reach of an unresolved event wait and cost of a wait is a profile of the virtual
device, and the benchmark's own trial runs on it. A process is one draw of the mapping, and rows
that an author measured come from one process unless they say otherwise. So a combination is
*consistent with* a set of rows if at least one draw gives simulated rates whose exact intervals
meet those of all the rows at once. That is weaker than "explains", and says nothing of
combinations left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from atom.benchmarks.race_plan import Arm
from atom.benchmarks.race_rows import Outcome
from atom.benchmarks.race_trial import TrialBench
from atom.config import CopyPath, CopyProtocol, Front, RaceSettings
from atom.device.profiles import (
    BarrierScope,
    CopyLane,
    DeviceProfile,
    QueueMapping,
    QueueOrder,
    find_profile,
)
from atom.device.virtual import VirtualDevice


@dataclass(frozen=True)
class ObservedRow:
    """A stale count that a model must meet.

    Attributes:
        name: shown in tables.
        front: what was queued ahead.
        queues: hardware queues, ``None`` for the profile's default.
        stale: stale trials.
        trials: trials.
        low, high: interval of the rate, as the observer's design gives it.
        copy_path: path of the status copy, where the observer chose it; ``None`` leaves it to the
            model.
    """

    name: str
    front: Front
    queues: int | None
    stale: int
    trials: int
    low: float
    high: float
    copy_path: CopyPath | None = None


@dataclass(frozen=True)
class Combination:
    """One queue model.

    Attributes:
        mapping: how streams get their hardware queue.
        copy_path: who moves the small status copy.
        lane: whether an engine copy takes a turn in its stream's hardware queue.
        order: when a queue's next operation may start.
        barrier: what an unresolved event wait holds up.
        wait_seconds: device time of an event wait after its event.
        full_dispatch_seconds: mean delay of a small kernel that meets a full machine.
    """

    mapping: QueueMapping
    copy_path: CopyPath
    lane: CopyLane
    order: QueueOrder
    barrier: BarrierScope
    wait_seconds: float
    full_dispatch_seconds: float = 0.0

    @property
    def copy_text(self) -> str:
        """The copy's path in words."""
        if self.copy_path is CopyPath.KERNEL:
            return "kernel"
        return "engine, in the queue" if self.lane is CopyLane.QUEUE else "engine, own lane"

    def profile(self, base: DeviceProfile) -> DeviceProfile:
        """``base`` with this model's queues."""
        return replace(
            base,
            mapping=self.mapping,
            small_copy_bytes=0,
            engine_copy_lane=self.lane,
            order=self.order,
            barrier=self.barrier,
            wait_seconds=self.wait_seconds,
            full_dispatch_seconds=self.full_dispatch_seconds,
        )


@dataclass(frozen=True)
class SimulatedRow:
    """What one draw of one combination gave for one observed row."""

    combination: Combination
    draw: int
    row: ObservedRow
    stale: int
    trials: int


def combinations(
    *,
    wait_seconds: Sequence[float] = (0.0, 1e-5),
    full_dispatch_seconds: Sequence[float] = (0.0, 2e-5),
    copy_paths: Iterable[CopyPath] = tuple(CopyPath),
) -> Iterator[Combination]:
    """Every combination; the lane varies for engine copies only."""
    paths = [
        (path, lane)
        for path in copy_paths
        for lane in (tuple(CopyLane) if path is CopyPath.ENGINE else (CopyLane.OWN,))
    ]
    for mapping, (path, lane), order, barrier, wait, dispatch in itertools.product(
        QueueMapping, paths, QueueOrder, BarrierScope, wait_seconds, full_dispatch_seconds
    ):
        yield Combination(mapping, path, lane, order, barrier, wait, dispatch)


def simulate(
    combination: Combination,
    rows: Sequence[ObservedRow],
    settings: RaceSettings,
    *,
    draws: int = 4,
    trials: int = 3,
) -> list[SimulatedRow]:
    """Run the observed rows, unpatched, on one queue model.

    Args:
        combination: the model.
        rows: what was observed.
        settings: sizes of the work in front; ``device_profile`` gives clocks and bandwidths.
        draws: processes; draw ``n`` has ``n`` streams before the copy stream and seed ``n``.
        trials: of each row and draw.
    """
    profile = combination.profile(find_profile(settings.device_profile))
    results = []
    for draw in range(draws):
        benches: dict[int | None, TrialBench] = {}
        for row in rows:
            bench = benches.get(row.queues)
            if bench is None:
                device = VirtualDevice(profile, seed=draw, hardware_queues=row.queues)
                bench = TrialBench(device, settings, seed=draw, streams_before=draw)
                benches[row.queues] = bench
            arm = Arm(
                "model",
                "model",
                CopyProtocol.UNPATCHED,
                False,
                row.front,
                row.copy_path or combination.copy_path,
                trials,
                batch_size=settings.batch_size,
            )
            outcomes = [bench.run(arm).outcome for _ in range(trials)]
            stale = sum(outcome is not Outcome.CLEAN for outcome in outcomes)
            results.append(SimulatedRow(combination, draw, row, stale, trials))
    return results

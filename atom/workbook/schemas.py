"""Which tables each experiment records, and the row model of each."""

from __future__ import annotations

from pydantic import BaseModel

from atom.benchmarks.accuracy_rows import AccuracyItemRow, AccuracyRow, AccuracyTextRow
from atom.benchmarks.capacity_rows import CapacityRow
from atom.benchmarks.colocation_rows import (
    BandwidthRow,
    ColocationRaceRow,
    ColocationRow,
    NeighbourRow,
)
from atom.benchmarks.engine_fault_rows import EngineFaultRow
from atom.benchmarks.engine_speed_rows import DeviceTimeRow, FloorRow, MemoryRow, SpeedRow
from atom.benchmarks.foreign_rows import BlindSpotRow, ForeignFindingRow, ForeignRow
from atom.benchmarks.greedy_equality_rows import GreedyEqualityRow
from atom.benchmarks.kernel_rows import KernelRow
from atom.benchmarks.protocol_cost_rows import CostRow, HeldRow, LimitRow
from atom.benchmarks.race_rows import RaceRow, TimelineRow
from atom.benchmarks.source_lifetime_rows import LifetimeRow
from atom.benchmarks.throughput_rows import ThroughputRequestRow, ThroughputRow, TierCauseRow
from atom.errors import BadInput
from atom.lifetime.detector_rows import DetectorRow, SlowdownRow

#: experiment -> table -> row model; a run of the experiment has one CSV file a table
TABLES: dict[str, dict[str, type[BaseModel]]] = {
    "race": {"trials": RaceRow, "timeline": TimelineRow},
    "detectors": {"detectors": DetectorRow, "slowdown": SlowdownRow},
    "lifetime": {"trials": LifetimeRow},
    "kernels": {"samples": KernelRow},
    "engine_fault": {"arms": EngineFaultRow},
    "greedy_equality": {"arms": GreedyEqualityRow},
    "engine_speed": {
        "samples": SpeedRow,
        "device_time": DeviceTimeRow,
        "floors": FloorRow,
        "memory": MemoryRow,
    },
    "protocol_cost": {"samples": CostRow, "limits": LimitRow, "held": HeldRow},
    "capacity": {"points": CapacityRow},
    "accuracy": {"points": AccuracyRow, "items": AccuracyItemRow, "texts": AccuracyTextRow},
    "foreign": {
        "programs": ForeignRow,
        "findings": ForeignFindingRow,
        "blind_spots": BlindSpotRow,
    },
    "throughput": {
        "points": ThroughputRow,
        "requests": ThroughputRequestRow,
        "causes": TierCauseRow,
    },
    "colocation": {
        "points": ColocationRow,
        "race": ColocationRaceRow,
        "neighbours": NeighbourRow,
        "bandwidth": BandwidthRow,
    },
}


#: experiment -> table -> columns that no two of its rows share
KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "race": {
        "trials": ("point_id",),
        "timeline": ("point_id", "trial", "lane", "label", "start_us"),
    },
    "detectors": {
        "detectors": ("scenario", "detector"),
        "slowdown": ("arm", "detector", "repeat"),
    },
    "lifetime": {"trials": ("point_id",)},
    "kernels": {"samples": ("point_id", "arm", "repeat")},
    "engine_fault": {"arms": ("point_id",)},
    "greedy_equality": {"arms": ("point_id",)},
    "engine_speed": {
        "samples": ("point_id", "arm", "repeat"),
        "device_time": ("point_id", "arm", "category"),
        "floors": ("point_id", "arm", "part"),
        "memory": ("point_id", "part"),
    },
    "protocol_cost": {
        "samples": ("point_id", "arm", "repeat"),
        "limits": ("limit", "repeat"),
        "held": ("point_id", "arm", "step"),
    },
    "capacity": {"points": ("point_id",)},
    "accuracy": {
        "points": ("point_id",),
        "items": ("point_id", "item"),
        "texts": ("point_id", "item"),
    },
    "foreign": {
        "programs": ("program",),
        "findings": ("program", "number"),
        "blind_spots": ("program", "number"),
    },
    "throughput": {
        "points": ("point_id",),
        "requests": ("point_id", "number"),
        "causes": ("point_id", "what", "kind", "cause"),
    },
    "colocation": {
        "points": ("point_id", "observed"),
        "race": ("colocation_id", "point_id"),
        "neighbours": ("point_id", "number"),
        "bandwidth": ("point_id", "second", "what", "gpu_index"),
    },
}


def row_models(experiment: str) -> dict[str, type[BaseModel]]:
    """Tables of ``experiment``.

    Raises:
        BadInput: no such experiment.
    """
    try:
        return TABLES[experiment]
    except KeyError:
        known = ", ".join(TABLES)
        raise BadInput(f"no experiment {experiment!r}; known: {known}") from None

"""Which tables each experiment records, and the row model of each."""

from __future__ import annotations

from pydantic import BaseModel

from atom.benchmarks.foreign_rows import BlindSpotRow, ForeignFindingRow, ForeignRow
from atom.benchmarks.kernel_rows import KernelRow
from atom.benchmarks.race_rows import RaceRow, TimelineRow
from atom.benchmarks.source_lifetime_rows import LifetimeRow
from atom.errors import BadInput
from atom.lifetime.detector_rows import DetectorRow, SlowdownRow

#: experiment -> table -> row model; a run of the experiment has one CSV file a table
TABLES: dict[str, dict[str, type[BaseModel]]] = {
    "race": {"trials": RaceRow, "timeline": TimelineRow},
    "detectors": {"detectors": DetectorRow, "slowdown": SlowdownRow},
    "lifetime": {"trials": LifetimeRow},
    "kernels": {"samples": KernelRow},
    "foreign": {
        "programs": ForeignRow,
        "findings": ForeignFindingRow,
        "blind_spots": BlindSpotRow,
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
    "foreign": {
        "programs": ("program",),
        "findings": ("program", "number"),
        "blind_spots": ("program", "number"),
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

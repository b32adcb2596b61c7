"""The published counts of the lifetime test, in the words of our own runs."""

from __future__ import annotations

from dataclasses import dataclass

from atom.benchmarks.source_lifetime_rows import CONTROL, PROTECTED
from atom.config import CopyProtocol
from atom.workbook.published_tables import load_published

_ARMS = {
    "holds": (CopyProtocol.HOLD, PROTECTED),
    "control": (CopyProtocol.HOLD, CONTROL),
    "unmodified main": (CopyProtocol.UNPATCHED, CONTROL),
}


@dataclass(frozen=True)
class PublishedPoint:
    """One published count, and the point of our experiment that repeats it.

    Attributes:
        path: as published, e.g. ``ell one-off``.
        arm: as published: ``holds``, ``control`` or ``unmodified main``.
        machine: slug.
        stale, trials: the count.
        point_id: of our experiment, e.g. ``ell_one_off/hold/control``.
    """

    path: str
    arm: str
    machine: str
    stale: int
    trials: int
    point_id: str


def published_points() -> list[PublishedPoint]:
    """The published counts in their order."""
    found = []
    for row in load_published("lifetime_controls").itertuples():
        protocol, arm = _ARMS[str(row.arm)]
        path = str(row.path).removesuffix("()").replace(" ", "_").replace("-", "_")
        found.append(
            PublishedPoint(
                str(row.path),
                str(row.arm),
                str(row.machine),
                int(row.stale_trials),  # type: ignore[arg-type]
                int(row.trials),  # type: ignore[arg-type]
                f"{path}/{protocol}/{arm}",
            )
        )
    return found

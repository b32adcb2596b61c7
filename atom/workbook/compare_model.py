"""What one side of a comparison consists of, for every experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atom.evidence import Evidence
from atom.workbook.records import Run
from atom.workbook.statistics import bootstrap_ratio, clustered_interval, exact_interval


@dataclass(frozen=True)
class Rate:
    """Events of trials, by process where that is known.

    Attributes:
        stale_per_process, trials_per_process: one entry a process.
        clustered: whether the entries are processes; published counts are one sum.
    """

    stale_per_process: tuple[int, ...]
    trials_per_process: tuple[int, ...]
    clustered: bool = True

    @property
    def stale(self) -> int:
        """Events."""
        return sum(self.stale_per_process)

    @property
    def trials(self) -> int:
        """Trials."""
        return sum(self.trials_per_process)

    @property
    def rate(self) -> float:
        """Events a trial."""
        return self.stale / self.trials

    @property
    def processes(self) -> int | None:
        """Processes, ``None`` where they are not stated."""
        return len(self.trials_per_process) if self.clustered else None

    @property
    def interval(self) -> tuple[float, float]:
        """Two-sided exact 95% interval, clustered by process where processes are known."""
        if not self.clustered:
            return exact_interval(self.stale, self.trials)
        return clustered_interval(self.stale_per_process, self.trials_per_process)[:2]


@dataclass(frozen=True)
class TimeRatio:
    """Times, one a process, over those of a base; without one, the times themselves.

    Attributes:
        top: of what is looked at.
        bottom: of the side's own null arm, the same processes in the same order; ``None`` for none.
    """

    top: tuple[float, ...]
    bottom: tuple[float, ...] | None = None

    @property
    def values(self) -> tuple[float, ...]:
        """One figure a process."""
        if self.bottom is None:
            return self.top
        return tuple(t / b for t, b in zip(self.top, self.bottom, strict=True))

    @property
    def value(self) -> float:
        """Median over processes."""
        import statistics

        return statistics.median(self.values)

    def over(self, base: TimeRatio, seed: int) -> tuple[float, float, float]:
        """Quotient of the medians with its bootstrap interval over processes."""
        return bootstrap_ratio(self.values, base.values, seed)


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        label: whose figures, in words.
        evidence: their kind.
        machine: slug.
        run_id: ``None`` for published figures.
        conditions: kind of difference (``load``, ``model``, ``seed``, ``settings``) to names and
            values; what a side does not state is left out and not compared.
        rates: cell to rate.
        to_null: name to a quotient of the side's own times.
        times: name to times in us.
        base: unit of the quotients.
    """

    label: str
    evidence: Evidence
    machine: str
    run_id: str | None
    conditions: Mapping[str, Mapping[str, Any]]
    rates: Mapping[str, Rate]
    to_null: Mapping[str, TimeRatio] = field(default_factory=dict)
    times: Mapping[str, TimeRatio] = field(default_factory=dict)
    base: str = "x its own null arm"


@dataclass(frozen=True)
class Comparison:
    """How runs of one experiment are compared.

    Attributes:
        whole: a run with all its cells.
        published: the published figures; fails where there are none.
        as_published: a run, in the published cells.
    """

    whole: Callable[[Run], Side]
    published: Callable[[], Side]
    as_published: Callable[[Run], Side]

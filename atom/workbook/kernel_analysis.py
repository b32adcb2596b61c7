"""What the rows of the kernel-speed experiment say: medians, rates, and ratios with intervals."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from atom.benchmarks.kernel_rows import KernelArm, Question
from atom.workbook.statistics import bootstrap_ratio

#: what an arm's time is divided by, for each question
BASES = {Question.SPEED: KernelArm.COPY, Question.GUARD: KernelArm.NONE}


@dataclass(frozen=True)
class ArmSummary:
    """One arm of one point.

    Attributes:
        point_id: the point.
        operator: what is timed.
        question: why.
        arm: which implementation.
        batch: rows of the decode batch.
        channels: of the convolution, or value heads x value size.
        queries: tokens a row.
        cache: ``cold`` or ``warm``.
        microseconds: median of a launch; ``None`` if it was left out.
        terabytes_per_s: bytes of our kernel, divided by that median.
        ratio: median over that of ``copy_`` (speed) or of the unguarded kernel (guard).
        low: lower end of its 95% bootstrap interval.
        high: upper end.
        left_out: why it was not timed.
    """

    point_id: str
    operator: str
    question: str
    arm: str
    batch: int
    channels: int
    queries: int
    cache: str
    microseconds: float | None
    terabytes_per_s: float | None
    ratio: float | None
    low: float | None
    high: float | None
    left_out: str | None


def summarise(samples: pd.DataFrame, seed: int = 42) -> list[ArmSummary]:
    """Summarise every arm of every point, in order of first appearance.

    Args:
        samples: rows of ``KernelRow``.
        seed: of the bootstrap.
    """
    summaries = []
    for point_id, point in samples.groupby("point_id", sort=False):
        first = point.iloc[0]
        base = point.loc[point["arm"] == BASES[Question(first["question"])], "microseconds"]
        base = base.dropna().astype(float)
        for arm, rows in point.groupby("arm", sort=False):
            times = rows["microseconds"].dropna().astype(float)
            median = rate = None
            ratio: tuple[float | None, float | None, float | None] = (None, None, None)
            if len(times):
                median = float(times.median())
                rate = float(first["bytes_moved"]) / median / 1e6
                if len(base):
                    ratio = bootstrap_ratio(times, base, seed)
            reasons = rows["left_out"].dropna()
            summaries.append(
                ArmSummary(
                    point_id=str(point_id),
                    operator=str(first["operator"]),
                    question=str(first["question"]),
                    arm=str(arm),
                    batch=int(first["batch"]),
                    channels=int(first["channels"]),
                    queries=int(first["queries"]),
                    cache=str(first["cache"]),
                    microseconds=median,
                    terabytes_per_s=rate,
                    ratio=ratio[0],
                    low=ratio[1],
                    high=ratio[2],
                    left_out=str(reasons.iloc[0]) if len(reasons) else None,
                )
            )
    return summaries

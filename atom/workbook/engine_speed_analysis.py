"""What the rows of the engine-speed experiment say: medians, ratios with intervals, and goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from atom.benchmarks.engine_speed_rows import Clock, Job, SpeedArm
from atom.workbook.statistics import bootstrap_ratio

#: a ratio with the ends of its 95% bootstrap interval
Ratio = tuple[float, float, float]
_MEANS = ("host_ms", "staging_ms", "status_wait_ms", "output_wait_ms", "gap_ms", "device_ms")
#: a step in which the host waits for less than this share of it is the host's
_HOST_BOUND = 0.05
#: the published outcome of a goal
MET, MISSED, OPEN, SIMULATED = "met", "not met", "open", "not testable here"


@dataclass(frozen=True)
class ArmSpeed:
    """One arm of one point; ``None`` where it was left out or the arm does not know.

    Attributes:
        point_id: the point.
        job: decode or prefill.
        arm: which.
        batch: requests.
        tokens_per_s: median over the repeats, with its interval.
        step_ms: median over the repeats of the median step; for a prefill, of its time.
        step_p99_ms: median over the repeats of each repeat's 99th percentile.
        tokens_per_row: tokens a request and decode step.
        parts: medians of host time, waits, gap and device time, in milliseconds, by column.
        agreement: lowest share of first tokens that are those of ``ours``.
        floor_ms: milliseconds that the step's bytes take at the rate of a copy.
        over_floor: median step over that.
        over_ours: tokens a second over those of ``ours``.
        over_transformers: tokens a second over transformers'.
        kernels: what transformers computed with.
        left_out: why it was not timed.
    """

    point_id: str
    job: str
    arm: str
    batch: int
    tokens_per_s: Ratio | None = None
    step_ms: float | None = None
    step_p99_ms: float | None = None
    tokens_per_row: float | None = None
    parts: dict[str, float | None] | None = None
    agreement: float | None = None
    floor_ms: float | None = None
    over_floor: Ratio | None = None
    over_ours: Ratio | None = None
    over_transformers: Ratio | None = None
    kernels: str | None = None
    left_out: str | None = None


@dataclass(frozen=True)
class Goal:
    """One goal, and what became of it.

    Attributes:
        name: in words.
        point_id: where it was looked at.
        value: the measured ratio with its interval; ``None`` if an arm is missing.
        wanted: the bound.
        at_least: whether the bound is the least, else the most.
        outcome: ``met`` if the whole interval is within the bound, ``not met`` if none of it is,
            ``open`` in between or without a value, ``not testable here`` in a simulation.
    """

    name: str
    point_id: str
    value: Ratio | None
    wanted: float
    at_least: bool
    outcome: str


def summarise(samples: pd.DataFrame, floors: pd.DataFrame, seed: int = 42) -> list[ArmSpeed]:
    """Summarise every arm of every point, in order of first appearance.

    Args:
        samples: rows of ``SpeedRow``.
        floors: rows of ``FloorRow``.
        seed: of the bootstrap.
    """
    summaries = []
    for point_id, point in samples.groupby("point_id", sort=False):
        rates = {
            str(arm): _numbers(rows["tokens_per_s"])
            for arm, rows in point.groupby("arm", sort=False)
        }
        for arm, rows in point.groupby("arm", sort=False):
            first = rows.iloc[0]
            same: dict[str, Any] = {
                "point_id": str(point_id),
                "job": str(first["job"]),
                "arm": str(arm),
                "batch": int(first["batch"]),
            }
            reasons = rows["left_out"].dropna()
            if len(reasons):
                summaries.append(ArmSpeed(**same, left_out=str(reasons.iloc[0])))
                continue
            mine = rates[str(arm)]
            floor = floor_ms(floors, str(point_id), str(arm))
            steps = _numbers(rows["step_ms"])
            agreement = _numbers(rows["agreement"])
            kernels = rows["kernels"].dropna()
            count = float(_numbers(rows["steps"]).sum())
            per_step = float(_numbers(rows["tokens"]).sum()) / count / same["batch"]
            summaries.append(
                ArmSpeed(
                    **same,
                    tokens_per_s=bootstrap_ratio(mine, [1.0], seed),
                    step_ms=float(steps.median()),
                    step_p99_ms=float(_numbers(rows["step_p99_ms"]).median()),
                    tokens_per_row=per_step if first["job"] == Job.DECODE else None,
                    parts={name: _median(rows[name]) for name in _MEANS},
                    agreement=float(agreement.min()) if len(agreement) else None,
                    floor_ms=floor,
                    over_floor=None if floor is None else bootstrap_ratio(steps, [floor], seed),
                    over_ours=_ratio(mine, rates.get(SpeedArm.OURS), seed),
                    over_transformers=_ratio(mine, rates.get(SpeedArm.TRANSFORMERS), seed),
                    kernels=str(kernels.iloc[0]) if len(kernels) else None,
                )
            )
    return summaries


def floor_ms(floors: pd.DataFrame, point_id: str, arm: str) -> float | None:
    """Milliseconds that a step's bytes take at the copy's rate; ``None`` without floor rows."""
    # the null arm is the same engine
    known = SpeedArm.OURS if arm == SpeedArm.NULL else arm
    rows = floors[(floors["point_id"] == point_id) & (floors["arm"] == known)]
    if rows.empty:
        return None
    nbytes = float(rows["read_bytes"].sum() + rows["written_bytes"].sum())
    return nbytes / float(rows["copy_bytes_per_s"].iloc[0]) * 1e3


def goals(summaries: list[ArmSpeed], samples: pd.DataFrame) -> list[Goal]:
    """The goals of the engine, each at every decode batch or at the prefill."""
    simulated = bool((samples["clock"] == Clock.SIMULATION).any())
    found = []
    for point_id in dict.fromkeys(summary.point_id for summary in summaries):
        arms = {summary.arm: summary for summary in summaries if summary.point_id == point_id}
        ours = arms.get(SpeedArm.OURS)
        if ours is None:
            continue
        if ours.job == Job.PREFILL:
            rate = ours.over_transformers
            wanted = [("prefill rate over transformers'", rate, 1.0, True)]
        else:
            forced, replay = arms.get(SpeedArm.FORCED), arms.get(SpeedArm.REPLAY_FORCED)
            wanted = [
                ("decode rate over transformers'", ours.over_transformers, 30.0, True),
                ("decode step over its bytes' floor", ours.over_floor, 3.0, False),
                (
                    "decode rate, MTP forced over no MTP",
                    None if forced is None else forced.over_ours,
                    1.6,
                    True,
                ),
            ]
            # runs of before there was another way to keep states have no such arm
            if replay is not None:
                name = "decode rate, MTP forced with replay over no MTP"
                wanted.append((name, replay.over_ours, 1.6, True))
        for name, value, bound, at_least in wanted:
            found.append(judged(name, point_id, value, bound, at_least, simulated))
    return found


def host_sentences(summaries: Sequence[ArmSpeed]) -> list[str]:
    """Points whose steps the host hardly waits in: their rate is the host's, not the device's."""
    bound: dict[str, list[str]] = {}
    for one in summaries:
        parts = one.parts or {}
        host = parts.get("host_ms")
        waits = [parts.get("status_wait_ms"), parts.get("output_wait_ms")]
        known = [wait for wait in waits if wait is not None]
        if host is None or not one.step_ms or len(known) < len(waits):
            continue
        if sum(known) < _HOST_BOUND * one.step_ms:
            bound.setdefault(one.point_id, []).append(f"{one.arm} {host:.2f} of {one.step_ms:.2f}")
    return [
        f"{point}: the host works through nearly the whole step and hardly waits for the device "
        f"(host ms, a mean, of the median step: {'; '.join(arms)}). There the host sets the rate, "
        "and the device idles within the step."
        for point, arms in bound.items()
    ]


def judged(
    name: str, point_id: str, value: Ratio | None, bound: float, at_least: bool, simulated: bool
) -> Goal:
    """A goal with its outcome; see :class:`Goal`."""
    outcome = SIMULATED if simulated else _outcome(value, bound, at_least)
    return Goal(name, point_id, value, bound, at_least, outcome)


def _outcome(value: Ratio | None, bound: float, at_least: bool) -> str:
    if value is None:
        return OPEN
    _, low, high = value
    within = low >= bound if at_least else high <= bound
    outside = high < bound if at_least else low > bound
    return MET if within else MISSED if outside else OPEN


def _numbers(column: pd.Series) -> pd.Series:
    return column.dropna().astype(float)


def _median(column: pd.Series) -> float | None:
    values = _numbers(column)
    return float(values.median()) if len(values) else None


def _ratio(top: pd.Series, bottom: pd.Series | None, seed: int) -> Ratio | None:
    if bottom is None or not len(bottom) or not len(top):
        return None
    return bootstrap_ratio(top, bottom, seed)

"""What the rows of the protocol-cost experiment say: medians, tails, ratios, goals and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from atom.benchmarks.protocol_cost_rows import (
    GUARD_ARMS,
    Clock,
    CostArm,
    Loop,
    Pressure,
)
from atom.workbook.engine_speed_analysis import Goal, Ratio, judged
from atom.workbook.statistics import bootstrap_ratio

#: goals: share of step time, microseconds of host time, and times cheaper than the plain send
STEP_ALLOWANCE = 0.01
HOST_ALLOWANCE_US = 1.0
PLAIN_OVER_OURS = 4.0
ZERO_COPY_US = 4.0
#: the guard's arms of the engine are held against this one
GUARD_BASE = CostArm.NO_GUARD
_RESAMPLES = 1000


@dataclass(frozen=True)
class ArmCost:
    """One arm of one point; ``None`` where it has no such value. Times in microseconds.

    Attributes:
        point_id, loop, arm, batch, lead, pressure: as in ``CostRow``.
        simulated: whether the times are a virtual device's.
        step_us, step_p99_us, make_us, send_us, send_p99_us, receive_us, receive_p99_us, wait_us,
            kept_us: medians over the repeats.
        step_ratio: step time over that of ``unpatched`` (of ``no guard`` for the guard's arms),
            with the ends of its 95% bootstrap interval.
        send_interval: the send, with the ends of its 95% bootstrap interval.
        send_ratio: it, over that of ``hold``, with its interval.
        host_us: send and receive together.
        host_more_us: that, less the base arm's, with its interval.
        held_peak_bytes, held_steady_bytes: device memory that the arm keeps out of the pool.
        held_beyond_bytes: its peak, less ``unpatched``'s.
        steady_beyond_bytes: its steady value, less ``unpatched``'s.
        segments, retries: of the allocator, over all repeats.
        events_a_step: events made in a step.
        stale: payloads of another step that arrived.
        agreement: least share of tokens that are those of ``unpatched``.
        left_out: why it was not timed in some repeat.
        windows, failed: its repeats, and those in which it was not timed.
    """

    point_id: str
    loop: str
    arm: str
    batch: int
    lead: int
    pressure: str
    simulated: bool
    step_us: float | None = None
    step_p99_us: float | None = None
    make_us: float | None = None
    send_us: float | None = None
    send_p99_us: float | None = None
    receive_us: float | None = None
    receive_p99_us: float | None = None
    wait_us: float | None = None
    kept_us: float | None = None
    step_ratio: Ratio | None = None
    send_interval: Ratio | None = None
    send_ratio: Ratio | None = None
    host_us: float | None = None
    host_more_us: Ratio | None = None
    held_peak_bytes: float | None = None
    held_steady_bytes: float | None = None
    held_beyond_bytes: float | None = None
    steady_beyond_bytes: float | None = None
    segments: int = 0
    retries: int = 0
    events_a_step: float | None = None
    stale: int = 0
    agreement: float | None = None
    left_out: str | None = None
    windows: int = 0
    failed: int = 0


_MEDIANS = (
    *("step_us", "step_p99_us", "make_us", "send_us", "send_p99_us", "receive_us"),
    *("receive_p99_us", "wait_us", "kept_us", "held_peak_bytes", "held_steady_bytes"),
)


def base_of(arm: str) -> CostArm:
    """What an arm is held against."""
    guards = {str(one) for one in GUARD_ARMS}
    return GUARD_BASE if arm in guards else CostArm.UNPATCHED


def summarise(samples: pd.DataFrame, seed: int = 42) -> list[ArmCost]:
    """Summarise every arm of every point, arms in the order of :class:`CostArm`.

    Args:
        samples: rows of ``CostRow``.
        seed: of the bootstrap.
    """
    order = [str(arm) for arm in CostArm]
    found = []
    for point_id, point in samples.groupby("point_id", sort=False):
        arms = {str(arm): rows for arm, rows in point.groupby("arm", sort=False)}
        for arm in sorted(arms, key=order.index):
            found.append(_arm(str(point_id), arm, arms, seed))
    return found


def _arm(point_id: str, arm: str, arms: dict[str, pd.DataFrame], seed: int) -> ArmCost:
    rows = arms[arm]
    first = rows.iloc[0]
    values: dict[str, Any] = {
        "point_id": point_id,
        "arm": arm,
        "simulated": first["clock"] == Clock.SIMULATION,
        **{name: str(first[name]) for name in ("loop", "pressure")},
        **{name: int(first[name]) for name in ("batch", "lead")},
    }
    reasons = rows["left_out"].dropna()
    values |= {"windows": len(rows), "failed": len(reasons)}
    if len(reasons):
        values["left_out"] = str(reasons.iloc[0])
    if not len(numbers(rows["step_us"])):
        return ArmCost(**values)
    values |= {name: median(rows[name]) for name in _MEDIANS}
    base = arms.get(str(base_of(arm)))
    host = numbers(rows["send_us"] + rows["receive_us"])
    values["host_us"] = float(np.median(host))
    if base is not None and len(numbers(base["step_us"])):
        steps = numbers(base["step_us"])
        values["step_ratio"] = bootstrap_ratio(
            numbers(rows["step_us"]), steps, seed, resamples=_RESAMPLES
        )
        values["host_more_us"] = difference(
            host, numbers(base["send_us"] + base["receive_us"]), seed
        )
    sends, hold = numbers(rows["send_us"]), arms.get(str(CostArm.HOLD))
    values["send_interval"] = bootstrap_ratio(sends, [1.0], seed, resamples=_RESAMPLES)
    if hold is not None and (numbers(hold["send_us"]) > 0).any():
        values["send_ratio"] = bootstrap_ratio(
            sends, numbers(hold["send_us"]), seed, resamples=_RESAMPLES
        )
    plain = arms.get(str(CostArm.UNPATCHED))
    if plain is not None:
        for name, of in (
            ("held_beyond_bytes", "held_peak_bytes"),
            ("steady_beyond_bytes", "held_steady_bytes"),
        ):
            mine, theirs = median(rows[of]), median(plain[of])
            values[name] = None if mine is None or theirs is None else mine - theirs
    counted = rows.dropna(subset=["events_created", "counted_steps"])
    if len(counted):
        steps_counted = float(counted["counted_steps"].astype(float).sum())
        values["events_a_step"] = float(counted["events_created"].astype(float).sum()) / (
            steps_counted
        )
    shares = numbers(rows["agreement"])
    values |= {
        "segments": int(numbers(rows["new_segments"]).sum()),
        "retries": int(numbers(rows["retries"]).sum()),
        "stale": int(numbers(rows["stale"]).sum()),
        "agreement": float(shares.min()) if len(shares) else None,
    }
    return ArmCost(**values)


def numbers(column: pd.Series) -> NDArray[np.float64]:
    """The values that are there."""
    values = column.to_numpy(dtype=float)
    return values[~np.isnan(values)]


def median(column: pd.Series) -> float | None:
    """Their median, if there are any."""
    values = numbers(column)
    return float(np.median(values)) if len(values) else None


def redrawn_medians(
    values: NDArray[np.float64], random: np.random.Generator, resamples: int = _RESAMPLES
) -> NDArray[Any]:
    """Medians of the values drawn again with replacement, one a resample."""
    found: NDArray[Any] = np.median(random.choice(values, (resamples, len(values))), axis=1)
    return found


def difference(a: Iterable[float], b: Iterable[float], seed: int) -> Ratio:
    """Median of ``a`` less that of ``b``, with the ends of its 95% percentile bootstrap."""
    top, bottom = np.asarray(list(a), dtype=float), np.asarray(list(b), dtype=float)
    random = np.random.default_rng(seed)
    draws = redrawn_medians(top, random) - redrawn_medians(bottom, random)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.median(top) - np.median(bottom)), float(low), float(high)


def limits_by_name(limits: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Median over the repeats of each limit's median and of its 99th percentile, in us."""
    return {
        str(name): (
            float(rows["median_us"].astype(float).median()),
            float(rows["p99_us"].astype(float).median()),
        )
        for name, rows in limits.groupby("limit", sort=False)
    }


def choose(
    summaries: Sequence[ArmCost],
    arm: CostArm | str,
    *,
    loop: Loop | None = None,
    batch: int | None = None,
    lead: int | None = None,
    pressure: Pressure | None = None,
) -> list[ArmCost]:
    """Timed summaries of an arm, at the points that are asked for."""
    wanted = {"loop": loop, "batch": batch, "lead": lead, "pressure": pressure}
    return [
        one
        for one in summaries
        if one.arm == arm
        and one.step_us is not None
        and all(value is None or getattr(one, name) == value for name, value in wanted.items())
    ]


def cost_goals(summaries: Sequence[ArmCost]) -> list[Goal]:
    """The goals at every point with an idle copy stream; those of step time in both loops."""
    by_point: dict[str, dict[str, ArmCost]] = {}
    for one in summaries:
        if one.pressure == Pressure.IDLE and one.step_us is not None:
            by_point.setdefault(one.point_id, {})[one.arm] = one
    found = []
    for point_id, arms in by_point.items():
        hold = arms.get(CostArm.HOLD)
        if hold is None or hold.step_ratio is None:
            continue
        wanted: list[tuple[str, Ratio | None, float, bool]] = [
            ("hold's step over unpatched's", hold.step_ratio, 1 + STEP_ALLOWANCE, False)
        ]
        if hold.loop == Loop.BARE:
            wanted.append(
                ("host us of hold beyond unpatched", hold.host_more_us, HOST_ALLOWANCE_US, False)
            )
            plain, zero = arms.get(CostArm.PLAIN), arms.get(CostArm.ZERO_COPY)
            if plain is not None:
                name = "the plain send over hold's"
                wanted.append((name, plain.send_ratio, PLAIN_OVER_OURS, True))
            if zero is not None:
                wanted.append(("send of zero_copy, us", zero.send_interval, ZERO_COPY_US, False))
        for name, value, bound, at_least in wanted:
            found.append(judged(name, point_id, value, bound, at_least, hold.simulated))
    return found

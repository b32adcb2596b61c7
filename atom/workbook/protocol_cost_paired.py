"""Windows of the protocol-cost experiment, pair by pair: what holds over all points together.

All arms of a repeat run within seconds. So a window of one arm is held against the other arm's
window of the same point and repeat, and the median is taken over all such pairs: a host that other
programs slow down for a while spoils some pairs, and not the median. Intervals are percentile
bootstraps over the pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from atom.benchmarks.protocol_cost_rows import PROTOCOLS, Clock, CostArm, Loop, Pressure
from atom.config import CopyProtocol
from atom.workbook.engine_speed_analysis import Goal, Ratio, judged
from atom.workbook.protocol_cost_analysis import (
    HOST_ALLOWANCE_US,
    PLAIN_OVER_OURS,
    STEP_ALLOWANCE,
    ZERO_COPY_US,
    redrawn_medians,
)

Values = npt.NDArray[np.float64]
STEP, SEND, HOST = ("step_us",), ("send_us",), ("send_us", "receive_us")
#: the four calls that a send cannot do without, where they were not timed together
SEND_CALLS = ("event record", "event wait", "copy call, 256 bytes", "event record")
SEND_ALONE, PLAIN_ALONE = "record, wait, copy, record", "plain send"
_FEWEST, _RESAMPLES = 3, 2000


def batches_of(samples: pd.DataFrame, loop: Loop = Loop.ENGINE) -> list[int]:
    """Batches that a loop ran at."""
    return sorted({int(one) for one in samples[samples["loop"] == loop]["batch"]})


def windows(
    samples: pd.DataFrame,
    arm: CostArm,
    columns: Sequence[str],
    *,
    loop: Loop,
    pressure: Pressure = Pressure.IDLE,
    batch: int | None = None,
) -> pd.Series:
    """Sums of ``columns`` of an arm's timed windows, by point and repeat."""
    rows = samples[
        (samples["loop"] == loop)
        & (samples["pressure"] == pressure)
        & (samples["arm"] == str(arm))
        & samples["step_us"].notna()
    ]
    if batch is not None:
        rows = rows[rows["batch"] == batch]
    return rows.set_index(["point_id", "repeat"])[list(columns)].astype(float).sum(axis=1)


def pairs(
    samples: pd.DataFrame,
    arm: CostArm,
    base: CostArm,
    columns: Sequence[str],
    *,
    loop: Loop,
    pressure: Pressure = Pressure.IDLE,
    batch: int | None = None,
) -> tuple[Values, Values]:
    """Sums of ``columns`` of both arms, a pair a point and repeat in which both were timed."""
    mine, theirs = (
        windows(samples, one, columns, loop=loop, pressure=pressure, batch=batch)
        for one in (arm, base)
    )
    both = mine.index.intersection(theirs.index)
    return mine.loc[both].to_numpy(), theirs.loc[both].to_numpy()


def interval(values: Values, seed: int) -> Ratio | None:
    """Their median with the ends of its 95% interval; ``None`` for fewer than three."""
    if len(values) < _FEWEST:
        return None
    random = np.random.default_rng(seed)
    draws = redrawn_medians(values, random, _RESAMPLES)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def paired_ratio(
    samples: pd.DataFrame,
    arm: CostArm,
    base: CostArm = CostArm.UNPATCHED,
    columns: Sequence[str] = STEP,
    *,
    loop: Loop,
    pressure: Pressure = Pressure.IDLE,
    batch: int | None = None,
    seed: int = 42,
) -> Ratio | None:
    """An arm's time over the base's, pair by pair; ``None`` where there are too few pairs."""
    mine, theirs = pairs(samples, arm, base, columns, loop=loop, pressure=pressure, batch=batch)
    return interval(mine / theirs, seed)


def paired_difference(
    samples: pd.DataFrame,
    arm: CostArm,
    base: CostArm = CostArm.UNPATCHED,
    columns: Sequence[str] = HOST,
    *,
    loop: Loop = Loop.BARE,
    seed: int = 42,
) -> Ratio | None:
    """An arm's time less the base's, in microseconds, with an idle copy stream."""
    mine, theirs = pairs(samples, arm, base, columns, loop=loop)
    return interval(mine - theirs, seed)


def pooled_goals(samples: pd.DataFrame, seed: int = 42) -> list[Goal]:
    """The goals over all points with an idle copy stream together, for each loop that was run."""
    simulated = bool((samples["clock"] == Clock.SIMULATION).all())
    found = []
    for loop in Loop:
        step = paired_ratio(samples, CostArm.HOLD, loop=loop, seed=seed)
        if step is None:
            continue
        count = len(pairs(samples, CostArm.HOLD, CostArm.UNPATCHED, STEP, loop=loop)[0])
        where = f"{loop}, {count} pairs of windows"
        wanted: list[tuple[str, Ratio | None, float, bool]] = [
            ("hold's step over unpatched's", step, 1 + STEP_ALLOWANCE, False)
        ]
        if loop is Loop.BARE:
            beyond = paired_difference(samples, CostArm.HOLD, seed=seed)
            plain = paired_ratio(samples, CostArm.PLAIN, CostArm.HOLD, SEND, loop=loop, seed=seed)
            zero = windows(samples, CostArm.ZERO_COPY, SEND, loop=loop).to_numpy()
            wanted += [
                ("host us of hold beyond unpatched", beyond, HOST_ALLOWANCE_US, False),
                ("the plain send over hold's", plain, PLAIN_OVER_OURS, True),
                ("send of zero_copy, us", interval(zero, seed), ZERO_COPY_US, False),
            ]
        found += [
            judged(name, where, value, bound, at_least, simulated)
            for name, value, bound, at_least in wanted
        ]
    return found


# -- the least that a send can cost


def send_floor(limits: Mapping[str, tuple[float, float]]) -> float | None:
    """Microseconds of the four calls of a send by themselves; ``None`` if they were not timed."""
    if SEND_ALONE in limits:
        return limits[SEND_ALONE][0]
    if not set(SEND_CALLS) <= set(limits):
        return None
    return sum(limits[name][0] for name in SEND_CALLS)


def best_ratio(
    samples: pd.DataFrame, limits: Mapping[str, tuple[float, float]], seed: int = 42
) -> float | None:
    """The plain send over those four calls: as much cheaper as any send of such calls can be.

    Both by themselves if the plain send was timed so, else the plain send of the bare loop, which
    takes longer than by itself and so flatters the ratio.
    """
    floor = send_floor(limits)
    if floor is None:
        return None
    if PLAIN_ALONE in limits:
        return limits[PLAIN_ALONE][0] / floor
    plain = windows(samples, CostArm.PLAIN, SEND, loop=Loop.BARE)
    return float(np.median(plain)) / floor if len(plain) else None


def send_table(samples: pd.DataFrame, limits: Mapping[str, tuple[float, float]]) -> pd.DataFrame:
    """What a send is made of, in microseconds: its calls alone, and all of it in the loop."""
    table: list[tuple[str, str, float, float | None]] = []
    parts = (
        ("event record, behind the producer", "event record"),
        ("event wait, of the copy stream", "event wait"),
        ("copy call, the change of streams included", "copy call, 256 bytes"),
        ("event record, behind the copy", "event record"),
        ("these four, one after the other", SEND_ALONE),
        ("the plain send", PLAIN_ALONE),
    )
    for label, name in parts:
        if name in limits:
            median, tail = limits[name]
            table.append((label, "alone", median, tail))
    if SEND_ALONE not in limits and (floor := send_floor(limits)) is not None:
        table.append(("these four, added up", "alone", floor, None))
    for arm in (CostArm.HOLD, CostArm.ZERO_COPY, CostArm.PLAIN):
        own = windows(samples, arm, SEND, loop=Loop.BARE)
        tails = windows(samples, arm, ("send_p99_us",), loop=Loop.BARE)
        if len(own):
            table.append(
                (f"a send of {arm}", "bare loop", float(np.median(own)), float(np.median(tails)))
            )
    return pd.DataFrame(
        {
            "what": label,
            "where": where,
            "median, us": f"{median:.2f}",
            "p99, us": "–" if tail is None else f"{tail:.1f}",
        }
        for label, where, median, tail in table
    )


# -- engines whose requests failed


def failures_table(samples: pd.DataFrame) -> pd.DataFrame:
    """Windows of the engine whose requests failed, by point and arm; the first reason of each."""
    rows = samples[samples["loop"] == Loop.ENGINE]
    table = []
    for (point, arm), own in rows.groupby(["point_id", "arm"], sort=False):
        reasons = own["left_out"].dropna()
        if len(reasons):
            table.append(
                {
                    "point": str(point),
                    "arm": str(arm),
                    "windows": len(own),
                    "failed": len(reasons),
                    "first reason": str(reasons.iloc[0]).partition(" (first")[0],
                }
            )
    return pd.DataFrame(table)


def failure_counts(samples: pd.DataFrame, *, protected: bool) -> tuple[int, int]:
    """Failed windows of the engine, and all, of the arms that protect their copies or of others."""
    bare = {str(arm) for arm, one in PROTOCOLS.items() if one is CopyProtocol.UNPATCHED}
    rows = samples[samples["loop"] == Loop.ENGINE]
    own = rows[rows["arm"].isin(bare) != protected]
    return int(own["left_out"].notna().sum()), len(own)

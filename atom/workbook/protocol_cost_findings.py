"""What the rows of the protocol-cost experiment say, in sentences; every word follows from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from atom.benchmarks.protocol_cost_rows import CostArm, Loop, Pressure
from atom.workbook.engine_speed_analysis import MET, Goal, Ratio
from atom.workbook.protocol_cost import goals_table
from atom.workbook.protocol_cost_analysis import PLAIN_OVER_OURS, ArmCost, choose
from atom.workbook.protocol_cost_claims import guard_ratio, ratio
from atom.workbook.protocol_cost_paired import (
    SEND,
    batches_of,
    best_ratio,
    failure_counts,
    paired_difference,
    paired_ratio,
    send_floor,
    windows,
)

Limits = Mapping[str, tuple[float, float]]
#: kernels whose latency is timed alone and beside a store
_ON_DEVICE, _ON_HOST, _BESIDE = (
    "kernel and wait",
    "host-writing kernel and wait",
    ", beside a store",
)


def direction(value: Ratio) -> str:
    """``longer``, ``shorter``, or that the interval does not tell."""
    return "longer" if value[1] > 1 else "shorter" if value[2] < 1 else "neither, by its interval"


def pooled_table(pooled: Sequence[Goal], single: Sequence[Goal]) -> pd.DataFrame:
    """The goals over all points together, and at how many points one meets them by itself."""
    alone = []
    for goal in pooled:
        loop = goal.point_id.partition(",")[0]
        own = [one for one in single if one.name == goal.name and one.point_id.startswith(loop)]
        alone.append(f"{sum(one.outcome == MET for one in own)} of {len(own)}")
    return goals_table(pooled).assign(**{"points that meet it alone": alone})


def send_sentences(samples: pd.DataFrame, limits: Limits) -> list[str]:
    """How far the goal of a send that is so many times cheaper can be reached at all."""
    floor, best = send_floor(limits), best_ratio(samples, limits)
    found = paired_ratio(samples, CostArm.PLAIN, CostArm.HOLD, SEND, loop=Loop.BARE)
    own = windows(samples, CostArm.HOLD, SEND, loop=Loop.BARE)
    if floor is None or best is None or found is None:
        return []
    reach = "within" if best >= PLAIN_OVER_OURS else "out of"
    return [
        f"The plain send costs {ratio(found)} of hold's. The four calls that hold's send cannot do "
        f"without take {floor:.1f} us alone, so that {best:.1f} is the most that this ratio could "
        f"be with PyTorch's calls, if Python and the ring cost nothing: the goal of "
        f"{PLAIN_OVER_OURS:g} is {reach} reach. In the loop the send takes "
        f"{float(np.median(own)):.1f} us: the rest is Python, the ring, and caches that are colder "
        "than in a loop of one call."
    ]


def noise_sentences(samples: pd.DataFrame) -> list[str]:
    """How much equal windows of the engine differ, and whether the host was what differed."""
    worst: tuple[float, int, float] | None = None
    for batch in batches_of(samples):
        rows = samples[
            (samples["loop"] == Loop.ENGINE)
            & (samples["batch"] == batch)
            & (samples["pressure"] == Pressure.IDLE)
            & samples["arm"].isin([str(CostArm.UNPATCHED), str(CostArm.NULL)])
        ].dropna(subset=["step_us", "send_us"])
        if len(rows) < 4:
            continue
        steps, sends = (rows[name].astype(float).to_numpy() for name in ("step_us", "send_us"))
        spread = steps.max() / steps.min() - 1
        if worst is None or spread > worst[0]:
            worst = float(spread), batch, float(np.corrcoef(steps, sends)[0, 1])
    if worst is None:
        return []
    spread, batch, together = worst
    text = (
        f"Equal windows of the engine (unpatched and its twin) differ most at {batch} requests, by "
        f"up to {spread:.1%}; step and send rise and fall together there (correlation "
        f"{together:.2f})"
    )
    if together > 0.7:
        text += ": the host itself was slower in some windows"
    one = paired_ratio(samples, CostArm.HOLD, loop=Loop.ENGINE, batch=batch)
    if one is None:
        return [f"{text}."]
    verdict = "is no finding" if one[1] <= 1 <= one[2] else "is more than that noise"
    return [f"{text}. Window by window hold's {ratio(one)} of unpatched at that batch {verdict}."]


def zero_copy_sentences(
    samples: pd.DataFrame, limits: Limits, summaries: Sequence[ArmCost]
) -> list[str]:
    """Where zero_copy is faster and where it is slower, and what is known of why."""
    found = []
    arm = CostArm.ZERO_COPY
    bare = paired_ratio(samples, arm, loop=Loop.BARE)
    less = paired_difference(samples, arm, CostArm.UNPATCHED, ("step_us",))
    send = paired_difference(samples, arm, CostArm.UNPATCHED, SEND)
    if bare is not None and less is not None and send is not None:
        text = (
            f"The bare loop's step is {ratio(bare)} of unpatched's under zero_copy: the host is "
            f"what that loop waits for, and of the {-less[0]:.1f} us that the step is shorter the "
            f"send has {-send[0]:.1f}."
        )
        behind = paired_ratio(samples, arm, loop=Loop.BARE, pressure=Pressure.STORE)
        if behind is not None and behind[2] < 0.7:
            text += (
                " Beside stores its steps follow each other faster than the link can store: the "
                "stores pile up, and those step times are not to be compared."
            )
        found.append(text)
    idle = paired_ratio(samples, arm, loop=Loop.ENGINE)
    if idle is not None:
        found.append(
            f"The engine waits for the device: with an idle copy stream its step is {ratio(idle)} "
            f"of unpatched's ({direction(idle)})."
        )
    stores = {
        batch: paired_ratio(samples, arm, loop=Loop.ENGINE, pressure=Pressure.STORE, batch=batch)
        for batch in batches_of(samples)
    }
    if any(stores.values()):
        by_batch = ", ".join(f"{batch}: {ratio(one)}" for batch, one in stores.items())
        text = f"Beside stores zero_copy's step over unpatched's is, by batch, {by_batch}."
        names = [kind + place for place in ("", _BESIDE) for kind in (_ON_HOST, _ON_DEVICE)]
        if set(names) <= set(limits):
            host, device, host_store, device_store = (limits[name][0] for name in names)
            text += (
                f" A kernel that writes 256 bytes to the host takes {host:.1f} us with its wait, "
                f"and {host_store:.1f} us beside a store; one that writes device memory "
                f"{device:.1f} and {device_store:.1f} us."
            )
            slow = (host_store - host) > 2 * max(device_store - device, 1.0)
            text += (
                " So what is written over the link waits for the store that has it."
                if slow
                else " So the link alone does not explain longer steps; what does is open."
            )
        else:
            text += (
                " Why is not measured here. Under zero_copy nothing on the copy stream makes a "
                "store wait for the step before, and the kernels' writes share the link with it."
            )
        found.append(text)
    late = [
        (one, hold)
        for one in choose(summaries, arm, loop=Loop.ENGINE, pressure=Pressure.STUCK)
        for hold in choose(summaries, CostArm.HOLD, loop=Loop.ENGINE, pressure=Pressure.STUCK)
        if one.point_id == hold.point_id
    ]
    if late:
        level = {
            one.batch: f"{one.step_p99_us or 0:,.0f}"
            for one in choose(summaries, CostArm.HOLD, loop=Loop.ENGINE, pressure=Pressure.IDLE)
        }
        rows = samples[(samples["loop"] == Loop.ENGINE) & samples["steps"].notna()]
        fewest = rows.groupby("batch")["steps"].min().astype(int).to_dict()
        by_batch = ", ".join(
            f"{one.batch}: {one.step_p99_us or 0:,.0f} for {hold.step_p99_us or 0:,.0f} us "
            f"({level.get(one.batch, 'not run')} idle, {fewest[one.batch]} steps)"
            for one, hold in late
        )
        found.append(
            "What is held up on the copy stream holds up the host that waits for a copy behind it. "
            "With a stuck copy stream the 99th percentile of zero_copy's step, for hold's, is, by "
            f"batch, {by_batch}; beside them hold's with an idle copy stream, and the steps of a "
            "window: of so few, the percentile is nearly the longest step."
        )
    return found


def failure_sentences(samples: pd.DataFrame) -> list[str]:
    """How often the unprotected engine lost requests, and that no other did.

    Raises:
        AssertionError: requests failed under a protocol that protects its copies.
    """
    failed, windows = failure_counts(samples, protected=False)
    wrong, others = failure_counts(samples, protected=True)
    assert not wrong, f"requests failed in {wrong} of {others} windows of protecting arms"
    if not failed:
        return [f"No request failed in {windows} windows of the unpatched engine."]
    return [
        f"In {failed} of {windows} windows of the unpatched engine requests failed, since bytes of "
        f"another payload stood in the host's copy: the fault itself. In none of the {others} "
        "windows of the other arms did a request fail.",
        "Where all windows of an arm failed there is nothing to time, and no ratio to it; where "
        "some did, its times are those of the windows that got through.",
    ]


def guard_sentences(samples: pd.DataFrame, worst_kernel: float | None = None) -> list[str]:
    """What the nets cost in the engine's step, by batch.

    Args:
        samples: rows of the experiment.
        worst_kernel: the most that a guarded kernel by itself takes of the unguarded one's time,
            in a run of its own.
    """
    nets = {
        "reporting guard and tag": CostArm.HOLD,
        "trap": CostArm.TRAP,
        "unguarded engine again": CostArm.NO_GUARD_AGAIN,
        "host check": CostArm.HOST_CHECK,
    }
    found = []
    for name, arm in nets.items():
        values = {batch: guard_ratio(samples, arm, batch) for batch in batches_of(samples)}
        known = {batch: one for batch, one in values.items() if one is not None}
        if known:
            text = ", ".join(f"{batch}: {ratio(one)}" for batch, one in known.items())
            found.append(f"{name}, step over that without a guard, by batch: {text}.")
    report = [
        one
        for batch in batches_of(samples)
        if (one := guard_ratio(samples, CostArm.HOLD, batch)) is not None
    ]
    worst = max(report, default=None)
    if worst is not None and worst_kernel is not None and worst[1] > worst_kernel:
        found.append(
            f"The engine's {ratio(worst)} is more than any guarded kernel by itself takes "
            f"({worst_kernel:.3f} at most) in the run that times kernels. Where the two runs are "
            "of different commits the kernels may be, too; else what the rest is, is open."
        )
    checked = {
        batch: paired_ratio(
            samples, CostArm.HOST_CHECK, CostArm.HOLD, loop=Loop.ENGINE, batch=batch
        )
        for batch in batches_of(samples)
    }
    text = ", ".join(
        f"{batch}: {ratio(one)} ({direction(one)})" for batch, one in checked.items() if one
    )
    if text:
        found.append(
            f"The host check with its synchronisation, over the reporting guard and tag without "
            f"one, by batch: {text}."
        )
    tag = paired_ratio(samples, CostArm.HOLD, CostArm.NO_TAG, loop=Loop.ENGINE)
    if tag is not None:
        found.append(
            f"The tag by itself: a step with it takes {ratio(tag)} of one without ("
            f"{direction(tag)})."
        )
    return found


def memory_sentences(held: pd.DataFrame) -> list[str]:
    """What a deep lead keeps out of the allocator, by protocol and place of what holds it up."""
    found = []
    for point, rows in held.groupby("point_id", sort=False):
        own = {str(arm): one["held_bytes"].astype(float) for arm, one in rows.groupby("arm")}
        hold, told = own.get(str(CostArm.HOLD)), own.get(str(CostArm.RECORD_STREAM))
        if hold is None or told is None:
            continue
        grown = int(rows["segments"].max() - rows["segments"].min())
        found.append(
            f"{point}: hold keeps {hold.max():,.0f} bytes at most and {hold.median():,.0f} in the "
            f"median step, record_stream {told.max():,.0f} and {told.median():,.0f}; "
            f"{grown or 'no'} segments were taken from the driver meanwhile."
        )
    return found

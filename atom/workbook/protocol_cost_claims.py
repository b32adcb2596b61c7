"""What the rows of the protocol-cost experiment settle, and which protocol is for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from atom.benchmarks.protocol_cost_rows import GUARD_ARMS, CostArm, Loop, Pressure
from atom.benchmarks.protocol_cost_settings import EXPERIMENT, sized
from atom.device.host_visibility import COHERENT_VARIABLE, why_no_host_writes
from atom.device.interface import DeviceKind
from atom.evidence import Evidence
from atom.workbook.engine_speed_analysis import Ratio
from atom.workbook.protocol_cost_analysis import STEP_ALLOWANCE, ArmCost, choose
from atom.workbook.protocol_cost_paired import (
    SEND,
    batches_of,
    paired_difference,
    paired_ratio,
    windows,
)
from atom.workbook.protocol_cost_runs import record_protocol_cost
from atom.workbook.records import Run, existing, load_runs
from atom.workbook.sweep_progress import SweepProgress

NOTHING = "–"
#: in place of a time: the arm has none, and that is a result
FAILED = "requests failed"
#: batch and lead that a table of one line an arm is taken at, where they were run
SHOWN_BATCH, SHOWN_LEAD = 32, 1
#: columns of the points' tables that are left out where they are zero throughout
MOSTLY_ZERO = ("segments", "retries", "windows failed")
#: nets of the engine, by arm
NETS = {
    CostArm.NO_GUARD: "no guard",
    CostArm.NO_GUARD_AGAIN: "no guard again",
    CostArm.TRAP: "trap",
    CostArm.NO_TAG: "reporting guard, no epoch tag",
    CostArm.HOLD: "reporting guard and epoch tag (hold)",
    CostArm.HOST_CHECK: "host check",
}
#: protocol to who should choose it
FOR_WHOM = {
    CostArm.HOLD: "an engine that receives what it sends: the default",
    CostArm.ZERO_COPY: "a host that is the bottleneck, or a copy stream that is held up at times, "
    "if its step beside stores does for you; producers outside graphs; CUDA, or HIP with coherent "
    "pinned memory",
    CostArm.RECORD_STREAM: "code that cannot keep the source: it is out of its hands once sent",
    CostArm.BLOCKING: "scripts and debugging, where nobody waits for the next step",
    CostArm.UNPATCHED: "nobody: it delivers other steps' bytes",
    CostArm.PLAIN: "nobody: it protects nothing",
}


def simulate(
    profile: str,
    seed: int,
    root: str | Path,
    records: Sequence[str] = (),
    progress: SweepProgress | None = None,
) -> Run:
    """A small run on the virtual device: of ``records`` if one is there, else made now.

    Args:
        profile: of the virtual device.
        seed: of the order of arms, weights and prompts.
        root: folder of new runs.
        records: folders to look in first.
        progress: told what it does.
    """
    runs, _ = load_runs(existing(records), EXPERIMENT)
    for run in reversed(runs):
        virtual = run.provenance.evidence is Evidence.SIMULATED
        if virtual and run.provenance.exit_state == "finished":
            return run
    settings = sized(
        {
            "device": "virtual",
            "device_profile": profile,
            "seed": seed,
            "engine_batch_sizes": [2],
            "engine_pressures": ["idle"],
            "guards": False,
            "counted_steps": 2,
            "repeats": 3,
            "engine_repeats": 3,
            "engine_steps": 6,
        },
        quick=False,
    )
    return record_protocol_cost(settings, root, progress)


def shown_point(
    summaries: Sequence[ArmCost], loop: Loop, pressure: Pressure = Pressure.IDLE
) -> dict[str, ArmCost]:
    """Arms of one point by name: of 32 requests and a lead of 1, or what comes next to it."""
    own = [one for one in summaries if one.loop == loop and one.pressure == pressure]
    if not own:
        return {}
    near = min(own, key=lambda one: (abs(one.batch - SHOWN_BATCH), abs(one.lead - SHOWN_LEAD)))
    return {one.arm: one for one in own if one.point_id == near.point_id}


def claim_arguments(run: Run, summaries: Sequence[ArmCost]) -> dict[str, dict[str, Any]]:
    """Arguments for the claims that a run settles, with its own kind of evidence.

    What counts of calls settle for the simulation is left to them (``contract-11``).
    """
    provenance = run.provenance
    same: dict[str, Any] = {
        "machine": provenance.profile or provenance.machine,
        "run_ids": (provenance.run_id,),
    }
    found: dict[str, dict[str, Any]] = {}
    engine = [
        shown
        for shown in _points(summaries, Loop.ENGINE, Pressure.IDLE)
        if CostArm.HOLD in shown and CostArm.UNPATCHED in shown
    ]
    if provenance.evidence is Evidence.MEASURED:
        found |= _events(summaries)
        found |= _versions(run.tables["samples"])
    found |= _nothing_else(engine)
    found |= _kept(summaries, engine, run.tables["samples"])
    return {claim: {**arguments, **same} for claim, arguments in found.items()}


def _points(
    summaries: Sequence[ArmCost], loop: Loop, pressure: Pressure
) -> list[dict[str, ArmCost]]:
    points: dict[str, dict[str, ArmCost]] = {}
    for one in summaries:
        if one.loop == loop and one.pressure == pressure and one.step_us is not None:
            points.setdefault(one.point_id, {})[one.arm] = one
    return list(points.values())


def _events(summaries: Sequence[ArmCost]) -> dict[str, dict[str, Any]]:
    both = [
        (one, base)
        for one in choose(summaries, CostArm.HOLD)
        for base in choose(summaries, CostArm.UNPATCHED)
        if one.point_id == base.point_id
        and one.events_a_step is not None
        and base.events_a_step is not None
    ]
    if not both:
        return {}
    extra = max(abs((one.events_a_step or 0) - (base.events_a_step or 0)) for one, base in both)
    plain = [one.events_a_step for one in choose(summaries, CostArm.PLAIN) if one.events_a_step]
    detail = f"events made in a step, counted at {len(both)} points: hold's less unpatched's"
    if plain:
        detail += f"; the plain send makes {max(plain):g}"
    return {"contract-11": {"value": extra, "detail": detail}}


def _versions(samples: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Hold over record_stream in the engine, over all batches with an idle copy stream."""

    def ratio_at(batch: int | None) -> Ratio | None:
        return paired_ratio(
            samples, CostArm.HOLD, CostArm.RECORD_STREAM, loop=Loop.ENGINE, batch=batch
        )

    whole = ratio_at(None)
    if whole is None:
        return {}
    text = ", ".join(f"{one}: {ratio(ratio_at(one), 4)}" for one in batches_of(samples))
    return {
        "thr-21": {
            "value": whole[0],
            "interval": (whole[1], whole[2]),
            "detail": "decode step of the engine, hold over record_stream, window by window, over "
            f"all batches; by batch {text}",
        }
    }


def _nothing_else(engine: Sequence[dict[str, ArmCost]]) -> dict[str, dict[str, Any]]:
    points = [point for point in engine if CostArm.NULL in point]
    if not points:
        return {}
    texts, holds = [], True
    for point in points:
        hold, null = point[CostArm.HOLD], point[CostArm.NULL]
        assert hold.step_ratio is not None
        assert null.step_ratio is not None
        equal = (hold.agreement or 0.0) >= min(null.agreement or 0.0, 1.0)
        # as far as two equal arms may lie apart, and the allowance of the goal at least
        noise = max(STEP_ALLOWANCE, *(abs(end - 1) for end in null.step_ratio))
        apart = hold.step_ratio[1] > 1 + noise or hold.step_ratio[2] < 1 - noise
        holds = holds and equal and not apart
        texts.append(
            f"{hold.batch} requests: {hold.agreement or 0:.1%} of tokens equal unpatched's (null "
            f"arm {null.agreement or 0:.1%}), step {hold.step_ratio[0]:.3f} of its (null arm "
            f"{null.step_ratio[0]:.3f})"
        )
    return {"contract-15": {"holds": holds, "detail": "; ".join(texts)}}


def _kept(
    summaries: Sequence[ArmCost], engine: Sequence[dict[str, ArmCost]], samples: pd.DataFrame
) -> dict[str, dict[str, Any]]:
    texts, value, ends = [], None, None
    for pressure in Pressure:
        point = shown_point(summaries, Loop.BARE, pressure)
        hold, told = point.get(CostArm.HOLD), point.get(CostArm.RECORD_STREAM)
        if hold is None or told is None or not hold.kept_us or not told.kept_us:
            continue
        ratio = hold.kept_us / told.kept_us
        if pressure is Pressure.IDLE:
            value = ratio
            own = samples[samples["lead"] == hold.lead]
            ends = paired_ratio(
                own, CostArm.HOLD, CostArm.RECORD_STREAM, ("kept_us",), loop=Loop.BARE
            )
        texts.append(f"{pressure}: {hold.kept_us:.0f} us for {told.kept_us:.0f} us")
    if value is None:
        return {}
    detail = (
        "hold's block is out of the allocator, for record_stream's, with the copy "
        f"stream {', '.join(texts)}; judged is idle, one step of lead, of the bare loop, window by "
        "window over all batches"
    )
    both = [(one[CostArm.HOLD], one.get(CostArm.RECORD_STREAM)) for one in engine]
    held = [(a.held_steady_bytes, b.held_steady_bytes) for a, b in both if b is not None]
    if held:
        alike = sum(a == b for a, b in held)
        detail += f". In the engine both keep as many bytes at {alike} of {len(held)} batches"
    if ends is None:
        return {"thr-22": {"value": value, "detail": detail}}
    return {"thr-22": {"value": ends[0], "interval": ends[1:], "detail": detail}}


def window_arguments(windows: Mapping[str, Counter[int]], profile: str) -> dict[str, Any]:
    """Arguments for ``thr-23`` from counted windows; see :mod:`atom.benchmarks.receive_windows`."""
    longest = {name: max(counts) for name, counts in windows.items()}
    text = "; ".join(
        f"{name}: {', '.join(f'{n} x {steps}' for steps, n in sorted(counts.items()))}"
        for name, counts in windows.items()
    )
    return {
        "holds": all(steps <= 1 for steps in longest.values()),
        "detail": f"steps from a send to its receive, times counted (times x steps): {text}",
        "machine": profile,
    }


def windows_table(windows: Mapping[str, Counter[int]]) -> pd.DataFrame:
    """One row a kind and situation: how often which window was counted."""
    return pd.DataFrame(
        {
            "transfer": name,
            "steps until it is received": ", ".join(str(steps) for steps in sorted(counts)),
            "times": ", ".join(str(counts[steps]) for steps in sorted(counts)),
        }
        for name, counts in windows.items()
    )


def costs_by_arm(summaries: Sequence[ArmCost], loop: Loop) -> pd.DataFrame:
    """One row an arm and point of a loop. What is zero in all of them has no column.

    The base is ``unpatched``; ``from`` and ``to`` are the ends of the ratio's interval.
    """
    table = pd.DataFrame(
        {
            "batch": one.batch,
            **({"lead": one.lead} if loop is Loop.BARE else {}),
            "copy stream": one.pressure,
            "arm": one.arm,
            "step us": FAILED if one.windows == one.failed else number(one.step_us, 1),
            "p99 us": number(one.step_p99_us, 1),
            **{
                name: number(None if one.step_ratio is None else one.step_ratio[place], 3)
                for place, name in enumerate(("over base", "from", "to"))
            },
            **({"make us": number(one.make_us, 2)} if loop is Loop.BARE else {}),
            "send us": number(one.send_us, 2),
            "send p99 us": number(one.send_p99_us, 1),
            "receive us": number(one.receive_us, 2),
            "wait us": number(one.wait_us, 1),
            **({"block kept us": number(one.kept_us, 1)} if loop is Loop.BARE else {}),
            "held beyond unpatched, peak": number(one.held_beyond_bytes, 0),
            "steady": number(one.steady_beyond_bytes, 0),
            "segments": one.segments,
            "retries": one.retries,
            "events a step": number(one.events_a_step, 2),
            "stale": one.stale if one.step_us is not None else NOTHING,
            "windows failed": f"{one.failed} of {one.windows}" if one.failed else 0,
        }
        for one in summaries
        if one.loop == loop and one.arm not in GUARD_ARMS
    )
    idle = [name for name in MOSTLY_ZERO if name in table and (table[name] == 0).all()]
    return table.drop(columns=idle)


def guard_ratio(samples: pd.DataFrame, arm: CostArm, batch: int) -> Ratio | None:
    """Decode step of the engine with an arm's nets over that without a guard, window by window."""
    return paired_ratio(samples, arm, CostArm.NO_GUARD, loop=Loop.ENGINE, batch=batch)


def guards_table(summaries: Sequence[ArmCost], samples: pd.DataFrame) -> pd.DataFrame:
    """One row a net of the engine and batch: step time over an unguarded engine's."""
    return pd.DataFrame(
        {
            "batch": one.batch,
            "net": NETS[CostArm(one.arm)],
            "step us": number(one.step_us, 1),
            "p99 us": number(one.step_p99_us, 1),
            "over no guard": ratio(guard_ratio(samples, name, one.batch), 4),
            "syncs it adds": "1 a step" if one.arm == CostArm.HOST_CHECK else "none",
        }
        for name in NETS
        for one in choose(summaries, name, loop=Loop.ENGINE, pressure=Pressure.IDLE)
        if choose(summaries, CostArm.NO_GUARD, loop=Loop.ENGINE, batch=one.batch)
    )


def decision_table(summaries: Sequence[ArmCost], samples: pd.DataFrame) -> pd.DataFrame:
    """Which protocol is for whom: figures over all points, window by window where they are ratios.

    The 99th percentile is that of the smallest batch, where a stuck copy stream shows most.
    """
    store = shown_point(summaries, Loop.BARE, Pressure.STORE)
    idle = shown_point(summaries, Loop.BARE)
    held_up = [one for one in summaries if one.loop == Loop.ENGINE and one.pressure == "stuck"]
    least = min((one.batch for one in held_up), default=0)
    stuck = {one.arm: one for one in held_up if one.batch == least}
    table = []
    for arm, whom in FOR_WHOM.items():
        if arm not in idle:
            continue
        sends = windows(samples, arm, SEND, loop=Loop.BARE)
        late = stuck.get(arm)
        table.append(
            {
                "protocol": str(arm),
                "for whom": whom,
                "send, us": number(float(np.median(sends)), 1),
                "host us beyond unpatched": ratio(paired_difference(samples, arm), 2),
                "bare step over unpatched": ratio(paired_ratio(samples, arm, loop=Loop.BARE)),
                "engine's step over unpatched": ratio(paired_ratio(samples, arm, loop=Loop.ENGINE)),
                "the same beside stores": ratio(
                    paired_ratio(samples, arm, loop=Loop.ENGINE, pressure=Pressure.STORE)
                ),
                "engine's p99 with a stuck copy stream, us": NOTHING
                if late is None
                else FAILED
                if late.windows == late.failed
                else number(late.step_p99_us, 0),
                "bytes kept beyond unpatched": number(idle[arm].held_beyond_bytes, 0),
                "stale behind a store": NOTHING if arm not in store else store[arm].stale,
            }
        )
    return pd.DataFrame(table)


def host_write_table() -> pd.DataFrame:
    """Where ``zero_copy`` works, by runtime and setting, and why not elsewhere."""
    settings: dict[str, tuple[DeviceKind, dict[str, str]]] = {
        "CUDA": (DeviceKind.CUDA, {}),
        "HIP": (DeviceKind.HIP, {}),
        f"HIP, {COHERENT_VARIABLE}=1": (DeviceKind.HIP, {COHERENT_VARIABLE: "1"}),
        "virtual device": (DeviceKind.VIRTUAL, {}),
    }
    return pd.DataFrame(
        {"runtime": name, "zero_copy": why_no_host_writes(kind, environment) or "works"}
        for name, (kind, environment) in settings.items()
    )


def number(value: float | None, digits: int) -> str:
    """``1,234.5``, or a dash."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def ratio(value: Ratio | None, digits: int = 3) -> str:
    """``1.012 [1.003, 1.020]``, or a dash."""
    if value is None:
        return NOTHING
    return f"{value[0]:.{digits}f} [{value[1]:.{digits}f}, {value[2]:.{digits}f}]"

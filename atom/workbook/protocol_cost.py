"""What notebook 06 shows, from rows: the guard's cost, the state kernels, the engine's speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from atom.benchmarks.engine_speed_rows import Clock, SpeedArm
from atom.benchmarks.kernel_rows import CacheState, KernelArm, Operator, Question
from atom.benchmarks.step_calls import StepCalls
from atom.config import CopyProtocol, GuardMode
from atom.evidence import Evidence
from atom.workbook.claim_model import Claim
from atom.workbook.engine_speed_analysis import MET, MISSED, OPEN, ArmSpeed, Goal, Ratio
from atom.workbook.kernel_analysis import BASES, ArmSummary
from atom.workbook.records import Run, existing, load_runs
from atom.workbook.run_choice import newest_whole

NOTHING = "–"
KERNELS, SPEED, PROTOCOL = "kernels", "engine_speed", "protocol_cost"
#: the goals of the state kernels: share of a copy's rate, and of a guard's cost
COPY_SHARE = 0.85
COPY_BATCH = 256
GUARD_ALLOWANCE = 0.01
GUARD_BATCH = 256

#: what the protocol-cost experiment answers on hardware, until it was run there
OPEN_ARMS = (
    "the bare transfer loop and the engine's decode loop, by protocol",
    "host time of a send and of a receive, tails beside medians, and the limits",
    "device memory held beyond the unpatched engine, and how long a block is kept",
    "the guard's modes, the epoch tag and a host check, by decode step",
    "the virtual device's cost model against held-out arms",
)
_NEEDS_RUN = "a recorded run of sweep protocol-cost on an accelerator"


@dataclass(frozen=True)
class CostRuns:
    """Recorded runs on hardware; ``None`` where there is none.

    Attributes:
        kernels: of the kernel-speed experiment.
        speed: of the engine-speed experiment.
        protocol: of the protocol-cost experiment.
        problems: runs that could not be used, and why.
        others: every other finished run of these experiments, newest first.
    """

    kernels: Run | None
    speed: Run | None
    protocol: Run | None
    problems: tuple[str, ...]
    others: tuple[Run, ...] = ()

    def all_of(self, shown: Run | None) -> list[Run]:
        """That run, and behind it every other one of its experiment, newest first."""
        if shown is None:
            return []
        experiment = shown.provenance.experiment
        return [shown, *(run for run in self.others if run.provenance.experiment == experiment)]


def gather_runs(records: Sequence[str], measured: Sequence[str]) -> CostRuns:
    """The newest finished hardware run of each experiment; one in ``records`` goes first.

    A run that was narrowed to some arms is chosen only where there is no other.
    """
    problems: list[str] = []
    found: dict[str, Run | None] = {}
    every: dict[str, Run] = {}
    for experiment in (KERNELS, SPEED, PROTOCOL):
        chosen = None
        for folders in (records, measured):
            runs, more = load_runs(existing(folders), experiment)
            problems += more
            usable = []
            for run in runs:
                if run.provenance.exit_state != "finished":
                    problems.append(f"{run.provenance.run_id} is {run.provenance.exit_state}")
                elif run.provenance.evidence is Evidence.MEASURED:
                    usable.append(run)
            every |= {run.provenance.run_id: run for run in usable}
            if usable and chosen is None:
                chosen = newest_whole(usable)
        found[experiment] = chosen
    unique = tuple(dict.fromkeys(problems))
    shown = {run.provenance.run_id for run in found.values() if run is not None}
    others = tuple(every[name] for name in sorted(every, reverse=True) if name not in shown)
    return CostRuns(found[KERNELS], found[SPEED], found[PROTOCOL], unique, others)


# -- calls of a step


def calls_table(calls: Sequence[StepCalls]) -> pd.DataFrame:
    """One row an arm: calls of a decode step."""
    names = {
        "events created": "events_created",
        "events recorded": "events_recorded",
        "host waits": "host_waits",
        "stream waits": "stream_waits",
        "record_stream": "streams_told",
        "kernels": "kernels",
        "copies": "copies",
        "blocks allocated": "blocks",
    }
    return pd.DataFrame(
        {
            "protocol": str(one.protocol),
            "guard": str(one.guard),
            "epoch tag": "yes" if one.epoch_tag else "no",
            **{label: f"{one.a_step(name):g}" for label, name in names.items()},
        }
        for one in calls
    )


def find_calls(
    calls: Sequence[StepCalls],
    protocol: CopyProtocol,
    guard: GuardMode = GuardMode.REPORT,
    *,
    epoch_tag: bool = True,
) -> StepCalls:
    """The counts of that arm."""
    return next(
        one
        for one in calls
        if (one.protocol, one.guard, one.epoch_tag) == (protocol, guard, epoch_tag)
    )


def call_arguments(calls: Sequence[StepCalls], profile: str) -> dict[str, dict[str, Any]]:
    """Arguments for the claims that counted calls settle, all simulated."""
    bare = find_calls(calls, CopyProtocol.UNPATCHED)
    hold = find_calls(calls, CopyProtocol.HOLD)
    unguarded = find_calls(calls, CopyProtocol.HOLD, GuardMode.NONE)
    trap = find_calls(calls, CopyProtocol.HOLD, GuardMode.TRAP)
    events = hold.events_created + hold.events_recorded
    extra = events - bare.events_created - bare.events_recorded
    waits = hold.host_waits - unguarded.host_waits
    return {
        "contract-11": {
            "value": extra / hold.steps,
            "detail": f"created and recorded in {hold.steps} decode steps: {events} with hold, "
            f"{bare.events_created + bare.events_recorded} unpatched",
            "machine": profile,
        },
        "limit-01": {
            "value": waits / hold.steps,
            "detail": f"host waits in {hold.steps} decode steps: {unguarded.host_waits} without a "
            f"guard, {hold.host_waits} with the reporting guard, {trap.host_waits} with the "
            "trapping one; its record travels with the status",
            "machine": profile,
        },
    }


# -- kernels


def chosen(
    summaries: Sequence[ArmSummary], question: Question, operator: Operator
) -> list[ArmSummary]:
    """Arms of one question and operator that were timed, cold, at the first number of channels."""
    rows = [
        one
        for one in summaries
        if one.question == question and one.operator == operator and one.cache == CacheState.COLD
    ]
    channels = rows[0].channels if rows else 0
    return [one for one in rows if one.channels == channels and one.microseconds is not None]


def kernels_table(summaries: Sequence[ArmSummary], question: Question) -> pd.DataFrame:
    """One row a point: our time and rate, and each arm's time over the base's."""
    base = str(BASES[question])
    ours = KernelArm.NONE if question is Question.GUARD else KernelArm.REPORT
    rows = [one for one in summaries if one.question == question]
    known_arms = {one.arm for one in rows}
    arms = [str(arm) for arm in KernelArm if str(arm) in known_arms and arm != base]
    table = []
    for point in dict.fromkeys(one.point_id for one in rows):
        own = {one.arm: one for one in rows if one.point_id == point}
        first = next(iter(own.values()))
        known = own.get(str(ours))
        line: dict[str, Any] = {
            "kernel": first.operator.replace("_update", ""),
            "batch": first.batch,
            "channels": first.channels,
            "tokens a row": first.queries,
            "cache": first.cache,
            f"{ours}, us": _number(None if known is None else known.microseconds, 2),
            "TB/s": _number(None if known is None else known.terabytes_per_s, 2),
        }
        line |= {
            f"{arm} over {base}": ratio_text(_ratio(own[arm])) if arm in own else NOTHING
            for arm in arms
        }
        table.append(line)
    return pd.DataFrame(table)


def left_out(summaries: Sequence[ArmSummary]) -> list[str]:
    """Why arms were not timed, once each, with the number of points."""
    counts = Counter((one.arm, one.left_out) for one in summaries if one.left_out is not None)
    return [
        f"{arm} was not timed at {count} {'point' if count == 1 else 'points'}: {reason}"
        for (arm, reason), count in counts.items()
    ]


def _ratio(one: ArmSummary) -> Ratio | None:
    if one.ratio is None or one.low is None or one.high is None:
        return None
    return one.ratio, one.low, one.high


def ratio_text(ratio: Ratio | None, digits: int = 3) -> str:
    """``1.012 [1.003, 1.020]``, or a dash."""
    if ratio is None:
        return NOTHING
    return f"{ratio[0]:.{digits}f} [{ratio[1]:.{digits}f}, {ratio[2]:.{digits}f}]"


def kernel_goals(summaries: Sequence[ArmSummary]) -> list[Goal]:
    """The state kernels' goals, at each point where they are set."""
    goals = []
    for one in summaries:
        ratio = _ratio(one)
        if ratio is None or one.arm != KernelArm.REPORT:
            continue
        name, bound = "", 0.0
        conv = one.operator == Operator.CONV_UPDATE
        if one.question == Question.GUARD:
            name, bound = "guard over none", 1 + GUARD_ALLOWANCE
        elif conv and one.batch >= COPY_BATCH and one.cache == CacheState.COLD:
            name, bound = "conv update's time over copy_", 1 / COPY_SHARE
        if name:
            goals.append(Goal(name, one.point_id, ratio, bound, False, _outcome(ratio, bound)))
    return goals


def _outcome(ratio: Ratio, bound: float) -> str:
    return MET if ratio[2] <= bound else MISSED if ratio[1] > bound else OPEN


def goals_table(goals: Sequence[Goal]) -> pd.DataFrame:
    """One row a goal: what was found, what was wanted, and what became of it."""
    return pd.DataFrame(
        {
            "goal": goal.name,
            "point": goal.point_id,
            "found": ratio_text(goal.value),
            "wanted": f"{'at least' if goal.at_least else 'at most'} {goal.wanted:.4g}",
            "outcome": goal.outcome,
        }
        for goal in goals
    )


def kernel_arguments(run: Run, summaries: Sequence[ArmSummary]) -> dict[str, dict[str, Any]]:
    """Arguments for the claims that kernel times settle.

    A graph is replayed by one host call: whatever is in it costs no synchronisation with the host.
    """
    guard = [
        one
        for one in summaries
        if one.question == Question.GUARD
        and one.arm == KernelArm.REPORT
        and one.microseconds is not None
    ]
    if not guard:
        return {"limit-01": {"reason": "this run does not time the guard"}}
    rows = run.tables["samples"]
    launches = int(rows[rows["question"] == Question.GUARD]["launches"].max())
    ratios = [one.ratio for one in guard if one.ratio is not None]
    return {
        "limit-01": {
            "value": 0,
            "detail": f"up to {launches:,} guarded launches run in one graph, whose replay is one "
            f"host call: none of them can wait for the host; their time is {min(ratios):.3f} to "
            f"{max(ratios):.3f} of the unguarded",
            "machine": run.provenance.machine,
            "run_ids": (run.provenance.run_id,),
        }
    }


# -- the engine


def speed_table(summaries: Sequence[ArmSpeed]) -> pd.DataFrame:
    """One row an arm and point, in the order of the arms; why one was left out, if one was."""
    order = [str(arm) for arm in SpeedArm]
    table = pd.DataFrame(
        {
            "point": one.point_id,
            "arm": one.arm,
            "tokens/s": NOTHING
            if one.tokens_per_s is None
            else f"{one.tokens_per_s[0]:,.0f} [{one.tokens_per_s[1]:,.0f}, "
            f"{one.tokens_per_s[2]:,.0f}]",
            "step ms": _number(one.step_ms, 3),
            "p99 ms": _number(one.step_p99_ms, 3),
            "tokens a row": _number(one.tokens_per_row, 2),
            "step over floor": ratio_text(one.over_floor, 2),
            "rate over ours": ratio_text(one.over_ours, 2),
            "rate over transformers'": ratio_text(one.over_transformers, 1),
            "host ms": _number((one.parts or {}).get("host_ms"), 3),
            "gap between steps ms": _number((one.parts or {}).get("gap_ms"), 3),
            "left out": one.left_out or "",
        }
        for one in sorted(summaries, key=lambda one: (one.point_id, order.index(one.arm)))
    )
    return table if any(one.left_out for one in summaries) else table.drop(columns="left out")


def memory_table(run: Run) -> pd.DataFrame:
    """Planned and counted device memory, in MiB."""
    return pd.DataFrame(
        {
            "part": str(row["part"]),
            "planned, MiB": f"{row['planned_bytes'] / 2**20:,.1f}",
            "measured, MiB": NOTHING
            if pd.isna(row["measured_bytes"])
            else f"{row['measured_bytes'] / 2**20:,.1f}",
            "measured over planned": NOTHING
            if pd.isna(row["measured_bytes"])
            else f"{row['measured_bytes'] / row['planned_bytes']:.3f}",
        }
        for row in run.tables["memory"].to_dict("records")
    )


def is_hardware(run: Run) -> bool:
    """Whether every time of an engine-speed run is an accelerator's."""
    return bool((run.tables["samples"]["clock"] == Clock.ACCELERATOR).all())


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


# -- what is open


def open_arms(runs: CostRuns) -> pd.DataFrame:
    """What no recorded hardware run answers yet."""
    names = () if runs.protocol is not None else OPEN_ARMS
    return pd.DataFrame({"not measured yet": name, "what it takes": _NEEDS_RUN} for name in names)


def open_claims(
    claims: Mapping[str, Claim], notebook: str, settled: Collection[str]
) -> pd.DataFrame:
    """Claims of a notebook that are not settled by every kind of evidence they name.

    Args:
        claims: all claims by id.
        notebook: its number.
        settled: keys ``<claim>/<evidence>``.
    """
    table = []
    for name, claim in claims.items():
        if claim.notebook != notebook:
            continue
        missing = [str(kind) for kind in claim.evidence if f"{name}/{kind}" not in settled]
        if missing:
            needs = _NEEDS_RUN
            if name == "limit-01":
                needs = "a recorded run of sweep kernels"
            elif name == "thr-23":
                needs = "windows counted on hardware; those of the code are counted above"
            table.append(
                {
                    "claim": name,
                    "what it says": claim.claim,
                    "open": ", ".join(missing),
                    "needs": needs,
                }
            )
    return pd.DataFrame(table)

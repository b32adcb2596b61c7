"""What ``python -m atom sweep`` prints: the plan, and the closing table, as text or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pandas as pd

from atom.benchmarks.race_estimate import estimate_seconds, trial_seconds
from atom.benchmarks.race_plan import Job, build_arms
from atom.config import DeviceChoice, RaceSettings
from atom.workbook.race_analysis import summarise
from atom.workbook.records import Run
from atom.workbook.tables import shown_path


def device_minutes(settings: RaceSettings, seconds: float) -> float:
    """Minutes for which an accelerator is held; none on the virtual device."""
    return seconds / 60 if settings.device is DeviceChoice.ACCELERATOR else 0.0


def processes_of(jobs: Sequence[Job]) -> Counter[str]:
    """How many of the jobs, a process each, run each arm."""
    return Counter(point.arm.name for job in jobs for point in job.points)


def plan_text(settings: RaceSettings, jobs: Sequence[Job]) -> str:
    """The arms of these jobs with trials and seconds, and the expected time of all."""
    processes = processes_of(jobs)
    arms = [arm for arm in build_arms(settings) if processes[arm.name]]
    lines = [f"{'arm':58} {'trials':>14} {'seconds':>8}"]
    for arm in arms:
        times = processes[arm.name]
        seconds = times * (arm.trials + arm.traced + 1) * trial_seconds(arm, settings)
        count = f"{times} x {arm.trials}"
        lines.append(f"{arm.name:58} {count:>14} {seconds:8.1f}")
    trials = sum(arm.trials * processes[arm.name] for arm in arms)
    seconds = estimate_seconds(jobs, settings)
    lines.append(
        f"{len(arms)} arms, {len(jobs)} processes, {trials} trials on "
        f"{settings.device.value}: about {seconds:.0f} s, {device_minutes(settings, seconds):.1f} "
        "device minutes"
    )
    return "\n".join(lines)


def result_text(trials: pd.DataFrame) -> str:
    """The closing table: arm, stale of trials, 95% interval clustered by process, processes."""
    if trials.empty:
        return "no process finished: nothing to show"
    lines = [f"{'arm':58} {'stale/trials':>12} {'95% interval':>18} {'processes':>9}"]
    for row in summarise(trials).sort_values(["grid", "arm"]).itertuples():
        interval = f"[{row.low:.1%}, {row.high:.1%}]"
        count = f"{row.stale}/{row.trials}"
        hit = f"{row.processes_hit}/{row.processes}"
        lines.append(f"{row.arm:58} {count:>12} {interval:>18} {hit:>9}")
    lines.append("processes: those with a stale trial, of all. 0 stale is no proof of safety:")
    lines.append("read the interval's upper end.")
    return "\n".join(lines)


def plan_json(settings: RaceSettings, jobs: Sequence[Job]) -> str:
    """The plan as JSON: settings, arms of these jobs with trials and seconds, the time of all."""
    processes = processes_of(jobs)
    seconds = estimate_seconds(jobs, settings)
    values = {
        "format": 1,
        "experiment": "race",
        "settings": settings.model_dump(mode="json"),
        "processes": len(jobs),
        "seconds": round(seconds, 1),
        "device_minutes": round(device_minutes(settings, seconds), 2),
        "arms": [
            {
                "arm": arm.name,
                "processes": processes[arm.name],
                "trials_per_process": arm.trials,
                "trial_seconds": trial_seconds(arm, settings),
            }
            for arm in build_arms(settings)
            if processes[arm.name]
        ],
    }
    return json.dumps(values, indent=1)


def result_json(run: Run, failures: Sequence[str]) -> str:
    """A finished sweep as JSON: where it is recorded, and each arm's rate with its interval."""
    trials = run.tables["trials"]
    columns = ("arm", "stale", "trials", "rate", "low", "high", "processes", "processes_hit")
    arms = [] if trials.empty else summarise(trials)[list(columns)].to_dict("records")
    values = {
        "format": 1,
        "run": shown_path(run.path),
        "run_id": run.provenance.run_id,
        "evidence": str(run.provenance.evidence),
        "device": run.provenance.device,
        "exit_state": run.provenance.exit_state,
        "failures": list(failures),
        "confidence": 0.95,
        "arms": arms,
    }
    return json.dumps(values, indent=1)

"""What notebook 03 shows of detectors, from rows; and the sanitizer on every scenario, now."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pandas as pd

from atom.config import DeviceChoice
from atom.device import open_device
from atom.evidence import Evidence
from atom.lifetime.compare_detectors import expected_kinds, load_scenarios
from atom.lifetime.detector_rows import EXPERIMENT, NULL_ARM, Detector, Result
from atom.lifetime.sanitizer import sanitizer
from atom.workbook.records import Run, existing, load_runs

NOTHING = "–"


def recorded(folders: Sequence[str]) -> tuple[Run | None, list[str]]:
    """Of the finished comparisons on hardware with most rows, the newest; and what is damaged."""
    runs, problems = load_runs(existing(folders), EXPERIMENT)
    usable = [
        run
        for run in runs
        if run.provenance.evidence is Evidence.MEASURED and run.provenance.exit_state == "finished"
    ]
    best = max(
        usable, key=lambda run: (len(run.tables["detectors"]), run.provenance.run_id), default=None
    )
    return best, problems


def sanitize_scenarios() -> pd.DataFrame:
    """Every scenario under the sanitizer on the virtual device, in this process.

    Returns:
        scenario, faulty, expected, found, right (exactly the expected kinds of finding).
    """
    known = load_scenarios().SCENARIOS.values()
    # each start collects cycles: over a notebook's libraries that takes longer than the scenario
    gc.freeze()
    try:
        rows = [_sanitize(scenario) for scenario in known]
    finally:
        gc.unfreeze()
    return pd.DataFrame(rows)


def _sanitize(scenario: Any) -> dict[str, Any]:
    with sanitizer() as report:
        device = open_device(DeviceChoice.VIRTUAL)
        scenario.program(device)
        device.synchronize()
    kinds = {finding.kind for finding in report.findings}
    return {
        "scenario": scenario.name,
        "faulty": scenario.faulty,
        "expected": expected_kinds(scenario),
        "found": "+".join(sorted(kinds)) or "nothing",
        "right": kinds == set(scenario.expected),
    }


def detectors_table(run: Run) -> pd.DataFrame:
    """Counts a detector: caught, missed, false alarms, lines named, and its slow-down."""
    rows, slow = run.tables["detectors"], slow_downs(run)
    table = []
    for name in Detector:
        own = rows[[str(value) == str(name) for value in rows["detector"]]]
        if own.empty or name is Detector.NOTHING:
            continue
        results = [str(value) for value in own["result"]]
        absent = results.count(str(Result.ABSENT))
        ran = own["faulty"].astype(bool)[[result != str(Result.ABSENT) for result in results]]
        faulty, correct = int(ran.sum()), int((~ran).sum())
        caught_rows = own[[result == str(Result.CAUGHT) for result in results]]
        table.append(
            {
                "detector": str(name),
                "caught": _of(results.count(str(Result.CAUGHT)), faulty),
                "false alarms": _of(results.count(str(Result.FALSE_ALARM)), correct),
                "did not end": results.count(str(Result.FAILED)),
                "not installed": absent,
                "names the copy": _named(caught_rows["names_copy"]),
                "names the free": _named(caught_rows["names_free"]),
                "names the reuse": _named(caught_rows["names_reuse"]),
                "decode step": f"{slow[str(name)]:.2f}x" if str(name) in slow else NOTHING,
            }
        )
    return pd.DataFrame(table)


def _named(column: pd.Series) -> str:
    known = column.dropna()
    return _of(int(known.astype(bool).sum()), len(known))


def _of(count: int, total: int) -> str:
    return f"{count} of {total}" if total else NOTHING


def scenarios_table(run: Run) -> pd.DataFrame:
    """One row a scenario, one column a detector: its result."""
    rows = run.tables["detectors"]
    rows = rows.assign(detector=[str(value) for value in rows["detector"]])
    rows = rows[rows["detector"] != str(Detector.NOTHING)]
    table = []
    for (scenario, expected), group in rows.groupby(["scenario", "expected"], sort=False):
        line = {"scenario": scenario, "missing order": expected}
        line |= {str(row.detector): str(row.result) for row in group.itertuples()}
        table.append(line)
    return pd.DataFrame(table)


def slow_downs(run: Run) -> dict[str, float]:
    """Median over the repeats of each timed arm's step time over that without a detector."""
    times = run.tables["slowdown"]
    arms = dict.fromkeys(str(arm) for arm in times["arm"])
    known = {arm: times["slow_down"][times["arm"] == arm].dropna() for arm in arms}
    return {arm: float(values.median()) for arm, values in known.items() if len(values)}


def slow_down_table(run: Run) -> pd.DataFrame:
    """One row a process of the timed decode loop, the null arm among them."""
    rows = []
    for row in run.tables["slowdown"].to_dict("records"):
        timed = row["steps"] > 0
        low, middle, high = (row[f"step_milliseconds{part}"] for part in ("_low", "", "_high"))
        rows.append(
            {
                "arm": str(row["arm"]),
                "repeat": int(row["repeat"]) + 1,
                "steps": int(row["steps"]),
                "ms a step [quartiles]": (
                    f"{middle:.2f} [{low:.2f}, {high:.2f}]" if timed else str(row["text"])
                ),
                "over nothing": f"{row['slow_down']:.2f}x" if timed else NOTHING,
                "operations seen": int(row["operations"]) or NOTHING,
                "false alarms": int(row["findings"]),
            }
        )
    return pd.DataFrame(rows)


def conclusions(run: Run) -> list[str]:
    """What the comparison shows, in sentences."""
    said = []
    for row in detectors_table(run).to_dict("records"):
        if NOTHING == row["caught"] == row["false alarms"]:
            said.append(f"{row['detector']} is not installed there.")
            continue
        text = f"{row['detector']}: {row['caught']} faults caught, false alarms on "
        text += f"{row['false alarms']} correct programs"
        if row["did not end"]:
            text += f"; did not end: {row['did not end']}"
        said.append(f"{text}.")
    slow = slow_downs(run)
    ours, null = slow.get(str(Detector.OURS)), slow.get(NULL_ARM)
    if ours is not None and null is not None:
        said.append(
            f"An eager decode step takes {ours:.2f} times as long under ours (the null arm: "
            f"{null:.2f}); the goal is under 3, which is {'met' if ours < 3 else 'missed'}."
        )
    return said

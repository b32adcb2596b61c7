"""Every recorded run of the kernels and of the engine's speed beside the one that is shown."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from atom.benchmarks.engine_speed_rows import SpeedArm
from atom.benchmarks.kernel_rows import Operator
from atom.workbook.engine_speed_analysis import MET, Goal, goals
from atom.workbook.engine_speed_analysis import summarise as summarise_speed
from atom.workbook.kernel_analysis import summarise as summarise_kernels
from atom.workbook.protocol_cost import NOTHING, kernel_goals, ratio_text
from atom.workbook.race_analysis import label_of
from atom.workbook.records import Run


def named(run: Run) -> str:
    """The run with the commit of its code: runs of one machine differ by that, too."""
    return f"{label_of(run)}, commit {str(run.provenance.commit)[:8]}"


def kernels_beside(runs: Sequence[Run], seed: int = 42) -> pd.DataFrame:
    """One row a run: the ranges of the kernels' goals, and how many points meet them."""
    table = []
    for run in runs:
        summaries = summarise_kernels(run.tables["samples"], seed)
        found = kernel_goals(summaries)
        table.append(
            {
                "run": named(run),
                **_group("conv update's time over copy_", found, "conv update's time over copy_"),
                **_group(
                    "conv's guard over none",
                    [goal for goal in found if goal.point_id.startswith(Operator.CONV_UPDATE)],
                    "guard over none",
                ),
                **_group(
                    "recurrent update's guard over none",
                    [goal for goal in found if goal.point_id.startswith(Operator.RECURRENT_UPDATE)],
                    "guard over none",
                ),
            }
        )
    return pd.DataFrame(table)


def _group(title: str, found: Sequence[Goal], name: str) -> dict[str, str]:
    own = [goal for goal in found if goal.name == name]
    values = [goal.value[0] for goal in own if goal.value is not None]
    met = sum(goal.outcome == MET for goal in own)
    return {
        title: f"{min(values):.3f} to {max(values):.3f}" if values else NOTHING,
        f"{title}: met": f"{met} of {len(own)}",
    }


def speeds_beside(runs: Sequence[Run], seed: int = 42) -> pd.DataFrame:
    """One row a goal and point, one column a run: what it found, and the outcome."""
    columns: dict[str, dict[tuple[str, str], str]] = {}
    for run in runs:
        samples = run.tables["samples"]
        summaries = summarise_speed(samples, run.tables["floors"], seed)
        columns[named(run)] = {
            (goal.name, goal.point_id): f"{ratio_text(goal.value, 2)} {goal.outcome}"
            for goal in goals(summaries, samples)
        }
    keys = list(dict.fromkeys(key for column in columns.values() for key in column))
    return pd.DataFrame(
        {
            "goal": name,
            "point": point,
            **{title: column.get((name, point), NOTHING) for title, column in columns.items()},
        }
        for name, point in keys
    )


def spread_sentences(runs: Sequence[Run], seed: int = 42) -> list[str]:
    """How far the medians of the plain decode arms lie apart between runs, a device at a time."""
    rates: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        for one in summarise_speed(run.tables["samples"], run.tables["floors"], seed):
            if one.tokens_per_s is not None and one.arm in (SpeedArm.OURS, SpeedArm.TRANSFORMERS):
                key = (run.provenance.device, one.point_id, one.arm)
                rates.setdefault(key, []).append(one.tokens_per_s[0])
    parts: dict[str, list[str]] = {}
    for (device, point, arm), values in rates.items():
        if len(values) > 1:
            parts.setdefault(device, []).append(
                f"{point}, {arm}: {min(values):,.0f} to {max(values):,.0f} (a factor of "
                f"{max(values) / min(values):.2f})"
            )
    return [
        f"Between the runs on {device} the medians of the repeats, in tokens/s, span "
        f"{'; '.join(own)}. Their hours differ and their commits may, and the intervals above hold "
        "for one run."
        for device, own in parts.items()
    ]

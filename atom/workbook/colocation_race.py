"""Stale statuses of the race beside neighbours, from recorded rows."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from atom.benchmarks.colocation_settings import MemoryNode, Neighbour, condition_text
from atom.workbook.records import Run
from atom.workbook.statistics import clustered_interval


def race_trials(runs: Sequence[Run]) -> dict[tuple[str, str, str], list[tuple[int, int]]]:
    """Stale trials and trials, a pair a process, by arm, memory node and condition."""
    found: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for run in runs:
        for row in run.tables["race"].to_dict("records"):
            if row["neighbours_at_end"] == row["neighbours"]:
                condition = condition_text(row["neighbour"], row["neighbours"])
                stale = int(row["trials"]) - int(row["clean"])
                key = (str(row["arm"]), str(row["memory_node"]), condition)
                found.setdefault(key, []).append((stale, int(row["trials"])))
    return found


def stale_rates(
    runs: Sequence[Run],
) -> dict[tuple[str, str, str], tuple[int, int, int, float, float]]:
    """Stale trials, trials, processes and the ends of a 95% interval; alone stands first."""
    found = {}
    for key, pairs in sorted(race_trials(runs).items()):
        stales, trials = ([pair[place] for pair in pairs] for place in (0, 1))
        low, high, _ = clustered_interval(stales, trials)
        found[key] = (sum(stales), sum(trials), len(pairs), low, high)
    return found


def race_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row an arm: stale trials under each condition, with 95% intervals over its processes."""
    return pd.DataFrame(
        {
            "arm": arm,
            "beside it": condition,
            "node": node,
            "stale": f"{stale:,} of {trials:,}",
            "rate": f"{stale / trials:.1%} [{low:.1%}, {high:.1%}]",
            "processes": processes,
        }
        for (arm, node, condition), (stale, trials, processes, low, high) in stale_rates(
            runs
        ).items()
    )


def widened_arms(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Arms whose rate beside neighbours lies above the one alone, intervals apart: beside whom."""
    rates = stale_rates(runs)
    return [
        (arm, condition if node == MemoryNode.ANY else f"{condition} ({node} node)")
        for (arm, node, condition), (*_, low, _) in rates.items()
        if (alone := rates.get((arm, node, Neighbour.NONE.value))) is not None and low > alone[-1]
    ]

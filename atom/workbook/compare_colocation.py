"""A co-location run's figures for a comparison: quotients to its own points alone, stale rates."""

from __future__ import annotations

from collections.abc import Iterator

from atom.workbook.colocation_analysis import (
    ALONE,
    METRICS,
    is_undisturbed,
    observed_rows,
)
from atom.workbook.colocation_race import race_trials
from atom.workbook.compare_model import TimeRatio
from atom.workbook.records import Run


def rates(run: Run) -> Iterator[tuple[str, int, int]]:
    """Stale statuses of the race by arm and condition, summed over its processes."""
    for (arm, node, condition), pairs in race_trials([run]).items():
        stale, trials = (sum(pair[place] for pair in pairs) for place in (0, 1))
        yield f"stale, {arm}, {condition}, {node} node", stale, trials


def quotients(run: Run) -> Iterator[tuple[str, TimeRatio]]:
    """Each condition over alone, round by round."""
    rows = [row for row in observed_rows([run]) if is_undisturbed(row) and not row["observed"]]
    places = {
        (row["subject"], row["memory_node"], row["condition"], row["repeat"]): row for row in rows
    }
    for metric, words in METRICS.items():
        found: dict[str, tuple[list[float], list[float]]] = {}
        for (subject, node, condition, repeat), row in sorted(places.items()):
            base = places.get((subject, node, ALONE, repeat))
            if condition == ALONE or base is None or not row[metric] or not base[metric]:
                continue
            name = f"{words}, {subject} beside {condition}, {node} node"
            top, bottom = found.setdefault(name, ([], []))
            top.append(float(row[metric]))
            bottom.append(float(base[metric]))
        for name, (top, bottom) in found.items():
            yield name, TimeRatio(tuple(top), tuple(bottom))

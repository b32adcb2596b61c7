"""Which queue models are consistent with the published rows, and which with measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from atom.benchmarks.race_model import (
    Combination,
    ObservedRow,
    SimulatedRow,
    combinations,
    simulate,
)
from atom.config import CopyPath, CopyProtocol, Front, RaceSettings
from atom.workbook.race_analysis import per_process, queues_text, select
from atom.workbook.race_comparison import published_cells
from atom.workbook.records import Run
from atom.workbook.statistics import clustered_interval, exact_interval

#: queue settings of a measured run whose kernel copies a model must meet
_MEASURED_QUEUES = ("1", "4", "32")


def published_rows() -> list[ObservedRow]:
    """The published unpatched rows, with exact intervals: each came from one process or few."""
    rows = []
    for cell in published_cells():
        stale, trials, queues = cell["stale"], cell["trials"], cell["queues"]
        if cell["protocol"] != CopyProtocol.UNPATCHED or stale is None:
            continue
        low, high = exact_interval(stale, trials)
        rows.append(
            ObservedRow(cell["label"], Front(cell["front"]), queues, stale, trials, low, high)
        )
    return rows


def measured_rows(run: Run) -> list[ObservedRow]:
    """Unpatched rows of a measured run that a queue model must meet, by copy path.

    Intervals are clustered by process. Rows without trials are left out.
    """
    wanted = [
        (Front.NOTHING, CopyPath.ENGINE, "default"),
        (Front.STORE_ON_COPY_STREAM, CopyPath.ENGINE, "default"),
        (Front.STORE_ON_OTHER_STREAMS, CopyPath.ENGINE, "default"),
        (Front.MATMUL, CopyPath.ENGINE, "default"),
        *((Front.MATMUL, CopyPath.KERNEL, queues) for queues in _MEASURED_QUEUES),
    ]
    rows = []
    for front, path, queues in wanted:
        cell = select(
            run.tables["trials"],
            protocol=CopyProtocol.UNPATCHED,
            front=front,
            copy_path=path,
            queue_setting=queues,
        )
        if cell.empty:
            continue
        stale, trials = per_process(cell)
        low, high, _ = clustered_interval(stale, trials)
        rows.append(
            ObservedRow(
                f"{front}, by {path}, {queues_text(queues)}",
                front,
                None if queues == "default" else int(queues),
                sum(stale),
                sum(trials),
                low,
                high,
                path,
            )
        )
    return rows


def is_consistent(simulated: SimulatedRow) -> bool:
    """Whether the simulated rate's exact 95% interval meets the observed one."""
    low, high = exact_interval(simulated.stale, simulated.trials)
    return low <= simulated.row.high and simulated.row.low <= high


def study(
    rows: Sequence[ObservedRow],
    settings: RaceSettings,
    *,
    draws: int,
    trials: int,
    models: Sequence[Combination] | None = None,
) -> pd.DataFrame:
    """Try every queue model on every draw of the mapping.

    Args:
        rows: what was observed.
        settings: sizes of the work in front, and the profile that gives clocks and bandwidths.
        draws: processes a model.
        trials: of each row and draw.
        models: all of :func:`atom.benchmarks.race_model.combinations` unless given.

    Returns:
        One row a model: mapping, copy, order, barrier, wait_us, dispatch_us, a column for each
        observed row with the draws that meet it, ``all_rows`` with the draws that meet all rows at
        once, ``draws``, and ``consistent``.
    """
    found: list[dict[str, Any]] = []
    for model in combinations() if models is None else models:
        results = simulate(model, rows, settings, draws=draws, trials=trials)
        entry: dict[str, Any] = {
            "mapping": str(model.mapping),
            "copy": model.copy_text,
            "order": str(model.order),
            "barrier": str(model.barrier),
            "wait_us": model.wait_seconds * 1e6,
            "dispatch_us": model.full_dispatch_seconds * 1e6,
        }
        meets = {(result.row.name, result.draw): is_consistent(result) for result in results}
        for row in rows:
            entry[row.name] = sum(meets[row.name, draw] for draw in range(draws))
        entry["all_rows"] = sum(all(meets[row.name, draw] for row in rows) for draw in range(draws))
        entry["draws"] = draws
        entry["consistent"] = entry["all_rows"] > 0
        found.append(entry)
    return pd.DataFrame(found)


def what_decides(models: pd.DataFrame) -> pd.DataFrame:
    """For each value of each factor: how many models have it, and how many are consistent.

    A factor decides if some value is never consistent; it does not matter if all values are so
    equally often.
    """
    found = []
    for factor in ("mapping", "copy", "order", "barrier", "wait_us", "dispatch_us"):
        for value, group in models.groupby(factor, sort=False):
            found.append(
                {
                    "factor": factor.replace("_us", " (us)"),
                    "value": str(value),
                    "models": len(group),
                    "consistent": int(group["consistent"].sum()),
                }
            )
    return pd.DataFrame(found)

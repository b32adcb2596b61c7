"""Published, simulated and measured stale rates side by side, in the published rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from atom.benchmarks.race_plan import DEFAULT_QUEUES
from atom.config import CopyPath, CopyProtocol
from atom.evidence import Evidence
from atom.workbook.race_analysis import interval_text, label_of, per_process, select
from atom.workbook.records import Run, load_published
from atom.workbook.statistics import clustered_interval, exact_interval


def published_cells() -> list[dict[str, Any]]:
    """Cells of the published micro-benchmark table.

    Returns:
        label, protocol, front, queues (``None``: not stated), stale (``None``: the cell is empty),
        trials.
    """
    cells: list[dict[Any, Any]] = load_published("race_microbenchmark").to_dict("records")
    found = []
    for cell in cells:
        queues = None if pd.isna(cell["hardware_queues"]) else int(cell["hardware_queues"])
        label = str(cell["front"]).replace("_", " ")
        if queues is not None:
            label += f", {queues} queue" + ("s" if queues > 1 else "")
        found.append(
            {
                "label": label,
                "protocol": str(cell["protocol"]),
                "front": str(cell["front"]),
                "queues": queues,
                "stale": None if pd.isna(cell["stale_trials"]) else int(cell["stale_trials"]),
                "trials": None if pd.isna(cell["trials"]) else int(cell["trials"]),
            }
        )
    return found


def comparison(simulated: Run | None, measured: Sequence[Run]) -> pd.DataFrame:
    """Published, simulated and measured rates side by side, in the published rows.

    Returns:
        label, protocol, evidence, source (whose numbers), stale, trials, low, high. Published
        counts have exact intervals; the others are clustered by process. ``hold`` has no published
        cell: ours stand alone.
    """
    cells = published_cells()
    found: list[dict[str, Any]] = []
    runs = [run for run in (simulated, *measured) if run is not None]
    for label in dict.fromkeys(cell["label"] for cell in cells):
        group = [cell for cell in cells if cell["label"] == label]
        protocols = [*(cell["protocol"] for cell in group), str(CopyProtocol.HOLD)]
        for protocol in protocols:
            cell = next((one for one in group if one["protocol"] == protocol), None)
            base = {"label": label, "protocol": protocol}
            if cell is not None and cell["stale"] is not None:
                low, high = exact_interval(cell["stale"], cell["trials"])
                counts = {
                    "stale": cell["stale"],
                    "trials": cell["trials"],
                    "low": low,
                    "high": high,
                }
                found.append(
                    {
                        **base,
                        "evidence": Evidence.PUBLISHED,
                        "source": "MI355X, as stated",
                        **counts,
                    }
                )
            queues = group[0]["queues"]
            for run in runs:
                rows = select(
                    run.tables["trials"],
                    protocol=protocol,
                    front=group[0]["front"],
                    copy_path=CopyPath.ENGINE,
                    queue_setting=DEFAULT_QUEUES if queues is None else str(queues),
                )
                if rows.empty:
                    continue
                stale, trials = per_process(rows)
                low, high, _ = clustered_interval(stale, trials)
                counts = {"stale": sum(stale), "trials": sum(trials), "low": low, "high": high}
                found.append(
                    {
                        **base,
                        "evidence": run.provenance.evidence,
                        "source": label_of(run),
                        **counts,
                    }
                )
    return pd.DataFrame(found)


def runs_side_by_side(runs: Sequence[Run]) -> pd.DataFrame:
    """Stale of trials with intervals in the published rows: a column a run.

    Args:
        runs: measured runs; their labels name the columns.
    """
    rows = comparison(None, runs)
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows[rows["evidence"] != Evidence.PUBLISHED].to_dict("records"):
        line = {"row": row["label"], "protocol": row["protocol"]}
        line = lines.setdefault((row["label"], row["protocol"]), line)
        line[row["source"]] = interval_text(row["stale"], row["trials"], row["low"], row["high"])
    return pd.DataFrame(list(lines.values()), columns=["row", "protocol", *map(label_of, runs)])

"""Runs of the race experiment as sides of a comparison."""

from __future__ import annotations

from typing import Any

import pandas as pd

from atom.benchmarks.race_plan import DEFAULT_QUEUES
from atom.config import CopyPath, CopyProtocol, Front, RaceSettings
from atom.evidence import Evidence
from atom.workbook.compare_model import Comparison, Rate, Side, TimeRatio
from atom.workbook.race_analysis import label_of, per_process, select, text_of, with_stale
from atom.workbook.race_comparison import published_cells
from atom.workbook.records import Run, load_published

#: settings that make the load of a trial; the others say how much of it is run
LOAD = (
    "batch_size",
    "store_bytes",
    "matmul_size",
    "matmul_streams",
    "matmuls_per_stream",
    "spin_seconds",
)
_SEED = ("seed",)
#: where a run goes is no setting of its load, and each side's label names it
_PLACE = ("device", "device_profile")
#: load of the published rows, as far as its text states it
_PUBLISHED_LOAD = {
    "batch_size": 32,
    "store_bytes": 256 * 2**20,
    "matmul_size": 4096,
    "matmul_streams": 16,
    "matmuls_per_stream": 10,
}


def whole(run: Run) -> Side:
    """A run with a cell for each arm."""
    trials = with_stale(run.tables["trials"])
    rates = {}
    for arm, rows in trials.groupby("arm", sort=False):
        ordered = rows.sort_values("process")
        rates[str(arm)] = Rate(_whole(ordered["stale"]), _whole(ordered["trials"]))
    times = _times(run.tables["trials"])
    null = times.get("null")
    ratios = {}
    if null is not None:
        ratios = {
            f"send time, {name}": TimeRatio(time.top, null.top)
            for name, time in times.items()
            if name != "null" and len(time.top) == len(null.top)
        }
    return _side(run, rates, ratios, {f"send time, {name}": one for name, one in times.items()})


def published() -> Side:
    """The published table; its empty cells are left out."""
    rates = {
        _cell(cell): Rate((cell["stale"],), (cell["trials"],), clustered=False)
        for cell in published_cells()
        if cell["stale"] is not None
    }
    machine = str(load_published("race_microbenchmark")["machine"].iloc[0])
    return Side(
        label=f"the published micro-benchmark ({machine}, as inferred from the text; processes, "
        "seed and copy path not stated)",
        evidence=Evidence.PUBLISHED,
        machine=machine,
        run_id=None,
        conditions={"load": _PUBLISHED_LOAD},
        rates=rates,
    )


def as_published(run: Run) -> Side:
    """A run in the published cells: copies by the engine, native allocator."""
    rates = {}
    for cell in published_cells():
        rows = select(
            run.tables["trials"],
            protocol=cell["protocol"],
            front=cell["front"],
            copy_path=CopyPath.ENGINE,
            queue_setting=DEFAULT_QUEUES if cell["queues"] is None else str(cell["queues"]),
        )
        if not rows.empty:
            stale, trials = per_process(rows)
            rates[_cell(cell)] = Rate(tuple(stale), tuple(trials))
    return _side(run, rates, {}, {})


def _side(
    run: Run, rates: dict[str, Rate], ratios: dict[str, TimeRatio], times: dict[str, TimeRatio]
) -> Side:
    return Side(
        label=_label(run),
        evidence=run.provenance.evidence,
        machine=run.provenance.machine,
        run_id=run.provenance.run_id,
        conditions=_conditions(run),
        rates=rates,
        to_null=ratios,
        times=times,
    )


def _cell(cell: dict[str, Any]) -> str:
    return f"{cell['label']} / {cell['protocol']}"


def _label(run: Run) -> str:
    p = run.provenance
    commit = "unknown commit" if p.commit is None else f"commit {p.commit[:12]}"
    return f"{label_of(run)} ({p.runtime}, torch {p.torch}, {commit}{'*' if p.dirty else ''})"


def _conditions(run: Run) -> dict[str, dict[str, Any]]:
    # a run of an older format may lack a setting, which then had its default
    recorded = RaceSettings.parse({}).model_dump(mode="json") | run.provenance.settings
    rest = [name for name in recorded if name not in (*LOAD, *_SEED, *_PLACE)]
    return {
        "load": {name: recorded[name] for name in LOAD},
        "seed": {name: recorded[name] for name in _SEED},
        "settings": {name: recorded[name] for name in rest},
    }


def _times(trials: pd.DataFrame) -> dict[str, TimeRatio]:
    """Host time of a send with nothing in front, us, by protocol; a value a process."""
    rows = text_of(trials)
    plain = (rows["grid"] == "main") & (rows["front"] == str(Front.NOTHING))
    zero = rows["protocol"] == str(CopyProtocol.ZERO_COPY)
    rows = rows[plain & ((rows["copy_path"] == str(CopyPath.ENGINE)) | zero)]
    found = {}
    for arm, group in rows.groupby("arm", sort=False):
        name = str(arm).split("/")[1]
        values = tuple(float(v) for v in group.sort_values("process")["send_us_median"])
        if all(value > 0 for value in values):
            found[name] = TimeRatio(values)
    return found


def _whole(column: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in column)


COMPARISON = Comparison(whole, published, as_published)

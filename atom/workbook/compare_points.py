"""Runs of the experiments of points as sides of a comparison: figures without a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pandas as pd

from atom.benchmarks.engine_speed_rows import SpeedArm
from atom.benchmarks.kernel_rows import Question
from atom.benchmarks.protocol_cost_rows import CostArm
from atom.benchmarks.throughput_settings import GRID_FIELDS
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import compare_colocation, compare_throughput
from atom.workbook.compare_model import Comparison, Rate, Side, TimeRatio
from atom.workbook.kernel_analysis import BASES
from atom.workbook.lifetime_published import published_points
from atom.workbook.race_analysis import label_of
from atom.workbook.records import Run

_MODEL = ("model", "preset", "precision")
_AMOUNT = (
    *("trials", "repeats", "requests", "steps", "peer_steps", "profile_steps", "marked_steps"),
    *("duration_seconds", "central_repeats", "time_limit_seconds", "setup_seconds"),
)
#: where a run goes, and which of its cells are there: what both have is compared
_SCOPE = ("device", "device_profile", "only", "paths", "protocols", "memory", "token_budgets")
_SCOPE_TOO = ("law_budgets", "batch_sizes", "channels", "queries", "start_limit_seconds")

Rates = Iterator[tuple[str, int, int]]
Ratios = Iterator[tuple[str, TimeRatio]]


@dataclass(frozen=True)
class _Figures:
    """What a run's rows give: rates, quotients to ``base`` in the same run, and times in us."""

    rates: Callable[[Run], Rates] = lambda run: iter(())
    ratios: Callable[[Run], Ratios] = lambda run: iter(())
    times: Callable[[Run], Ratios] = lambda run: iter(())
    base: str = "x its own null arm"


def _conditions(run: Run) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"load": {}, "model": {}, "seed": {}, "settings": {}}
    for name, value in run.provenance.settings.items():
        if name in (*_SCOPE, *_SCOPE_TOO, *GRID_FIELDS):
            continue
        kind = "settings" if name in _AMOUNT else "seed" if name == "seed" else "load"
        found["model" if name in _MODEL else kind][name] = value
    return found


def _rows(run: Run, table: str) -> list[dict[Any, Any]]:
    return run.tables[table].to_dict("records")


def _lifetime(run: Run) -> Rates:
    for row in _rows(run, "trials"):
        yield f"stale, {row['point_id']}", int(row["stale"]), int(row["trials"])


def _fault_rates(run: Run) -> Rates:
    for row in _rows(run, "arms"):
        name = row["point_id"]
        yield f"stale statuses, {name}", int(row["stale_statuses"]), int(row["statuses"])
        yield f"failed requests, {name}", int(row["failed_requests"]), int(row["requests"]) + 1
        yield (
            f"changed requests, {name}",
            int(row["changed_requests"]),
            int(row["compared_requests"]),
        )


def _stale_values(run: Run) -> Ratios:
    for row in _rows(run, "arms"):
        if row["largest_bonus"] > row["draft_tokens"]:
            value = TimeRatio((float(row["largest_bonus"]),), (float(row["token_budget"]),))
            yield f"largest stale value, {row['point_id']}", value


def _greedy(run: Run) -> Rates:
    for row in _rows(run, "arms"):
        name, requests = row["arm"], int(row["requests"])
        yield f"requests that differ, {name}", int(row["first_differences"]), requests
        yield f"differ by more than rounding, {name}", int(row["above_bound"]), requests
        yield f"accepted drafts, {name}", int(row["accepted_tokens"]), int(row["drafted_tokens"])


def _by_arm(rows: pd.DataFrame, column: str) -> dict[str, tuple[float, ...]]:
    timed = rows[rows["left_out"].isna()].sort_values("repeat")
    return {
        str(arm): tuple(float(value) for value in group[column])
        for arm, group in timed.groupby("arm", sort=False)
    }


def _kernel_ratios(run: Run) -> Ratios:
    for point_id, rows in run.tables["samples"].groupby("point_id", sort=False):
        base = str(BASES[Question(rows.iloc[0]["question"])])
        arms = _by_arm(rows, "microseconds")
        for arm, values in arms.items():
            if arm != base and len(values) == len(arms.get(base, ())):
                yield f"time of {arm} over {base}, {point_id}", TimeRatio(values, arms[base])


def _kernel_times(run: Run) -> Ratios:
    for point_id, rows in run.tables["samples"].groupby("point_id", sort=False):
        for arm, values in _by_arm(rows, "microseconds").items():
            yield f"time of {arm}, {point_id}", TimeRatio(values)


def _speed_ratios(run: Run) -> Ratios:
    for point_id, rows in run.tables["samples"].groupby("point_id", sort=False):
        arms = _by_arm(rows, "tokens_per_s")
        for base in (str(SpeedArm.OURS), str(SpeedArm.TRANSFORMERS)):
            for arm, values in arms.items():
                if arm != base and len(values) == len(arms.get(base, ())):
                    name = f"tokens a second of {arm} over {base}, {point_id}"
                    yield name, TimeRatio(values, arms[base])


def _cost_ratios(run: Run) -> Ratios:
    for point_id, rows in run.tables["samples"].groupby("point_id", sort=False):
        arms = _by_arm(rows, "step_us")
        base = arms.get(str(CostArm.UNPATCHED), ())
        for arm, values in arms.items():
            if arm != CostArm.UNPATCHED and len(values) == len(base):
                yield f"step of {arm} over unpatched, {point_id}", TimeRatio(values, base)


def _cost_times(run: Run) -> Ratios:
    for point_id, rows in run.tables["samples"].groupby("point_id", sort=False):
        for arm, values in _by_arm(rows, "send_us").items():
            yield f"send of {arm}, {point_id}", TimeRatio(values)


def _comparison(experiment: str, figures: _Figures) -> Comparison:
    def whole(run: Run) -> Side:
        rates = {
            cell: Rate((events,), (trials,), clustered=False)
            for cell, events, trials in figures.rates(run)
            if trials
        }
        p = run.provenance
        commit = "unknown commit" if p.commit is None else f"commit {p.commit[:12]}"
        return Side(
            label=f"{label_of(run)} ({p.runtime}, torch {p.torch}, {commit})",
            evidence=p.evidence,
            machine=p.machine,
            run_id=p.run_id,
            conditions=_conditions(run),
            rates=rates,
            to_null=dict(figures.ratios(run)),
            times=dict(figures.times(run)),
            base=figures.base,
        )

    def published() -> NoReturn:
        raise BadInput(
            f"compare: the source publishes no counts that a run of {experiment} repeats (only of "
            "race and lifetime); compare two runs instead"
        )

    return Comparison(whole, published, whole)


def _published_cells() -> dict[str, tuple[str, Rate]]:
    """Point of our experiment to its cell's name and published count."""
    return {
        one.point_id: (
            f"stale, {one.path}, {one.arm}",
            Rate((one.stale,), (one.trials,), clustered=False),
        )
        for one in published_points()
    }


def _published_lifetime() -> Side:
    machine = published_points()[0].machine
    return Side(
        label=f"the published lifetime test ({machine}, as stated; load and seed not stated)",
        evidence=Evidence.PUBLISHED,
        machine=machine,
        run_id=None,
        conditions={},
        rates=dict(_published_cells().values()),
    )


def _lifetime_as_published(run: Run) -> Side:
    side = COMPARISONS["lifetime"].whole(run)
    rates = {
        cell: side.rates[own]
        for point_id, (cell, _) in _published_cells().items()
        if (own := f"stale, {point_id}") in side.rates
    }
    return replace(side, rates=rates)


COMPARISONS = {
    name: _comparison(name, figures)
    for name, figures in {
        "lifetime": _Figures(_lifetime),
        "kernels": _Figures(ratios=_kernel_ratios, times=_kernel_times, base="x its own base"),
        "engine_fault": _Figures(_fault_rates, _stale_values, base="x the token budget"),
        "engine_speed": _Figures(ratios=_speed_ratios, base="x its own base"),
        "protocol_cost": _Figures(ratios=_cost_ratios, times=_cost_times, base="x unpatched"),
        "greedy_equality": _Figures(_greedy),
        "throughput": _Figures(
            compare_throughput.rates,
            compare_throughput.quotients,
            compare_throughput.times,
            base="x its own without offload",
        ),
        "colocation": _Figures(
            compare_colocation.rates, compare_colocation.quotients, base="x its own alone"
        ),
    }.items()
}
COMPARISONS["lifetime"] = replace(
    COMPARISONS["lifetime"], published=_published_lifetime, as_published=_lifetime_as_published
)

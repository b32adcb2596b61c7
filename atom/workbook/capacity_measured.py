"""Recorded throughput runs of the engine on hardware, and the capacity model beside them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import fisher_exact

from atom.benchmarks.capacity_check import (
    AGREES,
    CHANGES,
    Change,
    Checked,
    compare,
    like_id,
    usable,
)
from atom.benchmarks.capacity_rows import EXPERIMENT
from atom.benchmarks.session_model import Session
from atom.benchmarks.throughput_point import read_sessions
from atom.benchmarks.throughput_rows import EXPERIMENT as THROUGHPUT
from atom.benchmarks.throughput_rows import Outcome, ThroughputRow
from atom.benchmarks.throughput_settings import ThroughputSettings
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.kv_transfer.pool_entry import EntryKind, PoolPolicy
from atom.kv_transfer.tier_counts import Cause
from atom.workbook.capacity_records import rows_of
from atom.workbook.race_analysis import label_of
from atom.workbook.records import Run, existing, load_run, load_runs
from atom.workbook.throughput_outcomes import OURS

#: hits below it come and go with a part of the requests: the caches hold just less than is asked
_CLIFF = 0.5
_CLIFF_REASON = "at the cliff: a tenth of the caches spans it"


@dataclass(frozen=True)
class RecordedCheck:
    """Points of a recorded run beside the model.

    Attributes:
        points: none where there is no run, or none that was simulated.
        notes: what was not done, and why.
        machine: of the measured run.
        run_ids: of the measured run and of the simulated one.
        rows: measured points of our engine, all of them.
        evicted: state loads of a point that failed since the pool had evicted the state; points
            that are not named have none.
        slug: of the machine, as in the record.
    """

    points: tuple[Checked, ...] = ()
    notes: tuple[str, ...] = ()
    machine: str = ""
    run_ids: tuple[str, ...] = ()
    rows: tuple[ThroughputRow, ...] = ()
    evicted: Mapping[str, int] = field(default_factory=dict)
    slug: str = ""


def check_recorded(*groups: Sequence[str]) -> RecordedCheck:
    """The newest hardware run of our engine that was also simulated; runs asked for go first."""
    for folders in groups:
        runs = [run for run in load_runs(existing(folders), THROUGHPUT)[0] if _is_ours(run)]
        models = load_runs(existing(folders), EXPERIMENT)[0]
        for run in sorted(runs, key=lambda one: one.provenance.run_id, reverse=True):
            for model in sorted(models, key=lambda one: one.provenance.run_id, reverse=True):
                like = model.provenance.settings.get("like")
                if like is not None and Path(like).name == run.path.name:
                    rows, evicted = _rows(run), _evicted(run)
                    simulated = {row.point_id: row for row in rows_of(model)}
                    return RecordedCheck(
                        tuple(compare(rows, simulated, evicted)),
                        (),
                        label_of(run),
                        (run.provenance.run_id, model.provenance.run_id),
                        tuple(row for row in rows if row.system == OURS),
                        evicted,
                        run.provenance.machine,
                    )
    return RecordedCheck(
        notes=(
            "No rows: not run. Simulate a recorded throughput run of this engine with "
            "python -m atom sweep capacity -p like RUN_FOLDER, and --traces if it used some.",
        )
    )


def _is_ours(run: Run) -> bool:
    hardware = run.provenance.evidence is Evidence.MEASURED
    return hardware and bool((run.tables["points"]["system"] == OURS).any())


def _rows(run: Run) -> list[ThroughputRow]:
    return [
        ThroughputRow.model_validate({str(k): None if pd.isna(v) else v for k, v in line.items()})
        for line in run.tables["points"].fillna({"worker": ""}).to_dict("records")
    ]


def _evicted(run: Run) -> dict[str, int]:
    """State loads of each point that failed since the state had been evicted."""
    causes = run.tables["causes"]
    wanted = causes[
        (causes["what"] == "load")
        & (causes["kind"] == EntryKind.STATE.value)
        & (causes["cause"] == Cause.EVICTED.value)
    ]
    return {str(k): int(v) for k, v in wanted.groupby("point_id")["count"].sum().items()}


def _measured(folder: str) -> tuple[ThroughputSettings, list[ThroughputRow]]:
    """Settings of a throughput run and its points that can be simulated, in a fixed order."""
    run = load_run(folder)
    if run.provenance.experiment != THROUGHPUT:
        raise BadInput(f"like: {folder} is a run of {run.provenance.experiment}")
    settings = ThroughputSettings.parse(run.provenance.settings, where=f"settings of {folder}")
    rows = [row for row in _rows(run) if usable(settings, row)]
    if not rows:
        raise BadInput(f"like: {folder} has no point that ended well with times and sizes")
    return settings, sorted(rows, key=lambda row: (row.pool_gib or 0, row.concurrency, row.repeat))


def like_plan(folder: str) -> list[str]:
    """Names of the rows that simulating a throughput run gives.

    Raises:
        BadInput: no throughput run, or none of its points can be simulated.
    """
    _, rows = _measured(folder)
    return [like_id(row.point_id, change) for row, change in product(rows, CHANGES)]


def like_sessions(folder: str, traces: str | None) -> tuple[Session, ...]:
    """The sessions of a throughput run.

    Args:
        folder: of the run.
        traces: where its recorded sessions lie here; ``None`` for a run that generated its own.

    Raises:
        BadInput: it used recorded sessions and none are named, or the other way round.
    """
    settings, _ = _measured(folder)
    if (settings.traces is None) is not (traces is None):
        raise BadInput(f"--traces {traces}: the run in {folder} has traces of {settings.traces}")
    return read_sessions(settings.model_copy(update={"traces": traces})).sessions


def like_tasks(
    folder: str, done: Collection[str]
) -> tuple[ThroughputSettings, list[tuple[ThroughputRow, Change]]]:
    """What of a throughput run is to be simulated: each point as it is and with each change.

    Args:
        folder: of the run.
        done: names of rows that are left out.

    Returns:
        Its settings; and points with their changes, for :func:`simulate_like`.
    """
    settings, rows = _measured(folder)
    return settings, [
        (row, change)
        for row, change in product(rows, CHANGES)
        if like_id(row.point_id, change) not in done
    ]


def _pair(values: tuple[float | None, float | None], form: str) -> str:
    return " / ".join("–" if value is None else format(value, form) for value in values)


def _failed_of(one: Checked) -> str:
    """How many state loads failed of how many, measured and simulated; nothing without a pool."""
    if one.asked is None:
        return ""
    return " / ".join(
        f"{round((share or 0.0) * asked)} of {asked}"
        for share, asked in zip(one.failed, one.asked, strict=True)
    )


def _reason(one: Checked) -> str:
    """Why a point's hits may differ by more than a tenth."""
    measured, _ = one.hits
    if one.agrees("hits") is not False or measured is None:
        return ""
    if one.apart is not None and one.apart < 1.5:
        return "one request"
    if one.reach is not None and one.reach[0] * (1 - AGREES) <= measured <= one.reach[1] * (
        1 + AGREES
    ):
        return "within what a tenth of the step time does"
    return _CLIFF_REASON if measured < _CLIFF and one.like_caches is not None else "not explained"


def checked_table(points: Sequence[Checked]) -> pd.DataFrame:
    """Measured and simulated, a row a point."""
    words = {True: "yes", False: "no", None: ""}
    return pd.DataFrame(
        {
            "point": one.point_id,
            "hits, measured / simulated": _pair(one.hits, ".1%"),
            "steps 10% shorter to longer": ""
            if one.reach is None
            else f"{one.reach[0]:.1%} to {one.reach[1]:.1%}",
            "within 10%": words[one.agrees("hits")],
            "else": _reason(one),
            "requests": _pair(one.requests, "d"),
            "state loads failed": _failed_of(one),
            "tok/s": _pair(one.throughput, ",.0f"),
            "throughput within 10%": words[one.agrees("throughput")],
        }
        for one in points
    )


def checked_sentences(points: Sequence[Checked]) -> list[str]:
    """How many points agree, and what sets the others apart."""
    counts = []
    for what, name in (("hits", "hit rate"), ("failed", "failure rate"), ("throughput",) * 2):
        judged = [one.agrees(what) for one in points if one.agrees(what) is not None]
        counts.append(f"{name}: {sum(map(bool, judged))} of {len(judged)} points within 10%")
    said = ["; ".join(counts) + "."]
    high = [one for one in points if (one.hits[0] or 0.0) >= _CLIFF]
    if high and all(one.agrees("hits") for one in high):
        text = f"Where half of the tokens or more are found, all {len(high)} points agree in hits."
        moved = [
            max(abs(share - (one.hits[1] or 0.0)) / (one.hits[1] or 1.0) for share in shares)
            for one in high
            if len(shares := [share for _, share in one.by_caches]) > 1
        ]
        if moved:
            text += (
                " Caches a tenth smaller or larger move the simulated hits there by up to "
                f"{max(moved):.0%}."
            )
        said.append(text)
    reasons = [reason for one in points if (reason := _reason(one))]
    if reasons:
        parts = [f"{reasons.count(name)} {name}" for name in dict.fromkeys(reasons)]
        said.append(f"Of the {len(reasons)} points that differ in hits: {'; '.join(parts)}.")
    lost = [one for one in points if one.agrees("failed") is False]
    if lost:
        said.append(
            "Failed state loads differ, measured / simulated: "
            + "; ".join(f"{one.point_id} {_failed_of(one)}" for one in lost)
            + ". Where the model finds fewer prefixes, it also asks for fewer states."
            * all(one.asked is not None and one.asked[1] < one.asked[0] for one in lost)
        )
    said += _cliff_sentences([one for one in points if _reason(one) == _CLIFF_REASON])
    return said


def _cliff_sentences(cliff: Sequence[Checked]) -> list[str]:
    """What other sizes of the caches, and other orders of the sessions, do at the cliff."""
    if not cliff:
        return []
    spans = [(one.by_caches[0], one.by_caches[-1]) for one in cliff]
    (smallest, _), (largest, _) = spans[0]
    said = [
        f"At these {len(cliff)} points the caches hold just less than the sessions ask for. "
        f"Simulated with caches of {smallest:g} to {largest:g} of the size and nothing else "
        f"changed, they find {min(low for (_, low), _ in spans):.1%} to "
        f"{max(low for (_, low), _ in spans):.1%} at the least and "
        f"{min(high for _, (_, high) in spans):.0%} to {max(high for _, (_, high) in spans):.0%} "
        "at the most, so that a span of a fifth says little by itself. How steep it is says more: "
    ]
    close = [one.closeness for one in cliff if one.closeness is not None]
    sizes = [one.like_caches for one in cliff if one.like_caches is not None]
    if close:
        said[0] += (
            f"to come within a tenth of the hits, the size would have to be right to "
            f"{min(close):.1%} to {max(close):.1%}. "
        )
    said[0] += (
        f"The model finds what was measured with caches of {min(sizes):.3f} to {max(sizes):.3f} of "
        "the recorded size."
    )
    if min(sizes) > 1 or max(sizes) < 1:
        less = "less" if min(sizes) > 1 else "more"
        said.append(
            f"All of them lie on one side: the model finds {less} than the engine at each. They "
            "share the sessions and their order, so that this is one draw rather than "
            f"{len(cliff)}: a bias in size cannot be told from it."
        )
    orders = [one for one in cliff if one.by_order]
    if orders:
        inside = sum(
            min(*one.by_order, one.hits[1] or 0.0)
            <= (one.hits[0] or 0.0)
            <= max(*one.by_order, one.hits[1] or 0.0)
            for one in orders
        )
        widest = max(max(one.by_order) - min(one.by_order) for one in orders)
        said.append(
            f"Three other orders of the same sessions lie up to {100 * widest:.0f} points apart "
            f"there, and the measured share lies within what all {len(orders[0].by_order) + 1} "
            f"give at {inside} of {len(orders)} points. So a rate at the cliff is one draw, "
            "measured or simulated."
        )
    return said


def cliff_table(points: Sequence[Checked]) -> pd.DataFrame:
    """Points that differ in hits: measured, and simulated with other caches and other orders."""
    lines = []
    for one in points:
        if one.agrees("hits") is not False or not one.by_caches or _reason(one) == "one request":
            continue
        sizes = ", ".join(f"{size:g}" for size, _ in one.by_caches)
        lines.append(
            {
                "point": one.point_id,
                "hits measured": "" if one.hits[0] is None else f"{one.hits[0]:.1%}",
                f"simulated, caches x {sizes}": " / ".join(
                    f"{share:.1%}" for _, share in one.by_caches
                ),
                "caches at which the model finds it": ""
                if one.like_caches is None
                else f"x {one.like_caches:.3f}",
                "size that moves hits by a tenth": ""
                if one.closeness is None
                else f"{one.closeness:.1%}",
                "simulated, other orders of the sessions": " / ".join(
                    f"{share:.1%}" for share in one.by_order
                ),
            }
        )
    return pd.DataFrame(lines)


def repeats_table(points: Sequence[Checked]) -> pd.DataFrame:
    """Points that were measured twice: how far two measurements of the same lie apart."""
    twins: dict[str, list[Checked]] = {}
    for one in points:
        twins.setdefault(one.point_id.rsplit("/", 1)[0], []).append(one)
    return pd.DataFrame(
        {
            "point": name,
            "hits, first and second": _pair((own[0].hits[0], own[1].hits[0]), ".1%"),
            "second over first": ""
            if not own[0].hits[0]
            else f"{(own[1].hits[0] or 0) / own[0].hits[0]:.2f}",
            "tok/s, second over first": f"{own[1].throughput[0] / own[0].throughput[0]:.2f}",
        }
        for name, own in twins.items()
        if len(own) > 1
    )


def measured_arguments(found: RecordedCheck) -> dict[str, dict[str, Any]]:
    """Arguments of ``judge`` by claim: what the recorded hardware run says of failed loads."""
    with_pool = [row for row in found.rows if row.pool_gib is not None]
    same: dict[str, Any] = {"machine": found.slug, "run_ids": found.run_ids[:1]}
    arguments: dict[str, dict[str, Any]] = {}

    def lost(row: ThroughputRow) -> int:
        return found.evicted.get(row.point_id, 0)

    served = [row for row in with_pool if row.outcome is Outcome.OK]
    twins = [
        (shared, paired)
        for shared, paired in product(served, served)
        if (shared.offload_policy, paired.offload_policy)
        == (PoolPolicy.SHARED_LRU, PoolPolicy.PAIRED)
        and (shared.concurrency, shared.pool_gib) == (paired.concurrency, paired.pool_gib)
        and shared.arm == str(paired.arm).replace(", paired", "")
    ]
    if twins:
        # a point of one policy may stand beside several repeats of the other
        sides = [list({pair[n].point_id: pair[n] for pair in twins}.values()) for n in (0, 1)]
        (failed, asked), (other, other_asked) = (
            (sum(map(lost, rows)), sum(lost(row) + (row.states_loaded or 0) for row in rows))
            for rows in sides
        )
        chance = fisher_exact([[failed, asked - failed], [other, other_asked - other]]).pvalue
        arguments["limit-07"] = {
            "holds": failed > 0 and other == 0,
            "value": f"{failed} of {asked} state loads fail in one LRU, {other} of {other_asked} "
            "where a state goes with its KV",
            "detail": f"equal pool and sessions, the policy alone differs; by chance {chance:.2g}. "
            "Our engine",
            **same,
        }
    if served:
        total = sum(map(lost, served))
        arguments["limit-08"] = {
            "holds": total > 0,
            "value": f"{total} state loads whose KV was there and whose state was evicted, at "
            f"{sum(lost(row) > 0 for row in served)} of {len(served)} points",
            "detail": "what lies behind the next lower state is computed again. Our engine",
            **same,
        }
    broken = [row for row in with_pool if row.outcome in (Outcome.CRASH, Outcome.GUARD_ERROR)]
    if broken and served:
        clean = [row for row in broken if not lost(row)]
        arguments["limit-10"] = {
            "undecided": f"{len(clean)} of {len(broken)} points that crashed or met the guard had "
            f"no failed state load, and {sum(lost(row) > 0 for row in served)} points with failed "
            "loads ran to their end: neither needs the other. The loads are too few to compare "
            "their share between protocols",
            **same,
        }
    return arguments

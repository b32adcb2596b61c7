"""The frozen fit simulated at its own place, and what other orders of the sessions change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import pandas as pd

from atom.benchmarks.capacity_fit import Noise, Prediction, Setup
from atom.benchmarks.capacity_rows import CapacityRow
from atom.workbook.capacity_analysis import (
    Study,
    in_order,
    observations,
    range_text,
    setup_text,
    share_text,
)
from atom.workbook.capacity_records import PLACE

_BASE = "shared_lru"


def _span(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _failed(rows: Sequence[CapacityRow]) -> list[float]:
    return [row.state_failure_rate or 0.0 for row in rows]


def _at_the_fit(found: Study, rows: Sequence[CapacityRow]) -> dict[Setup, list[CapacityRow]]:
    """Rows as published that were simulated at the fitted place, to a twentieth, by setup."""
    place = (found.fitted.byte_scale, found.fitted.device_gb, found.fitted.load_gb_per_second)
    own: dict[Setup, list[CapacityRow]] = {}
    for row in rows:
        at = [getattr(row, name) for name in PLACE]
        near = all(
            got is not None and math.isclose(got, wanted, rel_tol=0.05)
            for got, wanted in zip(at, place, strict=True)
        )
        if row.arm == _BASE and near:
            own.setdefault((row.concurrency, row.pool_gib), []).append(row)
    return own


def direct_table(found: Study, rows: Sequence[CapacityRow]) -> pd.DataFrame:
    """The frozen fit between the grid's places, and simulated at its own place (to rounding).

    Over several orders of the sessions: the least and the most.
    """
    own = _at_the_fit(found, rows)
    return pd.DataFrame(
        {
            "setup": setup_text(one.setup),
            "interpolated, tok/s": f"{found.predicted[one.setup].throughput:,.0f}",
            "simulated, tok/s": _span(
                [row.effective_total_throughput / found.fitted.slowness for row in own[one.setup]],
                ",.0f",
            ),
            "published, tok/s": ", ".join(f"{value:,.0f}" for value in one.throughput),
            "interpolated failures": share_text(found.predicted[one.setup].failed),
            "simulated failures": _span(_failed(own[one.setup]), ".1%"),
            "published failures": range_text(one),
            "orders of the sessions": len(own[one.setup]),
        }
        for one in found.offload
        if one.setup in own
    )


def direct_sentences(found: Study, rows: Sequence[CapacityRow]) -> list[str]:
    """How far the frozen fit lies from what was published when it is simulated at its own place."""
    own = _at_the_fit(found, rows)
    if any(one.setup not in own for one in found.offload):
        return ["The remedies were not simulated at the place of the frozen fit."]
    predicted = {
        setup: Prediction(
            fmean(row.effective_total_throughput for row in orders) / found.fitted.slowness,
            fmean(_failed(orders)),
        )
        for setup, orders in own.items()
    }
    score = found.errors(predicted, found.unseen)
    ordered = in_order({setup: one.failed for setup, one in predicted.items()})
    said = (
        "Simulated at its own place, the frozen fit misses unseen setups by "
        f"{score.throughput:.0%} in throughput (rms) and {100 * (score.failed or 0):.1f} points in "
        "failures, which come "
        + ("in the published order." if ordered else "in another order than the published one.")
    )
    seeds = {row.seed for orders in own.values() for row in orders}
    each = [
        in_order(
            {
                s: row.state_failure_rate
                for s, orders in own.items()
                for row in orders
                if row.seed == n
            }
        )
        for n in seeds
    ]
    if len(seeds) < 2:
        return [said]
    inside = [
        one
        for one in found.unseen
        if min(_failed(own[one.setup])) <= one.middle_failed <= max(_failed(own[one.setup]))
    ]
    return [
        said,
        f"Of {len(seeds)} orders of the same sessions, {sum(each)} give the published order of "
        f"failures; {len(inside) or 'none'} of the {len(found.unseen)} unseen published shares "
        f"lie{'s' * (len(inside) == 1)} within what the orders span.",
    ]


def with_first_order(
    repeats: Sequence[CapacityRow], remedies: Sequence[CapacityRow]
) -> list[CapacityRow]:
    """Rows of several orders, and what the remedies' run has of the same points in its own order.

    Points are the same at the same place of the grid, with the same arm, sessions and pool.
    """

    def point(row: CapacityRow) -> tuple[object, ...]:
        return (row.arm, row.concurrency, row.pool_gib, *(getattr(row, name) for name in PLACE))

    known = {point(row) for row in repeats}
    seeds = {row.seed for row in repeats}
    more = [row for row in remedies if point(row) in known and row.seed not in seeds]
    return [*more, *repeats]


def orders_table(rows: Sequence[CapacityRow]) -> pd.DataFrame:
    """Every arm at every setup over the orders of the sessions, each beside the same order's own.

    Args:
        rows: of one place of the grid, several seeds.
    """
    lines = []
    for setup in dict.fromkeys((row.concurrency, row.pool_gib) for row in rows):
        here = [row for row in rows if (row.concurrency, row.pool_gib) == setup]
        base = {row.seed: row for row in here if row.arm == _BASE}
        for arm in dict.fromkeys(row.arm for row in here):
            own = [row for row in here if row.arm == arm and row.seed in base]
            if not own:
                continue
            lines.append(
                {
                    "setup": setup_text(setup),
                    "remedy": arm,
                    "orders": len(own),
                    "failed": _span(_failed(own), ".1%"),
                    "tok/s": _span([row.effective_total_throughput for row in own], ",.0f"),
                    "over shared_lru of the same order": _span(_ratios(own, base), ".2f"),
                    "TTFT mean, s": _span([row.ttft_mean_seconds or 0.0 for row in own], ".1f"),
                }
            )
    return pd.DataFrame(lines)


def _ratios(own: Sequence[CapacityRow], base: dict[int, CapacityRow]) -> list[float]:
    return [
        row.effective_total_throughput / base[row.seed].effective_total_throughput for row in own
    ]


def orders_sentences(rows: Sequence[CapacityRow]) -> list[str]:
    """How far other orders of the sessions move the figures, and which remedies stand over all."""
    _, offload = observations()
    wanted = {one.setup for one in offload}
    here = [row for row in rows if (row.concurrency, row.pool_gib) in wanted]
    base = {(row.concurrency, row.pool_gib, row.seed): row for row in here if row.arm == _BASE}
    spreads, shares = [], []
    for setup in wanted:
        own = [row for key, row in base.items() if key[:2] == setup]
        if len(own) > 1:
            speeds = [row.effective_total_throughput for row in own]
            spreads.append(max(speeds) / min(speeds) - 1)
            shares.append(max(_failed(own)) - min(_failed(own)))
    said = []
    if spreads:
        said.append(
            "Another order of the same sessions alone moves the shared pool's throughput by up to "
            f"{max(spreads):.0%} at one setup and its failures by up to {100 * max(shares):.0f} "
            "points: differences between remedies smaller than that count only where each order "
            "shows them."
        )
        if max(spreads) > Noise().throughput:
            said.append(
                f"That is more than the {Noise().throughput:.0%} by which two published runs of "
                "one setup differ, which share their seed. The grid of the fit has one order. So "
                "its numbers, and how near its predictions come to what was published, are in part "
                "that order's luck: near misses and near hits of section 2 are no proof."
            )
    for arm in dict.fromkeys(row.arm for row in here if row.arm != _BASE):
        pairs = [
            (row, base[key])
            for row in here
            if row.arm == arm and (key := (row.concurrency, row.pool_gib, row.seed)) in base
        ]
        if not pairs:
            continue
        ratios = [r.effective_total_throughput / b.effective_total_throughput for r, b in pairs]
        fewer = sum(
            (row.state_failure_rate or 0.0) < (other.state_failure_rate or 0.0)
            for row, other in pairs
        )
        said.append(
            f"{arm}: fewer failures than the shared pool in {fewer} of {len(pairs)} pairs of a "
            f"setup and an order, more throughput in {sum(ratio > 1 for ratio in ratios)} "
            f"({min(ratios):.2f} to {max(ratios):.2f})."
        )
    return said

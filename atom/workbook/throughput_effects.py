"""What one factor alone does to throughput, and what protection costs where both survive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from atom.evidence import Evidence
from atom.workbook.published_tables import load_published
from atom.workbook.throughput_analysis import (
    FACTOR_NAMES,
    FACTORS,
    NOTHING,
    OFFLOAD_FACTORS,
    SETTING,
    Row,
    agrees,
    is_ok,
    main_factors,
    main_rows,
    mean_of,
    place_in_sitting,
    spread_of,
    value_text,
)
from atom.workbook.throughput_points import (
    LoadPoint,
    Ratio,
    Spread,
    published_spread,
    ratio_text,
)


@dataclass(frozen=True)
class Effect:
    """What changing one factor, and nothing else, does.

    Attributes:
        factor: what changes.
        change: its two values, in words.
        where: what stays.
        evidence: kind of the numbers.
        throughput: ratio of throughputs, the second value over the first.
        ttft: the same of mean times to the first token; ``None`` where one is not known.
    """

    factor: str
    change: str
    where: str
    evidence: Evidence
    throughput: Ratio
    ttft: float | None


def effects(rows: Sequence[Row], evidence: Evidence) -> list[Effect]:
    """Every factor that rows vary alone: from the main grid's value, or from least to most.

    Sessions and pool go from the smallest to the largest value that share the other; ``no offload``
    is no size of pool. Any other factor goes from the main grid's value to each other value. Both
    ends are of one sitting; an arm that several sittings have is an effect of each.
    """
    main = main_factors(rows)
    spread = spread_of(rows)
    own = [row for row in main_rows(rows) if is_ok(row)]
    found = []
    for name, other in (("pool_gib", "concurrency"), ("concurrency", "pool_gib")):
        sides = {(row["sitting"], row[other]) for row in own}
        for sitting, fixed in sorted(sides, key=lambda side: (side[1] or 0.0, side[0])):
            same = [row for row in own if row[other] == fixed and row["sitting"] == sitting]
            values = sorted({row[name] for row in same if row[name] is not None})
            if len(values) > 1:
                ends = [
                    [row for row in same if row[name] == end] for end in (values[0], values[-1])
                ]
                change = f"{value_text(name, values[0])} to {value_text(name, values[-1])}"
                where = value_text(other, fixed)
                found.append(_effect(FACTOR_NAMES[name], change, where, evidence, ends, spread))
    for name in FACTORS:
        places = {place_in_sitting(row) for row in rows}
        for place in sorted(places, key=lambda one: (one[0], one[1] or 0.0, one[2])):
            here = [
                row
                for row in rows
                if place_in_sitting(row) == place and is_ok(row) and agrees(row, main, (name,))
            ]
            base = [row for row in here if row[name] == main.get(name)]
            if not base or (place[1] is None and name in OFFLOAD_FACTORS):
                continue
            for value in dict.fromkeys(row[name] for row in here if row[name] != main[name]):
                ends = [base, [row for row in here if row[name] == value]]
                change = f"{value_text(name, main[name])} to {value_text(name, value)}"
                where = f"{value_text('concurrency', place[0])}, {value_text('pool_gib', place[1])}"
                found.append(_effect(FACTOR_NAMES[name], change, where, evidence, ends, spread))
    return found


def _effect(
    factor: str,
    change: str,
    where: str,
    evidence: Evidence,
    ends: Sequence[Sequence[Row]],
    spread: Spread,
) -> Effect:
    before, after = ends
    rates = [[row["effective_total_throughput"] for row in end] for end in ends]
    first, second = (mean_of(row["ttft_mean_seconds"] for row in end) for end in (before, after))
    ttft = second / first if first and second else None
    return Effect(factor, change, where, evidence, spread.of(rates[1], rates[0]), ttft)


def unpaired_sentences(rows: Sequence[Row]) -> list[str]:
    """Points that ended well and stand over nothing: their sitting has no point of the grid there.

    Those of a setting that another sitting can compare are not named.
    """
    main = main_factors(rows)
    ended = [row for row in rows if is_ok(row) and main]
    bases = {place_in_sitting(row) for row in ended if agrees(row, main)}
    others = [
        row
        for row in ended
        if not agrees(row, main) and any(agrees(row, main, (name,)) for name in FACTORS)
    ]
    compared = {_setting(row) for row in others if place_in_sitting(row) in bases}
    alone = [row["point_id"] for row in others if _setting(row) not in compared]
    if not alone:
        return []
    return [
        "not compared, since no point of the main grid was run in the same sitting at as many "
        f"sessions and such a pool: {'; '.join(alone)}."
    ]


def _setting(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in SETTING)


def effects_table(found: Sequence[Effect]) -> pd.DataFrame:
    """A row an effect."""
    return pd.DataFrame(
        {
            "alone": one.factor,
            "changes": one.change,
            "at": one.where,
            "throughput": ratio_text(one.throughput),
            "TTFT": NOTHING if one.ttft is None else f"{one.ttft:.2f}",
        }
        for one in found
    )


def protocol_ratio(rows: Sequence[Row], top: str, bottom: str) -> tuple[Ratio | None, int]:
    """Throughput of one protection over another's, paired by sitting, setting and other factors.

    Args:
        rows: any.
        top, bottom: values of ``protection``.

    Returns:
        Geometric mean of the pairs' ratios with its 95% t interval over pairs (``None`` with fewer
        than two), and the number of pairs.
    """
    keys = [name for name in FACTORS if name != "protection"]
    keys += ["concurrency", "pool_gib", "sitting"]
    groups: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        if is_ok(row) and row["protection"] in (top, bottom):
            key = tuple(row[name] for name in keys)
            rates = groups.setdefault(key, {}).setdefault(row["protection"], [])
            rates.append(math.log(row["effective_total_throughput"]))
    pairs = [
        float(np.mean(own[top]) - np.mean(own[bottom])) for own in groups.values() if len(own) == 2
    ]
    if len(pairs) < 2:
        return None, len(pairs)
    middle = float(np.mean(pairs))
    half = float(stats.t.ppf(0.975, len(pairs) - 1) * np.std(pairs, ddof=1) / math.sqrt(len(pairs)))
    return (math.exp(middle), math.exp(middle - half), math.exp(middle + half)), len(pairs)


def published_effects(points: Sequence[LoadPoint]) -> list[Effect]:
    """Every pair of published hours that differs in sessions, pool or source tree alone, or not.

    With and without offload are compared elsewhere: here either both have a pool or neither.
    """
    trees = load_published("agentx").set_index("point")["tree"]
    spread = published_spread()
    found = []
    for first, second in combinations(sorted(points, key=_by_size), 2):
        if (first.pool_gib is None) is not (second.pool_gib is None):
            continue
        sides = [
            {
                "sessions": value_text("concurrency", one.concurrency),
                "pool": value_text("pool_gib", one.pool_gib),
                "source tree": str(trees[one.name]),
            }
            for one in (first, second)
        ]
        differs = [name for name in sides[0] if sides[0][name] != sides[1][name]]
        if len(differs) > 1:
            continue
        factor = differs[0] if differs else "nothing (a repeat)"
        change = " to ".join(side[factor] for side in sides) if differs else "first to second run"
        where = ", ".join(
            text for name, text in sides[0].items() if name not in (factor, "source tree")
        )
        ttft = second.ttft_s / first.ttft_s if first.ttft_s and second.ttft_s else None
        ratio = spread.of(second.rates, first.rates)
        found.append(Effect(factor, change, where, Evidence.PUBLISHED, ratio, ttft))
    return found


def _by_size(one: LoadPoint) -> tuple[float, int, int]:
    # the longer name is the repeat, or the tree with one change more
    return one.pool_gib or 0.0, one.concurrency, len(one.name)

"""What accuracy rows say of the source's claims, as arguments of ``judge``."""

from __future__ import annotations

from statistics import median
from typing import Any

from atom.benchmarks.accuracy_settings import HOLD, TWIN, UNPATCHED
from atom.config import CopyProtocol
from atom.workbook.accuracy_analysis import (
    AccuracySet,
    PointResult,
    acceptance_difference,
    changed_items,
    floor,
    p_text,
)
from atom.workbook.statistics import (
    difference_interval,
    exact_interval,
    fisher_exact,
)

Arguments = dict[str, dict[str, Any]]

_LEVEL = 0.05
#: share of the items by which points that are worded alike may differ
_OTHER_WORDS = 0.01
_RUN = "a recorded run of sweep accuracy on an accelerator with the trained model"
#: what a claim waits for that no row here settles
NEEDS = dict.fromkeys(("acc-08", "acc-09", "acc-11", "acc-12"), _RUN)


def measured_arguments(found: AccuracySet) -> Arguments:
    """Arguments by claim for measured rows. Scores of random weights settle nothing of answers."""
    arguments: dict[str, dict[str, Any] | None] = {
        "acc-09": _acceptance(found),
        "acc-12": _damage(found),
    }
    if found.has_scores:
        arguments |= {"acc-08": _no_loss(found), "acc-11": _hold_with_pool(found)}
    same = {"machine": found.run.provenance.machine, "run_ids": tuple(found.run_ids)}
    return {name: {**given, **same} for name, given in arguments.items() if given is not None}


def simulated_arguments(found: AccuracySet) -> Arguments:
    """Arguments for the adversarial schedule: with the same schedule, hold is the control."""
    held = found.find(HOLD, pool=True, drafts=True)
    bare = found.find(UNPATCHED, pool=True, drafts=True)
    if held is None or bare is None or held.against is None or bare.against is None:
        return {}
    if held.against.damaged:
        # then the damage is not that of the protocol alone
        return {}
    noise = " (random weights: only equality is shown)" if found.is_noise else ""
    return {
        "acc-12": {
            "holds": bare.against.damaged > 0,
            "value": f"{bare.against.damaged} of {bare.against.items} answers damaged",
            "detail": f"hold under the same schedule: 0 of {held.against.items}{noise}",
            "machine": found.run.provenance.profile or found.source,
            "run_ids": tuple(found.run_ids),
        }
    }


def _protected(found: AccuracySet) -> list[PointResult]:
    return [
        point
        for point in found.points
        if point.against is not None
        and point.row["protocol"] not in (None, CopyProtocol.UNPATCHED.value)
        and not point.row["pressure_mib"]
    ]


def _no_loss(found: AccuracySet) -> dict[str, Any] | None:
    points = _protected(found)
    pairs = [point.against for point in points if point.against is not None]
    if not pairs:
        return None
    apart = max(abs(one.lost - one.gained) for one in pairs)
    smallest = min(one.p for one in pairs)
    return {
        # as many tests as points
        "holds": smallest > _LEVEL / len(pairs),
        "value": f"at most {apart} of {pairs[0].items} items apart",
        "detail": f"{len(pairs)} protected points against the reference, item by item; smallest "
        f"p of McNemar's exact test {p_text(smallest)}",
    }


def _acceptance(found: AccuracySet) -> dict[str, Any] | None:
    first = found.find(HOLD, pool=False, drafts=True)
    second = found.find(UNPATCHED, pool=False, drafts=True)
    if first is None or second is None:
        return None
    both = acceptance_difference(found, first, second)
    if both is None or first.acceptance is None or second.acceptance is None:
        return None
    twin = found.find(TWIN, pool=False, drafts=True)
    null = None if twin is None else acceptance_difference(found, first, twin)
    return {
        "value": both[0],
        "interval": (both[1], both[2]),
        "detail": f"hold {first.acceptance:.2%}, unpatched {second.acceptance:.2%} by the engine's "
        "counters, no pool; the difference and its bootstrap are over items"
        + ("" if null is None else f"; hold against itself: {null[0]:.2g} points"),
    }


def _hold_with_pool(found: AccuracySet) -> dict[str, Any] | None:
    bare = found.find(HOLD, pool=False, drafts=True)
    pool = found.find(HOLD, pool=True, drafts=True)
    if bare is None or pool is None or bare.score is None or pool.score is None:
        return None
    low, high = difference_interval(bare.score[0], bare.score[1:], pool.score[0], pool.score[1:])
    return {
        "value": 100 * (pool.score[0] - bare.score[0]),
        "interval": (100 * low, 100 * high),
        "detail": f"{pool.row['strict']} and {bare.row['strict']} of {pool.row['items']} right, "
        "with and without a pool; as of two independent samples, which is wider than they are",
    }


def _damage(found: AccuracySet) -> dict[str, Any] | None:
    points = [
        (point, count)
        for drafts in (True, False)
        if (point := found.find(UNPATCHED, pool=True, drafts=drafts)) is not None
        and (count := found.damaged(point)) is not None
    ]
    null = [count for point in floor(found) if (count := found.damaged(point)) is not None]
    if not points or not null:
        return None
    worst, count = max(points, key=lambda one: one[1])
    items, most = int(worst.row["items"]), max(null)
    p = fisher_exact(count, items, most, items)
    value = f"{count} of {items} {found.damage_words}"
    beside = f"hold's own points: up to {most} of {items}; Fisher p {p_text(p)}"
    if p < _LEVEL and count > most:
        return {"holds": True, "value": value, "detail": beside}
    high = exact_interval(count, items)[1]
    pressed = [(found.damaged(point) or 0, point) for point in found.ladder(UNPATCHED)]
    more = ""
    if pressed:
        lost, point = max(pressed, key=lambda one: one[0])
        more = f"; with {point.pressure_text}, and no pool, {lost} of {items}"
    return {
        "value": value,
        "undecided": f"{beside}; {worst.stale} stale reads; at most "
        f"{high:.2%} were damaged (95%){more}",
    }


def same_answers(found: AccuracySet) -> bool:
    """Whether every protected point gave the reference's answers, all of them."""
    points = [
        point.against
        for point in found.points
        if point.against is not None and point.row["protocol"] != CopyProtocol.UNPATCHED.value
    ]
    return bool(points) and not any(one.damaged for one in points)


def worded_apart(found: AccuracySet) -> tuple[dict[str, int], int, int] | None:
    """Points with drafts and without pressure whose answers are worded unlike most of them.

    Returns:
        By name, from how many answers of the point in their middle each differs; most answers that
        one of the others differs from it; and most by which two of those apart differ. ``None``
        where none is apart.
    """
    points = [p for p in found.grid() if p.row["draft_tokens"] and p.score is not None]
    items, names = found.run.tables["items"], [point.name for point in points]
    gaps = {a: {b: changed_items(items, a, b).changed for b in names} for a in names}
    if len(names) < 3:
        return None
    middle = min(names, key=lambda name: (median(gaps[name].values()), name))
    most = _OTHER_WORDS * int(points[0].row["items"])
    apart = {name: gap for name, gap in gaps[middle].items() if gap > most}
    if not apart:
        return None
    near = max(gap for gap in gaps[middle].values() if gap <= most)
    return apart, near, max(gaps[a][b] for a in apart for b in apart)

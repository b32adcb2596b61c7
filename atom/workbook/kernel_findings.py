"""What the rows of the kernel-speed experiment say, in sentences; every word follows from rows."""

from __future__ import annotations

from collections.abc import Sequence

from atom.benchmarks.kernel_rows import CacheState, KernelArm, Operator, Question
from atom.workbook.kernel_analysis import ArmSummary
from atom.workbook.protocol_cost import COPY_BATCH, COPY_SHARE

#: a warm copy this many times as fast as a cold one finds its bytes in the cache
_IN_CACHE = 1.1
#: a ``copy_`` that takes this many times a kernel's copy is no yardstick
_SLOW_COPY = 1.1
Arms = dict[str, ArmSummary]


def _points(summaries: Sequence[ArmSummary], question: Question) -> list[Arms]:
    points: dict[str, Arms] = {}
    for one in summaries:
        if one.question == question and one.microseconds is not None:
            points.setdefault(one.point_id, {})[one.arm] = one
    return list(points.values())


def _over(point: Arms, top: KernelArm, bottom: KernelArm) -> float | None:
    first, second = point.get(top), point.get(bottom)
    if first is None or second is None or not first.microseconds or not second.microseconds:
        return None
    return first.microseconds / second.microseconds


def _place(one: ArmSummary) -> str:
    return f"{_many(one.batch, 'row')} of {one.channels} channels and {_many(one.queries, 'token')}"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _range(values: Sequence[float], digits: int = 3) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def conv_sentences(summaries: Sequence[ArmSummary]) -> list[str]:
    """The convolution update's share of a copy's rate, cold and warm, from the goal's batch up."""
    points = [
        point
        for point in _points(summaries, Question.SPEED)
        if (own := point.get(KernelArm.REPORT)) is not None
        and own.operator == Operator.CONV_UPDATE
        and own.batch >= COPY_BATCH
        and KernelArm.COPY in point
    ]
    found = []
    for cache in (CacheState.COLD, CacheState.WARM):
        here = [point for point in points if point[KernelArm.REPORT].cache == cache]
        shares = [one for point in here if (one := _over(point, KernelArm.COPY, KernelArm.REPORT))]
        kernel = [
            one for point in here if (one := _over(point, KernelArm.COPY_KERNEL, KernelArm.REPORT))
        ]
        if not shares:
            continue
        sentence = (
            f"With a {cache} cache and {COPY_BATCH} rows or more the convolution update runs at "
            f"{_range(shares)} of copy_'s rate"
        )
        if kernel:
            sentence += f", and at {_range(kernel)} of the rate of a copy by an elementwise kernel"
        bound = f"The goal of {COPY_SHARE} of copy_'s is set for a cold cache"
        found.append(f"{sentence}. {bound}." if cache == CacheState.COLD else f"{sentence}.")
    colds = {
        (first.batch, first.channels, first.queries): point[KernelArm.COPY]
        for point in points
        if (first := point[KernelArm.REPORT]).cache == CacheState.COLD
    }
    for point in points:
        own, copy = point[KernelArm.REPORT], point[KernelArm.COPY]
        if own.cache != CacheState.WARM or not copy.microseconds:
            continue
        cold = colds.get((own.batch, own.channels, own.queries))
        if cold is None or not cold.microseconds:
            continue
        faster = cold.microseconds / copy.microseconds
        if faster >= _IN_CACHE and own.terabytes_per_s and own.microseconds:
            size = own.terabytes_per_s * own.microseconds
            found.append(
                f"At {_place(own)} the {size:,.0f} MB of a launch stay in the L2 cache when it is "
                f"warm: copy_ is {faster:.2f} times as fast there as with a cold one, and the "
                f"update's share is {copy.microseconds / own.microseconds:.3f}. Once memory holds "
                "neither up, what the update computes and a copy does not shows more."
            )
    return found


def copy_sentences(summaries: Sequence[ArmSummary]) -> list[str]:
    """Where ``copy_`` itself is slow, so that a time over it flatters what stands beside it."""
    slow = []
    for point in _points(summaries, Question.SPEED):
        times = _over(point, KernelArm.COPY, KernelArm.COPY_KERNEL)
        ours = _over(point, KernelArm.REPORT, KernelArm.COPY_KERNEL)
        if times is not None and ours is not None and times >= _SLOW_COPY:
            slow.append((times, ours, point[KernelArm.REPORT]))
    if not slow:
        return []
    names = "; ".join(
        f"{str(one.operator).replace('_update', '')}, {_place(one)}, {one.cache}"
        for _, _, one in slow
    )
    return [
        f"copy_ takes {_range([times for times, _, _ in slow], 2)} times as long as a copy of the "
        f"same bytes by a kernel at {_many(len(slow), 'point')} ({names}): there it is no "
        "yardstick, and a ratio below one is no gain. Over the kernel's copy the update takes "
        f"{_range([ours for _, ours, _ in slow])}."
    ]


def guard_sentences(summaries: Sequence[ArmSummary]) -> list[str]:
    """Where a reporting guard is faster than none by more than the null arm differs."""
    faster = []
    for point in _points(summaries, Question.GUARD):
        report, null = point.get(KernelArm.REPORT), point.get(KernelArm.NULL)
        if report is None or null is None or report.high is None or null.low is None:
            continue
        if report.high < min(null.low, 0.99):
            faster.append(report)
    if not faster:
        return []
    least = min(faster, key=lambda one: one.ratio or 1.0)
    return [
        f"At {_many(len(faster), 'point')} the guarded kernel is more than 1% faster than the "
        f"unguarded (lowest ratio {least.ratio:.3f}, {_place(least)}). A comparison saves "
        "nothing: the guarded kernel is compiled apart and is another program. What differs in it "
        "was not looked at."
    ]

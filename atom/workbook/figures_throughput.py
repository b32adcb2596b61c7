"""Figures of throughput: points against sessions and pool, ratios, cycles, survival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from atom.evidence import Evidence
from atom.workbook.figures import (
    BLACK,
    BLUE,
    EVIDENCE_STYLE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    evidence_handle,
)
from atom.workbook.published_derived import CrashTimes
from atom.workbook.throughput_crashes import HOUR, Step, Watched, survival
from atom.workbook.throughput_points import LoadPoint, Ratio, pool_text


@dataclass(frozen=True)
class PoolStyle:
    """Look of one pool size: colour, marker and line style, each distinct by itself."""

    colour: str
    marker: str
    linestyle: str | tuple[int, tuple[int, ...]]


_NO_POOL = PoolStyle(BLACK, "X", "-")
_POOLS = (
    PoolStyle(SKY, "v", "--"),
    PoolStyle(ORANGE, "s", "-."),
    PoolStyle(GREEN, "D", ":"),
    PoolStyle(BLUE, "o", (0, (5, 1, 1, 1, 1, 1))),
    PoolStyle(VERMILION, "^", (0, (3, 1))),
    PoolStyle(PURPLE, "P", (0, (1, 1))),
)
_TOGETHER = "pool and sessions move together"

#: quantity of a point: axis label and factor
_PANELS: tuple[tuple[str, str, float], ...] = (
    ("throughput", "throughput, 1,000 tok/s a GPU", 1e-3),
    ("requests_per_hour", "requests an hour", 1.0),
    ("ttft_s", "mean time to first token, s", 1.0),
    ("itl_p90_ms", "inter-token latency, p90, ms", 1.0),
    ("cached_share", "prompt tokens from a cache, %", 100.0),
    ("failed_loads", "state loads that failed, %", 100.0),
)


def pool_styles(points: Sequence[LoadPoint]) -> dict[float | None, PoolStyle]:
    """A look for each pool size, from the smallest up; one and the same within a figure."""
    pools = sorted({one.pool_gib for one in points if one.pool_gib is not None})
    looks: dict[float | None, PoolStyle] = {None: _NO_POOL}
    looks |= {pool: _POOLS[number % len(_POOLS)] for number, pool in enumerate(pools)}
    return looks


def _pool_handles(looks: dict[float | None, PoolStyle], used: set[float | None]) -> list[Line2D]:
    return [
        Line2D(
            [], [], color=look.colour, marker=look.marker, ls=look.linestyle, label=pool_text(pool)
        )
        for pool, look in looks.items()
        if pool in used
    ]


def _mark(axes: Axes, x: float, y: float, look: PoolStyle, evidence: Evidence) -> None:
    fill: Any = EVIDENCE_STYLE[evidence].fill
    axes.plot(
        [x],
        [y],
        ls="none",
        marker=look.marker,
        color=look.colour,
        fillstyle=fill,
        markerfacecoloralt="white",
        markeredgewidth=1.5,
        zorder=4,
    )


def load_figure(points: Sequence[LoadPoint], evidence: Evidence, title: str) -> Figure:
    """Throughput, requests, latencies, hits and failures against sessions, a line a pool size.

    A quantity that no point knows has no panel. Where every pool size has one number of sessions
    only, its points are joined by a thin line that says so.
    """
    panels = [
        panel for panel in _PANELS if any(getattr(one, panel[0]) is not None for one in points)
    ]
    columns = 3 if len(panels) > 4 else 2
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(3.75 * columns, 0.6 + 2.75 * lines), sharex=True, squeeze=False
    )
    looks = pool_styles(points)
    moved = _moved_together(points)
    sessions = sorted({one.concurrency for one in points})
    for axes, (name, label, factor) in zip(grid.flat, panels, strict=False):
        known = [one for one in points if getattr(one, name) is not None]
        for pool, look in looks.items():
            own = sorted(
                (one for one in known if one.pool_gib == pool), key=lambda one: one.concurrency
            )
            axes.plot(
                [one.concurrency for one in own],
                [getattr(one, name) * factor for one in own],
                color=look.colour,
                ls=look.linestyle,
                lw=1.4,
            )
            for one in own:
                _mark(axes, one.concurrency, getattr(one, name) * factor, look, evidence)
        if moved:
            chain = [one for one in moved if getattr(one, name) is not None]
            axes.plot(
                [one.concurrency for one in chain],
                [getattr(one, name) * factor for one in chain],
                color=GREY,
                lw=1,
                ls=(0, (1, 2)),
                zorder=1,
            )
        axes.set_title(label, fontsize=10)
        axes.set_ylim(0, 1.12 * factor * max(getattr(one, name) for one in known) or 1)
        axes.set_xticks(sessions, [str(count) for count in sessions])
        axes.margins(x=0.1)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    for axes in list(grid.flat)[max(len(panels) - columns, 0) : len(panels)]:
        axes.set_xlabel("live sessions")
        axes.tick_params(labelbottom=True)
    handles = _pool_handles(looks, {one.pool_gib for one in points})
    if moved:
        handles.append(Line2D([], [], color=GREY, lw=1, ls=(0, (1, 2)), label=_TOGETHER))
    figure.legend(
        handles=[*handles, evidence_handle(evidence)],
        loc="outside upper left",
        ncols=min(len(handles) + 1, 5),
        frameon=False,
        title=title,
        alignment="left",
        title_fontproperties={"size": 11},
    )
    return figure


def _moved_together(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """The points with the largest pool of each number of sessions, if no pool has two numbers."""
    pooled = [one for one in points if one.pool_gib is not None]
    for pool in {one.pool_gib for one in pooled}:
        if len({one.concurrency for one in pooled if one.pool_gib == pool}) > 1:
            return []
    largest: dict[int, LoadPoint] = {}
    for one in pooled:
        known = largest.get(one.concurrency)
        if known is None or (one.pool_gib or 0) > (known.pool_gib or 0):
            largest[one.concurrency] = one
    chain = [largest[count] for count in sorted(largest)]
    return chain if len(chain) > 1 else []


def gains_figure(groups: dict[str, Sequence[LoadPoint]]) -> Figure:
    """Throughput over that without offload, of more than one kind of evidence on one axis.

    Args:
        groups: what a reader is to call the points (machine and model) to the points.
    """
    figure, axes = plt.subplots(figsize=(9.5, 5.0))
    axes.axhline(1, color=BLACK, lw=1)
    words: dict[str, Any] = {"fontsize": 8, "va": "top", "transform": axes.get_yaxis_transform()}
    axes.text(0.0, 0.99, " no offload", **words)
    shown = {name: [one for one in own if one.ratio] for name, own in groups.items()}
    shown = {name: own for name, own in shown.items() if own}
    sessions = sorted({one.concurrency for own in shown.values() for one in own})
    handles = []
    for place, ((name, own), colour) in enumerate(
        zip(shown.items(), (BLACK, BLUE, PURPLE, VERMILION), strict=False)
    ):
        shift = 0.34 * (place - (len(shown) - 1) / 2)
        _gains(axes, own, sessions, shift, colour)
        kind = own[0].evidence
        fill: Any = EVIDENCE_STYLE[kind].fill
        look = {"marker": "o", "color": colour, "fillstyle": fill, "markerfacecoloralt": "white"}
        handles.append(Line2D([], [], ls="none", label=f"{kind}: {name}", **look))
    axes.set_xticks(range(len(sessions)), [str(count) for count in sessions])
    axes.set_xlim(-0.5, len(sessions) - 0.5)
    axes.set_xlabel("live sessions; beside a line or a point: its pool in GiB")
    axes.set_ylabel("throughput over that without offload")
    axes.grid(axis="x", visible=False)
    axes.set_ylim(bottom=0)
    title = "Machine, model and pool differ between the groups: only the ratio is shared"
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        frameon=False,
        title=title if len(handles) > 1 else None,
        alignment="left",
    )
    return figure


def _gains(
    axes: Axes, own: Sequence[LoadPoint], sessions: Sequence[int], shift: float, colour: str
) -> None:
    """One group of ratios: points side by side at their number of sessions, a line a pool."""
    fill: Any = EVIDENCE_STYLE[own[0].evidence].fill
    places: dict[float, list[tuple[float, Ratio]]] = {}
    for count in sessions:
        here = sorted(
            (one for one in own if one.concurrency == count), key=lambda one: one.pool_gib or 0.0
        )
        step = min(0.09, 0.3 / max(1, len(here) - 1))
        for number, one in enumerate(here):
            x = sessions.index(count) + shift + step * (number - (len(here) - 1) / 2)
            assert one.ratio is not None
            places.setdefault(one.pool_gib or 0.0, []).append((x, one.ratio))
    for number, (pool, chain) in enumerate(sorted(places.items())):
        look = _POOLS[number % len(_POOLS)]
        across = [x for x, _ in chain]
        middles = [ratio[0] for _, ratio in chain]
        axes.plot(across, middles, color=colour, lw=0.8, ls=look.linestyle, alpha=0.7)
        axes.errorbar(
            across,
            middles,
            yerr=[
                [ratio[0] - ratio[1] for _, ratio in chain],
                [ratio[2] - ratio[0] for _, ratio in chain],
            ],
            color=colour,
            marker=look.marker,
            fillstyle=fill,
            markerfacecoloralt="white",
            capsize=2.5,
            elinewidth=1.2,
            ls="none",
        )
        # left of the first point: with more sessions the lines come together
        axes.annotate(
            f"{pool:g}",
            (across[0], middles[0]),
            xytext=(-7, 0),
            textcoords="offset points",
            fontsize=7.5,
            ha="right",
            va="center",
            color=colour,
        )


def cycle_figure(points: Sequence[LoadPoint], title: str) -> Figure:
    """Mean cycle of a session: waiting for the first token, and the rest, a bar a point."""
    rows = [one for one in points if one.ttft_s is not None and one.requests_per_hour]
    figure, axes = plt.subplots(figsize=(9.0, 1.6 + 0.28 * len(rows)))
    for place, one in enumerate(rows):
        cycle, wait = cycle_of(one)
        axes.barh(-place, wait, height=0.7, color=ORANGE, hatch="////", ec="#222222", lw=0.7)
        rest = max(cycle - wait, 0.0)
        axes.barh(-place, rest, left=wait, height=0.7, color=SKY, ec="#222222", lw=0.7)
        axes.annotate(
            f"{cycle:.3g} s, {wait / cycle:.0%} waiting",
            (max(cycle, wait), -place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(
        [-float(place) for place in range(len(rows))],
        [one.setting + (f" ({one.name})" if _twice(one, rows) else "") for one in rows],
        fontsize=9,
    )
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.set_xlabel("seconds from one request of a session to its next")
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    handles = [
        plt.Rectangle((0, 0), 1, 1, fc=ORANGE, hatch="////", ec="#222222"),
        plt.Rectangle((0, 0), 1, 1, fc=SKY, ec="#222222"),
    ]
    axes.legend(
        handles,
        ["waiting for the first token", "the rest: decoding and thinking"],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=2,
        frameon=False,
        title=title,
        alignment="left",
    )
    return figure


def cycle_of(one: LoadPoint) -> tuple[float, float]:
    """Mean seconds from one request of a session to its next, and those until the first token.

    A session has one request open at a time, so its cycle is sessions over requests a second.
    """
    assert one.requests_per_hour
    assert one.ttft_s is not None
    return one.concurrency * 3600 / one.requests_per_hour, one.ttft_s


def _twice(one: LoadPoint, rows: Sequence[LoadPoint]) -> bool:
    return sum(other.setting == one.setting for other in rows) > 1


def survival_figure(times: CrashTimes, watches: dict[str, Watched]) -> Figure:
    """Share of published runs alive by minute, with and without the fix, and the debug catches."""
    figure, axes = plt.subplots(figsize=(9.5, 4.6))
    low, high = survival(times.earliest, times.runs), survival(times.latest, times.runs)
    minutes = [minute / 10 for minute in range(int(HOUR) * 10 + 1)]
    axes.fill_between(
        minutes,
        [_alive(low, minute) for minute in minutes],
        [_alive(high, minute) for minute in minutes],
        step="post",
        color=VERMILION,
        alpha=0.18,
        hatch="....",
        lw=0,
        label="what the printed 13 to 54 min alone allow",
    )
    likely = survival(times.likely, times.runs)
    unfixed, fixed, debug = watches["unfixed"], watches["fixed"], watches["debug"]
    _steps(axes, likely, VERMILION, "-", f"{unfixed.name}: {unfixed.events} of {unfixed.runs}")
    still = survival([], fixed.runs)
    _steps(axes, still, BLUE, "-.", f"{fixed.name}: {fixed.events} of {fixed.runs}")
    for step, colour, marker, x in (
        (likely[-1], VERMILION, "X", HOUR + 1.5),
        (still[-1], BLUE, "s", HOUR + 3.5),
    ):
        ends = step.interval
        axes.errorbar(
            x,
            step.share,
            yerr=[[step.share - ends[0]], [ends[1] - step.share]],
            color=colour,
            marker=marker,
            fillstyle="none",
            capsize=4,
            lw=1.6,
        )
    for number, minute in enumerate(_debug_minutes()):
        axes.axvline(minute, color=GREY, lw=1.2, ls="--", zorder=0)
        axes.annotate(
            f"caught, {minute:g} min",
            (minute, 0.04),
            xytext=(3 if number else -3, 0),
            textcoords="offset points",
            ha="left" if number else "right",
            fontsize=8,
            color="#444444",
        )
    label = f"{debug.name}: {debug.event}, {debug.events} of {debug.runs}"
    axes.plot([], [], color=GREY, lw=1.2, ls="--", label=label)
    axes.set_xlim(0, HOUR + 5.5)
    axes.set_ylim(0, 1.06)
    axes.set_xlabel("minutes under load; bars at the right: exact 95% intervals after the hour")
    axes.set_ylabel("share of runs alive")
    axes.set_xticks(range(0, int(HOUR) + 1, 10))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, ncols=1)
    return figure


def _debug_minutes() -> list[float]:
    from atom.workbook.published_tables import load_published

    table = load_published("crash_history")
    return sorted(table[table["outcome"] == "caught"]["minutes_low"].astype(float))


def _alive(steps: Sequence[Step], minute: float) -> float:
    return [step.share for step in steps if step.minute <= minute][-1]


def _steps(axes: Axes, steps: Sequence[Step], colour: str, style: str, label: str) -> None:
    axes.step(
        [*(step.minute for step in steps), HOUR],
        [*(step.share for step in steps), steps[-1].share],
        where="post",
        color=colour,
        ls=style,
        lw=2,
        label=label,
    )


def failed_loads_figure(points: Sequence[LoadPoint], title: str) -> Figure:
    """State loads that failed against the pool a session, where both are known."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8))
    looks = pool_styles(points)
    shown = [one for one in points if one.failed_loads is not None and one.pool_gib is not None]
    for one in shown:
        assert one.pool_gib is not None
        assert one.failed_loads is not None
        x, y = one.pool_gib / one.concurrency, 100 * one.failed_loads
        if one.failed_range:
            ends = [100 * end for end in one.failed_range]
            axes.plot([x, x], ends, color=looks[one.pool_gib].colour, lw=3, alpha=0.5)
        _mark(axes, x, y, looks[one.pool_gib], one.evidence)
    for setting in dict.fromkeys(one.setting for one in shown):
        one = next(point for point in shown if point.setting == setting)
        axes.annotate(
            setting,
            ((one.pool_gib or 0) / one.concurrency, 100 * (one.failed_loads or 0)),
            xytext=(8, 4),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xlabel("pool a session, GiB")
    axes.set_ylabel("state loads that failed, %")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.25)
    axes.set_title(title)
    return figure

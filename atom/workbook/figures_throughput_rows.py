"""Figures of throughput rows: single factors, what binds a point, status latency, outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from atom.benchmarks.throughput_rows import Outcome
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
    YELLOW,
    evidence_handle,
)
from atom.workbook.throughput_analysis import Row, value_text
from atom.workbook.throughput_bounds import (
    COPY,
    DECODE,
    IDLE,
    PREFILL,
    CopyRate,
    PointBounds,
    Scale,
)
from atom.workbook.throughput_effects import Effect
from atom.workbook.throughput_outcomes import CUT_SHORT, ArmOutcomes
from atom.workbook.throughput_points import LoadPoint

_FACTOR_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, YELLOW, GREY, BLACK)


def place_ratio(
    axes: Axes, place: int, ratio: tuple[float, float, float], text: str, **style: Any
) -> None:
    """A ratio with its interval on a line of its own, and its text at the right edge.

    Args:
        axes: to draw in; see also :func:`name_lines`.
        place: number of the line from above.
        ratio: middle, low, high.
        text: of the value.
        style: of the marker, as ``Axes.errorbar`` takes it.
    """
    middle, low, high = ratio
    axes.errorbar(
        middle, -place, xerr=[[middle - low], [high - middle]], capsize=3, ls="none", **style
    )
    axes.annotate(text, (1.01, -place), xycoords=("axes fraction", "data"), va="center", fontsize=8)


def name_lines(axes: Axes, names: Sequence[str]) -> None:
    """Write the names of the lines of :func:`place_ratio` beside them."""
    axes.set_yticks([-float(place) for place in range(len(names))], names, fontsize=8)
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.grid(axis="y", visible=False)


def effects_figure(found: Sequence[Effect], title: str, kind: str) -> Figure:
    """One factor changed at a time: ratio of throughputs with its ends, a line an effect."""
    figure, axes = plt.subplots(figsize=(9.5, 1.4 + 0.3 * len(found)))
    axes.axvline(1, color=BLACK, lw=1)
    factors = list(dict.fromkeys(one.factor for one in found))
    for place, one in enumerate(found):
        place_ratio(
            axes,
            place,
            one.throughput,
            f"{one.throughput[0]:.2f}",
            color=_FACTOR_COLOURS[factors.index(one.factor) % len(_FACTOR_COLOURS)],
            marker=("o", "s", "D", "^", "v", "P", "X", "*", "h")[factors.index(one.factor) % 9],
            fillstyle=EVIDENCE_STYLE[one.evidence].fill,
            markerfacecoloralt="white",
        )
    name_lines(axes, [f"{one.factor}: {one.change} ({one.where})" for one in found])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(f"throughput over that before the change (log); bars: {kind}", fontsize=9)
    axes.set_title(title)
    return figure


_SESSIONS = (("v", SKY), ("s", ORANGE), ("D", GREEN), ("o", BLUE), ("^", VERMILION), ("P", PURPLE))


def scale_figure(points: Sequence[LoadPoint], scale: Scale) -> Figure:
    """Throughput over that without offload, against how much of the working set the pool holds."""
    figure, axes = plt.subplots(figsize=(8.0, 4.2))
    axes.axhline(1, color=BLACK, lw=1)
    axes.axvline(1, color=GREY, lw=1, ls="--")
    counts = sorted({one.concurrency for one in points if one.ratio})
    for count, (marker, colour) in zip(counts, cycle(_SESSIONS), strict=False):
        own = sorted(
            (one for one in points if one.ratio and one.concurrency == count),
            key=lambda one: one.pool_gib or 0.0,
        )
        fill: Any = EVIDENCE_STYLE[own[0].evidence].fill
        ratios = [one.ratio for one in own if one.ratio]
        axes.errorbar(
            [scale.pool_over_working_set(one.pool_gib or 0.0, count) for one in own],
            [ratio[0] for ratio in ratios],
            yerr=[
                [ratio[0] - ratio[1] for ratio in ratios],
                [ratio[2] - ratio[0] for ratio in ratios],
            ],
            color=colour,
            marker=marker,
            fillstyle=fill,
            markerfacecoloralt="white",
            capsize=3,
            lw=1.2,
            label=value_text("concurrency", count),
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("pool over the live sessions' working set (log); dashed: it holds all of it")
    axes.set_ylabel("throughput over that without offload")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


#: what a point is bound by: colour, hatch, marker
_BOUNDS: dict[str, tuple[str, str, str]] = {
    PREFILL: (ORANGE, "////", "s"),
    DECODE: (SKY, "", "o"),
    COPY: (VERMILION, "xxxx", "^"),
    IDLE: ("#FFFFFF", "....", "X"),
}


def bounds_figure(found: Sequence[PointBounds], rate: CopyRate, evidence: Evidence) -> Figure:
    """The roofline: tokens a second under the host copy's roof; and where each point's time went.

    Left, both axes logarithmic: the roof is the copy's rate over the bytes copied for each token.
    Points that copied nothing stand at the left edge. Right: busy share of the time under load.
    """
    settings = _by_setting(found)
    height = 1.6 + 0.24 * len(settings)
    figure, (roof, bars) = plt.subplots(1, 2, figsize=(11.5, max(4.6, height)))
    roof.set_box_aspect(0.85)
    roof.set_anchor("N")
    copied = [one.bytes_per_token for one in found if one.copied_bytes]
    least = min(copied, default=1.0) / 4
    most = max(copied, default=1.0) * 8
    x = np.geomspace(least, most, 20)
    roof.plot(x, rate.bytes_per_s / x, color=VERMILION, lw=1.6)
    roof.annotate(
        f"host copy, {rate.bytes_per_s / 1e9:.4g} GB/s",
        (x[12], rate.bytes_per_s / x[12]),
        xytext=(4, 4),
        textcoords="offset points",
        fontsize=8,
        color=VERMILION,
    )
    fill: Any = EVIDENCE_STYLE[evidence].fill
    for one in found:
        place = max(one.bytes_per_token, least) if one.copied_bytes else least
        served = float(one.row["effective_total_throughput"])
        colour = GREY if one.bound == IDLE else _BOUNDS[one.bound][0]
        roof.plot(
            [place],
            [served],
            marker=_BOUNDS[one.bound][2],
            color=colour,
            markeredgecolor="#222222" if fill == "full" else colour,
            fillstyle=fill,
            markerfacecoloralt="white",
            ls="none",
        )
    roof.set_xscale("log")
    roof.set_yscale("log")
    roof.set_xlabel(
        "bytes copied a token served, both directions (log); left edge: none", fontsize=9
    )
    roof.set_ylabel("throughput, tok/s (log)")
    used = dict.fromkeys(one.bound for one in found)
    roof.legend(
        handles=[
            Line2D(
                [],
                [],
                ls="none",
                marker=_BOUNDS[name][2],
                color=GREY if name == IDLE else _BOUNDS[name][0],
                label="nothing busy half of the time" if name == IDLE else f"bound by {name}",
            )
            for name in used
        ]
        + [evidence_handle(evidence)],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=2,
        frameon=False,
        fontsize=8,
    )
    for place, shares in enumerate(settings.values()):
        left = 0.0
        for name in (PREFILL, DECODE):
            share = 100 * shares[name]
            colour, hatch, _ = _BOUNDS[name]
            look = {"color": colour, "hatch": hatch, "ec": "#222222", "lw": 0.6}
            bars.barh(-place, share, left=left, height=0.72, **look)
            left += share
        # copies overlap with compute, so they stand on a line of their own across the bar
        copy = 100 * shares[COPY]
        bars.plot([copy, copy], [-place - 0.42, -place + 0.42], color=VERMILION, lw=3)
    bars.set_yticks([-float(place) for place in range(len(settings))], list(settings), fontsize=8)
    bars.set_ylim(-len(settings) + 0.4, 0.6)
    bars.set_xlabel("% of the time under load")
    bars.set_xlim(0, 105)
    bars.grid(axis="y", visible=False)
    bars.legend(
        handles=[
            Patch(fc=_BOUNDS[PREFILL][0], hatch="////", ec="#222222", label="prefill steps"),
            Patch(fc=_BOUNDS[DECODE][0], ec="#222222", label="decode steps"),
            Line2D([], [], color=VERMILION, lw=3, label="copies, busier direction"),
        ],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure


def _by_setting(found: Sequence[PointBounds]) -> dict[str, dict[str, float]]:
    """Shares by setting, means over its repeats."""
    groups: dict[str, list[PointBounds]] = {}
    for one in found:
        sessions = value_text("concurrency", one.row["concurrency"])
        groups.setdefault(f"{sessions}, {value_text('pool_gib', one.row['pool_gib'])}", []).append(
            one
        )
    return {
        setting: {name: float(np.mean([one.shares[name] for one in own])) for name in own[0].shares}
        for setting, own in groups.items()
    }


def latency_figure(rows: Sequence[Row], rate: CopyRate | None, evidence: Evidence) -> Figure:
    """Status latency by arm and setting: median, 99th percentile and the longest, a line a point.

    The upright ticks show how long one chunk's store takes by its bytes, where the rate is known.
    """
    shown = [row for row in rows if row["status_latency_p50_us"] is not None]
    shown.sort(
        key=lambda row: (
            row["concurrency"],
            row["pool_gib"] or 0.0,
            row["sitting"],
            str(row["protection"]),
            row["chunk_tokens"] or 0,
            row["repeat"],
        )
    )
    pooled = [row for row in shown if row["pool_gib"] is not None]
    policies = len({row["offload_policy"] for row in pooled}) > 1
    sittings: dict[tuple[int, float | None], list[str]] = {}
    for row in shown:
        known = sittings.setdefault((row["concurrency"], row["pool_gib"]), [])
        known += [row["sitting"]] * (row["sitting"] not in known)
    figure, axes = plt.subplots(figsize=(10.0, 1.6 + 0.27 * len(shown)))
    fill: Any = EVIDENCE_STYLE[evidence].fill
    colours = {"hold": BLUE, "zero_copy": GREEN, "unpatched": VERMILION}
    for place, row in enumerate(shown):
        colour = colours.get(str(row["protocol"]), PURPLE)
        ends = [
            row[name]
            for name in (
                "status_latency_p50_us",
                "status_latency_p99_us",
                "status_latency_max_us",
            )
            if row[name] is not None
        ]
        axes.plot(ends, [-place] * len(ends), color=colour, lw=1.2)
        for value, marker in zip(ends, ("o", "|", "4"), strict=False):
            look = {"marker": marker, "color": colour, "fillstyle": fill}
            axes.plot([value], [-place], markerfacecoloralt="white", ls="none", **look)
        if rate and row["pool_gib"] is not None and row["kv_bytes_per_token"]:
            chunk = row["chunk_tokens"] * row["kv_bytes_per_token"] / rate.bytes_per_s * 1e6
            axes.plot([chunk, chunk], [-place - 0.4, -place + 0.4], color=BLACK, lw=1, ls=":")
    axes.set_yticks(
        [-float(place) for place in range(len(shown))],
        [
            f"{row['concurrency']} sessions, {value_text('pool_gib', row['pool_gib'])}, "
            f"{row['protection']}"
            + ("" if row["pool_gib"] is None else f", chunk {row['chunk_tokens']}")
            + (f", {row['offload_policy']}" if policies and row["pool_gib"] is not None else "")
            + _sitting_name(row, sittings[row["concurrency"], row["pool_gib"]])
            for row in shown
        ],
        fontsize=8,
    )
    # linear below a microsecond: under zero_copy a status may land at once
    axes.set_xscale("symlog", linthresh=1.0)
    longest = max((row["status_latency_max_us"] or 1.0 for row in shown), default=1.0)
    axes.set_xlim(-0.2, 2 * longest)
    axes.set_ylim(-len(shown) + 0.4, 0.6)
    axes.set_xlabel("microseconds from the step's last kernel to the landed status (log above 1)")
    axes.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], ls="none", marker=marker, color=GREY, label=label)
        for marker, label in (("o", "median"), ("|", "99th percentile"), ("4", "longest"))
    ]
    if rate:
        label = "one chunk's KV by its bytes"
        handles.append(Line2D([], [], color=BLACK, lw=1, ls=":", label=label))
    axes.legend(
        handles=[*handles, evidence_handle(evidence)],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    return figure


def _sitting_name(row: Row, here: Sequence[str]) -> str:
    return f", {row['sitting']}" if len(here) > 1 else ""


_ENDS: dict[str, tuple[str, str]] = {
    Outcome.OK: (SKY, ""),
    Outcome.GUARD_ERROR: (YELLOW, "////"),
    Outcome.CRASH: (VERMILION, "\\\\\\\\"),
    Outcome.HANG: (PURPLE, "xxxx"),
    Outcome.OUT_OF_MEMORY: (GREY, "...."),
    Outcome.LOAD_FAILED: ("#FFFFFF", "++++"),
    CUT_SHORT: ("#FFFFFF", ""),
}


def outcomes_figure(found: Sequence[ArmOutcomes], title: str) -> Figure:
    """How the points of each arm ended: a stacked bar an arm, and its stale statuses in words."""
    figure, axes = plt.subplots(figsize=(9.5, 1.5 + 0.36 * len(found)))
    for place, one in enumerate(found):
        left = 0
        for end, (colour, hatch) in _ENDS.items():
            count = one.ends.get(str(end), 0)
            if count:
                look = {"color": colour, "hatch": hatch, "ec": "#222222", "lw": 0.7}
                axes.barh(-place, count, left=left, height=0.7, **look)
            left += count
        stale = "stale statuses not counted" if one.stale is None else f"{one.stale:,} stale"
        _beside(axes, f"{stale}, {one.time_text} under load", left, -place)
    axes.set_yticks([-float(place) for place in range(len(found))], [one.name for one in found])
    axes.set_xlabel("points")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    used = [end for end in _ENDS if any(str(end) in one.ends for one in found)]
    axes.legend(
        handles=[
            Patch(fc=_ENDS[end][0], hatch=_ENDS[end][1], ec="#222222", label=str(end))
            for end in used
        ],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=6,
        frameon=False,
        title=title,
        alignment="left",
    )
    return figure


def _beside(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)

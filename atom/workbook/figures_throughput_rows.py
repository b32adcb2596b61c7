"""Figures of throughput rows: single factors, what binds a point, status latency, outcomes."""

from __future__ import annotations

from collections.abc import Sequence
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
from atom.workbook.throughput_bounds import COPY, DECODE, IDLE, PREFILL, CopyRate, PointBounds
from atom.workbook.throughput_effects import Effect
from atom.workbook.throughput_outcomes import ArmOutcomes

_FACTOR_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, YELLOW, GREY, BLACK)


def effects_figure(found: Sequence[Effect], title: str, kind: str) -> Figure:
    """One factor changed at a time: ratio of throughputs with its ends, a line an effect."""
    figure, axes = plt.subplots(figsize=(9.5, 1.4 + 0.3 * len(found)))
    axes.axvline(1, color=BLACK, lw=1)
    factors = list(dict.fromkeys(one.factor for one in found))
    for place, one in enumerate(found):
        middle, low, high = one.throughput
        fill: Any = EVIDENCE_STYLE[one.evidence].fill
        axes.errorbar(
            middle,
            -place,
            xerr=[[middle - low], [high - middle]],
            color=_FACTOR_COLOURS[factors.index(one.factor) % len(_FACTOR_COLOURS)],
            marker=("o", "s", "D", "^", "v", "P", "X", "*", "h")[factors.index(one.factor) % 9],
            fillstyle=fill,
            markerfacecoloralt="white",
            capsize=3,
            ls="none",
        )
        axes.annotate(
            f"{middle:.2f}",
            (1.01, -place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
    axes.set_yticks(
        [-float(place) for place in range(len(found))],
        [f"{one.factor}: {one.change} ({one.where})" for one in found],
        fontsize=8,
    )
    axes.set_ylim(-len(found) + 0.4, 0.6)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"throughput over that before the change (log); bars: {kind}", fontsize=9)
    axes.set_title(title)
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
    height = 1.6 + 0.27 * len(found)
    figure, (roof, bars) = plt.subplots(
        1, 2, figsize=(11.5, max(4.4, height)), width_ratios=[1.0, 1.25]
    )
    copied = [one.bytes_per_token for one in found if one.copied_bytes]
    least = min(copied, default=1.0) / 4
    most = max(copied, default=1.0) * 8
    x = np.geomspace(least, most, 20)
    roof.plot(x, rate.bytes_per_s / x, color=VERMILION, lw=1.6)
    roof.annotate(
        f"host copy, {rate.bytes_per_s / 1e9:.3g} GB/s",
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
    roof.set_xlabel("bytes copied between host and device a token served (log)")
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
    for place, one in enumerate(found):
        left = 0.0
        for name in (PREFILL, DECODE):
            share = 100 * one.shares[name]
            colour, hatch, _ = _BOUNDS[name]
            bars.barh(
                -place,
                share,
                left=left,
                height=0.72,
                color=colour,
                hatch=hatch,
                ec="#222222",
                lw=0.6,
            )
            left += share
        # copies overlap with compute, so they stand on a line of their own across the bar
        copy = 100 * one.shares[COPY]
        bars.plot([copy, copy], [-place - 0.42, -place + 0.42], color=VERMILION, lw=3)
    names = [
        f"{value_text('concurrency', one.row['concurrency'])}, "
        f"{value_text('pool_gib', one.row['pool_gib'])}"
        for one in found
    ]
    bars.set_yticks([-float(place) for place in range(len(found))], names, fontsize=8)
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


def latency_figure(rows: Sequence[Row], rate: CopyRate | None, evidence: Evidence) -> Figure:
    """Status latency by arm and setting: median, 99th percentile and the longest, a line a point.

    The upright ticks show how long one chunk's store takes by its bytes, where the rate is known.
    """
    shown = [row for row in rows if row["status_latency_p50_us"] is not None]
    shown.sort(
        key=lambda row: (
            row["concurrency"],
            row["pool_gib"] or 0.0,
            str(row["protection"]),
            row["chunk_tokens"] or 0,
            row["repeat"],
        )
    )
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
            for row in shown
        ],
        fontsize=8,
    )
    # linear below a microsecond: under zero_copy a status may land at once
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=-0.2)
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


_ENDS: dict[str, tuple[str, str]] = {
    Outcome.OK: (SKY, ""),
    Outcome.GUARD_ERROR: (YELLOW, "////"),
    Outcome.CRASH: (VERMILION, "\\\\\\\\"),
    Outcome.HANG: (PURPLE, "xxxx"),
    Outcome.OUT_OF_MEMORY: (GREY, "...."),
    Outcome.LOAD_FAILED: ("#FFFFFF", "++++"),
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

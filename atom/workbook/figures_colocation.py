"""An engine beside its neighbours: ratios to alone, and bandwidths over time."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from atom.benchmarks.colocation_settings import MemoryNode
from atom.evidence import Evidence
from atom.workbook.colocation_analysis import TOLERANCE, Cost
from atom.workbook.figures import (
    BLACK,
    BLUE,
    EVIDENCE_STYLE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
)
from atom.workbook.figures_throughput_rows import name_lines, place_ratio

_LINES = ((BLUE, "o"), (VERMILION, "s"), (GREEN, "D"), (ORANGE, "^"), (PURPLE, "v"), (BLACK, "x"))


def cost_figure(found: Sequence[Cost], ends: str, evidence: Evidence) -> Figure:
    """Throughput beside neighbours over that alone, a line a condition; the band is the 1%.

    Args:
        found: of ``colocation_analysis.costs``.
        ends: what the bars are.
        evidence: kind of the ratios.
    """
    figure, axes = plt.subplots(figsize=(9.0, 1.5 + 0.3 * len(found)))
    axes.axvspan(1 - TOLERANCE, 1 + TOLERANCE, color=GREY, alpha=0.25, lw=0)
    axes.axvline(1, color=BLACK, lw=1)
    kinds = list(dict.fromkeys(one.condition.partition(" ")[0] for one in found))
    for place, one in enumerate(found):
        colour, marker = _LINES[kinds.index(one.condition.partition(" ")[0]) % len(_LINES)]
        place_ratio(
            axes,
            place,
            one.ratio,
            f"{one.ratio[0]:.3f}",
            color=colour,
            marker=marker,
            fillstyle=EVIDENCE_STYLE[evidence].fill,
        )
    name_lines(axes, [_line(one) for one in found])
    below = f"throughput, ratio; band: within {TOLERANCE:.0%}; bars: {ends}"
    axes.set_xlabel(textwrap.fill(below, 95), fontsize=9)
    axes.set_title("Throughput beside neighbours")
    return figure


def bandwidth_figure(series: Mapping[str, pd.DataFrame], title: str, evidence: Evidence) -> Figure:
    """A row a bandwidth, a line a condition, seconds of the load below.

    Args:
        series: of ``colocation_analysis.bandwidth_series``.
        title: of the figure.
        evidence: kind of the samples.
    """
    places = {
        condition: own.assign(place=[_place(row) for row in own.to_dict("records")])
        for condition, own in series.items()
    }
    names = sorted({name for own in places.values() for name in own["place"]})
    figure, rows = plt.subplots(
        len(names), 1, figsize=(9.0, 1.2 + 1.9 * len(names)), sharex=True, squeeze=False
    )
    fill: Any = EVIDENCE_STYLE[evidence].fill
    for axes, name in zip(rows[:, 0], names, strict=True):
        for number, (condition, own) in enumerate(places.items()):
            rounds, line = divmod(number, len(_LINES))
            colour, marker = _LINES[line]
            here = own[own["place"] == name]
            axes.plot(
                here["second"],
                here["bytes_per_second"] / 1e9,
                color=colour,
                marker=marker,
                markersize=3,
                # a colour that comes again has another line
                ls=("-", "--", ":")[rounds % 3],
                fillstyle=fill,
                lw=1,
                label=condition,
            )
        axes.set_ylabel("GB/s")
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=9, loc="left")
    rows[-1, 0].set_xlabel("seconds from the first request")
    rows[0, 0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.suptitle(title)
    return figure


def _line(one: Cost) -> str:
    node = "" if one.node == MemoryNode.ANY else f", {one.node} node"
    return f"{one.subject}{node}: {one.condition} over {one.against}"


def _place(row: Mapping[Any, Any]) -> str:
    gpu = row["gpu_index"]
    return str(row["what"]) if pd.isna(gpu) else f"{row['what']}, GPU {int(gpu)}"

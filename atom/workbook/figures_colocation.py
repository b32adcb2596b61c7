"""Bandwidths over time while an engine was observed beside its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from atom.evidence import Evidence
from atom.workbook.figures import BLACK, BLUE, EVIDENCE_STYLE, GREEN, ORANGE, PURPLE, VERMILION

_LINES = ((BLUE, "o"), (VERMILION, "s"), (GREEN, "D"), (ORANGE, "^"), (PURPLE, "v"), (BLACK, "x"))


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
        for (condition, own), (colour, marker) in zip(places.items(), cycle(_LINES), strict=False):
            here = own[own["place"] == name]
            axes.plot(
                here["second"],
                here["bytes_per_second"] / 1e9,
                color=colour,
                marker=marker,
                markersize=3,
                fillstyle=fill,
                lw=1,
                label=condition,
            )
        axes.set_ylabel("GB/s")
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=9, loc="left")
    rows[-1, 0].set_xlabel("seconds from the first request")
    rows[0, 0].legend(fontsize=7, ncols=3, loc="upper right")
    figure.suptitle(title)
    return figure


def _place(row: Mapping[Any, Any]) -> str:
    gpu = row["gpu_index"]
    return str(row["what"]) if pd.isna(gpu) else f"{row['what']}, GPU {int(gpu)}"

"""Figures of the race micro-benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from atom.benchmarks.race_timeline import TrialPicture, lanes
from atom.config import CopyPath
from atom.evidence import Evidence
from atom.workbook.figures import (
    BLACK,
    EVIDENCE_STYLE,
    PURPLE,
    arm_style,
    evidence_handle,
    stale_rate_plot,
    timeline_plot,
)

#: colours and markers that no protocol has
_PATH_STYLE = {
    str(CopyPath.ENGINE): (BLACK, "v", "copy by engine"),
    str(CopyPath.KERNEL): (PURPLE, "h", "copy by kernel"),
}
#: more would make the words of a figure small
_MOST_PANELS = 2


_ORDER_TEXT = {
    "serial": "next starts at the end",
    "issue": "next starts at the issue",
}


def rates_figure(rows: pd.DataFrame, title: str) -> Figure:
    """Stale rates with intervals; see :func:`atom.workbook.figures.stale_rate_plot`."""
    points = len(rows)
    labels = rows["label"].nunique()
    figure, axes = plt.subplots(figsize=(9.0, 1.6 + 0.2 * points + 0.12 * labels))
    stale_rate_plot(axes, rows)
    # the legend stands above the axes: the title goes above both
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def pictures_figure(pictures: Sequence[TrialPicture]) -> Figure:
    """One timeline a trial, one above the other, on one scale."""
    figure, all_axes = plt.subplots(
        len(pictures), 1, figsize=(9.5, 2.9 * len(pictures)), sharex=True, squeeze=False
    )
    for number, (axes, trial) in enumerate(zip(all_axes[:, 0], pictures, strict=True)):
        named = lanes(trial)
        last = number == len(pictures) - 1
        timeline_plot(axes, named.spans, named.ownership, marks=named.marks, legend=last)
        axes.set_title(f"{trial.protocol}: the host receives {_received(trial)}")
    return figure


def _received(trial: TrialPicture) -> str:
    return "this step's bytes" if trial.outcome == "clean" else f"the next step's ({trial.outcome})"


def queue_figure(rates: dict[str, tuple[Evidence, pd.DataFrame]], title: str) -> Figure:
    """Unpatched stale rate against the hardware-queue setting, one panel a source.

    Args:
        rates: panel title to kind of evidence and rows of ``race_analysis.queue_rates``.
        title: of the figure.
    """
    columns = min(len(rates), _MOST_PANELS)
    lines = -(-len(rates) // columns)
    figure, all_axes = plt.subplots(
        lines, columns, figsize=(5.0 * columns, 3.8 * lines), sharey=True, squeeze=False
    )
    for axes in all_axes.flat[len(rates) :]:
        axes.remove()
    for axes, (name, (evidence, rows)) in zip(all_axes.flat, rates.items(), strict=False):
        _queue_panel(axes, evidence, rows)
        axes.set_title(name, fontsize=10)
    for axes in all_axes[:, 0]:
        axes.set_ylabel("stale trials (%)")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _queue_panel(axes: Axes, evidence: Evidence, rows: pd.DataFrame) -> None:
    settings = list(dict.fromkeys(rows["queues"]))
    for side, (path, group) in zip((-1, 1), rows.groupby("copy_path"), strict=False):
        colour, marker, label = _PATH_STYLE[str(path)]
        x = np.array([settings.index(queues) for queues in group["queues"]]) + 0.08 * side
        rate = 100 * group["rate"].to_numpy()
        low = np.maximum(rate - 100 * group["low"].to_numpy(), 0)
        high = np.maximum(100 * group["high"].to_numpy() - rate, 0)
        axes.errorbar(
            x,
            rate,
            yerr=[low, high],
            color=colour,
            marker=marker,
            fillstyle=EVIDENCE_STYLE[evidence].fill,
            markerfacecoloralt="white",
            linestyle="none",
            capsize=3,
            label=label,
        )
        hits = zip(x, rate, group["processes_hit"], group["processes"], strict=True)
        for place, height, hit, processes in hits:
            axes.annotate(
                f"{hit}/{processes}",
                (place, height),
                xytext=(5 * side, 4),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                fontsize=7.5,
                color=colour,
            )
    axes.set_xticks(range(len(settings)), settings)
    # room for the words beside the outer points
    axes.set_xlim(-0.5, len(settings) - 0.5)
    axes.set_ylim(-6, 112)
    axes.set_xlabel("hardware queues\n(beside a point: processes with a stale trial, of all)")
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(
        handles=[*handles, evidence_handle(evidence)],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.24),
        ncols=3,
        frameon=False,
        fontsize=8,
    )


def margin_figure(panels: dict[str, tuple[Evidence, pd.DataFrame]], title: str) -> Figure:
    """Copy end minus end of the next step's write, one dot a traced trial.

    Args:
        panels: panel title to kind of evidence and rows of ``race_analysis.lateness`` with a
            ``label`` column, one line of the panel a label.
        title: of the figure.
    """
    lines = max(rows["label"].nunique() for _, rows in panels.values())
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 1.6 + 0.32 * lines), squeeze=False
    )
    for axes, (name, (evidence, rows)) in zip(all_axes[0], panels.items(), strict=True):
        labels = list(dict.fromkeys(rows["label"]))
        for row in rows.itertuples():
            stale = row.outcome != "clean"
            axes.plot(
                row.margin_us,
                -labels.index(row.label),
                marker="X" if stale else "o",
                color=arm_style("unpatched").colour if stale else BLACK,
                fillstyle=EVIDENCE_STYLE[evidence].fill,
                markerfacecoloralt="white",
                linestyle="none",
                alpha=0.8,
            )
        axes.axvline(0, color="#222222", lw=1)
        axes.margins(x=0.08)
        axes.set_xscale("symlog", linthresh=10)
        axes.set_yticks([-n for n in range(len(labels))], labels, fontsize=8)
        axes.set_ylim(-len(labels) + 0.5, 0.5)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel(
            "copy end - next write end (us); right of 0 the copy ended after\n"
            "the write and may have read before it (X stale, o clean)"
        )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def consistency_figure(models: pd.DataFrame, title: str) -> Figure:
    """Draws that meet all rows: mapping and copy path against order and barrier.

    Wait and dispatch costs share a cell, which shows the least and the most draws over them.
    """
    rows = list(dict.fromkeys(zip(models["mapping"], models["copy"], strict=True)))
    columns = list(dict.fromkeys(zip(models["order"], models["barrier"], strict=True)))
    draws = int(models["draws"].iloc[0])
    figure, axes = plt.subplots(figsize=(8.2, 1.4 + 0.33 * len(rows)))
    shares = np.zeros((len(rows), len(columns)))
    for i, (mapping, copy) in enumerate(rows):
        for j, (order, barrier) in enumerate(columns):
            cell = models[
                (models["mapping"] == mapping)
                & (models["copy"] == copy)
                & (models["order"] == order)
                & (models["barrier"] == barrier)
            ]["all_rows"]
            shares[i, j] = cell.max() / draws
            text = str(cell.max()) if cell.min() == cell.max() else f"{cell.min()} to {cell.max()}"
            dark = shares[i, j] > 0.6
            axes.text(
                j, i, text, ha="center", va="center", fontsize=9, color="white" if dark else "black"
            )
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(
        range(len(columns)),
        [f"{_ORDER_TEXT[o]}\nwait holds its {b}" for o, b in columns],
        fontsize=8,
    )
    axes.set_yticks(range(len(rows)), [f"{m}, {c}" for m, c in rows])
    axes.grid(visible=False)
    axes.set_title(f"{title}\ndraws, of {draws}, that meet all rows at once")
    return figure


def cost_figure(costs: pd.DataFrame, unit: str) -> Figure:
    """Host time of a send by protocol, one dot a process; the null arm shows what noise is.

    Args:
        costs: columns protocol (``null`` for the null arm), send_us, evidence.
        unit: what the times are, for the axis.
    """
    figure, axes = plt.subplots(figsize=(8.0, 3.2))
    names = list(dict.fromkeys(costs["protocol"]))
    for row in costs.itertuples():
        look = arm_style(str(row.protocol))
        axes.plot(
            row.send_us,
            -names.index(row.protocol),
            marker=look.marker,
            color=look.colour,
            fillstyle=EVIDENCE_STYLE[Evidence(str(row.evidence))].fill,
            markerfacecoloralt="white",
            linestyle="none",
        )
    axes.set_yticks([-n for n in range(len(names))], names)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"host time of one send, median of a process ({unit})")
    return figure

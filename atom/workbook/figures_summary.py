"""The figures of the first page: the coverage matrix and the ledger's bars."""

from __future__ import annotations

import textwrap

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from pandas import DataFrame

from atom.workbook.figures import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION, YELLOW
from atom.workbook.results import VERDICT_ORDER
from atom.workbook.summary import CoverageMatrix

#: colour, hatch and colour of words by what a cell of the matrix holds
COVERAGE_STYLE: dict[str, tuple[str, str, str]] = {
    "published alone": ("#D9D9D9", "", BLACK),
    "published and measured here": (BLUE, "", "white"),
    # light, so that grey print tells it from the one above
    "measured here alone": ("#8FD3BD", "", BLACK),
    "published and simulated here": ("#BFE0F3", "....", BLACK),
    "simulated here alone": ("#CFEDE4", "////", BLACK),
    "nothing": ("#FFFFFF", "", "#555555"),
}

VERDICT_STYLE: dict[str, tuple[str, str]] = {
    "reproduced": (GREEN, ""),
    "reproduced in simulation": (SKY, "...."),
    "inconclusive": (YELLOW, "////"),
    "source inconsistent": (ORANGE, "xxxx"),
    "differs": (VERMILION, "\\\\\\\\"),
    "not testable here": ("#BDBDBD", ""),
    "not run": ("#FFFFFF", ""),
}


def coverage_figure(matrix: CoverageMatrix) -> Figure:
    """One row an experiment, one column a protocol; a cell says what exists and of which kind."""
    experiments = list(matrix)
    protocols = list(next(iter(matrix.values())))
    texts = {
        (line, column): _cell_text(matrix[experiment][protocol].lines)
        for line, experiment in enumerate(experiments)
        for column, protocol in enumerate(protocols)
    }
    tallest = max(text.count("\n") + 1 for text in texts.values())
    height = max(0.5, 0.14 * tallest + 0.1) * len(experiments)
    figure, axes = plt.subplots(figsize=(12.5, 1.2 + height))
    used: dict[str, None] = {}
    for line, experiment in enumerate(experiments):
        for column, protocol in enumerate(protocols):
            cell = matrix[experiment][protocol]
            used[cell.state] = None
            colour, hatch, words = COVERAGE_STYLE[cell.state]
            axes.add_patch(
                Rectangle(
                    (column - 0.48, line - 0.46), 0.96, 0.92, fc=colour, ec="#666666", hatch=hatch
                )
            )
            box = {"facecolor": "white", "alpha": 0.85, "lw": 0, "pad": 1} if hatch else None
            axes.text(
                column,
                line,
                texts[line, column],
                ha="center",
                va="center",
                fontsize=7.5,
                color=words,
                bbox=box,
            )
    axes.set_xlim(-0.5, len(protocols) - 0.5)
    axes.set_ylim(len(experiments) - 0.5, -0.5)
    axes.set_xticks(range(len(protocols)), protocols)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(experiments)), experiments)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    figure.legend(
        handles=[
            Patch(fc=colour, hatch=hatch, ec="#666666", label=state)
            for state, (colour, hatch, _) in COVERAGE_STYLE.items()
            if state in used
        ],
        loc="outside upper center",
        ncols=3,
        frameon=False,
    )
    return figure


def _cell_text(lines: list[str]) -> str:
    wrapped = [piece for line in lines for piece in textwrap.wrap(line, 29)]
    return "\n".join(wrapped) or "no figure"


def ledger_figure(counts: DataFrame) -> Figure:
    """Verdicts by group of claims, as bars of counts."""
    figure, axes = plt.subplots(figsize=(10, 1.3 + 0.36 * len(counts)))
    lines = np.arange(len(counts))
    left = np.zeros(len(counts))
    for verdict in VERDICT_ORDER:
        width = counts[verdict].to_numpy(dtype=float)
        if not width.any():
            continue
        colour, hatch = VERDICT_STYLE[verdict]
        axes.barh(
            lines,
            width,
            left=left,
            color=colour,
            hatch=hatch,
            edgecolor="#333333",
            lw=0.7,
            label=verdict,
        )
        for line, start, length in zip(lines, left, width, strict=True):
            if length:
                axes.text(
                    start + length / 2,
                    line,
                    f"{length:.0f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    bbox={"facecolor": "white", "alpha": 0.85, "lw": 0, "pad": 0.8},
                )
        left += width
    axes.set_yticks(lines, [str(name) for name in counts["group"]])
    axes.set_ylim(len(counts) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("verdicts (one a claim and kind of evidence)")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure

"""Figures of the engine: the fault in it, and where a decode step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from atom.benchmarks.engine_fault_arms import GUARD_ALONE
from atom.evidence import Evidence
from atom.workbook.engine_fault_analysis import LawPoint, protected, rows_of
from atom.workbook.figures import (
    BLUE,
    EVIDENCE_STYLE,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    evidence_handle,
)
from atom.workbook.records import Run

#: what became of a request: colour, hatch
_FATES: dict[str, tuple[str, str]] = {
    "same tokens as under hold": (SKY, ""),
    "other tokens, no error": (VERMILION, "\\\\\\\\"),
    "failed with an error": (ORANGE, "...."),
    "lost with the engine": (GREY, "xxxx"),
}


def law_figure(points: Sequence[LawPoint], evidence: Evidence) -> Figure:
    """``num_bonus`` of the first stale status, against the token budget; beside the prediction."""
    figure, axes = plt.subplots(figsize=(7.5, 4.4))
    budgets = sorted({point.budget for point in points})
    ends = [budgets[0] * 0.7, budgets[-1] * 1.4]
    axes.plot(ends, ends, color=GREY, lw=1, ls="--", label="prediction: the token budget")
    fill: Any = EVIDENCE_STYLE[evidence].fill
    for unpatched, colour, marker, label in (
        (True, VERMILION, "X", f"{GUARD_ALONE} alone"),
        (False, BLUE, "o", "hold (control)"),
    ):
        own = [point for point in points if point.unpatched is unpatched]
        axes.plot(
            [point.budget for point in own],
            [max(point.largest, 0.5) for point in own],
            ls="none",
            marker=marker,
            ms=10,
            color=colour,
            fillstyle=fill,
            markerfacecoloralt="white",
            label=label,
        )
        for point in own:
            axes.annotate(
                str(point.largest),
                (point.budget, max(point.largest, 0.5)),
                xytext=(10, -4),
                textcoords="offset points",
                fontsize=9,
                color=colour,
            )
    axes.axhspan(0.4, 3.5, color="#DDEBF5", zorder=0)
    axes.text(ends[0], 1.0, " counts that a step of three drafts can give", fontsize=8, va="center")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(*ends)
    axes.set_ylim(0.4, ends[1] * 1.6)
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.set_yticks([1, 3, *budgets], ["1", "3", *(f"{budget:,}" for budget in budgets)])
    axes.minorticks_off()
    axes.set_xlabel("token budget of a prefill step")
    axes.set_ylabel("largest num_bonus of the first stale status\n(held: of all statuses)")
    axes.set_title("The stale value changes with the token budget")
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(
        handles=[*handles, evidence_handle(evidence)],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
    )
    return figure


def fates_figure(run: Run, budget: int) -> Figure:
    """What became of the requests under each arm: a stacked bar an arm."""
    rows = [row for row in rows_of(run) if row["token_budget"] == budget]
    figure, axes = plt.subplots(figsize=(10.0, 1.6 + 0.34 * len(rows)))
    names = [str(row["arm"]) for row in rows]
    for place, row in enumerate(rows):
        left = 0
        for fate, count in zip(_FATES, fates(row), strict=True):
            if not count:
                continue
            colour, hatch = _FATES[fate]
            axes.barh(
                -place,
                count,
                left=left,
                height=0.7,
                color=colour,
                hatch=hatch,
                ec="#222222",
                lw=0.7,
            )
            axes.text(
                left + count / 2,
                -place,
                str(count),
                ha="center",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "alpha": 0.85, "lw": 0, "pad": 1},
            )
            left += count
    axes.set_yticks([-float(place) for place in range(len(rows))], names)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(BLUE if protected(row) else VERMILION)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("requests")
    figure.suptitle("What became of the requests, arm by arm", x=0.01, ha="left", fontsize=11)
    handles = [
        plt.Rectangle((0, 0), 1, 1, fc=colour, hatch=hatch, ec="#222222", label=fate)
        for fate, (colour, hatch) in _FATES.items()
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False)
    return figure


def fates(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """Requests with the same tokens, with others, failed, and lost; they add up to all."""
    changed, failed = int(row["changed_requests"]), int(row["failed_requests"])
    same = int(row["compared_requests"]) - changed
    # one more than those that decode brings the long prompt
    lost = int(row["requests"]) + 1 - same - changed - failed
    return same, changed, failed, lost if row["crashed"] else 0

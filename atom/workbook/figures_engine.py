"""Figures of the engine: the fault in it, its kernels, and where a decode step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from atom.benchmarks.engine_fault_arms import GUARD_ALONE
from atom.benchmarks.engine_speed_rows import Category, Job, SpeedArm
from atom.benchmarks.kernel_rows import KernelArm, Operator, Question
from atom.evidence import Evidence
from atom.workbook.engine_fault_analysis import LawPoint, protected, rows_of
from atom.workbook.engine_speed_analysis import ArmSpeed
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
from atom.workbook.kernel_analysis import ArmSummary
from atom.workbook.protocol_cost import COPY_SHARE, GUARD_ALLOWANCE, chosen
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
    title = f"What became of the requests, arm by arm, token budget {budget}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
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


#: colour, marker; the markers are none of a protocol's
_KERNEL_ARMS: dict[str, tuple[str, str]] = {
    KernelArm.REPORT: (BLACK, "*"),
    KernelArm.NONE: (GREY, "P"),
    KernelArm.NULL: (GREY, "P"),
    KernelArm.TRAP: (PURPLE, "p"),
    KernelArm.UNPACKED: (SKY, "h"),
    KernelArm.FLA: (GREEN, ">"),
    KernelArm.TRANSFORMERS: (PURPLE, "<"),
    KernelArm.COPY: (BLACK, "_"),
    KernelArm.COPY_KERNEL: (ORANGE, "v"),
}
_OPERATORS = {
    Operator.CONV_UPDATE: "convolution update",
    Operator.RECURRENT_UPDATE: "recurrent update",
}


def _intervals(axes: Axes, rows: Sequence[ArmSummary], arms: Sequence[KernelArm]) -> None:
    """Ratios with intervals, a group of arms a batch size."""
    batches = sorted({one.batch for one in rows})
    step = 0.7 / max(len(arms), 1)
    for place, arm in enumerate(arms):
        own = [one for one in rows if one.arm == arm and one.ratio is not None]
        colour, marker = _KERNEL_ARMS[arm]
        shift = step * (place - (len(arms) - 1) / 2)
        for one in own:
            assert one.ratio is not None
            assert one.low is not None
            assert one.high is not None
            axes.errorbar(
                batches.index(one.batch) + shift,
                one.ratio,
                yerr=[[max(one.ratio - one.low, 0)], [max(one.high - one.ratio, 0)]],
                color=colour,
                marker=marker,
                capsize=3,
                ls="none",
                label=str(arm),
            )
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlim(-0.6, len(batches) - 0.4)
    axes.grid(axis="x", visible=False)
    for number in range(1, len(batches)):
        axes.axvline(number - 0.5, color="#CCCCCC", lw=0.8, zorder=0)
    axes.set_xlabel("rows of the decode batch")


def _one_legend(figure: Figure, all_axes: Sequence[Axes]) -> None:
    found: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside upper left",
        ncols=min(len(found), 4),
        frameon=False,
    )


def guard_figure(summaries: Sequence[ArmSummary]) -> Figure:
    """Time of a guarded launch over the unguarded one, by batch; the band is the allowance."""
    operators = [one for one in Operator if chosen(summaries, Question.GUARD, one)]
    figure, all_axes = plt.subplots(
        1, len(operators), figsize=(5.0 * len(operators), 4.0), sharey=True, squeeze=False
    )
    for axes, operator in zip(all_axes[0], operators, strict=True):
        axes.axhspan(1 - GUARD_ALLOWANCE, 1 + GUARD_ALLOWANCE, color="#DDEBF5", zorder=0)
        rows = chosen(summaries, Question.GUARD, operator)
        _intervals(axes, rows, (KernelArm.NULL, KernelArm.REPORT, KernelArm.TRAP))
        axes.set_title(_OPERATORS[operator], fontsize=10)
    all_axes[0][0].set_ylabel("time over the unguarded kernel")
    _one_legend(figure, all_axes[0])
    return figure


def updates_figure(summaries: Sequence[ArmSummary]) -> Figure:
    """Times of the state updates and their peers over a copy of the same bytes."""
    panels = [
        (operator, queries)
        for operator in Operator
        for queries in sorted(
            {one.queries for one in chosen(summaries, Question.SPEED, operator)}, reverse=True
        )
    ]
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    figure, all_axes = plt.subplots(
        lines, columns, figsize=(4.9 * columns, 0.9 + 3.4 * lines), sharey=True, squeeze=False
    )
    for axes in all_axes.flat[len(panels) :]:
        axes.remove()
    arms = tuple(arm for arm in KernelArm if arm not in (KernelArm.NONE, KernelArm.NULL, "trap"))
    for axes, (operator, queries) in zip(all_axes.flat, panels, strict=False):
        rows = [
            one
            for one in chosen(summaries, Question.SPEED, operator)
            if one.queries == queries and one.arm != KernelArm.COPY
        ]
        axes.axhline(1, color=BLACK, lw=1, label="copy_ of the same bytes")
        if operator is Operator.CONV_UPDATE:
            goal = f"goal from 256 rows up: {COPY_SHARE:.0%} of the copy's rate"
            axes.axhline(1 / COPY_SHARE, color=GREY, lw=1, ls="--", label=goal)
        _intervals(axes, rows, [arm for arm in arms if any(one.arm == arm for one in rows)])
        tokens = "token" if queries == 1 else "tokens"
        axes.set_title(f"{_OPERATORS[operator]}, {queries} {tokens} a row", fontsize=9)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axes in all_axes[:, 0]:
        axes.set_ylabel("time over the copy (log)")
    _one_legend(figure, all_axes.flat[: len(panels)])
    return figure


_SPEED_ARMS: dict[str, tuple[str, str]] = {
    SpeedArm.OURS: (BLUE, ""),
    SpeedArm.NULL: ("#BDBDBD", "oooo"),
    SpeedArm.MTP: (SKY, "...."),
    SpeedArm.FORCED: (GREEN, "////"),
    SpeedArm.REPLAY: (YELLOW, "----"),
    SpeedArm.REPLAY_FORCED: (ORANGE, "++++"),
    SpeedArm.TRANSFORMERS: (PURPLE, "xxxx"),
}


def rates_figure(summaries: Sequence[ArmSpeed]) -> Figure:
    """Decode rates by arm, with the rate at which a copy of a step's bytes would end it."""
    timed = [one for one in summaries if one.job == Job.DECODE and one.tokens_per_s is not None]
    points = list(dict.fromkeys(one.point_id for one in timed))
    figure, all_axes = plt.subplots(
        len(points), 1, figsize=(9.5, 0.9 + 2.1 * len(points)), sharex=True, squeeze=False
    )
    for axes, point in zip(all_axes[:, 0], points, strict=True):
        order = list(_SPEED_ARMS)
        rows = [one for one in timed if one.point_id == point]
        rows.sort(key=lambda one: order.index(SpeedArm(one.arm)))
        for place, one in enumerate(rows):
            assert one.tokens_per_s is not None
            rate, low, high = one.tokens_per_s
            colour, hatch = _SPEED_ARMS[one.arm]
            axes.barh(-place, rate, height=0.65, color=colour, hatch=hatch, ec="#222222", lw=0.7)
            axes.errorbar(
                rate, -place, xerr=[[max(rate - low, 0)], [max(high - rate, 0)]], color=BLACK
            )
            axes.annotate(
                f"{rate:,.0f}",
                (high, -place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            if one.floor_ms and one.tokens_per_row:
                floor = one.batch * one.tokens_per_row / one.floor_ms * 1e3
                axes.plot([floor, floor], [-place - 0.4, -place + 0.4], color=VERMILION, lw=2.5)
        axes.set_yticks([-float(place) for place in range(len(rows))], [one.arm for one in rows])
        axes.set_title(f"decode, {rows[0].batch} requests", fontsize=10)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.12)
    all_axes[-1, 0].xaxis.set_major_formatter("{x:,.0f}")
    all_axes[-1, 0].set_xlabel("tokens/s; upright lines: the floor, a copy of the step's bytes")
    return figure


_CATEGORIES: dict[str, tuple[str, str]] = {
    Category.LINEAR: (BLUE, ""),
    Category.CONV: (SKY, "////"),
    Category.RECURRENT: (GREEN, "||||"),
    Category.ATTENTION: (ORANGE, "...."),
    Category.ELEMENTWISE: (YELLOW, "oooo"),
    Category.SAMPLER: (PURPLE, "xxxx"),
    Category.DRAFTS: ("#8C510A", "\\\\\\\\"),
    Category.COPIES: (VERMILION, "++++"),
    Category.OTHER: ("#BDBDBD", "----"),
    Category.GAPS: ("#FFFFFF", ""),
}


def time_figure(device_time: pd.DataFrame) -> Figure:
    """Where a decode step's device time goes: a stacked bar an arm, the peer on its own scale."""
    rows = device_time[device_time["left_out"].isna()]
    bars = list(dict.fromkeys(zip(rows["point_id"], map(str, rows["arm"]), strict=True)))
    panels = [
        part
        for peer in (False, True)
        if (part := [bar for bar in bars if (bar[1] == SpeedArm.TRANSFORMERS) is peer])
    ]
    figure, all_axes = plt.subplots(
        len(panels),
        1,
        figsize=(10.5, 1.8 + 0.5 * len(bars)),
        height_ratios=[len(part) + 0.6 for part in panels],
        squeeze=False,
    )
    for axes, part in zip(all_axes[:, 0], panels, strict=True):
        for place, (point, arm) in enumerate(part):
            own = rows[(rows["point_id"] == point) & (rows["arm"] == arm)]
            spent = own["ms_per_step"].astype(float)
            times = dict(zip(map(str, own["category"]), spent, strict=True))
            _stacked_bar(axes, -place, times, labelled=place == 0)
        names = [f"{arm}\n{point}" for point, arm in part]
        axes.set_yticks([-float(place) for place in range(len(part))], names, fontsize=8)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.1)
    all_axes[0, 0].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    all_axes[-1, 0].set_xlabel("milliseconds of a decode step; each panel has a scale of its own")
    return figure


def _stacked_bar(axes: Axes, y: float, times: dict[str, float], *, labelled: bool) -> None:
    left = 0.0
    for category, (colour, hatch) in _CATEGORIES.items():
        width = times.get(str(category), 0.0)
        look = {"color": colour, "hatch": hatch, "ec": "#222222", "lw": 0.6}
        label = str(category) if labelled else None
        axes.barh(y, width, left=left, height=0.7, label=label, **look)
        left += width
    axes.annotate(
        f"{left:.3f} ms",
        (left, y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def memory_figure(memory: pd.DataFrame) -> Figure:
    """Planned and counted device memory, part by part."""
    figure, axes = plt.subplots(figsize=(9.0, 1.2 + 0.6 * len(memory)))
    for place, row in enumerate(memory.to_dict("records")):
        looks = [("planned", row["planned_bytes"], SKY, "////", 0.18)]
        if not pd.isna(row["measured_bytes"]):
            looks.append(("counted by the allocator", row["measured_bytes"], BLUE, "", -0.18))
        for label, nbytes, colour, hatch, shift in looks:
            width = float(nbytes) / 2**30
            axes.barh(
                -place + shift,
                width,
                height=0.34,
                color=colour,
                hatch=hatch,
                ec="#222222",
                lw=0.6,
                label=label if place == 0 else None,
            )
            axes.annotate(
                f"{width:,.2f}",
                (width, -place + shift),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.set_yticks([-float(place) for place in range(len(memory))], list(memory["part"]))
    axes.set_xlabel("GiB")
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False)
    return figure

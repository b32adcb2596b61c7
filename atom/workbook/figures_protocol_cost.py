"""Figures of the protocol-cost experiment: host times beside the limits, steps, and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from atom.benchmarks.protocol_cost_rows import BARE_ARMS, ENGINE_ARMS, CostArm, Loop
from atom.config import CopyProtocol
from atom.workbook.engine_speed_analysis import Ratio
from atom.workbook.figures import (
    BLACK,
    GREY,
    NULL_STYLE,
    PROTOCOL_STYLE,
    PURPLE,
    SKY,
    VERMILION,
    ArmStyle,
)
from atom.workbook.protocol_cost_analysis import PLAIN_OVER_OURS, STEP_ALLOWANCE, ArmCost
from atom.workbook.protocol_cost_claims import NETS, guard_ratio, shown_point
from atom.workbook.protocol_cost_paired import batches_of, paired_ratio, send_floor

_PLAIN_STYLE = ArmStyle(PURPLE, "v", (0, (3, 1)), "--", '.to("cpu") with fresh events')
#: limits that are drawn beside the sends
_DRAWN_LIMITS = ("event record", "kernel launch", "copy of 256 bytes and wait")
#: look of the nets of the engine
_NET_STYLE = {
    CostArm.NO_GUARD_AGAIN: (GREY, "P"),
    CostArm.TRAP: (PURPLE, "p"),
    CostArm.NO_TAG: (SKY, "s"),
    CostArm.HOLD: (BLACK, "*"),
    CostArm.HOST_CHECK: (VERMILION, "^"),
}


def style_of(arm: CostArm | str) -> ArmStyle:
    """Look of an arm."""
    if arm == CostArm.PLAIN:
        return _PLAIN_STYLE
    return NULL_STYLE if arm == CostArm.NULL else PROTOCOL_STYLE[CopyProtocol(str(arm))]


def _legend(figure: Figure, panels: Sequence[Axes], columns: int) -> None:
    """One legend of all panels, each label once."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()), list(found), loc="outside upper left", ncols=columns, frameon=False
    )


def host_figure(summaries: Sequence[ArmCost], limits: Mapping[str, tuple[float, float]]) -> Figure:
    """Host time of a send and of a receive by arm, with tails, beside what none can do without."""
    point = shown_point(summaries, Loop.BARE)
    arms = [arm for arm in BARE_ARMS if arm in point and point[arm].step_us is not None]
    figure, both = plt.subplots(1, 2, figsize=(11.0, 1.4 + 0.42 * len(arms)), sharey=True)
    for axes, name in zip(both, ("send", "receive"), strict=True):
        for place, arm in enumerate(arms):
            look = style_of(arm)
            median = getattr(point[arm], f"{name}_us") or 0.0
            tail = max(getattr(point[arm], f"{name}_p99_us") or 0.0, median)
            axes.barh(
                -place, median, height=0.65, color=look.colour, hatch=look.hatch, ec="#222222"
            )
            axes.plot([median, tail], [-place, -place], color=BLACK, lw=1)
            axes.plot([tail], [-place], color=BLACK, marker="|", ms=9)
            axes.annotate(
                f"{median:.1f}",
                (tail, -place),
                xytext=(5, -3),
                textcoords="offset points",
                fontsize=8,
                bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"},
            )
        axes.set_xlabel(f"host time of a {name}, us (bar: median, tick: 99th percentile)")
        axes.grid(axis="y", visible=False)
    for limit, dashes in zip(_DRAWN_LIMITS, ((1, 1), (4, 2), (1, 3)), strict=True):
        if limit in limits:
            both[0].axvline(
                limits[limit][0], color=GREY, lw=1.4, ls=(0, dashes), label=f"limit: {limit}"
            )
    floor, plain = send_floor(limits), point.get(CostArm.PLAIN)
    if floor is not None:
        label = f"limit: the calls of a send alone, {floor:.1f} us"
        both[0].axvline(floor, color=BLACK, lw=1.4, ls=(0, (6, 1)), label=label)
    if plain is not None and plain.send_us is not None:
        label = f'goal: 1/{PLAIN_OVER_OURS:g} of .to("cpu")'
        both[0].axvline(plain.send_us / PLAIN_OVER_OURS, color=PURPLE, lw=1.6, label=label)
    both[0].set_yticks([-float(place) for place in range(len(arms))], [str(arm) for arm in arms])
    _legend(figure, [both[0]], 3)
    return figure


def _whisker(axes: Axes, place: float, value: Ratio, colour: str, marker: str, label: str) -> None:
    middle, low, high = value
    axes.errorbar(
        place,
        middle,
        yerr=[[max(middle - low, 0)], [max(high - middle, 0)]],
        color=colour,
        marker=marker,
        capsize=3,
        ls="none",
        label=label,
    )


def _ratio_panel(
    axes: Axes,
    batches: Sequence[int],
    arms: Sequence[CostArm],
    value: Callable[[CostArm, int], Ratio | None],
    look: Callable[[CostArm], tuple[str, str, str]],
) -> None:
    """Ratios by batch, a group of arms each; the band is one percent either way."""
    axes.axhspan(1 - STEP_ALLOWANCE, 1 + STEP_ALLOWANCE, color="#DDEBF5", zorder=0)
    width = 0.75 / len(arms)
    for place, arm in enumerate(arms):
        for group, batch in enumerate(batches):
            found = value(arm, batch)
            if found is not None:
                at = group + width * (place - (len(arms) - 1) / 2)
                _whisker(axes, at, found, *look(arm))
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlim(-0.6, max(len(batches), 1) - 0.4)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("requests")


def steps_figure(samples: pd.DataFrame) -> Figure:
    """Step time over ``unpatched``'s, window by window, by loop and batch, all leads together.

    With an idle copy stream. A group of arms a batch size.
    """

    def look(arm: CostArm) -> tuple[str, str, str]:
        style = style_of(arm)
        return style.colour, style.marker, style.label

    figure, both = plt.subplots(1, 2, figsize=(11.0, 4.0))
    for axes, loop, arms in zip(both, Loop, (BARE_ARMS[1:], ENGINE_ARMS[1:]), strict=True):
        batches = batches_of(samples, loop)
        value = partial(_step_ratio, samples, loop)
        _ratio_panel(axes, batches, arms, value, look)
        axes.set_title("bare transfer loop" if loop is Loop.BARE else "the engine's decode steps")
    both[0].set_ylabel("step time over unpatched's")
    _legend(figure, list(both), 4)
    return figure


def _step_ratio(samples: pd.DataFrame, loop: Loop, arm: CostArm, batch: int) -> Ratio | None:
    return paired_ratio(samples, arm, loop=loop, batch=batch)


def nets_figure(samples: pd.DataFrame) -> Figure:
    """Step time of the engine with each net over that of one without a guard, by batch."""
    figure, axes = plt.subplots(figsize=(8.0, 4.0))
    batches = batches_of(samples)
    arms = tuple(_NET_STYLE)

    def look(arm: CostArm) -> tuple[str, str, str]:
        return (*_NET_STYLE[arm], NETS[arm])

    _ratio_panel(axes, batches, arms, partial(guard_ratio, samples), look)
    axes.set_ylabel("step time over no guard's")
    _legend(figure, [axes], 2)
    return figure


def held_figure(held: pd.DataFrame) -> Figure:
    """Device memory out of the allocator, step by step, under a deep lead.

    A panel a place of what holds the copy stream up: in front of the step's copy, or behind it.
    """
    points = list(dict.fromkeys(held["point_id"]))
    figure, all_axes = plt.subplots(
        1, len(points), figsize=(5.6 * len(points), 4.0), sharey=True, squeeze=False
    )
    for axes, point_id in zip(all_axes[0], points, strict=True):
        rows = held[held["point_id"] == point_id]
        stuck = rows[rows["stuck"].astype(bool)]["step"]
        for step in sorted(set(stuck)):
            axes.axvline(step, color=GREY, lw=1, ls=(0, (2, 2)), label="copy stream held up")
        for place, (arm, own) in enumerate(rows.groupby("arm", sort=False)):
            look = style_of(str(arm))
            # markers at places of their own: lines that lie on each other stay apart
            apart = max(1, len(own) // 8)
            axes.plot(
                own["step"],
                own["held_bytes"].astype(float) / 2**10,
                color=look.colour,
                ls=look.linestyle,
                lw=1.8,
                marker=look.marker,
                ms=5,
                markevery=(place * apart // 5, apart),
                label=look.label,
            )
        behind = str(point_id).endswith("behind")
        axes.set_title(f"held up {'behind' if behind else 'in front of'} a step's copy")
        axes.set_xlabel("step")
    all_axes[0][0].set_ylabel("out of the allocator, KiB")
    _legend(figure, list(all_axes[0]), 3)
    return figure

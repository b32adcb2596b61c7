"""Figures of the capacity model: published beside predicted, remedies, and what-if curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from atom.benchmarks.capacity_fit import Setup
from atom.benchmarks.capacity_rows import CapacityRow
from atom.workbook.capacity_analysis import FITTED, Study
from atom.workbook.figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

_ARM_LOOK = (
    *(("o", BLACK), ("s", BLUE), ("^", GREEN), ("v", SKY), ("D", ORANGE), ("P", PURPLE)),
    *(("X", VERMILION), ("<", GREY), ("*", BLUE), (">", GREEN), ("h", VERMILION), ("d", PURPLE)),
)


def _short(setup: Setup) -> str:
    return f"{setup[0]}\n" + ("none" if setup[1] is None else f"{setup[1]:g} GiB")


def predictions_figure(found: Study) -> Figure:
    """Throughput and failure rates: published, by the frozen fit, and with the setup left out."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), width_ratios=(7, 4))
    both = [*found.bare, *found.offload]
    for place, one in enumerate(both):
        for value in one.throughput:
            left.plot(place - 0.2, value, marker="o", color=BLACK, fillstyle="none")
        left.plot(place, found.predicted[one.setup].throughput, marker="s", color=BLUE)
        if one.setup in found.left_out:
            held = found.left_out[one.setup].throughput
            left.plot(place + 0.2, held, marker="^", color=VERMILION)
    left.set_xticks(range(len(both)), [_short(one.setup) for one in both], fontsize=8)
    left.set_ylim(bottom=0)
    left.set_ylabel("tokens a second and GPU")
    left.set_xlabel("sessions, pool")
    for place, one in enumerate(found.offload):
        assert one.failed is not None
        low, high = (100 * share for share in one.failed)
        right.errorbar(
            place - 0.2,
            (low + high) / 2,
            yerr=(high - low) / 2,
            marker="o",
            color=BLACK,
            fillstyle="none",
            capsize=3,
        )
        right.plot(place, 100 * (found.predicted[one.setup].failed or 0), marker="s", color=BLUE)
        right.plot(
            place + 0.2, 100 * (found.left_out[one.setup].failed or 0), marker="^", color=VERMILION
        )
    right.set_xticks(
        range(len(found.offload)), [_short(one.setup) for one in found.offload], fontsize=8
    )
    right.set_ylim(bottom=0)
    right.set_ylabel("state loads that fail, %")
    right.set_xlabel("sessions, pool")
    handles = [
        left.plot([], [], ls="none", marker=marker, color=colour, fillstyle=fill, label=label)[0]
        for marker, colour, fill, label in (
            ("o", BLACK, "none", "published"),
            (
                "s",
                BLUE,
                "full",
                f"simulated: fit on no offload and on {FITTED[0]} sessions, {FITTED[1]:g} GiB",
            ),
            ("^", VERMILION, "full", "simulated: this setup left out of the fit"),
        )
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure


def remedies_figure(rows: Sequence[CapacityRow], setups: Sequence[Setup]) -> Figure:
    """Failure rate and throughput of each remedy, a column a published setup."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(9.5, 6.0), sharex=True)
    names = list(dict.fromkeys(row.arm for row in rows))
    for number, name in enumerate(names):
        marker, colour = _ARM_LOOK[number % len(_ARM_LOOK)]
        shift = 0.085 * (number - (len(names) - 1) / 2)
        own = {(row.concurrency, row.pool_gib): row for row in rows if row.arm == name}
        places = [place for place, setup in enumerate(setups) if setup in own]
        look: dict[str, Any] = {"ls": "none", "marker": marker, "color": colour}
        above.plot(
            [place + shift for place in places],
            [100 * (own[setups[place]].state_failure_rate or 0) for place in places],
            label=name,
            **look,
        )
        below.plot(
            [place + shift for place in places],
            [own[setups[place]].effective_total_throughput / 1e3 for place in places],
            **look,
        )
    for axes in (above, below):
        axes.grid(axis="x", visible=False)
        for place in range(1, len(setups)):
            axes.axvline(place - 0.5, color=GREY, lw=0.5)
    above.set_ylabel("state loads that fail, %")
    below.set_ylabel("thousand tokens a second")
    below.set_ylim(bottom=0)
    below.set_xticks(range(len(setups)), [_short(setup) for setup in setups], fontsize=8)
    below.set_xlabel("sessions, pool")
    above.legend(ncols=3, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def what_if_figure(rows: Sequence[CapacityRow]) -> Figure:
    """Throughput, failures and waiting against the pool, a line an arm."""
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.4))
    names = list(dict.fromkeys(row.arm for row in rows if row.pool_gib is not None))
    bare = next((row for row in rows if row.pool_gib is None), None)
    for number, name in enumerate(names):
        marker, colour = _ARM_LOOK[number % len(_ARM_LOOK)]
        own = sorted(
            (row for row in rows if row.arm == name and row.pool_gib is not None),
            key=lambda row: row.pool_gib or 0.0,
        )
        pools = [row.pool_gib for row in own]
        for axes, values in zip(panels, _what_if_values(own), strict=True):
            axes.plot(pools, values, marker=marker, color=colour, label=name)
    words = ("thousand tokens a second", "state loads that fail, %", "mean TTFT, s")
    for axes, text in zip(panels, words, strict=True):
        _finish(axes, text)
    if bare is not None:
        panels[0].axhline(bare.effective_total_throughput / 1e3, color=GREY, ls="--", lw=1)
        panels[0].annotate(
            "no offload",
            (0.98, bare.effective_total_throughput / 1e3),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    panels[1].legend(frameon=False, fontsize=8)
    return figure


def _what_if_values(own: Sequence[CapacityRow]) -> tuple[list[float], list[float], list[float]]:
    return (
        [row.effective_total_throughput / 1e3 for row in own],
        [100 * (row.state_failure_rate or 0.0) for row in own],
        [row.ttft_mean_seconds or 0.0 for row in own],
    )


def _finish(axes: Axes, text: str) -> None:
    axes.set_ylabel(text)
    axes.set_xlabel("pool, GiB")
    axes.set_ylim(bottom=0)

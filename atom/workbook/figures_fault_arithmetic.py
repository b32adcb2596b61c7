"""The figures of the fault arithmetic: slots, rows, pools and blocks."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import ArrayLike, NDArray

from atom.model_ops.conv_state_layout import (
    ConvStateLayout,
    Landing,
    landing_ranges,
    row_sources,
)
from atom.workbook.fault_arithmetic import layout_name
from atom.workbook.figures import BLACK, GREEN, ORANGE, PURPLE, SKY

#: colour and hatch of each kind of place
LANDING_STYLE: dict[Landing, tuple[str, str]] = {
    Landing.OWN_SLOT: (GREEN, ""),
    Landing.UNUSED_SLOT: (SKY, "...."),
    Landing.ANOTHER_SLOT: (ORANGE, "////"),
    Landing.ANOTHER_LAYER: (PURPLE, "xxxx"),
    Landing.OUTSIDE: ("#333333", ""),
}

_WIDEST = 72


def slot_figure(layout: ConvStateLayout, slot: int = 0) -> Figure:
    """Which rows of its slot a step reads, for each honest count and the first that is not."""
    counts = [*layout.valid_counts.tolist(), layout.highest_valid_count + 1]
    columns = layout.rows_per_slot + 2
    figure, axes = plt.subplots(figsize=(min(2.5 + 0.75 * columns, 11), 1.2 + 0.42 * len(counts)))
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(len(counts) - 0.5, -0.5)
    axes.grid(visible=False)
    for line, count in enumerate(counts):
        for tap in range(layout.taps):
            column = count - 1 + tap
            inside = column < layout.rows_per_slot
            colour, hatch = LANDING_STYLE[Landing.OWN_SLOT if inside else Landing.ANOTHER_SLOT]
            axes.add_patch(
                Rectangle((column - 0.46, line - 0.4), 0.92, 0.8, fc=colour, ec=BLACK, hatch=hatch)
            )
            if columns <= 24:
                box = {"facecolor": "white", "lw": 0, "pad": 1.2, "alpha": 0.9}
                axes.text(
                    column, line, f"tap {tap}", ha="center", va="center", fontsize=8, bbox=box
                )
    axes.axvline(layout.rows_per_slot - 0.5, color=BLACK, lw=2)
    axes.text(layout.rows_per_slot - 0.42, -0.62, "next slot", fontsize=8.5, va="bottom")
    names = [f"{count}" for count in counts[:-1]] + [f"{counts[-1]} (not honest)"]
    every = max(1, len(counts) // 12)
    axes.set_yticks(range(0, len(counts), every), names[::every])
    axes.set_ylabel("num_accepted_tokens")
    axes.set_xlabel(f"row, counted from the slot's first (slot of {layout.rows_per_slot} rows)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def needed_bonus_figure(layouts: Sequence[ConvStateLayout], row: int, bonus: int) -> Figure:
    """Every (slot, tap) of each layout against the bonus that would make it read ``row``.

    Left: the pool's own slots, coloured by needed bonus minus the stale bonus (0 explains the row).
    Right: the slots, in the pool or past it, where honest counts could read the row.
    """
    figure, grid = plt.subplots(
        len(layouts),
        2,
        figsize=(11.5, 0.9 + 1.75 * len(layouts)),
        width_ratios=(3.4, 1),
        squeeze=False,
    )
    image = None
    found = [_near(layout, row, bonus) for layout in layouts]
    reach = max(float(np.nanmax(np.abs(values), initial=1)) for _, values in found)
    for (left, right), layout, (slots, values) in zip(grid, layouts, found, strict=True):
        norm = TwoSlopeNorm(0, -reach, reach)
        image = left.imshow(values.T, aspect="auto", cmap="RdBu_r", norm=norm)
        _slot_axis(left, slots, layout.taps)
        left.set_title(f"{layout_name(layout)}: slots of the pool")
        exact = np.argwhere(values == 0)
        for column, tap in exact:
            _frame(left, column, tap)
            left.annotate(
                f"slot {slots[column]}, tap {tap}",
                (column, tap),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                fontweight="bold",
                bbox={"facecolor": "white", "lw": 0, "pad": 1.5},
            )
        if not len(exact):
            left.text(
                0.5,
                0.5,
                f"no slot and no tap gives row {row:,} with bonus {bonus:,}",
                transform=left.transAxes,
                ha="center",
                va="center",
                fontsize=8.5,
                fontweight="bold",
                bbox={"facecolor": "white", "lw": 0, "pad": 2},
            )
        _honest_map(right, layout, row)
    if image is not None:
        figure.colorbar(
            image, ax=grid[:, 0].tolist(), label="bonus needed minus\nthe stale bonus", pad=0.01
        )
    return figure


def _near(
    layout: ConvStateLayout, row: int, bonus: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The slots to draw (at most a screenful, around the closest) and [slots, taps] values."""
    sources = row_sources(layout, row)
    values = np.where(sources.possible, sources.counts - 1 - bonus, np.nan)
    if len(values) <= _WIDEST:
        return sources.slots, values
    closest = int(np.nanargmin(np.abs(np.where(np.isnan(values), np.inf, values)).min(axis=1)))
    start = min(max(closest - _WIDEST // 2, 0), len(values) - _WIDEST)
    return sources.slots[start : start + _WIDEST], values[start : start + _WIDEST]


def _slot_axis(axes: Axes, slots: ArrayLike, taps: int) -> None:
    names = np.asarray(slots)
    every = max(1, -(-len(names) // 16))
    axes.set_xticks(range(0, len(names), every), [str(value) for value in names[::every]])
    step = max(1, -(-taps // 6))
    axes.set_yticks(range(0, taps, step))
    axes.set_ylabel("tap")
    axes.set_xlabel("slot")
    axes.grid(visible=False)


def _frame(axes: Axes, column: float, line: float) -> None:
    axes.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, fill=False, ec=BLACK, lw=2.2))


def _honest_map(axes: Axes, layout: ConvStateLayout, row: int) -> None:
    """Counts that the last four groups at or before ``row`` need; honest ones are framed."""
    last = (row // layout.rows_per_slot - layout.first_slot) // layout.slots_per_request
    groups = np.arange(max(last - 3, 0), max(last, 0) + 1)
    slots = layout.first_slot + groups * layout.slots_per_request
    counts = row + 1 - slots[:, None] * layout.rows_per_slot - np.arange(layout.taps)[None, :]
    honest = (counts >= 1) & (counts <= layout.highest_valid_count)
    axes.imshow(
        honest.T.astype(float),
        aspect="auto",
        cmap=ListedColormap(["#EEEEEE", GREEN]),
        vmin=0,
        vmax=1,
    )
    _slot_axis(axes, slots, layout.taps)
    if layout.taps <= 8:
        for (column, tap), count in np.ndenumerate(counts):
            axes.text(
                column,
                tap,
                f"{count}" if count >= 1 else "·",
                ha="center",
                va="center",
                fontsize=8.5,
                color="white" if honest[column, tap] else BLACK,
                fontweight="bold" if honest[column, tap] else "normal",
            )
    known = "in the pool" if slots[-1] < layout.slots else f"pool: {layout.slots} slots"
    axes.set_title(f"count needed ({known})", fontsize=9.5)


def pool_figure(layout: ConvStateLayout, layer: int, slot: int, counts: Sequence[int]) -> Figure:
    """The pool, layer under layer, with the rows that some counts read, and all counts below it."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(10.5, 2.6 + 0.75 * min(layout.layers, 12)), height_ratios=(1.25, 1)
    )
    pool_map(top, layout, layer, slot, counts)
    landing_bands(bottom, layout, slot, max(counts))
    figure.legend(
        handles=[
            Patch(facecolor=colour, hatch=hatch, edgecolor="#222222", label=kind.label)
            for kind, (colour, hatch) in LANDING_STYLE.items()
        ],
        loc="outside upper center",
        ncols=5,
        frameon=False,
    )
    return figure


def pool_map(
    axes: Axes, layout: ConvStateLayout, layer: int, slot: int, counts: Sequence[int]
) -> None:
    """One line a layer, one column a row; markers where a count's first tap reads."""
    shown = min(layout.layers, 12)
    columns = layout.rows_per_layer
    for line in range(shown):
        kind = Landing.ANOTHER_SLOT if line == layer else Landing.ANOTHER_LAYER
        _pool_cells(axes, line, 0, columns, kind)
    requests = set(layout.request_slots.tolist())
    if layout.slots <= 512:
        for other in range(layout.slots):
            if other not in requests:
                _pool_cells(
                    axes,
                    layer,
                    other * layout.rows_per_slot,
                    layout.rows_per_slot,
                    Landing.UNUSED_SLOT,
                )
            axes.plot(
                [other * layout.rows_per_slot] * 2, [-0.36, shown - 0.64], color="white", lw=0.5
            )
    _pool_cells(axes, layer, slot * layout.rows_per_slot, layout.rows_per_slot, Landing.OWN_SLOT)
    outside = []
    # (line, [(column, count)]): counts that lie closer than their words share one label
    inside: list[tuple[int, list[tuple[int, int]]]] = []
    for count in sorted(counts):
        row = int(layout.base_row(slot, count)) + layer * columns
        line, column = divmod(row, columns)
        if line >= shown:
            outside.append(f"count {count:,}: {line - shown + 1:,} layer pools past the last")
            continue
        near = inside and inside[-1][0] == line and column - inside[-1][1][-1][0] < columns / 25
        if near:
            inside[-1][1].append((column, count))
        else:
            inside.append((line, [(column, count)]))
    for line, places in inside:
        spots = [column for column, _ in places]
        axes.plot(spots, [line] * len(spots), "v", color=BLACK, ms=8, mec="white", zorder=5)
        axes.annotate(
            ", ".join(f"{count:,}" for _, count in places),
            (float(np.mean(spots)), line),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            fontweight="bold",
            bbox={"facecolor": "white", "lw": 0, "pad": 0.8, "alpha": 0.85},
            zorder=6,
        )
    _pool_cells(axes, shown, 0, columns, Landing.OUTSIDE)
    axes.text(
        columns / 2,
        shown,
        "outside: " + ("; ".join(outside) or "none of these counts"),
        ha="center",
        va="center",
        color="white",
        fontsize=8.5,
    )
    axes.set_yticks(range(shown + 1), [f"layer {line}" for line in range(shown)] + ["past it"])
    axes.set_ylim(shown + 0.5, -0.75)
    axes.set_xlim(-columns * 0.005, columns * 1.005)
    axes.set_xlabel(
        f"row in the layer's pool ({layout.slots} slots of {layout.rows_per_slot} rows)"
    )
    axes.grid(visible=False)
    axes.set_title(
        f"Rows read for slot {slot} by the kernel of layer {layer}; the number is the count",
        fontsize=10,
    )


def _pool_cells(axes: Axes, line: int, start: int, width: int, kind: Landing) -> None:
    colour, hatch = LANDING_STYLE[kind]
    axes.add_patch(
        Rectangle((start, line - 0.36), width, 0.72, fc=colour, ec="#222222", hatch=hatch, lw=0.6)
    )


def landing_bands(axes: Axes, layout: ConvStateLayout, slot: int, highest_count: int) -> None:
    """For the kernel of each layer: the farthest kind of place that each count reaches."""
    shown = min(layout.layers, 12)
    # every count to 512, then one a pixel of the log axis
    spread = np.geomspace(1, highest_count, 700).astype(np.int64)
    counts = np.unique(np.concatenate([np.arange(1, min(512, highest_count) + 1), spread]))
    for layer in range(shown):
        for first, last, kind in landing_ranges(layout, layer, slot, counts):
            colour, hatch = LANDING_STYLE[kind]
            axes.barh(
                layer,
                last + 1 - first,
                left=first,
                height=0.8,
                color=colour,
                hatch=hatch,
                edgecolor="#222222",
                lw=0.6,
            )
    axes.set_xscale("log", base=2)
    powers = [2**power for power in range(0, highest_count.bit_length() + 1, 2)]
    axes.set_xticks(powers, [f"{value:,}" for value in powers])
    axes.set_xlim(1, highest_count + 1)
    axes.axvline(layout.highest_valid_count + 1, color=BLACK, lw=2)
    axes.set_ylim(shown - 0.5, -0.5)
    axes.set_yticks(range(shown), [f"layer {layer}" for layer in range(shown)])
    axes.grid(visible=False)
    axes.set_xlabel("num_accepted_tokens (log scale); honest counts lie left of the thick line")
    axes.set_title(f"Farthest place that a step of slot {slot} reads, by layer", fontsize=10)

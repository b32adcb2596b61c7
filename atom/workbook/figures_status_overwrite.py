"""The figures of the written-over status: candidate tensors, surviving ones, shared blocks."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from atom.model_ops.status_overwrite import (
    BLOCK_BYTES,
    Fit,
    Reading,
    block_bytes,
    chance_of_ones,
    payload_bytes,
)
from atom.workbook.figures import BLACK, BLUE, GREEN, VERMILION


def puzzle_figure(readings: Sequence[Reading], logged: Sequence[int]) -> Figure:
    """Which tensor of which dtype, over a verdict of which dtype, gives the logged values."""
    names = list(dict.fromkeys(reading.tensor.name for reading in readings))
    kinds = list(dict.fromkeys((reading.verdict_dtype, reading.dtype) for reading in readings))
    kinds.sort(key=lambda pair: pair[0])
    order = [Fit.FITS, Fit.TAIL_DIFFERS, Fit.HEAD_DIFFERS]
    words = {Fit.FITS: "fits", Fit.TAIL_DIFFERS: "later", Fit.HEAD_DIFFERS: "first"}
    table = np.full((len(names), len(kinds)), np.nan)
    figure, axes = plt.subplots(figsize=(11, 1.5 + 0.4 * len(names)))
    for reading in readings:
        line = names.index(reading.tensor.name)
        column = kinds.index((reading.verdict_dtype, reading.dtype))
        table[line, column] = order.index(reading.fit)
        fits = reading.fit is Fit.FITS
        axes.text(
            column,
            line,
            words[reading.fit] + (f"\n{reading.bytes_written} B" if fits else ""),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if fits else BLACK,
            fontweight="bold" if fits else "normal",
        )
    colours = ListedColormap([GREEN, "#F3D9A4", "#E4E4E4"])
    axes.imshow(table, aspect="auto", cmap=colours, vmin=-0.5, vmax=2.5)
    mixed = {reading.tensor.name for reading in readings if reading.tensor.mixed_batch}
    axes.set_yticks(range(len(names)), [f"{n} (*)" if n in mixed else n for n in names])
    axes.set_xticks(range(len(kinds)), [kind for _, kind in kinds])
    for column in range(1, len(kinds)):
        if kinds[column][0] != kinds[column - 1][0]:
            axes.axvline(column - 0.5, color=BLACK, lw=2)
    axes.set_xlabel("dtype of the next step's tensor")
    for verdict in dict.fromkeys(kind[0] for kind in kinds):
        columns = [i for i, kind in enumerate(kinds) if kind[0] == verdict]
        axes.text(
            float(np.mean(columns)), -0.62, f"over a verdict of {verdict}", ha="center", va="bottom"
        )
    axes.grid(visible=False)
    shown = ", ".join(str(value) for value in logged)
    axes.legend(
        handles=[
            Patch(facecolor=GREEN, label=f"fits [{shown}, ...], with the bytes written"),
            Patch(facecolor="#F3D9A4", label="first value right, a later one differs"),
            Patch(facecolor="#E4E4E4", label="first value differs"),
        ],
        loc="upper left",
        bbox_to_anchor=(-0.35, -0.16),
        ncols=3,
        frameon=False,
    )
    return figure


def ones_figure(mean_length: float, batch_size: int) -> Figure:
    """How likely surviving verdict values are all 1, by how many survive."""
    figure, axes = plt.subplots(figsize=(8, 3.2))
    values = np.arange(1, max(batch_size, 3))
    axes.semilogy(values, np.maximum(chance_of_ones(mean_length, values), 1e-12), "o-", ms=4)
    axes.axvline(2, color=VERMILION, ls="--")
    axes.annotate(
        "the two ones that the log shows",
        (2, 0.5),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color=VERMILION,
    )
    axes.set_xlabel("surviving verdict values (count)")
    axes.set_ylabel("chance that all are 1")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def block_figure(batch_size: int, *, rows: int = 2, element_bytes: int = 4) -> Figure:
    """Size of the allocator's block for a status verdict, by batch, with and without the tags."""
    figure, axes = plt.subplots(figsize=(9, 3.2))
    batches = np.arange(1, max(4 * batch_size, 160) + 1)
    for tagged, colour, line, width in ((False, BLUE, "-", 3.2), (True, VERMILION, "--", 1.6)):
        size = payload_bytes(batches, rows=rows, element_bytes=element_bytes, tagged=tagged)
        axes.step(
            batches,
            block_bytes(size) // BLOCK_BYTES,
            where="post",
            color=colour,
            ls=line,
            lw=width,
            label="with 16 bytes of epoch tags" if tagged else "verdict alone",
        )
    axes.axvline(batch_size, color="#444444", ls=":")
    axes.annotate(
        f"batch {batch_size}",
        (batch_size, 0.93),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
    )
    axes.set_xlabel(f"batch (requests), {rows} values of {element_bytes} bytes each")
    axes.set_ylabel("block (units of 512 bytes)")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0.5)
    axes.legend(loc="lower right")
    return figure

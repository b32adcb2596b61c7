"""How every figure of the workbook looks, and the plots that several notebooks share.

Series are told apart by colour (Okabe and Ito's set, safe for colour blindness), by marker and by
hatch, so that a grey print keeps them apart. A kind of evidence shows as the fill of a marker:
hollow for published, full for measured, half for simulated. Every figure carries its evidence
label inside the picture, because pictures are cut out of pages.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy
from pandas import DataFrame

from atom.config import CopyProtocol
from atom.evidence import Evidence

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#767676"

#: name of the arm that repeats the baseline to show how much two equal arms differ
NULL_ARM = "null"

_STAMP_NAME = "atom-evidence-stamp"


@dataclass(frozen=True)
class ArmStyle:
    """Look of one series: colour, marker, line style and hatch, each distinct by itself."""

    colour: str
    marker: str
    linestyle: str | tuple[int, tuple[int, ...]]
    hatch: str
    label: str


PROTOCOL_STYLE: dict[CopyProtocol, ArmStyle] = {
    CopyProtocol.UNPATCHED: ArmStyle(VERMILION, "X", "-", "////", "unpatched"),
    CopyProtocol.RECORD_STREAM: ArmStyle(SKY, "s", "--", "....", "record_stream"),
    CopyProtocol.HOLD: ArmStyle(BLUE, "o", "-.", "\\\\\\\\", "hold"),
    CopyProtocol.BLOCKING: ArmStyle(ORANGE, "^", ":", "xxxx", "blocking"),
    CopyProtocol.ZERO_COPY: ArmStyle(GREEN, "D", (0, (5, 1, 1, 1, 1, 1)), "++++", "zero_copy"),
}

NULL_STYLE = ArmStyle(GREY, "P", (0, (1, 4)), "oooo", "null arm (unpatched again)")


@dataclass(frozen=True)
class EvidenceStyle:
    """Look of a kind of evidence: colour of its label and fill of its markers."""

    colour: str
    fill: str
    label: str


EVIDENCE_STYLE: dict[Evidence, EvidenceStyle] = {
    Evidence.PUBLISHED: EvidenceStyle("#4D4D4D", "none", "published"),
    Evidence.MEASURED: EvidenceStyle("#00543C", "full", "measured on"),
    Evidence.SIMULATED: EvidenceStyle("#7A2F5D", "left", "simulated, profile"),
    Evidence.ARITHMETIC: EvidenceStyle("#003E63", "bottom", "arithmetic"),
}


def arm_style(name: str) -> ArmStyle:
    """Style of a copy protocol or of the null arm, by its name."""
    return NULL_STYLE if name == NULL_ARM else PROTOCOL_STYLE[CopyProtocol(name)]


def style() -> None:
    """Set matplotlib's defaults for the workbook. Call it once, before the first figure."""
    add_own_fonts()
    mpl.rcParams.update(
        {
            "axes.axisbelow": True,
            "axes.edgecolor": "#444444",
            "axes.grid": True,
            "axes.prop_cycle": mpl.cycler(color=[BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY]),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 11,
            "figure.constrained_layout.use": True,
            "figure.dpi": 110,
            "figure.figsize": (9.0, 4.2),
            "font.size": 10,
            "grid.color": "#DDDDDD",
            "grid.linewidth": 0.6,
            "hatch.linewidth": 0.6,
            "legend.fontsize": 9,
            "legend.framealpha": 0.95,
            "lines.markersize": 7,
        }
    )


def add_own_fonts() -> None:
    """Make the fonts that come with matplotlib known, whatever its font cache lists.

    One cache serves every installation of a user, and one whose fonts were not there when it was
    written lists none. Text with a formula then warns of each missing family, on the page.
    """
    own = Path(mpl.get_data_path()) / "fonts" / "ttf"
    known = {Path(font.fname).name for font in font_manager.fontManager.ttflist}
    for file in sorted(own.glob("*.ttf")):
        if file.name not in known:
            font_manager.fontManager.addfont(file)


def evidence_label(evidence: Evidence | str, text: str = "") -> str:
    """The words of a stamp, e.g. ``measured on NVIDIA H200, 2026-01-31, run 3fa2c1``."""
    kind = Evidence(evidence)
    label = EVIDENCE_STYLE[kind].label
    if not text:
        return str(kind)
    joined = kind in (Evidence.MEASURED, Evidence.SIMULATED)
    return f"{label} {text}" if joined else f"{label}: {text}"


def origin_text(text: str, run_ids: Sequence[str] = (), date: str = "") -> str:
    """Machine or profile, date and run ids in one line, for a stamp.

    Args:
        text: machine or virtual profile.
        run_ids: recorded runs; each begins with its own date, which then stands for ``date``.
        date: ISO date of a figure that was drawn from no recorded run.
    """
    starts = [name[:8] for name in run_ids if name[:8].isdigit()]
    days = dict.fromkeys(f"{day[:4]}-{day[4:6]}-{day[6:]}" for day in starts) or [date]
    # a text may name date and run already
    more = [name for name in run_ids if name.rsplit("-", 1)[-1] not in text]
    parts = [day for day in days if day not in text]
    if more:
        parts.append(f"{'run' if len(more) == 1 else 'runs'} {', '.join(more)}")
    return "; ".join(part for part in (text, ", ".join(filter(None, parts))) if part)


def stamp(
    figure: Figure,
    evidence: Evidence | str,
    text: str = "",
    *,
    run_ids: Sequence[str] = (),
    date: str = "",
) -> None:
    """Write the evidence label into the figure's bottom right corner; a later stamp replaces it.

    Args:
        figure: any matplotlib figure.
        evidence: kind of every number in it.
        text: machine or virtual profile.
        run_ids: recorded runs that it was drawn from.
        date: ISO date, for a figure of no recorded run.
    """
    kind = Evidence(evidence)
    label = evidence_label(kind, origin_text(text, run_ids, date))
    # about what fits below nine inches of figure at this size
    label = textwrap.fill(label, int(figure.get_figwidth() * 12), break_on_hyphens=False)
    for old in [item for item in figure.texts if item.get_gid() == _STAMP_NAME]:
        old.remove()
    # below the lower edge: savefig's tight box takes it in, and no axes lie there
    figure.text(
        0.995,
        -0.015,
        label,
        gid=_STAMP_NAME,
        ha="right",
        va="top",
        fontsize=8.5,
        fontweight="bold",
        color="white",
        bbox={"boxstyle": "round,pad=0.35", "facecolor": EVIDENCE_STYLE[kind].colour, "lw": 0},
    )


def evidence_handle(evidence: Evidence | str) -> Line2D:
    """Legend entry of a kind of evidence: a grey marker with that kind's fill."""
    kind = Evidence(evidence)
    return Line2D(
        [],
        [],
        linestyle="none",
        marker="o",
        color="#333333",
        markerfacecoloralt="white",
        fillstyle=EVIDENCE_STYLE[kind].fill,
        label=str(kind),
    )


def arm_handle(name: str) -> Line2D:
    """Legend entry of an arm: its colour and marker, full."""
    arm = arm_style(name)
    return Line2D([], [], linestyle="none", marker=arm.marker, color=arm.colour, label=arm.label)


def stale_rate_plot(axes: Axes, rows: DataFrame, *, legend: bool = True) -> None:
    """Stale rates with their exact intervals, one line a label, one point a row.

    Args:
        axes: target; x is the stale rate in percent.
        rows: columns label, stale, trials, low, high (0 to 1), evidence, protocol (a copy protocol
            or ``null``). Labels keep the order of their first row, from the top.
        legend: draw the legend of arms and kinds of evidence above the axes.
    """
    labels = list(dict.fromkeys(rows["label"]))
    position = {label: -float(number) for number, label in enumerate(labels)}
    points: list[dict[Any, Any]] = rows.to_dict("records")
    size = Counter(row["label"] for row in points)
    seen: Counter[str] = Counter()
    step = 0.8 / max(size.values())
    for row in points:
        label = row["label"]
        y = position[label] + step * ((size[label] - 1) / 2 - seen[label])
        seen[label] += 1
        rate = row["stale"] / row["trials"]
        low, high = max(rate - row["low"], 0), max(row["high"] - rate, 0)
        arm = arm_style(row["protocol"])
        axes.errorbar(
            100 * rate,
            y,
            xerr=[[100 * low], [100 * high]],
            color=arm.colour,
            marker=arm.marker,
            fillstyle=EVIDENCE_STYLE[Evidence(row["evidence"])].fill,
            markerfacecoloralt="white",
            capsize=3,
            linestyle="none",
            elinewidth=1.4,
        )
        axes.annotate(
            f"{int(row['stale'])}/{int(row['trials'])}",
            (1.01, y),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=arm.colour if arm.colour != SKY else "#1F6FA3",
        )
    axes.set_yticks([position[label] for label in labels], labels)
    axes.set_ylim(-len(labels) + 0.45, 0.55)
    for number in range(1, len(labels)):
        axes.axhline(0.5 - number, color="#CCCCCC", lw=0.8, zorder=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(-3, 103)
    axes.set_xlabel("stale trials (%), exact 95% interval; stale/trials at the right")
    if legend:
        arms = [arm_handle(str(name)) for name in dict.fromkeys(rows["protocol"])]
        kinds = [evidence_handle(kind) for kind in dict.fromkeys(rows["evidence"])]
        axes.legend(
            handles=arms + kinds,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=min(len(arms) + len(kinds), 4),
            frameon=False,
            borderaxespad=0.2,
        )


@dataclass(frozen=True)
class RoleStyle:
    """Look of a kind of work in a timeline."""

    colour: str
    hatch: str
    label: str
    dark: bool = False


#: what a bar of a timeline does; the key is the ``role`` of a span
ROLE_STYLE: dict[str, RoleStyle] = {
    "producer": RoleStyle(SKY, "", "writes this step's values"),
    "front": RoleStyle("#D9D9D9", "////", "work in front of the copy"),
    "copy": RoleStyle(BLUE, "", "copy to the host", True),
    "writer": RoleStyle(VERMILION, "\\\\\\\\", "writes the next step's tensor"),
    "wait": RoleStyle("#FFFFFF", "....", "waits"),
    "host": RoleStyle(YELLOW, "", "host"),
    "read": RoleStyle(GREEN, "", "host reads the result", True),
}

Span = tuple[str, str, float, float, str]
Ownership = tuple[str, float, float]

_OWNER_STYLES = ((SKY, ""), (VERMILION, "\\\\\\\\"), ("#FFFFFF", "...."), (PURPLE, "xxxx"))


def timeline_plot(
    axes: Axes,
    spans: Sequence[Span],
    ownership: Sequence[Ownership],
    *,
    marks: Sequence[tuple[str, str, float]] = (),
    legend: bool = True,
    unit: str = "us",
) -> None:
    """Who ran when, and who owned the block: one lane a stream, a strip of owners below.

    Args:
        axes: target; x is time in ``unit``.
        spans: (lane, label, start, end, role); roles as in :data:`ROLE_STYLE`. Lanes keep the
            order of their first span, from the top.
        ownership: (owner, start, end) of the block; an owner that begins with "free" is white.
        marks: (lane, label, time) of moments, drawn as a tick with its words below the lane.
        legend: draw the legend of roles below the axes.
        unit: unit of time for the axis.
    """
    lanes = list(dict.fromkeys([span[0] for span in spans] + [mark[0] for mark in marks]))
    lanes.append("block owned by")
    height = {lane: -float(number) for number, lane in enumerate(lanes)}
    times = [t for s in spans for t in s[2:4]] + [t for o in ownership for t in o[1:3]]
    first, last = min(times), max(times)
    width = max(last - first, 1e-9)
    for lane, label, start, end, role in spans:
        look = ROLE_STYLE[role]
        bar = max(end - start, width * 0.004)
        _bar(axes, height[lane], start, bar, look.colour, look.hatch)
        _bar_text(axes, label, height[lane], start, bar, width, dark=look.dark)
    names = dict.fromkeys(owner for owner, _, _ in ownership)
    owned = [name for name in names if not name.startswith("free")]
    owners = {name: _OWNER_STYLES[number % 4] for number, name in enumerate(owned)}
    for owner, start, end in ownership:
        colour, hatch = owners.get(owner, ("#FFFFFF", ""))
        _bar(axes, height["block owned by"], start, end - start, colour, hatch)
        _bar_text(axes, owner, height["block owned by"], start, end - start, width)
    for lane, label, when in marks:
        axes.plot([when, when], [height[lane] - 0.45, height[lane] + 0.3], color=BLACK, lw=1.6)
        # words of bars stand above their lane, those of moments below it
        late = when - first > 0.6 * width
        axes.annotate(
            label,
            (when, height[lane] - 0.38),
            xytext=(-4 if late else 4, 0),
            textcoords="offset points",
            ha="right" if late else "left",
            fontsize=8,
            va="center",
        )
    axes.set_yticks([height[lane] for lane in lanes], lanes)
    axes.set_ylim(-len(lanes) + 0.4, 0.65)
    axes.axhline(height["block owned by"] + 0.49, color="#444444", lw=1)
    axes.set_xlim(first - 0.01 * width, last + 0.01 * width)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"time ({unit})")
    if legend:
        axes.legend(
            handles=role_handles([span[4] for span in spans]),
            loc="upper left",
            # below the axis' words, however high the axes are
            bbox_to_anchor=(0, 0),
            bbox_transform=offset_copy(axes.transAxes, axes.figure, 0, -36, units="points"),
            ncols=4,
            frameon=False,
        )


def role_handles(roles: Sequence[str]) -> list[Patch]:
    """Legend entries of the roles, in the order of their first use."""
    return [
        Patch(
            facecolor=ROLE_STYLE[role].colour,
            hatch=ROLE_STYLE[role].hatch,
            edgecolor="#222222",
            label=ROLE_STYLE[role].label,
        )
        for role in dict.fromkeys(roles)
    ]


def _bar(axes: Axes, y: float, start: float, width: float, colour: str, hatch: str) -> None:
    axes.barh(
        y, width, left=start, height=0.6, color=colour, hatch=hatch, edgecolor="#222222", lw=0.8
    )


def _bar_text(
    axes: Axes, label: str, y: float, start: float, bar: float, width: float, *, dark: bool = False
) -> None:
    # a character takes about 0.9% of the axes at this size; words that do not fit go above
    if len(label) * 0.0095 * width < bar:
        axes.text(
            start + bar / 2,
            y,
            label,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else BLACK,
            bbox=None if dark else {"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1},
        )
    elif label:
        right = start + len(label) * 0.0095 * width > _drawn_end(axes, start)
        axes.text(
            start + bar if right else start,
            y + 0.31,
            label,
            ha="right" if right else "left",
            va="bottom",
            fontsize=7.5,
        )


def _drawn_end(axes: Axes, start: float) -> float:
    """Right end of the time that bars drawn so far reach, at least ``start``."""
    return max(float(axes.dataLim.x1), start)

"""Figures of accuracy: published and own scores in panels of their own, and the damage curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from atom.benchmarks.accuracy_settings import HOLD, UNPATCHED
from atom.config import CopyProtocol
from atom.evidence import Evidence
from atom.workbook.accuracy_analysis import AccuracySet, PointResult
from atom.workbook.figures import BLACK, EVIDENCE_STYLE, PROTOCOL_STYLE, ArmStyle
from atom.workbook.published_derived import environment_value, gsm8k_derived

#: lines of the sizes of stores
_LINES = (":", "--", "-")


@dataclass(frozen=True)
class Score:
    """A score with its interval, as a line of a panel."""

    label: str
    protocol: CopyProtocol | None
    middle: float
    low: float
    high: float


def published_scores() -> list[Score]:
    """Strict-match of each run of the source's table, with the Wilson interval of its count."""
    items = int(environment_value("gsm8k", "items"))
    found = []
    for row in gsm8k_derived().dropna(subset=["correct_items"]).to_dict("records"):
        if not str(row["source_place"]).startswith("Accuracy table"):
            continue
        protocol = row["protocol"] if isinstance(row["protocol"], str) else None
        pool = f"pool {row['cpu_pool_gib']:g} GiB" if row["offload"] else "no pool"
        found.append(
            Score(
                f"{protocol or 'an older result'}, {pool}",
                None if protocol is None else CopyProtocol(protocol),
                row["correct_items"] / items,
                row["wilson_low"],
                row["wilson_high"],
            )
        )
    return found


def own_scores(points: Sequence[PointResult]) -> list[Score]:
    """Strict-match of own points without pressure."""
    return [
        Score(one.name, one.row["protocol"], *one.score)
        for one in points
        if one.score is not None and not one.row["pressure_mib"]
    ]


def scores_figure(published: Sequence[Score], own: AccuracySet | None) -> Figure:
    """Scores as intervals: the published ones, and beside them ours on an axis of its own.

    Args:
        published: of the source's model.
        own: of ours; ``None`` where there is none that means anything.
    """
    ours = own_scores(own.grid()) if own is not None else []
    rows = max(len(published), len(ours))
    figure, panels = plt.subplots(
        1, 2, figsize=(11.0, 1.6 + 0.27 * rows), width_ratios=(1, 1), squeeze=False
    )
    left, right = panels[0]
    _panel(left, published, Evidence.PUBLISHED)
    left.set_title("published: GSM8K, the source's model")
    if own is not None and ours:
        _panel(right, ours, own.kind)
        right.set_title(f"{own.kind}: word problems, {own.model}")
    else:
        right.set_title("measured: word problems, this engine")
        right.text(
            0.5, 0.5, "not measured yet", ha="center", va="center", transform=right.transAxes
        )
        right.set_xticks([])
        right.set_yticks([])
        right.grid(visible=False)
    return figure


def _panel(axes: Axes, scores: Sequence[Score], kind: Evidence) -> None:
    for place, score in enumerate(scores):
        look = _look(score.protocol)
        axes.errorbar(
            100 * score.middle,
            place,
            xerr=[[100 * (score.middle - score.low)], [100 * (score.high - score.middle)]],
            marker=look.marker if look else "o",
            color=look.colour if look else BLACK,
            fillstyle=EVIDENCE_STYLE[kind].fill,
            capsize=3,
        )
    axes.set_yticks(range(len(scores)), [score.label for score in scores], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("strict-match, %, with 95% intervals (Wilson)")


def _look(protocol: CopyProtocol | str | None) -> ArmStyle | None:
    return None if protocol is None else PROTOCOL_STYLE[CopyProtocol(protocol)]


def damage_figure(sets: Sequence[AccuracySet]) -> Figure:
    """Share of damaged items against how many steps had a store, a panel a set.

    A line a size of the stores, none where it has one point; points without stores stand at the
    left edge.
    """
    figure, panels = plt.subplots(
        1, len(sets), figsize=(6.4 * len(sets), 4.0), squeeze=False, sharey=True
    )
    for axes, one in zip(panels[0], sets, strict=True):
        _damage_panel(axes, one)
        axes.set_ylabel(f"{one.damage_words}, % of the items")
    return figure


def _damage_panel(axes: Axes, found: AccuracySet) -> None:
    ladder = found.ladder(UNPATCHED)
    edge = 100 * min((point.pressure[1] for point in ladder), default=1.0) / 3
    sizes = sorted({point.pressure[0] for point in ladder})
    for arm in (UNPATCHED, HOLD):
        look = PROTOCOL_STYLE[CopyProtocol(arm)]
        points = found.ladder(arm)
        bare = found.find(arm, pool=False, drafts=True)
        for size in sizes:
            known = [p for p in points if p.pressure[0] == size]
            if known and bare is not None:
                known = [bare, *known]
            pairs = [(p, share) for p in known if (share := found.damage(p)) is not None]
            if not pairs:
                continue
            shares = [share for _, share in pairs]
            axes.errorbar(
                [100 * point.pressure[1] or edge for point, _ in pairs],
                [100 * share[0] for share in shares],
                yerr=[
                    [100 * (share[0] - share[1]) for share in shares],
                    [100 * (share[2] - share[0]) for share in shares],
                ],
                marker=look.marker,
                color=look.colour,
                alpha=0.4 + 0.6 * (sizes.index(size) + 1) / len(sizes),
                # a line from a single pressed point would show damage where nothing was measured
                linestyle=_LINES[sizes.index(size) % len(_LINES)] if len(pairs) > 2 else "none",
                markersize=5 + 3 * sizes.index(size),
                fillstyle=EVIDENCE_STYLE[found.kind].fill,
                capsize=3,
                label=f"{look.label}, {size:g} MiB",
            )
    axes.set_xscale("log")
    steps = sorted({100 * point.pressure[1] for point in ladder})
    if steps:
        axes.set_xticks([edge, *steps], ["none", *(f"{share:.3g}" for share in steps)])
        axes.minorticks_off()
    axes.set_ylim(-3, 103)
    axes.set_xlabel("steps with a store on other streams, %")
    axes.set_title(f"{found.kind}: {found.model}", fontsize=10)
    if sizes:
        # above the panel: within it the legend would cover an interval
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.06), ncols=2, frameon=False, fontsize=8)

"""Figures of the source-lifetime notebook, and program text side by side."""

from __future__ import annotations

import html
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from atom.benchmarks.lifetime_check import counterexample, replay_recorded
from atom.benchmarks.lifetime_paths import LifetimePath
from atom.benchmarks.lifetime_programs import Following, LifetimeProgram
from atom.benchmarks.source_lifetime_rows import CONTROL, PROTECTED
from atom.config import CopyProtocol
from atom.lifetime.counterexample import OwnerBar, SpanBar, timeline
from atom.lifetime.explore import NotRepeatable, replay
from atom.lifetime.explore_device import ExploredDevice
from atom.workbook.figures import timeline_plot
from atom.workbook.lifetime_analysis import seven_paths, words

_TITLES = {PROTECTED: "with the protocol in force", CONTROL: "its protection taken away (control)"}


def counts_figure(trials: pd.DataFrame, title: str) -> Figure:
    """Stale of trials by path and protocol: one panel as it is, one with the protection gone."""
    rows = seven_paths(trials)
    paths = list(dict.fromkeys(rows["path"]))
    protocols = [str(p) for p in CopyProtocol if str(p) in set(rows["protocol"])]
    figure, all_axes = plt.subplots(
        1, 2, figsize=(11.0, 1.4 + 0.36 * len(paths)), sharey=True, squeeze=False
    )
    for axes, arm in zip(all_axes[0], (PROTECTED, CONTROL), strict=True):
        _counts_panel(axes, rows[rows["arm"] == arm], paths, protocols)
        axes.set_title(_TITLES[arm], fontsize=10)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _counts_panel(
    axes: Axes, rows: pd.DataFrame, paths: Sequence[str], protocols: Sequence[str]
) -> None:
    shares = np.full((len(paths), len(protocols)), np.nan)
    for row in rows.itertuples():
        i, j = paths.index(str(row.path)), protocols.index(str(row.protocol))
        stale, trials = int(str(row.stale)), int(str(row.trials))
        shares[i, j] = stale / trials
        colour = "white" if shares[i, j] > 0.6 else "black"
        axes.text(j, i, f"{stale}/{trials}", ha="center", va="center", fontsize=9, color=colour)
    for i, j in zip(*np.nonzero(np.isnan(shares)), strict=True):
        axes.text(j, i, "protects\nnothing", ha="center", va="center", fontsize=7, color="#555555")
    axes.imshow(shares, cmap="Oranges", vmin=0, vmax=1.25, aspect="auto")
    axes.set_xticks(range(len(protocols)), protocols, fontsize=8)
    axes.set_yticks(range(len(paths)), [words(path) for path in paths])
    axes.set_xticks(np.arange(len(protocols) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(paths) + 1) - 0.5, minor=True)
    axes.grid(visible=False)
    axes.grid(which="minor", color="#999999", lw=0.6)
    axes.tick_params(which="minor", length=0)


@dataclass(frozen=True)
class Schedule:
    """One program under one schedule.

    Attributes:
        protocol: what protects the source.
        spans, ownership: bars as :func:`atom.workbook.figures.timeline_plot` takes them.
        got: what the host got, in words.
        foreign: whether the host got another step's bytes.
        steps: of the schedule, until the host has read.
    """

    protocol: CopyProtocol
    spans: list[SpanBar]
    ownership: list[OwnerBar]
    got: str
    foreign: bool
    steps: int


def late_copy(path: LifetimePath = LifetimePath.SPEC_STATUS) -> tuple[Schedule, Schedule]:
    """The shortest schedule that breaks the unpatched code, and the held code under the same.

    The following step is a prefill, which writes its metadata.
    """
    program = LifetimeProgram(
        path, CopyProtocol.UNPATCHED, 1, following=Following.PREFILL, again=False
    )
    found = counterexample(program)
    if found is None:
        raise NotRepeatable("no schedule breaks the unpatched code")
    record, _ = found
    steps = record.example.steps
    held = replace(program, protocol=CopyProtocol.HOLD)
    device, _ = replay(held, steps)
    return (
        _schedule(CopyProtocol.UNPATCHED, replay_recorded(record), len(steps)),
        _schedule(CopyProtocol.HOLD, device, len(steps)),
    )


def _schedule(protocol: CopyProtocol, device: ExploredDevice, steps: int) -> Schedule:
    spans, ownership = timeline(device, steps)
    foreign = [violation for violation in device.violations if violation.kind == "foreign bytes"]
    got = foreign[0].text.split(": ", 1)[1].split(": first tag")[0] if foreign else "step 1's bytes"
    owners: list[OwnerBar] = []
    for owner, start, end in ownership:
        # tensor 1 is this step's: nothing was allocated before it
        name = {"free": "free", "tensor 1": "this step's"}.get(owner, "next step's")
        if owners and owners[-1][0] == name:
            start = owners.pop()[1]
        owners.append((name, start, end))
    return Schedule(protocol, _short(spans), owners, got, bool(foreign), steps)


_SHORT = {
    "allocate": "new",
    "allocate pinned memory": "pin",
    "queue fill": "fill>",
    "queue stamp_epoch_tag": "tag>",
    "queue copy": "copy>",
    "record an event": "rec",
    "queue a wait for an event": "dep>",
    "wait for an event": "wait",
    "stamp_epoch_tag": "tag",
}


def _short(spans: Sequence[SpanBar]) -> list[SpanBar]:
    """Labels that fit a bar of one step."""
    short: list[SpanBar] = []
    for lane, label, start, end, role in spans:
        text = _SHORT.get(label, label)
        text = "read" if label.startswith("read") else text
        text = "copy" if role == "copy" else text
        if role == "producer" and any(bar[1] == "tag" for bar in short):
            # behind this step's tag comes the following step, whichever block it writes
            role = "writer"
        short.append((lane, text, start, end, role))
    return short


SHORT_LABELS = (
    "host steps: new, a device allocation; pin, a pinned buffer; fill>, tag> and copy> queue work; "
    "dep>, the copy stream is told to wait for the producer; rec, an event is recorded; wait, for "
    "the copy's event"
)


def schedules_figure(schedules: Sequence[Schedule]) -> Figure:
    """One timeline a schedule, one above the other: a step is one unit wide."""
    figure, all_axes = plt.subplots(
        len(schedules), 1, figsize=(11.0, 2.7 * len(schedules)), sharex=True, squeeze=False
    )
    for number, (axes, one) in enumerate(zip(all_axes[:, 0], schedules, strict=True)):
        last = number == len(schedules) - 1
        timeline_plot(axes, one.spans, one.ownership, legend=last, unit="steps of the schedule")
        axes.set_title(textwrap.fill(f"{one.protocol}: {one.got}", 96))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if not last:
            axes.set_xlabel("")
    return figure


# -- program text


def live_text(function: Callable[..., Any]) -> str:
    """The present source text of a function, without its docstring."""
    text = textwrap.dedent(inspect.getsource(function)).rstrip()
    documentation = function.__doc__
    if documentation:
        start = text.index('"""')
        end = text.index('"""', start + 3) + 3
        head = text[:start].rstrip()
        text = f"{head}{text[end:]}"
    return text


def show_code(columns: Sequence[tuple[str, Sequence[Callable[..., Any]]]]) -> None:
    """Display functions of the running code in columns beside each other.

    Args:
        columns: heading, and the functions below it.
    """
    cells, plain = [], []
    for heading, functions in columns:
        text = "\n\n".join(live_text(function) for function in functions)
        cells.append(
            '<div style="flex: 1 1 24em; min-width: 0">'
            f'<p class="atom-say"><b>{html.escape(heading)}</b></p>'
            '<pre style="white-space: pre-wrap; font-size: 0.8em">'
            f"<code>{html.escape(text)}</code></pre></div>"
        )
        plain.append(f"--- {heading}\n{text}")
    markup = f'<div style="display: flex; flex-wrap: wrap; gap: 1em">{"".join(cells)}</div>'
    display({"text/html": markup, "text/plain": "\n\n".join(plain)}, raw=True)

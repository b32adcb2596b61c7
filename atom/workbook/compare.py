"""``python -m atom compare A B``: two recorded runs, or a run and the published figures.

An experiment takes part by an entry in :data:`COMPARISONS`. What it yields for one side is a
:class:`Side`: rates by cell and quotients of times to the side's own null arm, both without a
unit, and times, which are compared on one machine only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import compare_points, compare_race
from atom.workbook.compare_model import Comparison, Rate, Side, TimeRatio
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RUN_FILE
from atom.workbook.statistics import difference_interval
from atom.workbook.tables import shown_path

PUBLISHED = "published"
#: experiment to how its runs are compared
COMPARISONS: Mapping[str, Comparison] = {
    "race": compare_race.COMPARISON,
    **compare_points.COMPARISONS,
}
#: what may differ if told so
DIFFERENCES = ("load", "model", "seed", "settings")
_BOOTSTRAP_SEED = 7
#: of a side that shares none with the other, named in the error
_SHOWN_CELLS = 3


@dataclass(frozen=True)
class RateLine:
    """One cell of both sides. ``low`` and ``high`` bound B - A with 95% confidence."""

    cell: str
    a: Rate
    b: Rate
    difference: float
    low: float
    high: float

    @property
    def finding(self) -> str:
        """``B higher``, ``B lower`` or ``no difference seen``."""
        if self.low > 0:
            return "B higher"
        return "B lower" if self.high < 0 else "no difference seen"


@dataclass(frozen=True)
class RatioLine:
    """A quotient of B to A of one figure, with its bootstrap interval if it has repeats."""

    name: str
    unit: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Result:
    """What a comparison found.

    Attributes:
        experiment: of both sides.
        a, b: the sides.
        same_gpu: whether both ran on one kind of machine.
        allowed: differences that were allowed and exist, in words.
        rates: cells that both sides have.
        ratios: quotients to each side's own null arm; times in us where ``same_gpu``.
        only_a, only_b: cells that one side has.
    """

    experiment: str
    a: Side
    b: Side
    same_gpu: bool
    allowed: tuple[str, ...]
    rates: tuple[RateLine, ...]
    ratios: tuple[RatioLine, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def compare(a: str, b: str, allowed: Sequence[str] = ()) -> Result:
    """Compare two sides, each a run folder or ``published``.

    Args:
        a, b: the sides.
        allowed: of :data:`DIFFERENCES`, what may differ.

    Raises:
        BadInput: no such run, no experiment in common, nothing in common, or a difference that was
            not allowed.
    """
    if a == b == PUBLISHED:
        raise BadInput("compare: one side must be a run; both are the published figures")
    runs = {name: _find_run(name) for name in (a, b) if name != PUBLISHED}
    experiments = {run.provenance.experiment for run in runs.values()}
    if len(experiments) > 1:
        raise BadInput(f"compare: runs of different experiments: {', '.join(sorted(experiments))}")
    (experiment,) = experiments
    comparison = COMPARISONS.get(experiment)
    if comparison is None:
        known = ", ".join(COMPARISONS)
        raise BadInput(f"compare: runs of {experiment} cannot be compared (only: {known})")
    against_published = PUBLISHED in (a, b)
    sides = [
        comparison.published()
        if name == PUBLISHED
        else _side(comparison, runs[name], against_published)
        for name in (a, b)
    ]
    differing = _differing(sides[0], sides[1])
    refused = [text for kind, text in differing if kind not in allowed]
    if refused:
        kinds = " ".join(sorted({kind for kind, _ in differing if kind not in allowed}))
        raise BadInput(
            "compare: the two sides differ in more than what is compared:\n"
            + "\n".join(f"  {text}" for text in refused)
            + f"\nIf that is meant: --allow-different {kinds}"
        )
    result = _result(experiment, sides[0], sides[1], tuple(text for _, text in differing))
    stopped = [_stopped_early(runs[name]) for name in (a, b) if name != PUBLISHED]
    return replace(result, notes=(*result.notes, *filter(None, stopped)))


def _find_run(name: str) -> Run:
    folder = Path(name)
    if not folder.is_dir():
        raise BadInput(f"compare: {name}: no such folder (a run folder, or the word {PUBLISHED})")
    if not (folder / RUN_FILE).is_file():
        inside = sorted(shown_path(file.parent) for file in folder.rglob(RUN_FILE))
        if len(inside) != 1:
            listed = "".join(f"\n  {path}" for path in inside) or " none"
            raise BadInput(f"compare: {name} is no run folder; runs below it:{listed}")
        folder = next(iter(folder.rglob(RUN_FILE))).parent
    run = load_run(folder)
    if run.provenance.exit_state != "finished" and not _stopped_early(run):
        raise BadInput(
            f"compare: {shown_path(folder)} is {run.provenance.exit_state}, not finished: resume it"
        )
    return run


def _stopped_early(run: Run) -> str:
    """What a run left out that stopped where it was told to; its other points are whole."""
    left_out = set(run.provenance.facts.get("stopped_early", {}).get("not_run", {}))
    # a run that was gone on with keeps what it left at first
    for table in run.tables.values():
        left_out -= set(table.get("point_id", ()))
    if run.provenance.exit_state == "finished":
        left_out.clear()
    named = f"{shown_path(run.path)} stopped as it was told to: {len(left_out)} points did not run"
    return named if left_out else ""


def _side(comparison: Comparison, run: Run, against_published: bool) -> Side:
    return comparison.as_published(run) if against_published else comparison.whole(run)


def _differing(a: Side, b: Side) -> list[tuple[str, str]]:
    """Kind and text of each setting that both sides state and state differently."""
    found = []
    for kind in DIFFERENCES:
        first, second = a.conditions.get(kind, {}), b.conditions.get(kind, {})
        for name in sorted(first.keys() & second.keys()):
            if first[name] != second[name]:
                found.append((kind, f"{kind}: {name} is {first[name]} in A, {second[name]} in B"))
    return found


def _some_cells(side: Side) -> str:
    cells = [*side.rates, *side.to_null, *side.times]
    more = f" and {len(cells) - _SHOWN_CELLS} more" if len(cells) > _SHOWN_CELLS else ""
    return f"{'; '.join(cells[:_SHOWN_CELLS])}{more}" if cells else "none"


def _result(experiment: str, a: Side, b: Side, allowed: tuple[str, ...]) -> Result:
    # published figures name a machine only by inference, and no time stands among them
    same = a.machine == b.machine and a.evidence == b.evidence != Evidence.PUBLISHED
    lines = []
    for cell in (cell for cell in a.rates if cell in b.rates):
        first, second = a.rates[cell], b.rates[cell]
        low, high = difference_interval(first.rate, first.interval, second.rate, second.interval)
        lines.append(RateLine(cell, first, second, second.rate - first.rate, low, high))
    ratios = [
        _ratio(name, a.to_null[name], b.to_null[name], a.base)
        for name in a.to_null
        if name in b.to_null
    ]
    if same:
        ratios += [
            _ratio(name, a.times[name], b.times[name], "us") for name in a.times if name in b.times
        ]
    if not lines and not ratios:
        raise BadInput(
            f"compare: the two sides have no cell in common; A has {_some_cells(a)}, B has "
            f"{_some_cells(b)}"
        )
    notes = [
        f"{len(lines)} cells at 95% each: about {len(lines) * 0.05:.1f} of them would stand out by "
        "chance where nothing differs",
        "intervals of trials that come in processes are clustered by process; 0 stale is no proof",
    ]
    if experiment != "race":
        notes.append("trials of one process or engine are counted as if they were independent")
    if not same:
        notes.append(
            "different machines or kinds of evidence: times are left out, only figures "
            "without a unit are compared"
        )
    return Result(
        experiment,
        a,
        b,
        same,
        allowed,
        tuple(lines),
        tuple(ratios),
        tuple(cell for cell in a.rates if cell not in b.rates),
        tuple(cell for cell in b.rates if cell not in a.rates),
        tuple(notes),
    )


def _ratio(name: str, a: TimeRatio, b: TimeRatio, unit: str) -> RatioLine:
    ratio, low, high = b.over(a, _BOOTSTRAP_SEED)
    if min(len(a.top), len(b.top)) < 2:
        # resampling one value would give an interval without width
        return RatioLine(name, unit, a.value, b.value, ratio, None, None)
    return RatioLine(name, unit, a.value, b.value, ratio, low, high)


def as_markdown(result: Result) -> str:
    """The comparison as Markdown."""
    parts = [f"# Comparison of two sides of the {result.experiment} experiment", ""]
    for name, side in (("A", result.a), ("B", result.b)):
        parts.append(f"- **{name}** ({side.evidence}): {side.label}")
    if result.allowed:
        parts += ["", "Differs, as allowed:", "", *(f"- {text}" for text in result.allowed)]
    stale = "stale" if result.experiment == "race" else "events"
    if result.rates:
        parts += ["", f"## {stale.capitalize()} of trials", ""]
        parts += [
            f"| cell | A {stale}/trials | A 95% | B {stale}/trials | B 95% "
            "| B - A | 95% | finding |",
            "|---|---:|---:|---:|---:|---:|---:|---|",
        ]
    for line in result.rates:
        cells = [line.cell, *_rate_cells(line.a), *_rate_cells(line.b)]
        cells += [f"{line.difference:+.1%}", f"[{line.low:+.1%}, {line.high:+.1%}]", line.finding]
        parts.append("| " + " | ".join(cells) + " |")
    if result.ratios:
        parts += [
            "",
            "## Quotients and times",
            "",
            "| figure | unit | A | B | B / A | 95% |",
            "|---|---|---:|---:|---:|---:|",
        ]
        for one in result.ratios:
            known = one.low is not None and one.high is not None
            interval = f"[{one.low:.2f}, {one.high:.2f}]" if known else "one value"
            cells = [
                one.name,
                one.unit,
                f"{one.a:.2f}",
                f"{one.b:.2f}",
                f"{one.ratio:.2f}",
                interval,
            ]
            parts.append("| " + " | ".join(cells) + " |")
    parts += ["", *(f"- {note}" for note in result.notes)]
    for name, rest in (("A", result.only_a), ("B", result.only_b)):
        if rest:
            shown = ", ".join(rest[:6]) + (", ..." if len(rest) > 6 else "")
            parts.append(f"- in {name} alone, not compared: {len(rest)} cells ({shown})")
    return "\n".join(parts)


def _rate_cells(rate: Rate) -> list[str]:
    low, high = rate.interval
    return [f"{rate.stale}/{rate.trials}", f"[{low:.1%}, {high:.1%}]"]


def as_json(result: Result) -> str:
    """The comparison as JSON."""

    def rate(one: Rate) -> dict[str, Any]:
        low, high = one.interval
        return {
            "stale": one.stale,
            "trials": one.trials,
            "rate": one.rate,
            "low": low,
            "high": high,
            "processes": one.processes,
        }

    def side(one: Side) -> dict[str, Any]:
        return {
            "label": one.label,
            "evidence": str(one.evidence),
            "machine": one.machine,
            "run_id": one.run_id,
            "conditions": one.conditions,
        }

    values = {
        "format": 1,
        "experiment": result.experiment,
        "a": side(result.a),
        "b": side(result.b),
        "same_gpu": result.same_gpu,
        "allowed": list(result.allowed),
        "confidence": 0.95,
        "rates": [
            {
                "cell": line.cell,
                "a": rate(line.a),
                "b": rate(line.b),
                "difference": line.difference,
                "low": line.low,
                "high": line.high,
                "finding": line.finding,
            }
            for line in result.rates
        ],
        "times": [vars(line) for line in result.ratios],
        "only_a": list(result.only_a),
        "only_b": list(result.only_b),
        "notes": list(result.notes),
    }
    return json.dumps(values, indent=1)


Renderer = Callable[[Result], str]
RENDERERS: dict[str, Renderer] = {"markdown": as_markdown, "json": as_json}

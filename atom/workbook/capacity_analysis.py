"""What capacity rows say of the published hours: the fit, what it predicts, baselines, remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from atom.benchmarks.capacity_fit import (
    Errors,
    Fit,
    Observation,
    Prediction,
    Setup,
    Surface,
    errors,
    fit,
    line_baseline,
    nearest_failures,
    working_set_baseline,
)
from atom.errors import BadInput
from atom.workbook.capacity_records import rows_of
from atom.workbook.published_tables import load_published
from atom.workbook.records import Run
from atom.workbook.throughput_points import setting_text

#: free numbers of the model beside those of each baseline
FREE = {"capacity model": 4, "line in pool per session": 4, "share of the working set": 2}
#: the offload setup that the fit may look at: the middle one by pool per session whose loads and
#: failures both count, so that it tells the rate of loads and the bytes
FITTED: Setup = (48, 224.0)
_BASE = "shared_lru"


def observations() -> tuple[list[Observation], list[Observation]]:
    """Published setups: without offload, and with it. Runs of one setup stand together."""
    hours = load_published("agentx")
    failures: dict[Setup, tuple[float, float]] = {
        (int(row["concurrency_sessions"]), float(row["cpu_pool_gib"])): (
            row["failed_percent_low"] / 100,
            row["failed_percent_high"] / 100,
        )
        for row in load_published("state_load_failures").to_dict("records")
    }
    runs: dict[Setup, list[dict[Any, Any]]] = {}
    for row in hours.to_dict("records"):
        pool = None if pd.isna(row["cpu_pool_gib"]) else float(row["cpu_pool_gib"])
        runs.setdefault((int(row["concurrency_sessions"]), pool), []).append(row)

    def mean(rows: list[dict[Any, Any]], name: str, unit: float) -> float | None:
        values = [float(row[name]) for row in rows if not pd.isna(row[name])]
        return unit * sum(values) / len(values) if values else None

    found = [
        Observation(
            key,
            tuple(float(row["throughput_tok_s_per_gpu"]) for row in rows),
            failures.get(key),
            mean(rows, "itl_p90_ms", 1e-3),
            mean(rows, "ttft_mean_s", 1.0),
            sum(
                row["throughput_tok_s_per_gpu"] * row["gpus"] * row["duration_s"] / row["requests"]
                for row in rows
            )
            / len(rows),
        )
        for key, rows in runs.items()
    ]
    return [o for o in found if o.failed is None], [o for o in found if o.failed is not None]


@dataclass(frozen=True)
class Study:
    """The fit and its predictions.

    Attributes:
        bare, offload: what was published.
        fitted: on the hours without offload and ``FITTED``.
        predicted: by the frozen fit, every setup.
        left_out: of each offload setup, by a fit that has seen all others.
        left_out_fits: those fits.
        single_fits: of each offload setup, the fit that has seen it alone.
        surface: the simulated rows.
        baselines: name to the same of a baseline.
    """

    bare: list[Observation]
    offload: list[Observation]
    fitted: Fit
    predicted: dict[Setup, Prediction]
    left_out: dict[Setup, Prediction]
    left_out_fits: dict[Setup, Fit]
    single_fits: dict[Setup, Fit]
    surface: Surface
    baselines: dict[str, dict[Setup, Prediction]]

    @property
    def figures(self) -> int:
        """Published figures that the model may be fitted on."""
        return len(self.bare) + sum(2 + (one.itl_p90_seconds is not None) for one in self.offload)

    @property
    def unseen(self) -> list[Observation]:
        """Offload setups that the frozen fit has not seen."""
        return [one for one in self.offload if one.setup != FITTED]

    def errors(self, predicted: Mapping[Setup, Prediction], over: Sequence[Observation]) -> Errors:
        """How far predictions lie from what was published."""
        return errors([(predicted[one.setup], one) for one in over])


def study(run: Run) -> Study:
    """Fit on the rows of a run, and predict.

    Raises:
        BadInput: the run has no grid, or lacks a published setup.
    """
    rows = [row for row in rows_of(run) if row.arm == _BASE]
    bare, offload = observations()
    surface = Surface(rows)
    missing = [o.setup for o in [*bare, *offload] if o.setup not in surface.setups]
    if missing:
        raise BadInput(f"{run.path}: no rows of the published setups {missing}")
    known = [one for one in offload if one.setup == FITTED]
    fitted = fit(surface, bare, known)
    left_out, fits, singles = {}, {}, {}
    baselines: dict[str, dict[Setup, Prediction]] = {name: {} for name in list(FREE)[1:]}
    for one in offload:
        others = [other for other in offload if other is not one]
        singles[one.setup] = fit(surface, bare, [one])
        fits[one.setup] = fit(surface, bare, others)
        left_out[one.setup] = surface.predict(one.setup, fits[one.setup])
        seen = [*bare, *others]
        for name, baseline in zip(baselines, (line_baseline, working_set_baseline), strict=True):
            baselines[name][one.setup] = baseline(seen, one.setup)
    predicted = {one.setup: surface.predict(one.setup, fitted) for one in [*bare, *offload]}
    return Study(bare, offload, fitted, predicted, left_out, fits, singles, surface, baselines)


def study_sentences(found: Study) -> list[str]:
    """What the fit shows, where it does not fit, and whether the mechanism matters."""
    frozen = found.errors(found.predicted, found.unseen)
    model = found.errors(found.left_out, found.offload)
    said = [
        f"Four free numbers stand beside {found.figures} published figures, of which the frozen "
        f"fit sees {found.fitted.numbers + len(found.bare)}. It misses the throughput of setups "
        f"that it has not seen by {frozen.throughput:.0%} (rms), where two runs of one setup "
        f"differ by 8%, and their failures by {100 * (frozen.failed or 0):.1f} points in the mean."
    ]
    said += [_failures_sentence(found), _bound_sentence(found)]
    others = {name: found.errors(one, found.offload) for name, one in found.baselines.items()}
    for what, ours, theirs, form in (
        (
            "throughput",
            100 * model.throughput,
            {name: 100 * one.throughput for name, one in others.items()},
            "{:.0f}% (rms)",
        ),
        (
            "failures",
            100 * (model.failed or 0),
            {name: 100 * (one.failed or 0) for name, one in others.items()},
            "{:.1f} points",
        ),
    ):
        name = min(theirs, key=lambda one: theirs[one])
        better = "nearer than" if ours < theirs[name] else "no nearer than"
        said.append(
            f"Each setup left out in turn, the model comes {better} the better baseline in {what}: "
            f"{form.format(ours)} off, the {name} {form.format(theirs[name])}."
        )
    singles = list(found.single_fits.values())
    rates = [one.load_gb_per_second / one.slowness for one in singles]
    said.append(
        "By which setup is seen, the bytes come out at "
        f"{min(one.byte_scale for one in singles):.2f} to "
        f"{max(one.byte_scale for one in singles):.2f}, the device's KV at "
        f"{min(one.device_gb for one in singles):.0f} to "
        f"{max(one.device_gb for one in singles):.0f} GB and loads at {min(rates):.0f} to "
        f"{max(rates):.0f} GB/s."
        + (
            " So the rate of loads is hardly determined, and what is said of the host link below "
            "holds for the fitted rate."
            if max(rates) > 1.5 * min(rates)
            else ""
        )
    )
    if found.fitted.at_edge:
        place = (found.fitted.byte_scale, found.fitted.device_gb, found.fitted.load_gb_per_second)
        edges = [
            name
            for name, at, axis in zip(_PLACE_WORDS, place, found.surface.axes, strict=True)
            if math.isclose(at, axis[0]) or math.isclose(at, axis[-1])
        ]
        said.append(
            "Of the frozen fit's numbers these lie at the edge of the simulated grid: "
            f"{', '.join(edges)}. What lies beyond may fit as well."
        )
    for one in found.unseen:
        ratio = found.predicted[one.setup].throughput / one.mean_throughput
        if abs(ratio - 1) > 0.16:
            said.append(
                f"It does not fit: {setup_text(one.setup)}, predicted {ratio:.2f} of the "
                "published throughput."
            )
    return said


_PLACE_WORDS = ("the bytes", "the device's KV", "the rate of loads")


def _failures_sentence(found: Study) -> str:
    """How many unseen failure shares lie near the published, and whether their order holds."""
    pairs = [(found.predicted[one.setup].failed or 0.0, one.middle_failed) for one in found.unseen]
    near = sum(abs(got - wanted) <= max(0.25 * wanted, 0.02) for got, wanted in pairs)
    listed = ", ".join(f"{got:.1%} for {wanted:.1%}" for got, wanted in pairs)
    ordered = in_order({one.setup: found.predicted[one.setup].failed for one in found.offload})
    return (
        f"Of its {len(pairs)} unseen shares of failures {near or 'none'} lie within a quarter of "
        f"the published or two points: {listed}. The four setups come out "
        + ("in the published order." if ordered else "in another order than published.")
    )


def _bound_sentence(found: Study) -> str:
    """How near to all published failures any place of the grid comes."""
    nearest = nearest_failures(found.surface, found.offload)
    off = sum(abs(nearest[o.setup] - o.middle_failed) for o in found.offload) / len(found.offload)
    listed = ", ".join(f"{nearest[o.setup]:.1%} for {o.middle_failed:.1%}" for o in found.offload)
    if off < 0.01:
        return f"A place of the grid gives all four shares to a point ({listed})."
    return (
        "Were the four shares themselves fitted, and nothing else, the nearest place of the grid "
        f"would still be {100 * off:.1f} points off in the mean ({listed}): so much is left with "
        "this order of the sessions, whatever the numbers."
    )


def in_order(failed: Mapping[Setup, float | None]) -> bool:
    """Whether shares rise from setup to setup as the published ones do."""
    offload = sorted(observations()[1], key=lambda one: one.middle_failed)
    shares = [failed.get(one.setup) or 0.0 for one in offload]
    return shares == sorted(shares)


def setup_text(setup: Setup) -> str:
    """Sessions and pool."""
    return setting_text(*setup)


def share_text(share: float | None) -> str:
    """Percent, or nothing."""
    return "" if share is None else f"{share:.1%}"


def range_text(one: Observation) -> str:
    """The published share of failures, or its range."""
    if one.failed is None:
        return ""
    low, high = one.failed
    return f"{low:.1%}" if low == high else f"{low:.0%} to {high:.0%}"


def predictions_table(found: Study) -> pd.DataFrame:
    """Published beside predicted, a row a setup."""
    return pd.DataFrame(
        {
            "setup": setup_text(one.setup),
            "published, tok/s": ", ".join(f"{value:,.0f}" for value in one.throughput),
            "frozen fit, tok/s": f"{found.predicted[one.setup].throughput:,.0f}",
            "over published": f"{found.predicted[one.setup].throughput / one.mean_throughput:.2f}",
            "left out, tok/s": ""
            if one.setup not in found.left_out
            else f"{found.left_out[one.setup].throughput:,.0f}",
            "published failures": range_text(one),
            "frozen fit's": share_text(found.predicted[one.setup].failed),
            "left out's": ""
            if one.setup not in found.left_out
            else share_text(found.left_out[one.setup].failed),
            "seen by the frozen fit": "throughput"
            if one.failed is None
            else ("throughput, failures" if one.setup == FITTED else "nothing"),
        }
        for one in [*found.bare, *found.offload]
    )


def fits_table(found: Study) -> pd.DataFrame:
    """The free numbers of each fit."""
    fits = {f"frozen: {setup_text(FITTED)}": found.fitted} | {
        f"all but {setup_text(setup)}": one for setup, one in found.left_out_fits.items()
    }
    return pd.DataFrame(
        {
            "offload setups seen": name,
            "slowness": f"{one.slowness:.3f}",
            "bytes over the nominal model's": f"{one.byte_scale:.2f}",
            "KV on the device": f"{one.device_gb:.0f} GB",
            "misfit, sum of squares": f"{one.misfit:.1f}",
            "loads, GB/s": f"{one.load_gb_per_second / one.slowness:.1f}",
            "figures fitted": one.numbers + len(found.bare),
            "free": FREE["capacity model"],
            "at the edge of the grid": "yes" if one.at_edge else "no",
        }
        for name, one in fits.items()
    )


def scores_table(found: Study) -> pd.DataFrame:
    """Errors of the model and of the baselines, each with one setup left out in turn."""
    models = {"capacity model": found.left_out, **found.baselines}
    rows = []
    for name, predicted in models.items():
        score = found.errors(predicted, found.offload)
        rows.append(
            {
                "model": name,
                "free numbers": FREE[name],
                "published figures": found.figures
                if name == "capacity model"
                else len(found.bare) + 2 * len(found.offload),
                "throughput, rms error": f"{score.throughput:.0%}",
                "failures, mean error": ""
                if score.failed is None
                else f"{100 * score.failed:.1f} points",
            }
        )
    return pd.DataFrame(rows)


def singles_table(found: Study) -> pd.DataFrame:
    """Each offload setup as the only one that a frozen fit sees: what it says of the other three.

    The choice of that setup is ours: so all are shown.
    """
    lines = []
    for setup, one in found.single_fits.items():
        others = [other for other in found.offload if other.setup != setup]
        predicted = {other.setup: found.surface.predict(other.setup, one) for other in others}
        score = found.errors(predicted, others)
        lines.append(
            {
                "offload setup seen": setup_text(setup),
                "bytes over the nominal model's": f"{one.byte_scale:.2f}",
                "KV on the device": f"{one.device_gb:.0f} GB",
                "loads, GB/s": f"{one.load_gb_per_second / one.slowness:.1f}",
                "other three: throughput, rms error": f"{score.throughput:.0%}",
                "failures, mean error": f"{100 * (score.failed or 0):.1f} points",
            }
        )
    return pd.DataFrame(lines)


def latencies_table(found: Study) -> pd.DataFrame:
    """Latencies of the offload setups: published, and by the frozen fit."""

    def pair(published: float | None, simulated: float | None, unit: float) -> str:
        return f"{unit * (published or 0):.0f} / {unit * (simulated or 0):.0f}"

    return pd.DataFrame(
        {
            "setup": setup_text(one.setup),
            "ITL p90, ms, published / frozen fit": pair(
                one.itl_p90_seconds, found.predicted[one.setup].itl_p90_seconds, 1e3
            ),
            "TTFT mean, s, published / frozen fit": pair(
                one.ttft_seconds, found.predicted[one.setup].ttft_seconds, 1.0
            ),
            "seen by the frozen fit": "ITL" if one.setup == FITTED else "nothing",
        }
        for one in found.offload
    )

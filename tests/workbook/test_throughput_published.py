"""Notebook 05's published half: ratios with their spread, survival, exposure, single factors."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import pytest

from atom.evidence import Evidence
from atom.workbook import figures, figures_throughput, figures_throughput_rows
from atom.workbook.published_derived import agentx_derived
from atom.workbook.published_tables import load_published
from atom.workbook.throughput_crashes import (
    Watched,
    compare_rates,
    confounds_table,
    crash_times,
    matched_settings,
    published_watches,
    survival,
    watched_table,
)
from atom.workbook.throughput_effects import published_effects
from atom.workbook.throughput_points import (
    Spread,
    pooled_spread,
    published_points,
    published_spread,
)


def test_ratios_are_those_of_the_derived_table() -> None:
    table = agentx_derived().set_index("point")["gain_over_no_offload"].dropna()
    found = {one.name: one.ratio for one in published_points() if one.ratio}
    assert set(found) == set(table.index)
    for name, ratio in found.items():
        assert ratio[0] == pytest.approx(table[name])
        # the pair's difference on both sides, in quadrature
        factor = (61901 / 57369) ** math.sqrt(2)
        assert ratio[2] / ratio[0] == pytest.approx(ratio[0] / ratio[1]) == pytest.approx(factor)


def test_one_pair_is_no_interval_and_says_so() -> None:
    spread = published_spread()
    assert not spread.is_interval
    assert spread.kind.startswith("not an interval")
    # the t value of one degree of freedom makes it useless, and the notebook says how useless
    assert spread.certain_factor() == pytest.approx((61901 / 57369) ** 12.706, rel=1e-3)


def test_enough_repeats_make_an_interval() -> None:
    spread = pooled_spread([[10.0, 11.0], [20.0, 22.0], [5.0], [7.0, 7.7]], "test")
    assert spread is not None
    assert spread.freedom == 3
    assert spread.is_interval
    assert spread.sd == pytest.approx(math.log(1.1) / math.sqrt(2))
    middle, low, high = spread.of([20.0, 22.0], [10.0])
    assert low < middle < high
    # more repeats on either side narrow it
    narrower = spread.of([20.0, 22.0], [10.0, 10.0])
    assert narrower[2] / narrower[0] < high / middle
    assert pooled_spread([[1.0], [2.0]], "test") is None
    assert Spread(0.1, 0, "test").certain_factor() == math.inf


def test_survival_steps_of_the_history() -> None:
    times = crash_times()
    assert times.runs == 5
    for minutes in (times.likely, times.earliest, times.latest):
        assert len(minutes) == 4
        assert (min(minutes), max(minutes)) == (13, 54)
    assert {19, 20} <= set(times.likely)
    steps = survival(times.likely, times.runs)
    assert [step.share for step in steps] == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert steps[-1].interval == pytest.approx((0.0051, 0.7164), abs=5e-4)


def test_exposure_is_a_range_and_the_comparison_takes_its_worst() -> None:
    watches = published_watches()
    unfixed, fixed, debug = watches["unfixed"], watches["fixed"], watches["debug"]
    assert (unfixed.events, unfixed.runs) == (4, 5)
    assert unfixed.hours_range[0] < unfixed.hours < unfixed.hours_range[1]
    assert round(unfixed.hours, 1) == 2.8
    assert (fixed.events, fixed.hours) == (0, 6.0)
    assert debug.hours == pytest.approx(29 / 60)
    found = compare_rates(unfixed, fixed)
    best = compare_rates(Watched("", 5, 4, 2.5, (2.5, 2.5)), fixed)
    # a longer exposure of the crashed runs weakens the case
    assert found.low < best.low
    assert found.p > best.p
    assert found.p == pytest.approx((unfixed.hours_range[1] / (unfixed.hours_range[1] + 6)) ** 4)
    assert len(watched_table(list(watches.values()))) == 3


def test_machine_and_tree_are_confounded_with_the_fix() -> None:
    table = confounds_table().set_index("what")["in common"]
    assert table["machine"] == "nothing"
    assert table["source tree"] == "nothing"
    assert table["sessions"] == "32, 64"
    assert table["pool, GiB"] == "96, 160, 288"
    matched = matched_settings().set_index("setting")
    assert matched.loc["32 sessions, 96 GiB", "unpatched"] == "2 of 2"
    assert all(text.startswith("0 of") for text in matched["record_stream"])


def test_only_one_published_pair_varies_the_pool_alone() -> None:
    found = published_effects(published_points())
    alone = {(one.factor, one.where) for one in found}
    assert [one.change for one in found if one.factor == "pool"] == ["96 GiB to 160 GiB"]
    assert {where for factor, where in alone if factor == "sessions"} == {"no offload"}
    repeat = next(one for one in found if one.factor.startswith("nothing"))
    assert repeat.throughput[0] == pytest.approx(61901 / 57369)
    pool = next(one for one in found if one.factor == "pool")
    assert pool.ttft == pytest.approx(15.4 / 52.9)


def test_cycle_is_sessions_over_the_request_rate() -> None:
    table = agentx_derived().set_index("point")
    for one in published_points():
        if one.ttft_s is not None:
            cycle, wait = figures_throughput.cycle_of(one)
            assert cycle == pytest.approx(table.loc[one.name, "cycle_s"])
            assert wait / cycle == pytest.approx(table.loc[one.name, "ttft_share"])


def test_figures_are_drawn() -> None:
    figures.style()
    points = published_points()
    drawn = [
        figures_throughput.load_figure(points, Evidence.PUBLISHED, "hours"),
        figures_throughput.gains_figure({"MI355X": points}),
        figures_throughput.cycle_figure(points, "cycle"),
        figures_throughput.survival_figure(crash_times(), published_watches()),
        figures_throughput.failed_loads_figure(points, "loads"),
        figures_throughput_rows.effects_figure(published_effects(points), "alone", "spread"),
    ]
    shown = [axes for axes in drawn[0].axes if axes.get_visible()]
    # no published point tells its hits: five panels of six quantities
    assert len(shown) == 5
    legend = drawn[0].legends[0]
    assert "pool and sessions move together" in [text.get_text() for text in legend.get_texts()]
    for figure in drawn:
        plt.close(figure)


def test_the_rates_before_the_crashes_enter_no_ratio() -> None:
    before = set(load_published("crash_history")["throughput_tok_s_per_gpu_about"].dropna())
    assert before
    used = {rate for one in published_points() for rate in one.rates}
    assert not before & used

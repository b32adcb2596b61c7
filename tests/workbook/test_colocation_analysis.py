"""What neighbours cost, from made-up rows: ratios, the 1% question, stale rates."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from colocation_made_up import SLOWER, record

from atom.benchmarks.colocation_settings import (
    MemoryNode,
)
from atom.evidence import Evidence
from atom.workbook import (
    colocation_analysis,
    colocation_race,
    compare_colocation,
    figures,
    figures_colocation,
)
from atom.workbook.compare_points import COMPARISONS
from atom.workbook.records import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record(tmp_path_factory.mktemp("colocation"))


def test_ratios_to_alone_have_intervals_that_hold_what_was_put_in(run: Run) -> None:
    rows = colocation_analysis.observed_rows([run])
    found = {(one.subject, one.condition): one for one in colocation_analysis.costs(rows)}
    # two subjects, each beside four conditions and the sweep
    assert len(found) == 2 * 5
    for (_, condition), one in found.items():
        truth = SLOWER[condition.partition(" ")[0]]
        assert one.is_interval
        assert one.ratio[1] <= truth <= one.ratio[2]
        assert one.ratio[2] / one.ratio[1] < 1.01
    assert "the repeats of" in colocation_analysis.ends_text(rows)
    table = colocation_analysis.costs_table(rows)
    assert len(table) == 10
    assert "copy x3" in colocation_analysis.result_text(run)


@pytest.mark.parametrize(
    ("noise", "slower", "expected"),
    [(0.001, 0.97, "no"), (0.001, 1.0, "yes"), (0.05, 1.0, "open: the interval is not within")],
)
def test_whether_a_sweep_may_run_at_once_is_said_or_left_open(
    noise: float, slower: float, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SLOWER, "sweep", slower)
    given = {"neighbours": ["sweep"], "race": False}
    rows = colocation_analysis.observed_rows([record(tmp_path, noise, **given)])
    table = colocation_analysis.side_by_side_table(rows)
    assert list(table["at once"]) == ["4 GPUs"] * 2
    assert all(text.startswith(expected) for text in table["may run side by side"])


def test_what_an_engine_without_a_pool_scatters_does_not_widen_the_others_interval(
    run: Run,
) -> None:
    rows = colocation_analysis.observed_rows([run])
    scattered = [
        {**row, "effective_total_throughput": row["effective_total_throughput"] * factor}
        if row["subject"].endswith("no-pool")
        else row
        for row in rows
        for factor in (1 + 0.2 * row["repeat"],)
    ]
    widths = {
        one.subject: one.ratio[2] / one.ratio[1] for one in colocation_analysis.costs(scattered)
    }
    assert widths["hold/c32/4GiB"] < 1.01
    assert widths["hold/c32/no-pool"] > 1.2
    once = [row for row in rows if row["subject"].endswith("4GiB") or not row["repeat"]]
    found = {one.subject: one.is_interval for one in colocation_analysis.costs(once)}
    assert found == {"hold/c32/4GiB": True, "hold/c32/no-pool": False}
    assert f"no-pool: {colocation_analysis.UNREPEATED}" in colocation_analysis.ends_text(once)


def test_the_step_rate_may_tell_where_throughput_leaves_it_open(tmp_path: Path) -> None:
    rows = colocation_analysis.observed_rows([record(tmp_path, 0.05, race=False)])
    counted = [{**row, "tokens_per_step_second": 1e5 * (1 + 1e-4 * row["repeat"])} for row in rows]
    table = colocation_analysis.side_by_side_table(counted)
    assert all(text.startswith("open") for text in table["may run side by side"])
    assert set(table["by that"]) == {"yes"}
    steps = {"decode_seconds": 1.5, "prefill_seconds": 0.5, "lookup_tokens": 90}
    assert colocation_analysis.step_rate({**steps, "generated_tokens": 10}) == 50
    assert colocation_analysis.step_rate({**steps, "generated_tokens": None}) is None


def test_one_round_gives_ratios_without_an_interval_and_decides_nothing(tmp_path: Path) -> None:
    rows = colocation_analysis.observed_rows([record(tmp_path, repeats=1, race=False)])
    assert colocation_analysis.ends_text(rows) == colocation_analysis.UNREPEATED
    assert not any(one.is_interval for one in colocation_analysis.costs(rows))
    table = colocation_analysis.side_by_side_table(rows)
    assert set(table["may run side by side"]) == {"open: too few repeats for an interval"}


def test_a_point_whose_neighbours_did_not_last_counts_for_nothing(run: Run) -> None:
    rows = colocation_analysis.observed_rows([run])
    left = [
        {**row, "neighbours_at_end": 0} if row["condition"] == "copy x3" else row for row in rows
    ]
    conditions = {one.condition for one in colocation_analysis.costs(left)}
    assert "copy x3" not in conditions
    assert "copy x1" in conditions


def test_the_far_node_is_compared_with_the_near_one(run: Run) -> None:
    rows = [
        {**row, "memory_node": node.value, "effective_total_throughput": rate}
        for row in colocation_analysis.observed_rows([run])
        for node, rate in ((MemoryNode.NEAR, 100.0), (MemoryNode.FAR, 80.0))
    ]
    far = [one for one in colocation_analysis.costs(rows) if one.against == "the near node"]
    assert {one.condition for one in far} >= {"alone", "copy x1"}
    assert all(one.ratio[0] == pytest.approx(0.8) for one in far)
    said = " ".join(colocation_analysis.cost_sentences(rows))
    assert "far memory node: throughput over the near one 0.800 (" in said
    assert "(copy x1, near node)" in said


def test_a_window_that_neighbours_widen_is_named_and_no_other(run: Run) -> None:
    assert colocation_race.widened_arms([run]) == [
        ("main/unpatched/nothing/engine", "copy x1"),
        ("main/unpatched/nothing/engine", "copy x3"),
    ]
    table = colocation_race.race_table([run])
    shown = table[(table["beside it"] == "copy x1") & (table["arm"].str.contains("nothing"))]
    assert list(shown["stale"]) == ["90 of 120"]
    said = colocation_analysis.race_sentences([run])
    # two conditions; no arm is stale in every trial alone
    assert len(said) == 2
    race = run.tables["race"].copy()
    race.loc[race["arm"].str.contains("unpatched/spin"), "clean"] = 0
    full = Run(run.path, run.provenance, {**run.tables, "race": race})
    assert "1 of 7 arms are stale in every trial" in colocation_analysis.race_sentences([full])[-1]


def test_a_comparison_has_its_quotients_round_by_round_and_its_stale_rates(run: Run) -> None:
    own = dict(compare_colocation.quotients(run))
    one = own["throughput, hold/c32/4GiB beside copy x1, any node"]
    assert len(one.values) == 3
    assert one.value == pytest.approx(0.9, rel=0.01)
    stale = {name: (events, trials) for name, events, trials in compare_colocation.rates(run)}
    assert stale["stale, main/unpatched/nothing/engine, copy x1, any node"] == (90, 120)
    assert COMPARISONS["colocation"].whole(run).base == "x its own alone"


def test_points_of_another_host_are_not_mixed_in_and_that_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = run.tables["points"].copy()
    points["host"] = ["0" * 8 if repeat < 2 else "1" * 8 for repeat in points["repeat"]]
    points.loc[points["repeat"] == 2, "effective_total_throughput"] *= 2
    moved = Run(run.path, run.provenance, {**run.tables, "points": points})
    rows = colocation_analysis.observed_rows([moved])
    assert {row["repeat"] for row in rows} == {0, 1}
    monkeypatch.setattr(colocation_analysis, "load_runs", lambda *_: ([moved], []))
    _, [problem] = colocation_analysis.measured_runs([])
    assert f"{len(points) - len(rows)} points ran on another host" in problem


def test_what_is_unexpected_is_named(run: Run) -> None:
    assert colocation_analysis.unexpected(run) == []
    race = run.tables["race"].copy()
    held = race["protocol"] == "hold"
    race.loc[held, "clean"] = 39
    spoiled = Run(run.path, run.provenance, {**run.tables, "race": race})
    found = colocation_analysis.unexpected(spoiled)
    assert len(found) == held.sum()
    assert "1 stale statuses" in found[0]


def test_figures_are_drawn(run: Run) -> None:
    figures.style()
    rows = colocation_analysis.observed_rows([run])
    found = colocation_analysis.costs(rows)
    figure = figures_colocation.cost_figure(found, "ends", Evidence.MEASURED)
    assert len(figure.axes[0].get_yticks()) == len(found) == 10
    plt.close(figure)
    series = colocation_analysis.bandwidth_series(run, "hold/c32/4GiB")
    assert set(series) == {"alone", "copy x1", "copy x3", "compute x1", "compute x3", "sweep x3"}
    assert all(len(one) == 4 for one in series.values())
    figure = figures_colocation.bandwidth_figure(series, "bandwidths", Evidence.MEASURED)
    assert len(figure.axes) == 1
    plt.close(figure)
    assert len(colocation_analysis.bandwidth_table([run])) == 6 * 2 + 5

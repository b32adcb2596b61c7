"""Notebook 05's own half: points, factors, bounds, outcomes and verdicts, from made-up rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import throughput_points_made_up as made_up

from atom.benchmarks.throughput_rows import Outcome
from atom.benchmarks.throughput_settings import build_points
from atom.config import ThroughputNotebookSettings
from atom.evidence import Evidence
from atom.workbook import (
    figures,
    figures_throughput,
    figures_throughput_rows,
    throughput_claims,
    throughput_outcomes,
)
from atom.workbook.claims import Verdict, judge, load_claims
from atom.workbook.records import Run
from atom.workbook.throughput_analysis import (
    LoadSet,
    load_points,
    load_set,
    main_rows,
    rows_of,
    shows_fault,
    sitting_sentences,
    source_of,
    spread_of,
)
from atom.workbook.throughput_bounds import (
    COPY,
    IDLE,
    PREFILL,
    CopyRate,
    bound_counts,
    bounds,
    bounds_table,
    scale_of,
    scale_sentences,
    scale_table,
    size_text,
)
from atom.workbook.throughput_effects import (
    effects,
    effects_table,
    protocol_ratio,
    unpaired_sentences,
)
from atom.workbook.throughput_full_scale import full_scale
from atom.workbook.throughput_points import points_table, published_points
from atom.workbook.throughput_simulation import gather_runs, same_scale, simulated_settings

RATE = CopyRate(54.9e9, "made up")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made_up.record(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def found(run: Run) -> LoadSet:
    return load_set(Evidence.MEASURED, "H200", [run])


def again(found: LoadSet, rows: list[dict[str, Any]] | None = None, **more: Any) -> LoadSet:
    """The same points with other rows, or with other values in every row that ``more`` names."""
    rows = [{**one, **more} for one in rows or found.rows]
    main = main_rows(rows)
    points = load_points(main, found.kind)
    return LoadSet(found.kind, found.source, found.runs, rows, main, points, spread_of(rows))


def test_the_main_grid_is_hold_with_all_its_nets(found: LoadSet) -> None:
    assert {one["protection"] for one in found.main} == {"hold"}
    assert {one["chunk_tokens"] for one in found.main} == {64, None}
    # two numbers of sessions by two pools and none, each twice
    assert len(found.main) == 12
    assert [one.runs for one in found.points] == [2] * 6
    assert {one["protection"] for one in found.rows} == {
        "hold",
        "zero_copy",
        "unpatched, no net",
        "unpatched, guard alone",
    }


def test_points_carry_ratios_with_an_interval_of_the_repeats(found: LoadSet) -> None:
    assert found.spread.is_interval
    assert found.spread.freedom == 6
    by_name = {one.name: one for one in found.points}
    ratio = by_name["c32-16"].ratio
    assert ratio is not None
    assert ratio[0] == pytest.approx(2.0, rel=0.05)
    assert ratio[1] < 2.0 < ratio[2]
    assert by_name["c32-none"].ratio is None
    assert by_name["c64-16"].requests_per_hour == 36_000
    assert by_name["c32-4"].failed_loads == pytest.approx(0.1)
    assert by_name["c32-16"].cached_share == pytest.approx(0.6)
    assert len(points_table(found.points)) == 6


def test_each_factor_alone(found: LoadSet) -> None:
    table = effects(found.rows, Evidence.MEASURED)
    changed = {(one.factor, one.change) for one in table}
    assert ("pool", "4 GiB to 16 GiB") in changed
    assert ("sessions", "32 sessions to 64 sessions") in changed
    assert ("copy protocol and nets", "hold to zero_copy") in changed
    assert ("tokens of a stored chunk", "64 to 256") in changed
    # the unpatched points with a pool died: without one they may be compared
    bare = [one for one in table if one.change == "hold to unpatched, no net"]
    assert [one.where for one in bare] == ["32 sessions, no offload"]
    # no drafts and no protection differ in two things from the grid
    assert not [one for one in table if one.factor == "drafts"]
    pool = next(one for one in table if one.factor == "pool" and one.where == "32 sessions")
    assert pool.throughput[0] == pytest.approx(2 / 1.25, rel=0.05)
    assert pool.ttft == pytest.approx(1.25 / 2)
    assert len(effects_table(table)) == len(table)


def test_protocols_are_compared_where_both_survive(found: LoadSet) -> None:
    ratio, pairs = protocol_ratio(found.rows, "hold", "unpatched, no net")
    assert (ratio, pairs) == (None, 1)
    ratio, pairs = protocol_ratio(found.rows, "hold", "zero_copy")
    assert pairs == 2
    assert ratio is not None
    assert ratio[1] <= ratio[0] <= ratio[2]


def test_bounds_name_the_busiest_resource(found: LoadSet) -> None:
    table = bounds(found.main, RATE)
    assert bound_counts(table) == {PREFILL: 12}
    pooled = next(one for one in table if one.row["pool_gib"] == 16.0)
    assert pooled.shares[PREFILL] == pytest.approx(45 / 70)
    # the busier direction counts, not the sum of both
    assert pooled.shares[COPY] == pytest.approx(40 * 2**30 / 54.9e9 / 70)
    rate = pooled.row["effective_total_throughput"]
    assert pooled.ceiling(COPY) == pytest.approx(rate / pooled.shares[COPY])
    assert pooled.bytes_per_token == pytest.approx(50 * 2**30 / rate / 70)
    slow = CopyRate(0.5e9, "made up")
    bare_and_pooled = bound_counts(bounds(found.main, slow))
    assert bare_and_pooled == {COPY: 8, PREFILL: 4}
    lazy = again(found, prefill_seconds=1.0, decode_seconds=2.0)
    assert bound_counts(bounds(lazy.main, RATE)) == {IDLE: 12}
    assert len(bounds_table(table)) == 12
    bare = next(one for one in table if one.row["pool_gib"] is None)
    assert bare.ceiling(COPY) is None


def test_the_scale_tells_pool_over_working_set(found: LoadSet) -> None:
    scale = scale_of(found.main)
    assert scale is not None
    assert scale.pool_over_working_set(16.0, 32) == pytest.approx(2.0)
    assert scale.pool_over_working_set(4.0, 64) == pytest.approx(0.25)
    text = " ".join(scale_sentences(scale))
    assert "8 KiB of KV" in text
    assert "0.25 to 2" in text
    assert list(scale_table(scale)["16 GiB"]) == ["2.00", "1.00"]
    assert scale_of([{**one, "working_set_bytes": None} for one in found.main]) is None
    assert (size_text(512), size_text(3 * 2**30)) == ("512 B", "3 GiB")


def test_outcomes_count_faults_by_arm(found: LoadSet) -> None:
    arms = {one.name: one for one in throughput_outcomes.outcomes(found.rows)}
    bare = arms["unpatched, no net; MTP 3, forced 2.32; offload"]
    assert bare.ends == {Outcome.CRASH.value: 2}
    assert (bare.faults, bare.stale) == (2, 80)
    assert bare.hours == pytest.approx(140 / 3600)
    assert arms["hold; MTP 3, forced 2.32; offload"].faults == 0
    table = throughput_outcomes.outcomes_table(list(arms.values()), rates=True)
    assert "faulty points an hour" in table
    dead = throughput_outcomes.deaths(found.rows)
    assert len(dead) == 4
    assert any("crash after 70.0 s" in text for text in dead)
    unstarted = [{**one, "outcome": "start failed"} for one in found.rows]
    assert throughput_outcomes.outcomes(unstarted) == []


def test_a_stale_status_is_a_fault_of_a_point_that_lives(found: LoadSet) -> None:
    alive = {**found.main[0]}
    assert not shows_fault(alive)
    assert shows_fault({**alive, "stale_statuses": 1})
    assert not shows_fault({**alive, "outcome": "out of memory"})


def test_latencies_are_shown_where_arms_differ(found: LoadSet) -> None:
    heavy = throughput_outcomes.heavy_rows(found.rows)
    assert {one["pool_gib"] for one in heavy} == {16.0, None}
    sentences = throughput_outcomes.latency_sentences(found.rows)
    assert any("zero_copy, chunk 64: 0 / 1.2" in text for text in sentences)
    assert "p50 12, p99 90 us without offload; p50 400, p99 900 us with a pool" in sentences[0]
    assert len(throughput_outcomes.latency_table(found.rows)) > 6
    assert len(throughput_outcomes.hits_table(found.main)) == 12
    assert "32 sessions: of the prompt tokens 90% without offload, 78% with 4 GiB, 40% with" in (
        " ".join(throughput_outcomes.computed_sentences(found.main))
    )
    causes = throughput_outcomes.causes_table(found.runs)
    assert list(causes["cause"]) == ["evicted"]


def test_other_servers_have_a_table_and_no_place_in_the_grid(found: LoadSet) -> None:
    assert throughput_outcomes.clients_table(found.rows).empty
    foreign = {**found.main[0], "system": "xllamacpp", "protocol": None, "protection": None}
    rows = [*found.rows, {**foreign, "cached_share": None}]
    table = throughput_outcomes.clients_table(rows)
    assert list(table["prompt tokens cached"]) == ["not reported"]
    mixed = again(found, rows)
    assert len(mixed.main) == len(found.main)
    arms = throughput_outcomes.outcomes(rows)
    assert sum(arm.points for arm in arms) == len(found.rows)
    assert throughput_claims.row_arguments(mixed).keys() == (
        throughput_claims.row_arguments(found).keys()
    )


def verdict(arguments: dict[str, Any], claim: str, kind: Evidence = Evidence.MEASURED) -> Verdict:
    return judge(load_claims()[claim], kind, **arguments).verdict


def test_made_up_rows_settle_the_claims(found: LoadSet) -> None:
    arguments = throughput_claims.row_arguments(found)
    verdicts = {claim: verdict(given, claim) for claim, given in arguments.items()}
    assert verdicts == {
        "mech-19": Verdict.REPRODUCED,
        "thr-10": Verdict.REPRODUCED,
        "thr-11": Verdict.REPRODUCED,
        "thr-12": Verdict.REPRODUCED,
        "thr-17": Verdict.REPRODUCED,
        "crash-01": Verdict.REPRODUCED,
        "crash-05": Verdict.REPRODUCED,
    }
    claims = load_claims()
    settled = {f"{claim}/measured" for claim in arguments}
    left = throughput_claims.open_claims(claims, "05", settled)
    assert {"thr-14", "thr-18", "mech-19"} <= set(left["claim"])
    assert "simulated" in set(left[left["claim"] == "mech-19"]["open"])


@pytest.mark.parametrize(
    ("claim", "change", "expected"),
    [
        # the fault without offload, too
        ("mech-19", {"stale_statuses": 5}, Verdict.DIFFERS),
        # the fault nowhere
        (
            "mech-19",
            {"outcome": "ok", "stale_statuses": 0, "guard_errors": 0},
            Verdict.INCONCLUSIVE,
        ),
        ("thr-17", {"errors": 3}, Verdict.DIFFERS),
        # a minute without a crash says little, hours do
        ("crash-01", {"outcome": "ok"}, Verdict.INCONCLUSIVE),
        ("crash-01", {"outcome": "ok", "exposure_seconds": 36_000.0}, Verdict.DIFFERS),
        ("crash-05", {"outcome": "crash"}, Verdict.DIFFERS),
    ],
)
def test_each_verdict_on_outcomes_can_fall(
    found: LoadSet, claim: str, change: dict[str, Any], expected: Verdict
) -> None:
    arguments = throughput_claims.row_arguments(again(found, **change))
    assert verdict(arguments[claim], claim) is expected


@pytest.mark.parametrize(
    ("claim", "by_pool", "expected"),
    [
        # offload gives nothing
        ("thr-10", lambda sessions, pool: 1.0, Verdict.DIFFERS),
        # as much as published at one pool, far less at the other
        ("thr-10", lambda sessions, pool: 2.0 if pool == 16 else 1.0, Verdict.INCONCLUSIVE),
        ("thr-11", lambda sessions, pool: sessions / 32, Verdict.DIFFERS),
        ("thr-12", lambda sessions, pool: sessions / 32 + (pool or 0), Verdict.DIFFERS),
    ],
)
def test_each_verdict_on_rates_can_fall(
    found: LoadSet, claim: str, by_pool: Any, expected: Verdict
) -> None:
    rows = []
    for one in found.rows:
        rate = 1e4 * by_pool(one["concurrency"], one["pool_gib"]) * (1 + 0.002 * one["repeat"])
        rows.append({**one, "effective_total_throughput": rate})
    arguments = throughput_claims.row_arguments(again(found, rows))
    assert verdict(arguments[claim], claim) is expected


def test_a_limit_that_the_start_used_up_is_no_hang(tmp_path: Path) -> None:
    # the last as recorded today: its limit began with its load, which a start takes nothing from
    for setup, faults, limit in ((61.0, 0, None), (20.0, 1, None), (61.5, 1, 30.0)):
        own = made_up.record(
            tmp_path / str(setup),
            {"special": [], "no_offload": False, "concurrency": [32], "pool_gib": [4.0]},
            outcome=Outcome.HANG,
            wall_seconds=94.0,
            setup_seconds=setup,
            limit_seconds=limit,
        )
        (found,) = throughput_outcomes.outcomes(rows_of([own]))
        assert found.faults == faults * found.points
        arguments = throughput_claims.row_arguments(load_set(Evidence.MEASURED, "H200", [own]))
        assert arguments["crash-05"]["holds"] is not bool(faults)


def test_arms_that_were_left_out_leave_claims_open(tmp_path: Path) -> None:
    own = made_up.record(tmp_path, {"special": [], "no_offload": False, "concurrency": [32]})
    arguments = throughput_claims.row_arguments(load_set(Evidence.MEASURED, "H200", [own]))
    for claim in ("mech-19", "thr-10", "thr-11", "thr-12", "crash-01"):
        assert verdict(arguments[claim], claim) is Verdict.NOT_RUN, claim
    assert throughput_claims.factorial(rows_of([own])) == {}


def test_figures_are_drawn(found: LoadSet) -> None:
    figures.style()
    table, scale = bounds(found.main, RATE), scale_of(found.main)
    assert scale is not None
    drawn = [
        figures_throughput.load_figure(found.points, Evidence.MEASURED, "load"),
        figures_throughput.gains_figure({"theirs": published_points(), "ours": found.points}),
        figures_throughput.cycle_figure(found.points, "cycle"),
        figures_throughput_rows.effects_figure(
            effects(found.rows, Evidence.MEASURED), "alone", found.spread.kind
        ),
        figures_throughput_rows.bounds_figure(table, RATE, Evidence.MEASURED),
        figures_throughput_rows.latency_figure(
            throughput_outcomes.heavy_rows(found.rows), RATE, Evidence.MEASURED
        ),
        figures_throughput_rows.scale_figure(found.points, scale),
        figures_throughput_rows.outcomes_figure(
            throughput_outcomes.outcomes(found.rows), "outcomes"
        ),
    ]
    assert sum(axes.get_visible() for axes in drawn[0].axes) == 6
    title = drawn[1].axes[0].get_legend().get_title().get_text()
    assert "only the ratio is shared" in title
    for figure in drawn:
        plt.close(figure)


def test_parts_of_one_sweep_stand_together_and_others_do_not(tmp_path: Path) -> None:
    first = made_up.record(tmp_path, {"special": []})
    second = made_up.record(tmp_path, {"concurrency": [16], "special": []})
    # whether kernels were compiled before is no part of the scale
    second.provenance.settings["warm_up"] = True
    other = made_up.record(tmp_path, {"duration_seconds": 9.0, "special": []})
    chosen, left = same_scale([first, second, other])
    assert [run.path for run in chosen] == [first.path, second.path]
    assert len(left) == 1
    assert other.provenance.run_id in left[0]
    assert same_scale([]) == ([], [])


#: the two heaviest points again, with an arm that the first record has too
_REST = {
    "only": ["hold/c64/16GiB/*", "hold, chunk 256/c64/*", "zero_copy/c64/*"],
    "special": ["repeats", "zero_copy", "chunks"],
}


def test_a_slower_host_is_no_repeat_and_no_effect(tmp_path: Path, found: LoadSet) -> None:
    slow = made_up.record(tmp_path, _REST, speed=0.5)
    both = load_set(Evidence.MEASURED, "H200", [*found.runs, slow])
    # what pooled rows would have said
    pooled = again(both, [{**one, "sitting": ""} for one in both.rows])
    assert pooled.spread.sd > 10 * found.spread.sd
    assert both.spread.freedom == found.spread.freedom + 1
    assert both.spread.sd < 2 * found.spread.sd
    assert both.main == found.main
    tails = [run.provenance.run_id[-6:] for run in both.runs]
    assert all(f"run {tail}" in source_of(both.runs) for tail in tails)
    assert source_of(both.runs).count("H200") == 1
    assert [one.throughput for one in both.points] == [one.throughput for one in found.points]
    arms = [one for one in effects(both.rows, both.kind) if one.change == "hold to zero_copy"]
    assert [one.throughput[0] for one in arms if "64" in one.where] == pytest.approx(
        [1, 1], abs=0.1
    )
    assert protocol_ratio(both.rows, "hold", "zero_copy")[1] == 3
    (said,) = sitting_sentences(both.rows)
    assert "factor of 1.9" in said or "factor of 2.0" in said
    assert sitting_sentences(found.rows) == []
    assert unpaired_sentences(both.rows) == []
    table = throughput_outcomes.latency_table(both.rows)
    assert table["sitting"].nunique() == 2
    assert len(table) == len(throughput_outcomes.latency_table(found.rows)) + 3


@pytest.mark.parametrize("recorded", [True, False])
def test_what_a_resumed_run_measured_later_stands_apart(tmp_path: Path, recorded: bool) -> None:
    """``recorded``: by the rows' own column; else by what the record says was left."""
    late = "zero_copy/c64/16GiB/0"
    facts = {} if recorded else {"stopped_early": {"not_run": {late: "no time was left"}}}
    run = made_up.record(tmp_path, _REST, facts=facts)
    if recorded:
        points = run.tables["points"]
        points["host"] = ["b" * 8 if name == late else "a" * 8 for name in points["point_id"]]
    rows = rows_of([run])
    assert {one["sitting"] for one in rows if one["point_id"] != late}.isdisjoint(
        one["sitting"] for one in rows if one["point_id"] == late
    )
    assert "hold to zero_copy" not in {one.change for one in effects(rows, Evidence.MEASURED)}
    (said,) = unpaired_sentences(rows)
    assert said.endswith(f": {late}.")
    assert protocol_ratio(rows, "hold", "zero_copy") == (None, 0)
    assert "zero_copy" not in {one["protocol"] for one in throughput_outcomes.heavy_rows(rows)}


def test_the_simulated_sweep_has_the_arms_that_its_claims_need() -> None:
    settings = simulated_settings(ThroughputNotebookSettings())
    points = build_points(settings)
    unpatched = {
        (point.pool_gib is not None, point.arm.mtp)
        for point in points
        if point.arm.protocol == "unpatched"
    }
    assert unpatched == {(True, True), (True, False), (False, True), (False, False)}
    profile = settings.virtual_profile
    assert profile.name.endswith("host link at 1/1000")
    assert profile.d2h_bytes_per_second == pytest.approx(54.9e6)
    plain = simulated_settings(ThroughputNotebookSettings(link_slowdown=1.0)).virtual_profile
    assert plain.name == "H200"


def test_recorded_runs_are_found_and_nothing_is_simulated_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = made_up.record(tmp_path / "measured")
    server: dict[str, Any] = {"system": "xllamacpp", "protocol": None, "guard": None, "mtp": None}
    foreign = made_up.record(tmp_path / "measured", {"special": []}, **server)
    made: list[Any] = []

    def instead(*arguments: Any) -> str:
        made.append(arguments)
        return "a simulated run"

    monkeypatch.setattr("atom.workbook.throughput_simulation.record_points", instead)
    settings = ThroughputNotebookSettings(measured=(str(tmp_path / "measured"),))
    runs = gather_runs(settings, tmp_path / "new")
    assert [run.path for run in runs.measured] == [hardware.path]
    assert [run.path for run in runs.servers] == [foreign.path]
    assert (runs.simulated, runs.race, runs.problems) == ("a simulated run", None, ())
    assert len(made) == 1
    # nobody has to have recorded anything, but what was asked for by name is missed
    nowhere = (str(tmp_path / "nowhere"),)
    nothing = gather_runs(ThroughputNotebookSettings(measured=nowhere), tmp_path / "new")
    assert (nothing.measured, nothing.problems) == ((), ())
    missed = gather_runs(ThroughputNotebookSettings(records=nowhere, measured=()), tmp_path / "new")
    assert missed.problems == (f"{nowhere[0]}: no such folder",)


def test_the_full_sweep_is_one_command_that_parses() -> None:
    whole = full_scale()
    assert whole.seconds == 3600
    assert "--gpus 0,1,2,3,4,5,6,7" in whole.command
    assert whole.points > 30
    assert whole.hours > whole.points * 3600 / 8 / 3600
    assert math.isfinite(whole.largest_pool_gib)

"""What made-up rows of the protocol-cost experiment say, and that it can be otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from protocol_rows import COSTS, record_cost_run

from atom.__main__ import main
from atom.benchmarks.protocol_cost_rows import CostArm, Loop, Pressure
from atom.benchmarks.receive_windows import receive_windows
from atom.evidence import Evidence
from atom.workbook import figures, figures_protocol_cost, host_cost_fit, protocol_cost
from atom.workbook import protocol_cost_claims as claims
from atom.workbook.claims import Verdict, judge, load_claims
from atom.workbook.engine_speed_analysis import MET, MISSED
from atom.workbook.protocol_cost_analysis import (
    ArmCost,
    choose,
    cost_goals,
    difference,
    limits_by_name,
    summarise,
)
from atom.workbook.protocol_cost_runs import result_text
from atom.workbook.records import Run, check_folder, load_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record_cost_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def costs(run: Run) -> list[ArmCost]:
    return summarise(run.tables["samples"])


def outcomes(rows: list[ArmCost]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for goal in cost_goals(rows):
        found.setdefault(goal.name, set()).add(goal.outcome)
    return found


def test_goals_are_met(costs: list[ArmCost]) -> None:
    assert outcomes(costs) == {
        "hold's step over unpatched's": {MET},
        "host us of hold beyond unpatched": {MET},
        "the plain send over hold's": {MET},
        "send of zero_copy, us": {MET},
    }


def test_goals_are_missed(tmp_path: Path) -> None:
    slow = record_cost_run(tmp_path, hold_step=1.03, hold_send_more=6.0)
    found = outcomes(summarise(slow.tables["samples"]))
    assert found["hold's step over unpatched's"] == {MISSED}
    assert found["host us of hold beyond unpatched"] == {MISSED}
    assert found["the plain send over hold's"] == {MISSED}
    assert found["send of zero_copy, us"] == {MET}


def test_differences_carry_their_interval() -> None:
    middle, low, high = difference([3.0, 3.1, 2.9], [1.0, 1.1, 0.9], 1)
    assert (low, middle, high) == pytest.approx((1.8, 2.0, 2.2))


def test_summaries_hold_what_rows_say(costs: list[ArmCost]) -> None:
    [hold] = choose(costs, CostArm.HOLD, loop=Loop.BARE, lead=4, pressure=Pressure.IDLE)
    assert hold.held_beyond_bytes == 1024
    assert hold.steady_beyond_bytes == 512
    assert hold.events_a_step == 0
    [plain] = choose(costs, CostArm.PLAIN, lead=4, pressure=Pressure.STORE)
    assert plain.events_a_step == 2
    assert plain.stale == 45
    assert plain.host_us == pytest.approx((plain.send_us or 0) + (plain.receive_us or 0), rel=0.01)


@pytest.mark.parametrize(
    ("changes", "claim", "verdict"),
    [
        ({}, "contract-11", Verdict.REPRODUCED),
        ({}, "contract-15", Verdict.REPRODUCED),
        ({"hold_step": 1.03}, "contract-15", Verdict.DIFFERS),
        ({"agreement": 0.9}, "contract-15", Verdict.DIFFERS),
        ({}, "thr-21", Verdict.REPRODUCED),
        ({"hold_step": 1.03}, "thr-21", Verdict.DIFFERS),
        ({}, "thr-22", Verdict.REPRODUCED),
    ],
)
def test_claims_are_settled(
    tmp_path: Path, changes: dict[str, float], claim: str, verdict: Verdict
) -> None:
    made = record_cost_run(tmp_path, **changes)
    found = claims.claim_arguments(made, summarise(made.tables["samples"]))
    assert judge(load_claims()[claim], Evidence.MEASURED, **found[claim]).verdict is verdict


def test_windows_are_a_step_long_but_across_chunks() -> None:
    windows = receive_windows()
    assert {max(windows[f"{kind}, decode steps"]) for kind in ("status", "ids")} == {1}
    assert max(windows["status, with a long prompt"]) > 1
    arguments = claims.window_arguments(windows, "MI355X")
    found = judge(load_claims()["thr-23"], Evidence.SIMULATED, **arguments)
    assert found.verdict is Verdict.DIFFERS
    alone = {name: counts for name, counts in windows.items() if name.endswith("decode steps")}
    found = judge(
        load_claims()["thr-23"], Evidence.SIMULATED, **claims.window_arguments(alone, "MI355X")
    )
    assert found.verdict is Verdict.REPRODUCED_IN_SIMULATION
    assert len(claims.windows_table(windows)) == 4


def test_tables_have_their_rows(run: Run, costs: list[ArmCost]) -> None:
    bare = claims.costs_by_arm(costs, Loop.BARE)
    assert len(bare) == 2 * 3 * 7
    assert len(claims.costs_by_arm(costs, Loop.ENGINE)) == 3 * 6
    samples = run.tables["samples"]
    guards = claims.guards_table(costs, samples)
    assert list(guards["syncs it adds"]).count("1 a step") == 1
    assert len(guards) == 6
    decision = claims.decision_table(costs, samples)
    assert set(decision["protocol"]) == {str(arm) for arm in claims.FOR_WHOM}
    row = decision[decision["protocol"] == "unpatched"].iloc[0]
    assert row["stale behind a store"] == 45
    assert "goals" in result_text(run)


def test_a_fit_finds_the_costs_and_an_error_shows(tmp_path: Path, run: Run) -> None:
    rows = summarise(run.tables["samples"])
    fit = host_cost_fit.fit_costs(rows, run.tables["limits"])
    assert fit is not None
    assert fit.costs == pytest.approx(COSTS, rel=0.02)
    found = host_cost_fit.predictions(fit, rows)
    error = host_cost_fit.held_out_error(found)
    assert error is not None
    assert error < 0.005
    assert {one.arm for one in found if not one.held_out} == set(host_cost_fit.SEEN)
    # an arm that costs more than its calls
    slow = summarise(record_cost_run(tmp_path, hold_send_more=9.0).tables["samples"])
    wrong = [
        one
        for one in host_cost_fit.predictions(fit, slow)
        if (one.arm, one.section) == (CostArm.HOLD, "send")
    ]
    assert all(one.error < -0.3 for one in wrong)
    assert len(host_cost_fit.errors_table(found)) == len({(p.arm, p.section) for p in found})
    assert len(host_cost_fit.costs_table(fit, "H200")) == len(COSTS)
    profile = fit.profile("H200")
    assert profile.record_seconds == pytest.approx(COSTS["record_seconds"] / 1e6, rel=0.02)


def test_a_ring_that_asked_its_events_has_that_call_too(costs: list[ArmCost], run: Run) -> None:
    limits = run.tables["limits"]
    assert not host_cost_fit.asked_events(limits)
    assert host_cost_fit.asked_events(limits[limits["limit"] != "record, wait, copy, record"])
    [then, now] = [
        {(one.arm, one.section): one.predicted_us for one in found}
        for found in (
            host_cost_fit.predictions(host_cost_fit.HostFit(COSTS, 1, asked), costs)
            for asked in (True, False)
        )
    ]
    more = {key: then[key] - now[key] for key in now}
    asked = {key for key, us in more.items() if us == pytest.approx(COSTS["query_seconds"])}
    sends = {(arm, "send") for arm in ("unpatched", "unpatched again", "hold", "record_stream")}
    assert asked == sends
    assert sum(more.values()) == pytest.approx(4 * COSTS["query_seconds"])


def test_figures_are_drawn(run: Run, costs: list[ArmCost], tmp_path: Path) -> None:
    figures.style()
    drawn = [
        figures_protocol_cost.host_figure(costs, limits_by_name(run.tables["limits"])),
        figures_protocol_cost.steps_figure(run.tables["samples"]),
        figures_protocol_cost.nets_figure(run.tables["samples"]),
        figures_protocol_cost.held_figure(run.tables["held"]),
    ]
    for number, figure in enumerate(drawn):
        figure.savefig(tmp_path / f"{number}.png")
        plt.close(figure)
    assert [len(figure.axes) for figure in drawn] == [2, 2, 1, 2]


def test_a_recorded_run_closes_what_was_open(run: Run) -> None:
    found = protocol_cost.gather_runs([], [str(run.path)])
    assert found.protocol is not None
    assert protocol_cost.open_arms(found).empty


def test_it_runs_from_the_command_line_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "virtual", "-p", "loops", "[bare]", "-p", "pressures", "[idle]"]
    words += ["-p", "leads", "[1]", "-p", "steps", "8", "-p", "limit_calls", "6"]
    words += ["--only", "hold", "--out", str(tmp_path), "--json"]
    assert main(["sweep", "protocol-cost", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {one["arm"] for one in printed["arms"]} == {"unpatched", "hold"}
    assert {goal["outcome"] for goal in printed["goals"]} == {"not testable here"}
    assert check_folder(tmp_path) == []
    [made], problems = load_runs([tmp_path], "protocol_cost")
    assert problems == []
    assert made.provenance.evidence is Evidence.SIMULATED
    assert claims.simulate("MI355X", 1, tmp_path / "new", [str(tmp_path)]).path == made.path
    assert main(["sweep", "protocol-cost", "--dry-run", "--quick", "--device", "virtual"]) == 0
    assert "engine-b4-idle" in capsys.readouterr().out

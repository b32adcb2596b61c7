"""Tables, goals and verdict arguments of notebook 06, from made-up rows."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from cost_rows import record_kernel_run, record_speed_run

from atom.benchmarks.kernel_rows import Operator, Question
from atom.benchmarks.step_calls import ARMS, StepCalls
from atom.config import CopyProtocol, GuardMode
from atom.evidence import Evidence
from atom.workbook import figures, figures_engine, protocol_cost
from atom.workbook.claims import Verdict, judge, load_claims
from atom.workbook.engine_speed_analysis import MET, MISSED
from atom.workbook.engine_speed_analysis import summarise as summarise_speed
from atom.workbook.kernel_analysis import ArmSummary, summarise
from atom.workbook.records import Run


def calls(**more: int) -> list[StepCalls]:
    """Equal counts for every arm; ``more`` is added to the default one's."""
    found = []
    for protocol, guard, epoch_tag in ARMS:
        default = (protocol, guard, epoch_tag) == (CopyProtocol.HOLD, GuardMode.REPORT, True)
        extra = more if default else {}
        counts = {
            name: 8 + extra.get(name, 0)
            for name in (
                "events_created",
                "events_recorded",
                "host_waits",
                "stream_waits",
                "streams_told",
                "kernels",
                "copies",
                "blocks",
            )
        }
        found.append(
            StepCalls(protocol=protocol, guard=guard, epoch_tag=epoch_tag, steps=4, **counts)
        )
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record_kernel_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def kernel_summaries(kernels: Run) -> list[ArmSummary]:
    return summarise(kernels.tables["samples"])


@pytest.fixture(scope="module")
def speed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record_speed_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    ("more", "claim", "verdict"),
    [
        ({}, "contract-11", Verdict.REPRODUCED_IN_SIMULATION),
        ({"events_created": 1}, "contract-11", Verdict.DIFFERS),
        ({"events_recorded": 4}, "contract-11", Verdict.DIFFERS),
        ({}, "limit-01", Verdict.DIFFERS),
        # a guard that waits once a step is what the source speaks of
        ({"host_waits": 4}, "limit-01", Verdict.REPRODUCED_IN_SIMULATION),
    ],
)
def test_counts_settle_their_claims(more: dict[str, int], claim: str, verdict: Verdict) -> None:
    arguments = protocol_cost.call_arguments(calls(**more), "MI355X")[claim]
    assert judge(load_claims()[claim], Evidence.SIMULATED, **arguments).verdict == verdict


def test_calls_are_shown_by_step() -> None:
    table = protocol_cost.calls_table(calls(copies=2))
    assert len(table) == len(ARMS)
    assert set(table["copies"]) == {"2", "2.5"}


def test_a_guard_in_a_graph_costs_no_synchronisation(
    kernels: Run, kernel_summaries: list[ArmSummary]
) -> None:
    arguments = protocol_cost.kernel_arguments(kernels, kernel_summaries)["limit-01"]
    assert arguments["value"] == 0
    assert "1,000 guarded launches" in arguments["detail"]
    settled = judge(load_claims()["limit-01"], Evidence.MEASURED, **arguments)
    assert settled.verdict is Verdict.DIFFERS
    speed_alone = [one for one in kernel_summaries if one.question == Question.SPEED]
    assert set(protocol_cost.kernel_arguments(kernels, speed_alone)["limit-01"]) == {"reason"}


def test_goals_of_the_kernels_can_be_missed(
    tmp_path: Path, kernel_summaries: list[ArmSummary]
) -> None:
    goals = protocol_cost.kernel_goals(kernel_summaries)
    assert {goal.outcome for goal in goals} == {MET}
    speed_goals = [goal for goal in goals if "copy_" in goal.name]
    assert all("-b256-" in goal.point_id or "-b512-" in goal.point_id for goal in speed_goals)
    assert len(speed_goals) == 8
    slow = record_kernel_run(tmp_path, guard=1.05)
    missed = protocol_cost.kernel_goals(summarise(slow.tables["samples"]))
    assert {goal.outcome for goal in missed if goal.name.startswith("guard")} == {MISSED}


def test_tables_have_a_row_a_point(kernel_summaries: list[ArmSummary]) -> None:
    table = protocol_cost.kernels_table(kernel_summaries, Question.SPEED)
    points = {one.point_id for one in kernel_summaries if one.question == Question.SPEED}
    assert len(table) == len(points)
    assert set(table["transformers over copy_"]) == {protocol_cost.NOTHING}
    assert len(protocol_cost.left_out(kernel_summaries)) == 1
    guard = protocol_cost.kernels_table(kernel_summaries, Question.GUARD)
    assert {"report over none", "trap over none", "none again over none"} <= set(guard.columns)


def test_figures_are_drawn(kernel_summaries: list[ArmSummary], speed: Run, tmp_path: Path) -> None:
    figures.style()
    speeds = summarise_speed(speed.tables["samples"], speed.tables["floors"])
    drawn = [
        figures_engine.guard_figure(kernel_summaries),
        figures_engine.updates_figure(kernel_summaries),
        figures_engine.rates_figure(speeds),
        figures_engine.time_figure(speed.tables["device_time"]),
        figures_engine.memory_figure(speed.tables["memory"]),
    ]
    for number, figure in enumerate(drawn):
        figure.savefig(tmp_path / f"{number}.png")
        plt.close(figure)
    assert [len(figure.axes) for figure in drawn] == [2, 4, 2, 1, 1]
    assert protocol_cost.is_hardware(speed)
    assert len(protocol_cost.memory_table(speed)) == 2
    assert len(protocol_cost.speed_table(speeds)) == len(speeds)


def test_chosen_arms_are_of_the_first_width(kernel_summaries: list[ArmSummary]) -> None:
    rows = protocol_cost.chosen(kernel_summaries, Question.SPEED, Operator.CONV_UPDATE)
    assert {one.channels for one in rows} == {8192}
    assert protocol_cost.chosen([], Question.SPEED, Operator.CONV_UPDATE) == []


def test_runs_that_were_asked_for_go_first(tmp_path: Path) -> None:
    asked, beside = tmp_path / "asked", tmp_path / "beside"
    first = record_kernel_run(asked)
    record_kernel_run(beside)
    late = record_speed_run(beside)
    found = protocol_cost.gather_runs([str(asked)], [str(beside)])
    assert found.kernels is not None
    assert found.kernels.provenance.run_id == first.provenance.run_id
    assert found.speed is not None
    assert found.speed.provenance.run_id == late.provenance.run_id
    nothing = protocol_cost.gather_runs([], [str(tmp_path / "none")])
    assert nothing == protocol_cost.CostRuns(None, None, None, ())


def test_open_claims_are_those_without_a_verdict() -> None:
    claims = load_claims()
    table = protocol_cost.open_claims(claims, "06", {"contract-11/simulated"})
    assert set(table["claim"]) == {name for name, one in claims.items() if one.notebook == "06"}
    row = table[table["claim"] == "contract-11"].iloc[0]
    assert row["open"] == "measured"
    nothing = protocol_cost.CostRuns(None, None, None, ())
    assert len(protocol_cost.open_arms(nothing)) == len(protocol_cost.OPEN_ARMS)

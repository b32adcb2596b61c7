"""What engine-fault rows settle, and what they must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from atom.benchmarks.engine_fault_arms import (
    ARMS,
    GUARD_ALONE,
    NO_DRAFTS,
    NO_MIDDLE_CHUNK,
    NO_NET,
    NO_STORE,
    EngineFaultSettings,
)
from atom.benchmarks.engine_fault_rows import EngineFaultRow
from atom.config import CopyProtocol
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import engine_fault_analysis, engine_fault_runs, figures_engine
from atom.workbook.claims import Verdict, judge, load_claims
from atom.workbook.engine_fault_runs import record_engine_fault, unexpected
from atom.workbook.records import Run, check_folder
from atom.workbook.tables import to_frame

BUDGETS = (8192, 16384)


def row(name: str, budget: int, **changes: Any) -> EngineFaultRow:
    """A row as the fix says."""
    arm = next(arm for arm in ARMS if arm.name == name)
    faulty = name in (GUARD_ALONE, NO_NET)
    found: dict[str, Any] = {
        "point_id": f"{name}/{budget}",
        "arm": name,
        "protocol": arm.protocol,
        "guard": arm.guard,
        "status_check": arm.status_check,
        "epoch_tag": arm.epoch_tag,
        "token_budget": budget,
        "requests": 31,
        "draft_tokens": 3 if arm.drafts else 0,
        "store_bytes": 2**28 if arm.store else 0,
        "middle_chunks": 4 if arm.middle_chunks else 0,
        "statuses": 20 if arm.drafts else 0,
        "stale_statuses": 2 if faulty else 0,
        "largest_bonus": budget if faulty else 3 if arm.drafts else -1,
        "budget_statuses": 1 if faulty else 0,
        "status_lines": 1 if faulty else 0,
        "out_of_bounds_lines": 1 if faulty else 0,
        "first_out_of_bounds_line": "line" if faulty else None,
        "stale_payloads": 1 if name == NO_DRAFTS else 0,
        "guard_errors": 1 if name == GUARD_ALONE else 0,
        "guard_value": budget + 1 if name == GUARD_ALONE else None,
        "failed_requests": 1 if name == GUARD_ALONE else 0,
        "changed_requests": 20 if name == GUARD_ALONE else 0,
        "compared_requests": 0 if name == NO_NET else 31,
        "first_wrong_status": f"[{budget}, 1, 1, ...]" if faulty else None,
        "first_wrong_rows": 12 if faulty else None,
        "first_wrong_rows_in_range": 11 if faulty else None,
        "crashed": name == NO_NET,
        "exit_code": 3 if name == NO_NET else None,
        "error": {
            GUARD_ALONE: f"request short-0: row 0 (state slot 0): num_accepted_tokens {budget + 1}",
            NO_NET: "AcceleratorError: CUDA error: an illegal memory access was encountered",
        }.get(name),
    }
    return EngineFaultRow(**{**found, **changes})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small run of the virtual device."""
    root = tmp_path_factory.mktemp("runs")
    wanted = {
        "token_budgets": [128],
        "law_budgets": [256],
        "requests": 7,
        "output_tokens": 10,
        "chunks": 2,
        "only": [GUARD_ALONE, NO_NET],
    }
    return record_engine_fault(EngineFaultSettings.parse(wanted), root)


def measured(recorded: Run, **changes: dict[str, Any]) -> Run:
    """Rows of all arms as if from hardware; ``changes`` by arm, spaces as underscores."""
    rows = [
        row(arm.name, budget, **changes.get(arm.name.replace(", ", "_").replace(" ", "_"), {}))
        for budget in BUDGETS
        for arm in ARMS
    ]
    provenance = recorded.provenance.model_copy(
        update={"evidence": Evidence.MEASURED, "machine": "h200"}
    )
    return Run(recorded.path, provenance, {"arms": to_frame(rows, EngineFaultRow)})


def verdict(run: Run, claim: str) -> Verdict:
    arguments = engine_fault_analysis.claim_arguments(run)[claim]
    return judge(load_claims()[claim], run.provenance.evidence, **arguments).verdict


def test_a_recorded_run_is_sound_and_the_same_again(recorded: Run, tmp_path: Path) -> None:
    assert check_folder(recorded.path) == []
    assert len(recorded.tables["arms"]) == 5
    again = record_engine_fault(engine_fault_analysis.settings_of(recorded), tmp_path)
    assert again.tables["arms"].equals(recorded.tables["arms"])
    assert unexpected(recorded.tables["arms"]) == []


def test_a_simulated_run_settles_what_its_arms_show(recorded: Run) -> None:
    found = engine_fault_analysis.claim_arguments(recorded)
    assert "mech-16" not in found
    assert verdict(recorded, "mech-11") is Verdict.REPRODUCED_IN_SIMULATION
    assert verdict(recorded, "mech-15") is Verdict.REPRODUCED_IN_SIMULATION
    assert verdict(recorded, "limit-02") is Verdict.REPRODUCED_IN_SIMULATION
    # the arms that take a condition away were left out
    assert verdict(recorded, "mech-12") is Verdict.NOT_RUN
    assert verdict(recorded, "mech-09") is Verdict.NOT_RUN


def test_measured_rows_as_the_fix_says(recorded: Run) -> None:
    run = measured(recorded)
    found = engine_fault_analysis.claim_arguments(run)
    assert set(found) == {"mech-09", "mech-11", "mech-15", "mech-16", "limit-02"}
    assert {verdict(run, claim) for claim in found} == {Verdict.REPRODUCED}
    assert "8192 gives 8192, 16384 gives 16384" in found["mech-11"]["value"]
    assert "40 of 62 other requests" in found["limit-02"]["detail"]


@pytest.mark.parametrize(
    ("claim", "changes", "expected"),
    [
        # the fault did not show itself: nothing is decided
        (
            "mech-11",
            {"unpatched_guard": {"largest_bonus": 3, "first_wrong_status": None}},
            Verdict.INCONCLUSIVE,
        ),
        # an impossible count that is another one than the budget
        (
            "mech-11",
            {"unpatched_guard": {"budget_statuses": 0, "first_wrong_status": "[77, 1]"}},
            Verdict.DIFFERS,
        ),
        ("mech-11", {"hold": {"budget_statuses": 1}}, Verdict.DIFFERS),
        ("mech-09", {"unpatched_no_drafts": {"statuses": 4}}, Verdict.DIFFERS),
        ("mech-09", {"unpatched_no_drafts": {"crashed": True}}, Verdict.DIFFERS),
        # a row in mapped memory: wrong answers and no fault
        (
            "mech-16",
            {"unpatched_no_net": {"crashed": False, "changed_requests": 9}},
            Verdict.INCONCLUSIVE,
        ),
        ("mech-16", {"unpatched_no_net": {"error": "ended with code 1"}}, Verdict.DIFFERS),
        (
            "mech-15",
            {"unpatched_no_net": {"crashed": False, "changed_requests": 9}},
            Verdict.REPRODUCED,
        ),
        ("mech-15", {"unpatched_no_net": {"crashed": False}}, Verdict.DIFFERS),
        ("limit-02", {"unpatched_guard": {"error": "something is wrong"}}, Verdict.DIFFERS),
        ("limit-02", {"unpatched_guard": {"guard_errors": 0}}, Verdict.INCONCLUSIVE),
    ],
)
def test_rows_can_say_otherwise(
    recorded: Run, claim: str, changes: dict[str, dict[str, Any]], expected: Verdict
) -> None:
    assert verdict(measured(recorded, **changes), claim) is expected


def test_conditions_need_both(recorded: Run) -> None:
    def simulated(**changes: dict[str, Any]) -> Run:
        run = measured(recorded, **changes)
        return Run(run.path, recorded.provenance, run.tables)

    assert verdict(simulated(), "mech-12") is Verdict.REPRODUCED_IN_SIMULATION
    assert verdict(simulated(), "arith-08") is Verdict.REPRODUCED_IN_SIMULATION
    for name in (NO_STORE, NO_MIDDLE_CHUNK):
        key = name.replace(", ", "_").replace(" ", "_")
        assert verdict(simulated(**{key: {"budget_statuses": 1}}), "mech-12") is Verdict.DIFFERS
    assert verdict(simulated(zero_copy={"stale_statuses": 1}), "arith-08") is Verdict.DIFFERS


def test_requests_add_up(recorded: Run) -> None:
    for run in (recorded, measured(recorded)):
        for one in engine_fault_analysis.rows_of(run):
            parts = figures_engine.fates(one)
            assert min(parts) >= 0
            assert sum(parts) <= one["requests"] + 1
            assert parts[3] == (one["requests"] + 1 if one["crashed"] else 0)


def test_tables_and_figures(recorded: Run, tmp_path: Path) -> None:
    run = measured(recorded)
    assert len(engine_fault_analysis.arms_table(run)) == len(ARMS) * len(BUDGETS)
    nets = engine_fault_analysis.nets_table(run, BUDGETS[0])
    assert list(nets["requests told"])[-2:] == [1, 0]
    points = engine_fault_analysis.law_points(run)
    assert [(p.budget, p.largest) for p in points if p.unpatched] == [(b, b) for b in BUDGETS]
    for number, figure in enumerate(
        (
            figures_engine.law_figure(points, Evidence.MEASURED),
            figures_engine.fates_figure(run, BUDGETS[0]),
        )
    ):
        figure.savefig(tmp_path / f"{number}.png")
        plt.close(figure)


def test_a_protected_arm_that_is_stale_is_told(recorded: Run) -> None:
    stale = measured(recorded, hold={"stale_statuses": 1}).tables["arms"]
    assert [text.split(":")[0] for text in unexpected(stale)] == [f"hold/{b}" for b in BUDGETS]
    text = engine_fault_runs.result_text(stale)
    assert f"[{BUDGETS[0]}, 1, 1, ...] died (exit code 3)" in text


def test_runs_that_are_there_are_not_made_again(recorded: Run, tmp_path: Path) -> None:
    root = str(recorded.path.parent)
    found = engine_fault_analysis.gather_runs([root], [], "MI355X", 42, tmp_path)
    assert found.simulated.provenance.run_id == recorded.provenance.run_id
    assert found.measured is None
    assert list(tmp_path.iterdir()) == []


def test_options_of_other_sweeps_are_refused() -> None:
    from argparse import Namespace

    options: dict[str, Any] = {
        "processes": None,
        "resume": None,
        "trials": 5,
        "parameters": [],
        "device": None,
        "seed": None,
        "only": [],
        "quick": False,
    }
    with pytest.raises(BadInput, match="no --trials"):
        engine_fault_runs.SWEEP.settings_from(Namespace(**options), None)
    settings = engine_fault_runs.SWEEP.settings_from(
        Namespace(**{**options, "trials": None, "device": "accelerator"}), None
    )
    assert settings.token_budgets == BUDGETS
    assert settings.model == "preset:m395"
    assert all(a.protocol is CopyProtocol.UNPATCHED for a in ARMS if a.may_end_process)

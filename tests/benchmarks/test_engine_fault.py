"""The fault in a whole engine, on the virtual device: each net, each condition, and the law."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import pytest

from atom.benchmarks.engine_fault import (
    Seen,
    first_wrong_status,
    load_fault_model,
    measure_engine_fault,
    run_engine_fault,
)
from atom.benchmarks.engine_fault_arms import (
    ARMS,
    CHECK_ALONE,
    GUARD_ALONE,
    NO_DRAFTS,
    NO_MIDDLE_CHUNK,
    NO_NET,
    NO_STORE,
    QUICK,
    REFERENCE,
    TAG_ALONE,
    EngineFaultSettings,
    build_points,
    quick,
)
from atom.benchmarks.engine_fault_child import DIED, last_seen, run_in_child
from atom.benchmarks.engine_fault_rows import EngineFaultRow
from atom.config import CopyProtocol
from atom.device import open_device
from atom.errors import BadInput
from atom.transfer.copy_protocol import UnpatchedWarning

SETTINGS = quick(EngineFaultSettings())
BUDGET = SETTINGS.token_budgets[0]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], EngineFaultRow]:
    return {(row.arm, row.token_budget): row for row in run_engine_fault(SETTINGS)}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnpatchedWarning)
        yield


def arm(name: str) -> object:
    return next(arm for arm in ARMS if arm.name == name)


@pytest.mark.parametrize("one", [a for a in ARMS if a.protocol is not CopyProtocol.UNPATCHED])
def test_a_protected_engine_is_right(
    rows: dict[tuple[str, int], EngineFaultRow], one: object
) -> None:
    row = rows[one.name, BUDGET]  # type: ignore[attr-defined]
    assert row.middle_chunks == SETTINGS.chunks
    assert row.store_bytes > 0
    assert (row.stale_statuses, row.stale_payloads, row.guard_errors) == (0, 0, 0)
    assert (row.failed_requests, row.changed_requests) == (0, 0)
    assert row.compared_requests == SETTINGS.requests + 1
    # every legal count came: a smaller largest would make "no stale status" cheap
    assert row.largest_bonus == 3
    assert not row.crashed


def test_the_tag_names_the_stale_status(rows: dict[tuple[str, int], EngineFaultRow]) -> None:
    row = rows[TAG_ALONE, BUDGET]
    assert row.stale_statuses == 1
    assert row.stale_payloads >= 1
    assert row.largest_bonus <= 3
    assert row.guard_errors == 0
    assert "spec status carries no step at all" in (row.error or "")


def test_the_host_check_stops_the_count_before_a_kernel_sees_it(
    rows: dict[tuple[str, int], EngineFaultRow],
) -> None:
    row = rows[CHECK_ALONE, BUDGET]
    assert row.largest_bonus == BUDGET
    assert row.guard_errors == 0
    assert row.failed_requests == SETTINGS.requests


def test_the_guard_reports_the_count_and_others_change_in_silence(
    rows: dict[tuple[str, int], EngineFaultRow],
) -> None:
    row = rows[GUARD_ALONE, BUDGET]
    assert row.guard_errors == 1
    assert row.guard_value == BUDGET + 1
    assert (row.status_lines, row.out_of_bounds_lines) == (1, 1)
    assert f"nat={BUDGET + 1} num_bonus_sched={BUDGET}" in str(row.first_out_of_bounds_line)
    for word in ("request short-0", "state slot 0", f"num_accepted_tokens {BUDGET + 1}"):
        assert word in (row.error or "")
    # one request is told, and those whose wrong count was a legal one are not
    assert row.failed_requests == 1
    assert row.first_wrong_rows_in_range == (row.first_wrong_rows or 0) - 1
    assert row.changed_requests >= row.first_wrong_rows_in_range > 0


def test_without_a_net_the_device_faults(rows: dict[tuple[str, int], EngineFaultRow]) -> None:
    row = rows[NO_NET, BUDGET]
    assert row.crashed
    assert "IllegalAccess" in (row.error or "")
    assert row.exit_code is None


def test_the_stale_value_is_the_token_budget(rows: dict[tuple[str, int], EngineFaultRow]) -> None:
    budgets = (BUDGET, *SETTINGS.law_budgets)
    assert len(budgets) == 3
    assert [rows[GUARD_ALONE, budget].largest_bonus for budget in budgets] == list(budgets)
    # the control: held sources never show it
    assert [rows[REFERENCE, budget].budget_statuses for budget in budgets] == [0, 0, 0]
    assert [rows[REFERENCE, budget].largest_bonus for budget in budgets] == [3, 3, 3]


def test_the_budget_is_read_only_with_store_and_middle_chunk(
    rows: dict[tuple[str, int], EngineFaultRow],
) -> None:
    assert rows[GUARD_ALONE, BUDGET].budget_statuses > 0
    without_store = rows[NO_STORE, BUDGET]
    assert (without_store.stale_statuses, without_store.changed_requests) == (0, 0)
    without_chunk = rows[NO_MIDDLE_CHUNK, BUDGET]
    assert (without_chunk.middle_chunks, without_chunk.budget_statuses) == (0, 0)


def test_without_drafts_there_is_no_status_but_ids_are_stale(
    rows: dict[tuple[str, int], EngineFaultRow],
) -> None:
    row = rows[NO_DRAFTS, BUDGET]
    assert (row.draft_tokens, row.statuses, row.stale_statuses) == (0, 0, 0)
    assert row.guard_errors == 0
    assert not row.crashed
    assert row.stale_payloads > 0


def test_an_arm_in_a_child_leaves_its_end_behind() -> None:
    seen = run_in_child(SETTINGS, arm(NO_NET), BUDGET)  # type: ignore[arg-type]
    assert seen.exit_code == DIED
    assert "IllegalAccess" in (seen.crash or "")
    assert seen.largest_bonus == BUDGET


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("import os; os.abort()", -6, "ended with code -6"),
        ("import sys; print('bad address', file=sys.stderr); sys.exit(9)", 9, "bad address"),
        ("import time; time.sleep(30)", -9, "did not end"),
    ],
)
def test_a_child_that_dies_keeps_what_it_had_seen(program: str, code: int, words: str) -> None:
    told = Seen(statuses=4, largest_bonus=128).plain()
    said = f"import json; print(json.dumps({told!r}), flush=True); print('{{half'); {program}"
    seen = run_in_child(
        SETTINGS,
        arm(NO_NET),  # type: ignore[arg-type]
        BUDGET,
        command=(sys.executable, "-c", said),
        timeout=2.0 if code == -9 else 30.0,
    )
    assert (seen.exit_code, seen.statuses, seen.largest_bonus) == (code, 4, 128)
    assert words in (seen.crash or "")


def test_what_kills_the_device_does_not_take_the_later_arms_along() -> None:
    settings = EngineFaultSettings.parse({**QUICK, "law_budgets": [], "only": [NO_STORE]})
    device = open_device("virtual")
    asked = []

    def child(_: EngineFaultSettings, one: object, budget: int) -> Seen:
        asked.append((one.name, budget))  # type: ignore[attr-defined]
        return Seen(crash="gone", exit_code=-11)

    loaded = load_fault_model(settings, device)
    both = [row.arm for row in measure_engine_fault(device, loaded, settings, child)]
    assert both == [REFERENCE, NO_STORE]
    assert asked == []
    alone = settings.model_copy(update={"only": (NO_NET,)})
    last = list(measure_engine_fault(device, loaded, alone, child))[-1]
    assert asked == [(NO_NET, BUDGET)]
    assert (last.crashed, last.exit_code, last.error) == (True, -11, "gone")


def test_a_status_is_compared_while_both_engines_did_the_same() -> None:
    right = Seen(bonuses=[[1, 2], [0, 3], [1]])
    assert first_wrong_status(Seen(bonuses=[[1, 2], [9, 3]]), right) == ([9, 3], [0, 3])
    assert first_wrong_status(Seen(bonuses=[[1, 2], None, [2]]), right) == ([], [])
    assert first_wrong_status(Seen(bonuses=[[1, 2], [0]]), right) == ([], [])
    assert first_wrong_status(right, right) == ([], [])


def test_last_whole_line() -> None:
    first, second = Seen(statuses=1), Seen(statuses=2, done={"a"}, tokens={"a": [1]})
    text = "\n".join(f"{one.plain()!r}".replace("'", '"') for one in (first, second))
    text = text.replace("None", "null")
    assert last_seen(text + '\n{"statuses": 3').done == {"a"}
    assert last_seen("Traceback").statuses == 0


def test_settings_that_say_nothing_are_refused() -> None:
    with pytest.raises(BadInput, match="no arm 'unpached'"):
        build_points(EngineFaultSettings.parse({"only": ["unpached"]}))
    with pytest.raises(BadInput, match="stands twice"):
        EngineFaultSettings.parse({"token_budgets": [128, 128]})
    with pytest.raises(BadInput, match="128 stands in token_budgets too"):
        build_points(EngineFaultSettings.parse({"token_budgets": [128], "law_budgets": [128]}))

"""What notebook 07 makes of capacity rows, from made-up ones; and the sweep's record."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from atom.benchmarks.capacity_check import Checked
from atom.benchmarks.capacity_points import CapacitySettings
from atom.benchmarks.capacity_rows import CapacityRow
from atom.benchmarks.throughput_rows import Outcome
from atom.config import OffloadCapacitySettings
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import (
    capacity_analysis,
    capacity_claims,
    capacity_measured,
    capacity_orders,
    capacity_records,
    capacity_waits,
    capacity_what_if,
)
from atom.workbook.capacity_runs import SWEEP, record_capacity, result_text
from atom.workbook.claims import load_claims
from atom.workbook.published_derived import state_loads_by_pool
from atom.workbook.records import check_folder
from atom.workbook.verdicts import Verdict, judge


def made_row(
    sessions: int, pool: float | None, arm: str = "shared_lru", **over: Any
) -> CapacityRow:
    required = (name for name, field in CapacityRow.model_fields.items() if field.is_required())
    values: dict[str, Any] = dict.fromkeys(required, 0) | {
        "point_id": f"{arm}/{sessions}/{pool}/{over}",
        "arm": arm,
        "concurrency": sessions,
        "pool_gib": pool,
        "offload_policy": None,
        "state_share": None,
        "state_checkpoint_tokens": 256,
        "byte_scale": 3.0,
        "device_gb": 200.0,
        "load_gb_per_second": 10.0,
        "effective_total_throughput": 40e3,
        "ttft_mean_seconds": 20.0,
        "itl_p90_seconds": 0.1,
        "cached_share": 0.5,
        "tokens_per_request": 70e3,
        "state_pairs": 100,
    }
    return CapacityRow.model_validate(values | over)


def made_run(rows: list[CapacityRow]) -> Any:
    table = pd.DataFrame([row.model_dump(mode="json") for row in rows])
    return SimpleNamespace(tables={"points": table}, path=Path("made"))


def exact_grid() -> list[CapacityRow]:
    """Rows that are what was published at one corner of the grid, and something else elsewhere.

    The corner is scale 3, 200 GB and 10 GB/s, of a machine that is twice as fast.
    """
    bare, offload = capacity_analysis.observations()
    memories = (100.0, 200.0)
    rows = [
        made_row(
            one.setup[0],
            None,
            device_gb=memory,
            effective_total_throughput=2 * one.mean_throughput,
        )
        for one, memory in product(bare, memories)
    ]
    for one, scale, memory, rate in product(offload, (2.0, 3.0, 4.0), memories, (5.0, 10.0)):
        off = abs(scale - 3) + (200 - memory) / 100
        rows.append(
            made_row(
                *one.setup,
                byte_scale=scale,
                device_gb=memory,
                load_gb_per_second=rate,
                effective_total_throughput=2 * one.mean_throughput * (1 + 0.5 * off) * rate / 10,
                itl_p90_seconds=(one.itl_p90_seconds or 0) / 2 * (1 + off) * 10 / rate,
                state_pairs=100_000,
                state_pairs_failed=round(1e5 * one.middle_failed * (1 - 0.4 * off)),
            )
        )
    return rows


def test_the_study_predicts_what_it_has_not_seen_from_rows_that_hold_it() -> None:
    found = capacity_analysis.study(made_run(exact_grid()))
    assert found.fitted.slowness == pytest.approx(2.0)
    fitted = found.fitted
    assert (fitted.byte_scale, fitted.device_gb) == pytest.approx((3.0, 200.0))
    assert fitted.load_gb_per_second == pytest.approx(10.0)
    assert found.errors(found.predicted, found.unseen).throughput < 1e-6
    assert found.figures == 3 + 4 * 3
    claims = load_claims()
    for claim, arguments in capacity_claims.study_arguments(found, "made").items():
        verdict = judge(claims[claim], Evidence.SIMULATED, **arguments).verdict
        assert verdict is Verdict.REPRODUCED_IN_SIMULATION
    table = capacity_analysis.predictions_table(found)
    assert list(table["over published"]) == ["1.00"] * 7
    assert len(capacity_analysis.scores_table(found)) == 3
    assert len(capacity_analysis.singles_table(found)) == 4
    direct = capacity_orders.direct_table(found, [made_row(48, 224.0, state_pairs_failed=9)])
    assert list(direct["simulated, tok/s"]) == ["20,000"]
    assert list(direct["simulated failures"]) == ["9.0%"]
    # a run at another place of the grid says nothing of the fit
    elsewhere = [made_row(48, 224.0, byte_scale=2.0)]
    assert capacity_orders.direct_table(found, elsewhere).empty
    assert "not simulated at the place" in capacity_orders.direct_sentences(found, elsewhere)[0]
    own = {one.setup: round(100 * one.middle_failed) for one in found.offload}
    rows = [made_row(*setup, state_pairs_failed=failed) for setup, failed in own.items()]
    assert "in the published order" in capacity_orders.direct_sentences(found, rows)[0]
    rows[0] = made_row(*found.offload[0].setup, state_pairs_failed=90)
    assert "another order" in capacity_orders.direct_sentences(found, rows)[0]
    latencies = capacity_analysis.latencies_table(found).set_index("setup")
    assert latencies.loc["32 sessions, 96 GiB"].iloc[0] == "76 / 76"
    said = " ".join(capacity_analysis.study_sentences(found))
    assert "does not fit" not in said
    assert "3 lie within a quarter" in said
    assert "at the edge of the simulated grid: the device's KV, the rate of loads." in said
    requests = capacity_waits.requests_table(found)
    assert list(requests["tokens a request, frozen fit"]) == ["70,000"] * 7
    assert "104,751" in " ".join(requests["tokens a request, published"])
    said = " ".join(capacity_waits.requests_sentences(found))
    assert "87,689 to 104,751 (19%), and up with throughput" in said
    assert "open question" in said
    # control: a model whose requests grow with throughput has a cause for it
    grown = [
        row.model_copy(update={"tokens_per_request": row.effective_total_throughput})
        for row in exact_grid()
    ]
    found = capacity_analysis.study(made_run(grown))
    assert "open question" not in " ".join(capacity_waits.requests_sentences(found))


def test_a_study_says_where_it_does_not_fit() -> None:
    rows = [
        row.model_copy(update={"effective_total_throughput": 5e3}) if row.concurrency == 64 else row
        for row in exact_grid()
    ]
    found = capacity_analysis.study(made_run(rows))
    assert "does not fit: 64 sessions" in " ".join(capacity_analysis.study_sentences(found))
    with pytest.raises(BadInput, match="no rows of the published setups"):
        capacity_analysis.study(made_run([row for row in rows if row.concurrency != 48]))


def test_remedies_are_compared_in_one_place_of_the_grid_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(name: str, seconds: float, **over: Any) -> Any:
        run = made_run([*remedies(), *(row.model_copy(update=over) for row in remedies()[:1])])
        run.provenance = SimpleNamespace(
            exit_state="finished",
            evidence=Evidence.SIMULATED,
            settings={"duration_seconds": seconds},
            run_id=name,
        )
        return run

    runs = [made("a", 3600.0), made("b", 120.0), made("c", 3600.0, byte_scale=5.0)]
    runs.append(made("d", 3600.0, repeat=1))
    monkeypatch.setattr(capacity_records, "load_runs", lambda *_: (runs, []))
    found = capacity_records.gather_runs(["data/runs"])
    # the hour, not the newer two minutes, nor the run that mixes two sizes of bytes
    assert found.remedies is runs[0]
    assert found.repeats == (runs[3],)
    # a run of another order alone is one too, beside the first order of the remedies
    other = made("e", 3600.0)
    other.tables["points"]["repeat"] = 1
    monkeypatch.setattr(capacity_records, "load_runs", lambda *_: ([runs[0], other], []))
    assert capacity_records.gather_runs(["data/runs"]).repeats == (other,)
    assert ["several sizes" in one for one in found.problems] == [True]


def test_tables_are_shown_as_a_reader_wants_them() -> None:
    shown = pd.concat(
        [
            capacity_waits.shown_loads(state_loads_by_pool()),
            capacity_waits.shown_waits(capacity_waits.waits_table()),
            capacity_waits.shown_brackets(capacity_waits.brackets_table()),
            capacity_claims.shown_advice(capacity_claims.recommendation(remedies())),
        ]
    )
    text = shown.to_string(na_rep="")
    assert "15% to 18%" in text
    assert not re.search(r"None|True|False|\d\.\d{4}|_gib|_s\b", text)


def test_failed_loads_are_counted_beside_each_other() -> None:
    lost = Checked("a", (0.2, 0.15), (0.2, 0.0), (1.0, 1.0), apart=9.0, asked=(55, 30))
    bare = Checked("b", (0.7, 0.7), (None, None), (1.0, 1.0))
    table = capacity_measured.checked_table([lost, bare])
    assert list(table["state loads failed"]) == ["11 of 55 / 0 of 30", ""]
    said = capacity_measured.checked_sentences([lost, bare])
    assert any("differ, measured / simulated: a 11 of 55 / 0 of 30" in one for one in said)
    same = Checked("a", (0.2, 0.2), (0.2, 0.2), (1.0, 1.0), asked=(55, 55))
    assert not any("differ, measured" in one for one in capacity_measured.checked_sentences([same]))


def test_the_cliff_is_shown_by_caches_and_orders_and_not_asserted() -> None:
    sizes = ((0.9, 0.0), (1.0, 0.1), (1.1, 0.5))
    cliff = Checked(
        "a", (0.2, 0.1), (None, None), (1.0, 1.0), by_caches=sizes, by_order=(0.05, 0.3)
    )
    said = " ".join(capacity_measured.checked_sentences([cliff]))
    assert "caches of 1.025 to 1.025 of the recorded size" in said
    assert "finds less than the engine at each" in said
    assert "at 1 of 1 points" in said
    table = capacity_measured.cliff_table([cliff])
    assert table.iloc[0]["caches at which the model finds it"] == "x 1.025"
    # control: hits that no size within a tenth gives are not explained
    beyond = Checked("b", (0.4, 0.1), (None, None), (1.0, 1.0), by_caches=sizes[:2])
    said = " ".join(capacity_measured.checked_sentences([beyond]))
    assert "1 not explained" in said
    assert "recorded size" not in said


def test_a_hardware_run_settles_the_cause_by_its_policies() -> None:
    def point(name: str, outcome: Outcome = Outcome.OK, policy: str = "shared_lru") -> Any:
        return SimpleNamespace(
            point_id=name,
            arm="hold, paired" if policy == "paired" else "hold",
            concurrency=64,
            pool_gib=14.0,
            offload_policy=policy,
            outcome=outcome,
            states_loaded=40,
        )

    rows = (point("a"), point("b", policy="paired"), point("c", Outcome.CRASH))
    check = capacity_measured.RecordedCheck(rows=rows, evicted={"a": 10}, slug="h200")
    claims, found = load_claims(), capacity_measured.measured_arguments(check)
    judged = {
        name: judge(claims[name], Evidence.MEASURED, **given) for name, given in found.items()
    }
    assert judged["limit-07"].value.startswith("10 of 50 state loads fail in one LRU, 0 of 40")
    assert judged["limit-07"].verdict is judged["limit-08"].verdict is Verdict.REPRODUCED
    assert judged["limit-10"].verdict is Verdict.INCONCLUSIVE
    assert "1 of 1 points that crashed" in judged["limit-10"].detail
    # control: where paired loads fail as well, the policy is not the cause
    both = replace(check, evicted={"a": 10, "b": 10})
    found = capacity_measured.measured_arguments(both)
    assert judge(claims["limit-07"], Evidence.MEASURED, **found["limit-07"]).verdict is (
        Verdict.DIFFERS
    )
    assert capacity_measured.measured_arguments(capacity_measured.RecordedCheck()) == {}


def test_orders_of_the_sessions_give_remedies_a_spread() -> None:
    found = capacity_analysis.study(made_run(exact_grid()))
    shares = {one.setup: round(100 * one.middle_failed) for one in found.offload}
    rows = []
    for setup, failed in shares.items():
        rows += [
            made_row(*setup, seed=1, state_pairs_failed=failed),
            made_row(
                *setup, seed=2, state_pairs_failed=60 - failed, effective_total_throughput=5e4
            ),
            made_row(*setup, "late_lookup", seed=1, effective_total_throughput=44e3),
            made_row(*setup, "late_lookup", seed=2, effective_total_throughput=44e3),
        ]
    table = capacity_orders.orders_table(rows)
    late = table[table["remedy"] == "late_lookup"]
    assert set(late["over shared_lru of the same order"]) == {"0.88 to 1.10"}
    said = capacity_orders.orders_sentences(rows)
    assert "by up to 25%" in said[0]
    assert "its failures by up to 56 points" in said[0]
    assert "that order's luck" in said[1]
    assert "fewer failures than the shared pool in 8 of 8 pairs" in said[2]
    assert "more throughput in 4 (0.88 to 1.10)" in said[2]
    # control: orders that differ by less than two published runs say nothing of luck
    same = [row.model_copy(update={"effective_total_throughput": 4e4}) for row in rows]
    assert "luck" not in " ".join(capacity_orders.orders_sentences(same))
    direct = capacity_orders.direct_table(found, rows)
    assert list(direct["orders of the sessions"]) == [2] * 4
    said = capacity_orders.direct_sentences(found, rows)
    assert "Of 2 orders of the same sessions, 1 give the published order" in said[1]
    # the remedies' run gives its order of the same points, and of no others
    first = [made_row(*found.offload[0].setup, seed=9), made_row(64, 999.0, seed=9), rows[0]]
    more = [*first, made_row(*found.offload[0].setup, seed=9, byte_scale=2.0)]
    assert capacity_orders.with_first_order(rows, more) == [first[0], *rows]
    # one order has no spread to speak of
    assert len(capacity_orders.direct_sentences(found, [r for r in rows if r.seed == 1])) == 1


def test_waits_order_the_failures_and_leave_few_sessions_to_serve() -> None:
    table = capacity_waits.waits_table()
    assert list(table["failed_percent"].round(1)) == [1.6, 8.6, 16.5, 41.0]
    said = capacity_waits.waits_sentences(table)
    assert "all but 5.5 sessions wait" in said[0]
    assert len(said) == 2
    # control: in another order nothing is said of it
    mixed = table.assign(failed_percent=table["failed_percent"].to_numpy()[::-1])
    assert len(capacity_waits.waits_sentences(mixed)) == 1


def test_slower_loads_are_weighed_against_the_published_difference() -> None:
    found = capacity_analysis.study(made_run(exact_grid()))
    setup = (64, 288.0)
    # in the made rows throughput goes with the rate of loads
    assert "loads at 92% of the fitted rate cost the published 7.3%" in " ".join(
        capacity_waits.spread_sentences(found, setup)
    )
    assert capacity_waits.spread_table(found, setup)["figure"].iloc[0] == "tok/s"
    flat = [
        row.model_copy(update={"effective_total_throughput": 2 * 60e3})
        if row.concurrency == 64 and row.pool_gib
        else row
        for row in exact_grid()
    ]
    found = capacity_analysis.study(made_run(flat))
    assert "do not explain" in capacity_waits.spread_sentences(found, setup)[0]


def test_two_readings_of_the_bracketed_figure_fit() -> None:
    table = capacity_waits.brackets_table().set_index("reading")["fits"]
    assert list(table) == [True, False, False, True]


def remedies() -> list[CapacityRow]:
    rows = []
    for one in capacity_analysis.observations()[1]:
        rows += [
            made_row(*one.setup, state_pairs_failed=20, states_evicted=5),
            made_row(*one.setup, arm="paired", effective_total_throughput=44e3),
            made_row(*one.setup, arm="isolated-0.25", state_pairs_failed=50),
        ]
    return rows


def test_the_cause_is_settled_by_the_policy_alone() -> None:
    claims = load_claims()
    for rows, holds in ((remedies(), True), ([*remedies()[:1], *_failing_pairs()], False)):
        arguments = capacity_claims.remedy_arguments(rows, "made")
        assert arguments["limit-07"]["holds"] is holds
        judged = judge(claims["limit-07"], Evidence.SIMULATED, **arguments["limit-07"])
        assert (judged.verdict is Verdict.REPRODUCED_IN_SIMULATION) is holds
    assert capacity_claims.remedy_arguments([], "made") == {}


def _failing_pairs() -> list[CapacityRow]:
    return [row.model_copy(update={"state_pairs_failed": 3}) for row in remedies()[1:]]


def test_the_advice_names_the_best_remedy_without_failures() -> None:
    advice = capacity_claims.recommendation(remedies())
    assert "paired serves most: 1.10" in capacity_claims.advice_sentences(advice)[0]
    # what costs nothing and fails less is recommended first, and not what costs throughput
    better = [
        made_row(*one.setup, arm="late_lookup", state_pairs_failed=3, ttft_mean_seconds=19.0)
        for one in capacity_analysis.observations()[1]
    ]
    said = capacity_claims.advice_sentences(capacity_claims.recommendation([*remedies(), *better]))
    assert "nothing in the model: paired. At the worst setup 0%" in said[1]
    # what no figure counts is said of admission control, and of what rests on an inference
    assert "held back" not in " ".join(said)
    held = [
        made_row(*one.setup, arm="admission-0.75", effective_total_throughput=50e3)
        for one in capacity_analysis.observations()[1]
    ]
    table = capacity_claims.recommendation([*remedies(), *held])
    assert "25% of the sessions are held back" in " ".join(capacity_claims.advice_sentences(table))
    slow = [
        row.model_copy(update={"effective_total_throughput": 30e3}) if row.arm == "paired" else row
        for row in remedies()
    ]
    said = capacity_claims.advice_sentences(capacity_claims.recommendation([*slow, *better]))
    assert "nothing in the model: late_lookup. At the worst setup 3% of the state loads" in said[1]
    assert "which is inferred" in said[1]
    assert "No simulated pool" in capacity_claims.pool_sentences(remedies())[0]
    clean = [row.model_copy(update={"state_pairs_failed": 0}) for row in remedies()]
    assert "224 GiB at 48 sessions (4.7 GiB each)" in capacity_claims.pool_sentences(clean)[0]
    more = [
        row.model_copy(update={"pool_gib": 400.0, "effective_total_throughput": 60e3})
        for row in clean
        if row.concurrency == 64
    ]
    failing = [
        row.model_copy(update={"state_pairs_failed": 20}) for row in clean if row.concurrency == 64
    ]
    (text,) = capacity_claims.pool_sentences(
        [*(row for row in clean if row.concurrency != 64), *failing, *more]
    )
    assert "112 GiB more at 64 sessions (1.50)" in text
    # a small pool in which nothing can fail is no pool without failures where a larger one fails
    larger = [row.model_copy(update={"pool_gib": 999.0}) for row in failing]
    pools = capacity_claims.pools_without_failures([*clean, *larger])
    assert set(pools[pools["sessions"] == 64]["smallest without failures"]) == {"none of these"}
    pools = capacity_claims.pools_without_failures(remedies())
    by_arm = pools.groupby("remedy")["smallest without failures"].apply(set)
    assert by_arm["shared_lru"] == {"none of these"}
    assert by_arm["paired"] == {"96 GiB", "224 GiB", "288 GiB"}


def test_a_sweep_is_recorded_and_resumed(tmp_path: Path) -> None:
    settings = CapacitySettings.parse(
        {
            "setups": [[2, 0], [2, 1]],
            "byte_scale": [0.1],
            "device_gb": [1.0],
            "duration_seconds": 4.0,
            "sessions": 3,
            "processes": 1,
        }
    )
    run = record_capacity(settings, tmp_path)
    assert run.provenance.evidence is Evidence.SIMULATED
    assert run.provenance.machine == "model"
    assert not check_folder(run.path)
    assert len(run.tables["points"]) == len(SWEEP.plan(settings)) == 2
    assert "shared_lru/c2/1GiB" in result_text(run.tables["points"])
    again = record_capacity(settings, tmp_path)
    first, second = run.tables["points"], again.tables["points"]
    pd.testing.assert_frame_equal(first, second)


def test_a_panel_that_cannot_run_is_refused() -> None:
    for pool in (0.0, -3.0):
        with pytest.raises(BadInput, match="pool_gib"):
            OffloadCapacitySettings.parse({"pool_gib": [pool]})
    small = OffloadCapacitySettings.parse({"device_gb": 0.001, "concurrency": 2})
    with pytest.raises(BadInput, match="give the device more"):
        capacity_what_if.curve_rows(capacity_what_if.panel_settings(small))


def test_an_accelerator_is_refused() -> None:
    with pytest.raises(BadInput, match="no accelerator"):
        SWEEP.parse({"device": "accelerator"}, False)
    assert SWEEP.parse({}, True).duration_seconds < 3600

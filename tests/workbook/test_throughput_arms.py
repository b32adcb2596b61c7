"""Arms of one setting: what was found and held, and what was planned and not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import throughput_points_made_up as made_up

from atom.evidence import Evidence
from atom.workbook import throughput_arms, throughput_outcomes
from atom.workbook.records import Run
from atom.workbook.throughput_analysis import is_ok, load_set, main_rows, rows_of, source_of

IMAGE = 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made_up.record(tmp_path_factory.mktemp("runs"))


def arm(base: dict[str, Any], hits: float, kv_gib: float, states: int, **more: Any) -> Any:
    return {
        **base,
        "lookup_tokens": 1000,
        "hit_tokens": round(1000 * hits),
        "state_image_bytes": IMAGE,
        "states_stored": states + 5,
        "states_evicted": 5,
        "states_loaded": 1,
        "kv_load_failures": 0,
        "state_load_failures": 0,
        "pool_bytes_used": round(kv_gib * 2**30) + states * IMAGE,
        **more,
    }


@pytest.fixture
def rows(run: Run) -> list[dict[str, Any]]:
    first = next(
        row for row in main_rows(rows_of([run])) if is_ok(row) and row["pool_gib"] is not None
    )
    return [
        arm(first, 0.2, 12.0, 160),
        arm(first, 0.5, 13.0, 70, chunk_tokens=8 * first["chunk_tokens"]),
        arm(first, 0.0, 10.5, 290, offload_policy="isolated", kv_load_failures=111),
    ]


def test_arms_stand_beside_the_grid_s_own_with_what_they_held(rows: list[dict[str, Any]]) -> None:
    # three rows of one sitting; the grid's factors are those of most rows under hold
    table = throughput_arms.arms_table([rows[0], *rows])
    assert list(table["from a cache"]) == ["20%", "20%", "50%", "0%"]
    assert list(table["KV held at the end"]) == ["12 GiB", "12 GiB", "13 GiB", "10.5 GiB"]
    assert list(table["states held"]) == ["160", "160", "70", "290"]
    assert list(table["over the first arm"][:2]) == ["–", "–"]
    assert table["over the first arm"][2].startswith("1.00 [")
    said = throughput_arms.arms_sentences([rows[0], *rows])
    assert "least 0%" in said[0]
    assert "the cause is open" in said[1]
    assert "111 for KV, 0 for a state. Its states have bytes for themselves" in said[2]


def test_what_the_counts_do_not_show_is_not_said(rows: list[dict[str, Any]]) -> None:
    failed = {"kv_load_failures": 1, "state_load_failures": 9}
    base, large, isolated = rows
    crossed = [base, base, {**large, "pool_bytes_used": 2**30 + 70 * IMAGE}, {**isolated, **failed}]
    said = " ".join(throughput_arms.arms_sentences(crossed))
    assert "held most" not in said
    assert "bytes for themselves" not in said
    # another sitting has no arm of the grid to stand beside
    apart = [base, base, {**large, "sitting": "another"}]
    assert throughput_arms.arms_table(apart).empty


def test_points_that_no_run_came_to_are_named(run: Run, tmp_path: Path) -> None:
    done = run.tables["points"]["point_id"].iloc[0]
    left = {done: "no time was left", "a/0": "no time was left", "b/0": "x", "b/1": "x"}
    facts = {**run.provenance.facts, "stopped_early": {"not_run": left}}
    early = Run(run.path, run.provenance.model_copy(update={"facts": facts}), run.tables)
    assert throughput_arms.not_run_sentences([run]) == []
    assert throughput_arms.not_run_sentences([early]) == [
        "planned and not run (no time was left): a/0.",
        "planned and not run (x): b (2 repeats).",
    ]


def test_the_main_grid_names_the_runs_of_its_points_alone(run: Run) -> None:
    other = Run(
        run.path,
        run.provenance.model_copy(update={"run_id": "20260202T000000Z-throughput-0123ab"}),
        {**run.tables, "points": run.tables["points"].iloc[:0]},
    )
    found = load_set(Evidence.MEASURED, "both", [run, other])
    assert found.run_ids == [run.provenance.run_id, other.provenance.run_id]
    assert found.main_run_ids == [run.provenance.run_id]
    assert found.main_source == source_of([run])
    assert load_set(Evidence.MEASURED, "one", [run]).main_source == "one"


def test_points_that_shared_their_host_are_told(rows: list[dict[str, Any]]) -> None:
    one, two, three = ({**row, "worker": None, "sitting": "a"} for row in rows)
    alone = [one, {**two, "worker": 0}, {**three, "worker": 0}]
    assert throughput_arms.side_by_side_sentences(alone) == []
    [text] = throughput_arms.side_by_side_sentences([*alone, {**one, "worker": 1}])
    assert "(a: up to 2 at a time)" in text


def test_a_point_cut_short_by_its_start_is_called_so_in_table_and_text(
    rows: list[dict[str, Any]],
) -> None:
    cut = {**rows[0], "outcome": "hang", "limit_seconds": None, "wall_seconds": 90.0}
    cut |= {"setup_seconds": 60.0}
    [text] = throughput_outcomes.deaths([cut])
    assert f": {throughput_outcomes.CUT_SHORT}" in text
    [ended] = throughput_outcomes.outcomes([cut])
    assert set(ended.ends) == {throughput_outcomes.CUT_SHORT}

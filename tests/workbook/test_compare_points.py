"""``compare`` of the experiments of points, on the recorded runs and on changed copies of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from colocation_made_up import record as made_up_colocation
from protocol_rows import record_cost_run
from throughput_points_made_up import record as made_up_throughput

from atom.errors import BadInput
from atom.workbook import compare as module
from atom.workbook.compare import as_json, as_markdown, compare
from atom.workbook.compare_points import COMPARISONS
from atom.workbook.records import Run, load_runs

_ROOT = Path(__file__).resolve().parents[2] / "data" / "runs"


def beside(monkeypatch: pytest.MonkeyPatch, a: Run, b: Run) -> None:
    sides = {"a": a, "b": b}
    monkeypatch.setattr(module, "_find_run", lambda name: sides[name])


def other(run: Run, machine: str | None = None, **settings: Any) -> Run:
    changed = {**run.provenance.settings, **settings}
    values = {"settings": changed, "machine": machine or run.provenance.machine}
    return replace(run, provenance=run.provenance.model_copy(update=values))


@pytest.mark.parametrize("experiment", COMPARISONS)
def test_each_experiment(experiment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    makers: dict[str, Callable[[Path], Run]] = {
        "throughput": made_up_throughput,
        "colocation": made_up_colocation,
        "protocol_cost": record_cost_run,
    }
    made_up = makers.get(experiment)
    run = made_up(tmp_path) if made_up else load_runs([_ROOT], experiment)[0][0]
    beside(monkeypatch, run, run)
    same = compare("a", "b")
    assert same.rates or same.ratios
    assert all(line.finding == "no difference seen" for line in same.rates)
    for line in same.ratios:
        assert line.ratio == 1
        assert (line.low is None) == (experiment == "engine_fault") or made_up
        assert line.low is None or line.low <= 1 <= (line.high or 0)
    beside(monkeypatch, run, other(run, machine="elsewhere"))
    across = compare("a", "b")
    assert not across.same_gpu
    assert all(line.unit.startswith("x ") for line in across.ratios)
    assert json.loads(as_json(across))["experiment"] == experiment
    assert "95%" in as_markdown(across)
    beside(monkeypatch, run, other(run, seed=7))
    with pytest.raises(BadInput, match="seed is 42 in A, 7 in B"):
        compare("a", "b")
    assert compare("a", "b", ["seed"]).allowed
    if experiment != "lifetime":
        with pytest.raises(BadInput, match=f"a run of {experiment} repeats"):
            compare("published", "b")


def test_a_lifetime_run_beside_the_published_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_runs([_ROOT], "lifetime")[0][0]
    beside(monkeypatch, run, run)
    result = compare("published", "b")
    assert not result.same_gpu
    assert len(result.rates) == 7 * 3
    assert not result.only_a + result.only_b + result.ratios
    counts = {line.cell: (line.a.stale, line.a.trials, line.b.trials) for line in result.rates}
    assert counts["stale, ell one-off, unmodified main"] == (20, 20, 50)
    assert {line.finding for line in result.rates} == {"no difference seen"}
    # each cell has rows of its own: a change of one point shows in that one alone
    table = run.tables["trials"].copy()
    table.loc[table["point_id"] == "clean/hold/protected", "stale"] = 50
    beside(monkeypatch, run, replace(run, tables={**run.tables, "trials": table}))
    standing = [line.cell for line in compare("b", "published").rates if line.finding == "B lower"]
    assert standing == ["stale, clean(), holds"]


def test_a_changed_count_and_a_slower_arm_stand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_runs([_ROOT], "lifetime")[0][0]
    table = run.tables["trials"].assign(stale=0)
    beside(monkeypatch, run, replace(run, tables={**run.tables, "trials": table}))
    found = {line.cell: line.finding for line in compare("a", "b").rates}
    assert found["stale, spec_status/unpatched/control"] == "B lower"
    assert found["stale, spec_status/record_stream/protected"] == "no difference seen"
    run = load_runs([_ROOT], "kernels")[0][0]
    samples = run.tables["samples"].copy()
    samples.loc[samples["arm"] == "report", "microseconds"] *= 2
    beside(monkeypatch, run, replace(run, tables={**run.tables, "samples": samples}))
    slower = [one for one in compare("a", "b").ratios if one.name.startswith("time of report over")]
    assert slower
    assert all(one.ratio == pytest.approx(2) and one.low and one.low > 1 for one in slower)


def test_a_loads_quotients_are_those_to_its_own_points_without_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_up_throughput(tmp_path)
    # a machine twice as fast with and without a pool, but for one setting
    points = run.tables["points"].copy()
    points["total_throughput"] *= 2
    faster = points["point_id"].str.contains("/c32/4GiB/")
    points.loc[faster, "total_throughput"] *= 1.5
    beside(monkeypatch, run, other(replace(run, tables={**run.tables, "points": points}), "x"))
    ratios = {one.name: one for one in compare("a", "b").ratios}
    tokens = {name: one for name, one in ratios.items() if name.startswith("tokens a second")}
    assert {one.unit for one in ratios.values()} == {"x its own without offload"}
    changed = {name for name, one in tokens.items() if one.ratio == pytest.approx(1.5)}
    assert changed
    assert all("/c32/4GiB" in name for name in changed)
    assert all(one.ratio == pytest.approx(1) for name, one in tokens.items() if name not in changed)
    assert any(
        one.low is not None and one.low > 1.4 for name, one in tokens.items() if name in changed
    )
    # the unpatched arm with a pool dies: counted, and divided by nothing
    cells = {line.cell: line.a for line in compare("a", "b").rates}
    unwell = {name for name, rate in cells.items() if "did not end well" in name and rate.stale}
    assert unwell
    assert all("unpatched" in name for name in unwell)
    assert not any(name.partition(", ")[2] in ratio for name in unwell for ratio in ratios)


def test_a_run_of_one_setting_shares_its_cells_with_a_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_up_throughput(tmp_path)
    points = run.tables["points"]
    one = points[points["point_id"].isin(["hold/c32/4GiB/0", "hold/c32/no-pool/0"])]
    few = replace(run, tables={**run.tables, "points": one})
    beside(monkeypatch, run, replace(few, provenance=other(few, "x").provenance))
    names = {ratio.name for ratio in compare("a", "b").ratios}
    assert "tokens a second, hold/c32/4GiB" in names

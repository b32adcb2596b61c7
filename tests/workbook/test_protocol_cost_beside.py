"""Recorded runs of the kernels and of the engine's speed beside each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cost_rows import record_kernel_run, record_speed_run

from atom.workbook import protocol_cost, protocol_cost_beside
from atom.workbook.engine_speed_analysis import ArmSpeed, host_sentences
from atom.workbook.records import Run
from atom.workbook.run_choice import newest_whole


@pytest.fixture(scope="module")
def speed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record_speed_run(tmp_path_factory.mktemp("runs"))


def scaled(run: Run, factor: float, device: str) -> Run:
    """The same rows with ``factor`` times the rates of every arm but transformers."""
    samples = run.tables["samples"].copy()
    ours = samples["arm"].astype(str) != "transformers"
    samples.loc[ours, "tokens_per_s"] = samples.loc[ours, "tokens_per_s"] * factor
    provenance = run.provenance.model_copy(update={"device": device, "commit": "f" * 40})
    return Run(run.path, provenance, {**run.tables, "samples": samples})


def test_no_recorded_run_is_dropped(tmp_path: Path) -> None:
    made = [record_kernel_run(tmp_path / name) for name in ("asked", "beside")]
    ids = [run.provenance.run_id for run in made]
    found = protocol_cost.gather_runs([str(tmp_path / "asked")], [str(tmp_path)])
    assert [run.provenance.run_id for run in found.all_of(found.kernels)] == ids
    assert found.all_of(found.speed) == []


def test_a_narrowed_run_is_shown_only_where_there_is_no_other(speed: Run) -> None:
    def narrowed(run_id: str, only: list[str]) -> Run:
        known = speed.provenance
        update = {"run_id": run_id, "settings": known.settings | {"only": only}}
        return Run(speed.path, known.model_copy(update=update), speed.tables)

    whole, part, last = narrowed("a", []), narrowed("b", ["ours"]), narrowed("c", ["ours"])
    assert newest_whole([whole, part]) is whole
    assert newest_whole([part, last]) is last
    assert newest_whole([speed, whole, part]) is whole


def test_guards_that_cost_too_much_show_in_their_run(tmp_path: Path) -> None:
    runs = [record_kernel_run(tmp_path / "a"), record_kernel_run(tmp_path / "b", guard=1.05)]
    table = protocol_cost_beside.kernels_beside(runs)
    assert list(table["conv's guard over none: met"]) == ["4 of 4", "0 of 4"]
    assert list(table["recurrent update's guard over none: met"]) == ["4 of 4", "0 of 4"]
    assert table["conv update's time over copy_: met"].nunique() == 1
    assert "commit" in table["run"].iloc[0]


def test_goals_stand_beside_each_other_and_the_spread_is_said(speed: Run) -> None:
    device = speed.provenance.device
    slow = scaled(speed, 0.5, device)
    table = protocol_cost_beside.speeds_beside([speed, slow])
    row = table[table["goal"] == "decode rate over transformers'"].iloc[0]
    assert row.iloc[2].endswith(" met")
    assert row.iloc[3].endswith("not met")
    (sentence,) = protocol_cost_beside.spread_sentences([speed, slow])
    assert "ours: " in sentence
    assert "(a factor of 2.00)" in sentence
    assert "transformers: " in sentence
    assert "(a factor of 1.00)" in sentence


def test_one_run_of_a_device_has_no_spread(speed: Run) -> None:
    assert protocol_cost_beside.spread_sentences([speed]) == []
    assert protocol_cost_beside.spread_sentences([speed, scaled(speed, 2.0, "MI355X")]) == []


def test_a_host_that_does_not_wait_is_named() -> None:
    parts: dict[str, float | None] = {
        "host_ms": 1.38,
        "status_wait_ms": 0.0,
        "output_wait_ms": 0.01,
    }
    bound = ArmSpeed("decode-b64", "decode", "ours", 64, step_ms=1.34, parts=parts)
    (sentence,) = host_sentences([bound])
    assert sentence.startswith("decode-b64: ")
    assert "ours 1.38 of 1.34" in sentence
    waits = replace(bound, parts={**parts, "status_wait_ms": 0.4})
    unknown = replace(bound, parts={**parts, "status_wait_ms": None})
    assert host_sentences([waits, unknown, replace(bound, parts=None)]) == []

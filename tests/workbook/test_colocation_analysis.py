"""What neighbours cost, from made-up rows: ratios, the 1% question, stale rates."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import throughput_points_made_up as made_up

from atom.benchmarks.colocation_point import race_settings
from atom.benchmarks.colocation_rows import BandwidthRow, ColocationRaceRow, ColocationRow
from atom.benchmarks.colocation_settings import (
    ColocationPoint,
    ColocationSettings,
    MemoryNode,
    Neighbour,
    build_colocation,
)
from atom.benchmarks.race_plan import build_arms
from atom.config import CopyProtocol
from atom.evidence import Evidence
from atom.workbook import colocation_analysis, figures, figures_colocation
from atom.workbook.provenance import collect_provenance
from atom.workbook.records import Run, load_run
from atom.workbook.run_writer import RunWriter

SETTINGS: dict[str, Any] = {
    "concurrency": [32],
    "pool_gib": [4.0],
    "neighbours": ["copy", "compute", "sweep"],
    "neighbour_counts": [1, 3],
    "shared_gpu": False,
    "repeats": 4,
}
#: throughput beside neighbours over that alone, and the stale rate of the open window
SLOWER = {"copy": 0.9, "compute": 1.0, "sweep": 0.97, "alone": 1.0}
STALE = {"copy": 30, "compute": 0, "alone": 0}


def beside(settings: ColocationSettings, point: ColocationPoint) -> dict[str, Any]:
    return {
        "subject": point.subject,
        "neighbour": point.neighbour,
        "neighbours": point.count,
        "neighbours_at_end": point.count,
        "shared_gpu": settings.shared_gpu,
        "memory_node": point.node,
    }


def race_rows(settings: ColocationSettings, point: ColocationPoint) -> list[ColocationRaceRow]:
    rows = []
    for arm in build_arms(race_settings(settings, point.repeat)):
        shown = arm.protocol is CopyProtocol.UNPATCHED and arm.front == "nothing"
        stale = STALE[point.neighbour] if shown else 0
        values: dict[str, Any] = {
            **dict.fromkeys(ColocationRaceRow.model_fields, 0),
            **{
                name: getattr(arm, name)
                for name in (
                    *("grid", "protocol", "is_null", "front", "copy_path", "source"),
                    *("queue_setting", "allocator", "producer_edge", "batch_size"),
                )
            },
            **beside(settings, point),
            "point_id": f"{arm.name}@0",
            "colocation_id": point.point_id,
            "arm": arm.name,
            "repeat": point.repeat,
            "source_bytes": 8,
            "next_bytes": 8,
            "trials": 40,
            "clean": 40 - stale,
            "overwritten": stale,
            "address_reused": 40,
            "tag_caught": stale,
            "in_range": 0,
            "shares_default_queue": None,
        }
        rows.append(ColocationRaceRow(**values))
    return rows


def record(root: Path, noise: float = 0.001, **given: Any) -> Run:
    """Write made-up rows as a finished hardware run."""
    settings = ColocationSettings.parse({**SETTINGS, **given})
    plain = settings.model_dump(mode="json")
    machine = made_up.PROPERTIES
    writer = RunWriter(
        root, machine.machine, "colocation", collect_provenance(machine, "colocation", plain, {})
    )
    draws = random.Random(1)
    for point in build_colocation(settings):
        tables: dict[str, Any] = {
            "bandwidth": [
                BandwidthRow(
                    point_id=point.point_id,
                    second=second / 2,
                    what="pcie to device",
                    gpu_index=0,
                    bytes_per_second=1e9 * (1 + second),
                )
                for second in range(4)
            ]
        }
        if point.engine is None:
            tables["race"] = race_rows(settings, point)
        else:
            count = point.count + 1 if point.neighbour is Neighbour.SWEEP else 1
            rows = []
            for number in range(count):
                rate = 1e4 * SLOWER[point.neighbour] * (1 + draws.gauss(0, noise))
                row = made_up.row(
                    settings.engine, point.engine, effective_total_throughput=rate
                ).model_dump()
                own = {"point_id": point.point_id, "repeat": point.repeat, "observed": number}
                rows.append(ColocationRow(**{**row, **beside(settings, point), **own}))
            tables["points"] = rows
        writer.write_point(point.point_id, tables)
    writer.finish("finished")
    return load_run(writer.path)


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


def test_a_window_that_neighbours_widen_is_named_and_no_other(run: Run) -> None:
    assert colocation_analysis.widened_arms([run]) == [
        ("main/unpatched/nothing/engine", "copy x1"),
        ("main/unpatched/nothing/engine", "copy x3"),
    ]
    table = colocation_analysis.race_table([run])
    shown = table[(table["beside it"] == "copy x1") & (table["arm"].str.contains("nothing"))]
    assert list(shown["stale"]) == ["120 of 160"]


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

"""The tables, sentences and figures of notebook 01, for the published case and for odd ones."""

from __future__ import annotations

from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest

from atom.config import FaultArithmeticSettings
from atom.model_ops.status_overwrite import enumerate_readings
from atom.workbook import fault_arithmetic as tables
from atom.workbook import fault_arithmetic_findings as findings
from atom.workbook import figures_fault_arithmetic as drawn
from atom.workbook import figures_status_overwrite as status_drawn
from atom.workbook.records import load_published

matplotlib.use("Agg")
PUBLISHED = FaultArithmeticSettings.parse({})


def test_the_published_log_is_read_from_its_table() -> None:
    log = findings.published_log(load_published("debug_log"))
    assert log == findings.PublishedLog(status=(16384, 1, 1), bonus=16384, accepted=16385, slot=5)


def test_each_reading_has_its_own_conclusion() -> None:
    readings = tables.all_readings(PUBLISHED)
    found = {
        (reading.layout.slots_per_request, reading.layout.first_slot, reading.base_only): (
            reading.explained,
            reading.excludes_valid,
        )
        for reading in readings
    }
    assert found[1, 0, True] == (False, True)
    assert found[1, 0, False] == (True, False)
    assert found[4, 0, False] == (False, True)
    assert found[4, 1, False] == (True, True)
    assert found[4, 3, False] == (False, False)
    assert not any(explained for (_, _, base), (explained, _) in found.items() if base)


def test_an_honest_row_inside_the_pool_is_called_honest() -> None:
    settings = FaultArithmeticSettings.parse({"faulting_row": 33})
    reading = tables.all_readings(settings)[0]
    assert "nothing is wrong with it" in reading.conclusion


def test_steps_agree_with_the_layout() -> None:
    steps = tables.steps(tables.single_layout(PUBLISHED), 5, 16384)
    values = dict(zip(steps["step"], steps["value"], strict=True))
    assert values["base row"] == "16,414"
    assert values["rows of a slot"] == "6"


def test_the_landing_table_names_the_first_row_of_each_place() -> None:
    layout = tables.single_layout(PUBLISHED)
    counts = tables.interesting_counts(layout, 16384, 5)
    table = tables.landing_table(layout, 0, 5, counts).set_index("count")
    assert table.loc[4, "where, tap by tap"] == "own slot"
    assert table.loc[5, "where, tap by tap"] == "own slot, own slot, another slot"
    assert table.loc[355, "where, tap by tap"] == "another layer"
    assert table.loc[1507, "where, tap by tap"] == "outside"
    assert table.loc[355, "MiB past the whole pool"] == "inside"
    assert table.loc[1507, "MiB past the whole pool"] == "0.05"
    assert table.loc[16385, "layers that would hold it"] == 43


def test_the_case_names_what_was_changed() -> None:
    assert findings.case_text(PUBLISHED, PUBLISHED) == "published numbers, assumed pool"
    changed = FaultArithmeticSettings.parse({"conv_width": 3})
    assert findings.case_text(changed, PUBLISHED) == "changed case: conv_width 3"


def test_the_virtual_device_brings_every_fitting_overwrite_about() -> None:
    found = findings.replay(enumerate_readings((16384, 1, 1), 16384, 32), 32, "MI355X")
    assert len(found) == 7
    assert found["block reused"].all()
    assert found["as logged"].all()
    assert not found["as logged, held"].any()


ODD: list[dict[str, Any]] = [
    {},
    {"draft_tokens": 0, "slots_per_request": 1},
    {
        "conv_width": 2,
        "draft_tokens": 0,
        "slots": 1,
        "slots_per_request": 1,
        "layers": 1,
        "faulting_row": 3,
        "bonus": 5,
        "token_budget": 5,
        "logged_slot": 0,
        "batch_size": 1,
    },
    {"conv_width": 64, "draft_tokens": 64, "slots": 130, "slots_per_request": 65, "layers": 20},
    {"faulting_row": 0},
    {"bonus": 0, "faulting_row": 10},
]


@pytest.mark.parametrize("values", ODD, ids=lambda values: ",".join(values) or "published")
def test_every_figure_and_table_works_for_odd_cases(values: dict[str, Any]) -> None:
    settings = FaultArithmeticSettings.parse(values)
    pool = tables.single_layout(settings)
    readings = tables.all_readings(settings)
    counts = tables.interesting_counts(pool, settings.bonus, 0)
    status = (settings.token_budget, 1, 1)
    candidates = enumerate_readings(status, settings.token_budget, max(settings.batch_size, 3))
    drawn.slot_figure(pool)
    layouts = findings.layouts_to_draw(settings, readings)
    drawn.needed_bonus_figure(layouts, settings.faulting_row, settings.bonus)
    drawn.pool_figure(pool, 0, 0, counts)
    status_drawn.puzzle_figure(candidates, status)
    status_drawn.ones_figure(settings.forced_mean_length, settings.batch_size)
    status_drawn.block_figure(settings.batch_size)
    assert all(findings.reading_sentences(settings, readings))
    assert all(findings.landing_sentences(pool, 0, settings.bonus))
    assert all(findings.puzzle_sentences(candidates))
    assert len(tables.landing_table(pool, 0, 0, counts)) == len(counts)
    tables.readings_table(readings, settings.faulting_row, settings.bonus)
    plt.close("all")

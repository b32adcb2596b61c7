"""Every item of a list setting is checked before any work starts."""

from __future__ import annotations

from typing import Any

import pytest

from atom.benchmarks.race_plan import build_arms, quick
from atom.config import (
    LifetimeSettings,
    NotebookSettings,
    RaceMicrobenchmarkSettings,
    RaceSettings,
    Settings,
    SourceLifetimeSettings,
)
from atom.errors import BadInput


@pytest.mark.parametrize(
    ("model", "values", "said"),
    [
        (RaceSettings, {"batch_sizes": [1, -32]}, "batch_sizes.1: .* got -32"),
        (RaceSettings, {"batch_sizes": [65537]}, "batch_sizes.0: .* got 65537"),
        (RaceSettings, {"batch_sizes": []}, "batch_sizes: .*at least 1 item"),
        (RaceSettings, {"batch_sizes": [8, 1, 8]}, "batch_sizes: '8' stands twice"),
        (RaceSettings, {"hardware_queues": [0]}, "hardware_queues.0: .* got 0"),
        (RaceSettings, {"hardware_queues": [4, 129]}, "hardware_queues.1: .* got 129"),
        (RaceSettings, {"hardware_queues": [4, 4]}, "hardware_queues: '4' stands twice"),
        (RaceSettings, {"hardware_queues": []}, "hardware_queues: "),
        (RaceSettings, {"only": [""]}, "only.0: "),
        (RaceSettings, {"only": ["main", "main"]}, "only: 'main' stands twice"),
        (RaceMicrobenchmarkSettings, {"batch_sizes": [1, -32]}, "batch_sizes.1: "),
        (RaceMicrobenchmarkSettings, {"measured": [" "]}, "measured.0: "),
        (NotebookSettings, {"records": ["a", "a"]}, "records: 'a' stands twice"),
        (LifetimeSettings, {"paths": ["ell slot", ""]}, "paths.1: "),
        (LifetimeSettings, {"protocols": ["hold", "hold"]}, "protocols: 'hold' stands twice"),
        (SourceLifetimeSettings, {"measured": [""]}, "measured.0: "),
    ],
)
def test_the_error_names_the_item(model: type[Settings], values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        model.parse(values)


def test_the_largest_and_smallest_items_are_fine() -> None:
    made = RaceSettings.parse({"batch_sizes": [65536, 1], "hardware_queues": [128, 1]})
    assert (made.batch_sizes, made.hardware_queues) == ((65536, 1), (128, 1))


def test_a_quick_sweep_of_one_batch_size_has_valid_settings_and_no_arm_twice() -> None:
    small = quick(RaceSettings.parse({"batch_sizes": [8]}))
    assert RaceSettings.parse(small.model_dump(mode="json")) == small
    names = [arm.name for arm in build_arms(small)]
    assert len(names) == len(set(names))

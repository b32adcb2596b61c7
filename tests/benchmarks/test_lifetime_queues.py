"""A shared hardware queue hides the foreign bytes, not the early free, and adds no schedule."""

from __future__ import annotations

from typing import Any, cast

import pytest

from atom.benchmarks.lifetime_paths import LifetimePath
from atom.benchmarks.lifetime_programs import LifetimeProgram
from atom.benchmarks.lifetime_queues import explore_queues
from atom.config import CopyProtocol
from atom.errors import BadInput
from atom.lifetime.explore import ViolationKind, explore
from atom.workbook.lifetime_analysis import queues_table


def test_one_queue_hides_the_fault_and_leaves_it_there() -> None:
    rows = explore_queues((LifetimePath.SPEC_STATUS, LifetimePath.ELL_SLOT))
    for row in rows:
        assert row.own.complete
        assert row.shared.complete
        assert ViolationKind.FOREIGN_BYTES in row.own.counterexamples
        assert set(row.shared.counterexamples) == {ViolationKind.EARLY_FREE}
        # what is read: a mapping takes schedules away and brings none
        read = [
            {cast(tuple[Any, ...], one)[0] for one in found.outcomes}
            for found in (row.own, row.shared)
        ]
        assert read[1] < read[0]
    assert queues_table(rows).to_dict("records")[0] == {
        "path, unpatched": "spec status",
        "a queue a stream": "3: early free, foreign bytes",
        "one queue for both": "1: early free",
    }


def test_shared_queues_are_not_reduced() -> None:
    program = LifetimeProgram(LifetimePath.SPEC_STATUS, CopyProtocol.UNPATCHED)
    with pytest.raises(BadInput, match="hardware_queues=1 with the reduced method"):
        explore(program, hardware_queues=1)

"""Every schedule of the tier's copies, and what the sanitizer says of them; faults are caught."""

from __future__ import annotations

from typing import Any

import pytest
from offload_programs import FAULTY, RIGHT, OffloadProgram, expected_of

from atom.device import open_device
from atom.device.virtual import VirtualDevice
from atom.lifetime.explore import Method, explore
from atom.lifetime.findings import Edge, Kind
from atom.lifetime.sanitizer import sanitizer

DEVICES = ["virtual", pytest.param("accelerator", marks=pytest.mark.gpu)]


def values(found: Any) -> set[tuple[int, ...]]:
    return {outcome[0] for outcome in found.outcomes}


@pytest.mark.parametrize("name", RIGHT)
def test_no_schedule_gives_other_bytes(name: str) -> None:
    found = explore(RIGHT[name])
    assert found.complete
    assert found.holds, found.first
    assert values(found) == {expected_of(RIGHT[name])}
    # all orders are equivalent: nothing that touches the same bytes may change places
    assert found.schedules == 1
    every = explore(RIGHT[name], method=Method.STATES, most_schedules=200)
    assert every.holds
    assert values(every) == {expected_of(RIGHT[name])}


@pytest.mark.parametrize("name", FAULTY)
def test_each_fault_has_a_schedule_that_shows_it(name: str) -> None:
    found = explore(FAULTY[name])
    right = expected_of(FAULTY[name])
    assert right in values(found)
    assert values(found) > {right}


@pytest.mark.parametrize("choice", DEVICES)
@pytest.mark.parametrize("name", RIGHT)
def test_the_sanitizer_finds_nothing_in_the_right_ones(choice: str, name: str) -> None:
    with sanitizer() as report:
        # named blocks: by rows every kernel names the whole pool
        program = OffloadProgram(**{**vars(RIGHT[name]), "by_rows": False})
        assert program(open_device(choice)) == expected_of(program)
    assert not report.findings, report.text()


@pytest.mark.parametrize("name", FAULTY)
def test_the_sanitizer_finds_each_fault_without_bad_luck(name: str) -> None:
    program = FAULTY[name]
    with sanitizer() as report:
        device = VirtualDevice("MI355X")
        program(device)
    kinds = {finding.kind for finding in report.findings}
    assert kinds <= {Kind.LIVE_OVERWRITE, Kind.UNORDERED_WRITES, Kind.READ_TOO_EARLY}
    assert kinds
    assert all(finding.edge in (Edge.REUSE, Edge.PRODUCER) for finding in report.findings)

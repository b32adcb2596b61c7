"""Every scenario gives exactly the findings that it must, on the virtual device and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios import SCENARIOS, Scenario

from atom.device import open_device
from atom.lifetime.findings import Edge, Kind, Report
from atom.lifetime.sanitizer import sanitizer

DEVICES = ["virtual", pytest.param("accelerator", marks=pytest.mark.gpu)]


def run(scenario: Scenario, choice: str) -> Report:
    with sanitizer() as report:
        device = open_device(choice)
        scenario.program(device)
        device.synchronize()
    return report


@pytest.mark.parametrize("choice", DEVICES)
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.name)
def test_findings_are_exactly_the_expected_ones(scenario: Scenario, choice: str) -> None:
    if scenario.virtual_only and choice != "virtual":
        pytest.skip("torch does not tell when a pinned tensor dies")
    report = run(scenario, choice)
    assert {finding.kind for finding in report.findings} == scenario.expected, report.text()
    assert report.operations > 0


@pytest.mark.parametrize("choice", DEVICES)
def test_a_finding_names_all_three_lines_and_the_fix(choice: str) -> None:
    (finding,) = run(SCENARIOS["status_dropped"], choice).findings
    assert finding.edge is Edge.REUSE
    assert finding.kind is Kind.FREED_IN_USE
    assert finding.freed is not None
    assert finding.second is not None
    assert finding.next_owner is not None
    source = Path(finding.freed.file).read_text().splitlines()
    program = source.index("def status_dropped(device: Device) -> None:")

    def line_of(text: str) -> int:
        return next(
            number
            for number, line in enumerate(source, 1)
            if number > program and line.strip() == text
        )

    def lines(site: object) -> list[int]:
        return [line for _, line in site.lines()]  # type: ignore[attr-defined]

    assert finding.freed.line == line_of("del verdict")
    assert line_of("queue_copy(device, side, host, verdict)") in lines(finding.first.site)
    assert line_of("fill(device, following, 16384)") in lines(finding.second.site)
    assert line_of("following = at_address(device, address, 64)") in lines(finding.next_owner.site)
    assert finding.first.tensor == "int32[64]"
    assert finding.first.nbytes == 256
    assert finding.block_bytes == 512
    assert f"scenarios.py:{line_of('done = side.record_event()')}" in finding.fix
    assert "keep a reference" in finding.fix

"""Debug lines: what raises one, how it reads, and that parsing undoes formatting."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom.errors import BadInput
from atom.model_engine.debug_checks import (
    DebugChecks,
    DebugLine,
    DebugList,
    GdnOutOfBoundsLine,
    MtpStatusLine,
    parse_debug_line,
)

PUBLISHED_STATUS = (
    "[L1DBG-MTP-STATUS] num_bonus=[16384, 1, 1, ...] prev_batch.req_ids=[757, 798, ...]"
)
PUBLISHED_BOUNDS = (
    "[L1DBG-GDN-OOB] bad_nat_rows=[0] row=0 req=757 nat=16385 num_bonus_sched=16384 "
    "state_slots[0]=[5]"
)

integers = st.integers(-(2**63), 2**63 - 1)
lists = st.builds(DebugList, st.lists(integers, max_size=6).map(tuple), st.booleans())
lines: st.SearchStrategy[DebugLine] = st.builds(MtpStatusLine, lists, lists) | st.builds(
    GdnOutOfBoundsLine, lists, st.integers(0, 10**6), integers, integers, integers, lists
)


def test_published_lines_parse_and_read_the_same_again() -> None:
    status = parse_debug_line(PUBLISHED_STATUS)
    assert status == MtpStatusLine(DebugList((16384, 1, 1), True), DebugList((757, 798), True))
    assert str(status) == PUBLISHED_STATUS
    bounds = parse_debug_line(PUBLISHED_BOUNDS)
    assert bounds == GdnOutOfBoundsLine(DebugList((0,)), 0, 757, 16385, 16384, DebugList((5,)))
    assert str(bounds) == PUBLISHED_BOUNDS


@given(lines, st.sampled_from(["", "2026-01-01 12:00:00 ERROR engine: "]))
def test_parsing_undoes_formatting(line: DebugLine, prefix: str) -> None:
    assert parse_debug_line(f"{prefix}{line}\n") == line


@given(lines, st.data())
def test_a_line_that_lost_its_end_never_parses(line: DebugLine, data: st.DataObject) -> None:
    text = str(line)
    with pytest.raises(BadInput):
        parse_debug_line(text[: data.draw(st.integers(0, len(text) - 1))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here", "no debug line"),
        (
            "[L1DBG-MTP-STATUS] num_bonus=[1, x] prev_batch.req_ids=[1]",
            "column 34: expected an int",
        ),
        ("[L1DBG-MTP-STATUS] num_bonus=[1]", "expected a blank"),
        ("[L1DBG-MTP-STATUS] num_bonus=[1 2] prev_batch.req_ids=[1]", "expected ','"),
        (PUBLISHED_BOUNDS.replace("slots[0]", "slots[1]"), "expected 'state_slots[0]='"),
        (PUBLISHED_BOUNDS + " more", "the end of the line"),
        (PUBLISHED_BOUNDS.replace("[5]", "[..., 5]"), "expected an integer (state_slots)"),
    ],
)
def test_a_malformed_line_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_debug_line(text)
    assert message in str(error.value)


def test_checks_are_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    checks = DebugChecks(3)
    assert checks.check_status([16384], [757]) is None
    assert checks.check_accepted([16385], [757], [16384], [[5]]) is None
    assert not caplog.records


def test_the_published_case_is_caught(caplog: pytest.LogCaptureFixture) -> None:
    checks = DebugChecks(3, enabled=True)
    with caplog.at_level(logging.ERROR):
        checks.check_status(torch.tensor([16384, 1, 1], dtype=torch.int32), [757, 798, 799])
        checks.check_accepted([16385, 2], [757, 798], [16384, 1], [[5], [9]])
    assert caplog.messages == [
        "[L1DBG-MTP-STATUS] num_bonus=[16384, 1, 1] prev_batch.req_ids=[757, 798, 799]",
        PUBLISHED_BOUNDS,
    ]


@given(st.lists(st.integers(-2, 6), min_size=1, max_size=8), st.integers(0, 4))
def test_a_line_comes_exactly_for_values_out_of_range(values: list[int], draft: int) -> None:
    checks = DebugChecks(draft, enabled=True, shown=2)
    requests = list(range(len(values)))
    status = checks.check_status(values, requests)
    assert (status is not None) == any(value < 0 or value > draft for value in values)
    slots = [[row] for row in requests]
    bounds = checks.check_accepted(values, requests, values, slots)
    bad = [row for row, value in enumerate(values) if value < 1 or value > draft + 1]
    assert (bounds is not None) == bool(bad)
    if bounds is not None:
        assert bounds.row == bad[0]
        assert bounds.bad_rows == DebugList(tuple(bad[:2]), len(bad) > 2)

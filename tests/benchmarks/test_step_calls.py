"""Counts of a decode step's calls: what a protocol or a guard adds."""

from __future__ import annotations

import pytest

from atom.benchmarks.step_calls import StepCalls, count_calls
from atom.config import CopyProtocol, GuardMode

STEPS = 4


@pytest.fixture(scope="module")
def calls() -> dict[tuple[CopyProtocol, GuardMode, bool], StepCalls]:
    found = count_calls(batch=2, steps=STEPS)
    return {(one.protocol, one.guard, one.epoch_tag): one for one in found}


def test_hold_calls_what_unpatched_calls(
    calls: dict[tuple[CopyProtocol, GuardMode, bool], StepCalls],
) -> None:
    hold = calls[CopyProtocol.HOLD, GuardMode.REPORT, True]
    bare = calls[CopyProtocol.UNPATCHED, GuardMode.REPORT, True]
    assert hold == bare.model_copy(update={"protocol": CopyProtocol.HOLD})
    assert hold.steps == STEPS
    # the counts are not zero because nothing was counted
    assert hold.events_recorded >= 3 * STEPS
    assert hold.host_waits > 0


def test_the_other_protocols_differ_where_they_should(
    calls: dict[tuple[CopyProtocol, GuardMode, bool], StepCalls],
) -> None:
    hold, told, blocking, written = (
        calls[protocol, GuardMode.REPORT, True]
        for protocol in (
            CopyProtocol.HOLD,
            CopyProtocol.RECORD_STREAM,
            CopyProtocol.BLOCKING,
            CopyProtocol.ZERO_COPY,
        )
    )
    assert (hold.streams_told, told.streams_told) == (0, 3 * STEPS)
    assert blocking.host_waits == hold.host_waits + 3 * STEPS
    # status, tokens and drafts to the host, and one copy to the device
    assert hold.copies == 4 * STEPS
    assert written.copies == hold.copies - 3 * STEPS
    assert written.blocks == 0 < hold.blocks


@pytest.mark.parametrize(
    ("guard", "epoch_tag"),
    [(GuardMode.NONE, True), (GuardMode.TRAP, True), (GuardMode.REPORT, False)],
)
def test_no_guard_and_no_tag_waits_or_launches(
    calls: dict[tuple[CopyProtocol, GuardMode, bool], StepCalls], guard: GuardMode, epoch_tag: bool
) -> None:
    full = calls[CopyProtocol.HOLD, GuardMode.REPORT, True]
    other = calls[CopyProtocol.HOLD, guard, epoch_tag]
    names = ("events_created", "events_recorded", "host_waits", "kernels", "copies", "blocks")
    for name in names:
        assert getattr(other, name) == getattr(full, name), name

"""Footprints: bytes by arena and offset, halves of copies, and what depends on what."""

from __future__ import annotations

import torch

from atom.device.arena import Span
from atom.device.operations import Part
from atom.lifetime.explore_trace import (
    Clocks,
    Footprint,
    TraceEvent,
    dependent,
    part_ranges,
    ranges_of,
)


def span(offset: int, elements: int, stride: int = 1) -> Span:
    reach = ((elements - 1) * stride + 1) * 8
    return Span("device", offset, reach, torch.int64, (elements,), (stride,))


def test_a_strided_row_leaves_its_gaps_free() -> None:
    # the two tags around a payload's data
    assert ranges_of(span(0, 2, stride=5)) == [("device", 0, 8), ("device", 40, 48)]
    assert ranges_of(span(64, 4)) == [("device", 64, 96)]


def test_each_half_of_a_copy_touches_its_half_only() -> None:
    whole = (span(0, 5),)
    halves = [part_ranges(whole, Part(0, part, 2, "copy", 1, whole, whole)) for part in range(2)]
    # whole elements: two, then three
    assert halves == [[("device", 0, 16)], [("device", 16, 40)]]


def test_what_depends_on_what() -> None:
    low, high, host = ("device", 0, 8), ("device", 8, 16), ("pinned", 0, 8)
    write, read = Footprint(writes=[low]), Footprint(reads=[low])
    assert dependent(write, read)
    assert dependent(read, write)
    assert dependent(write, Footprint(writes=[low]))
    assert not dependent(read, Footprint(reads=[low]))
    assert not dependent(write, Footprint(reads=[high]))
    assert not dependent(write, Footprint(reads=[host]))
    ends, asks = Footprint(ends=(1, 0)), Footprint(polls={(1, 0), (1, 1)})
    assert dependent(ends, asks)
    assert dependent(asks, ends)
    assert not dependent(Footprint(ends=(2, 0)), asks)


def test_a_race_is_one_that_nothing_else_orders() -> None:
    write = Footprint(writes=[("device", 0, 8)])
    read = Footprint(reads=[("device", 0, 8)])
    trace = [
        TraceEvent(-1, "queue", Footprint(), []),
        TraceEvent(0, "write", write, [0]),
        TraceEvent(1, "read", read, [0]),
        TraceEvent(2, "read behind an event", read, [0, 1]),
    ]
    clocks = Clocks()
    assert [clocks.extend(trace) for _ in trace] == [[], [], [1], []]
    assert clocks.before(trace, 1, 2), "a race is ordered as it went"
    assert not clocks.before(trace, 2, 3)
    clocks.truncate(2)
    assert clocks.extend(trace) == [1]

"""When the parts of one trial ran, by timing events: the same on every device."""

from __future__ import annotations

from dataclasses import dataclass

from atom.device import Device
from atom.device.interface import Event, Stream


@dataclass(frozen=True)
class Span:
    """What one lane did. Microseconds since this step's fill ended on the device."""

    lane: str
    label: str
    start_us: float
    end_us: float


class Trace:
    """Timing events of one trial, by lane. A mark ends the lane's open span and may begin one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: list[tuple[str, str, Event]] = []

    def mark(self, lane: str, label: str, stream: Stream) -> None:
        """Record an event on ``stream``; an empty ``label`` only ends what is open."""
        event = self._device.new_event(timing=True)
        event.record(stream)
        self._marks.append((lane, label, event))

    def spans(self) -> tuple[Span, ...]:
        """The spans, relative to the end of the fill. The device has been waited on."""
        zero = next(
            marks[1]
            for marks in [[m[2] for m in self._marks if m[0] == "default"]]
            if len(marks) > 1
        )
        spans = []
        open_spans: dict[str, tuple[str, float]] = {}
        for lane, label, event in self._marks:
            at = _microseconds(zero, event)
            begun = open_spans.pop(lane, None)
            if begun is not None:
                spans.append(Span(lane, begun[0], begun[1], max(at, begun[1])))
            if label:
                open_spans[lane] = (label, at)
        return tuple(spans)


def _microseconds(start: Event, end: Event) -> float:
    return round(start.elapsed_time(end) * 1e3, 3)

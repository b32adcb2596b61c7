"""When the parts of one trial ran, by timing events: the same on every device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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


class _Spanned(AbstractContextManager[None]):
    # no generator: one that an exception ends keeps its frames' tensors alive
    def __init__(self, trace: Trace, lane: str, label: str, stream: Stream) -> None:
        self._mark = trace.mark
        self._lane, self._label, self._stream = lane, label, stream

    def __enter__(self) -> None:
        self._mark(self._lane, self._label, self._stream)

    def __exit__(self, *_: object) -> None:
        self._mark(self._lane, "", self._stream)


_NOT_TRACED = nullcontext()


def span(
    trace: Trace | None, lane: str, label: str, stream: Stream
) -> AbstractContextManager[None]:
    """The block's work on ``stream`` is one span of ``lane``; nothing without a trace."""
    return _NOT_TRACED if trace is None else _Spanned(trace, lane, label, stream)


def _microseconds(start: Event, end: Event) -> float:
    return round(start.elapsed_time(end) * 1e3, 3)

"""What one execution did: events, what they touch, and which of them happened before which.

An event is one atomic step: a host call with the Python code that follows it up to the next host
call, or one part of a queued operation. Two events of different processes (the host, each stream)
are *dependent* if their order can be told: they touch the same bytes and one of them writes, or one
asks whether work has ended that the other one ends. Bytes are named by arena and offset, so that
they are the same bytes in every execution; absolute addresses would not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from atom.device.arena import Span
from atom.device.operations import Part

HOST = -1

#: (arena, first byte, past the last byte)
Range = tuple[str, int, int]
#: (stream, place among the stream's operations)
OperationKey = tuple[int, int]
Frontier = frozenset[OperationKey]
NOTHING: Frontier = frozenset()


@dataclass(slots=True)
class Footprint:
    """What an event touches.

    Attributes:
        reads, writes: bytes.
        polls: operations of which it asks whether they have ended.
        ends: the operation that it ends.
    """

    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)
    polls: set[OperationKey] = field(default_factory=set)
    ends: OperationKey | None = None

    @property
    def empty(self) -> bool:
        """Whether nobody can tell its place."""
        return not (self.reads or self.writes or self.polls or self.ends)


def overlap(these: Iterable[Range], those: Sequence[Range]) -> bool:
    """Whether any two of the ranges share a byte."""
    for space, start, stop in these:
        for other, begin, end in those:
            if start < end and begin < stop and space == other:
                return True
    return False


def dependent(one: Footprint, other: Footprint) -> bool:
    """Whether the order of two events of different processes can be told."""
    if one.ends is not None and one.ends in other.polls:
        return True
    if other.ends is not None and other.ends in one.polls:
        return True
    if one.writes and (overlap(one.writes, other.writes) or overlap(one.writes, other.reads)):
        return True
    return bool(other.writes) and overlap(other.writes, one.reads)


@dataclass(slots=True, eq=False)
class TraceEvent:
    """One event of an execution.

    Attributes:
        process: ``HOST``, or a stream.
        label: what it does, in words.
        touched: its footprint.
        after: places in the trace of the events that enabled it.
        part, parts: which piece of an operation; 0 of 1 for the host.
        operation: the operation, ``None`` for the host.
        section: which duty of the program the host was in.
    """

    process: int
    label: str
    touched: Footprint
    after: list[int]
    part: int = 0
    parts: int = 1
    operation: OperationKey | None = None
    section: str = ""


@dataclass(slots=True, eq=False)
class Queued:
    """An operation that the host has queued.

    Attributes:
        key: its name.
        submitted: place in the trace of the host's event that queued it.
        after: operations on other streams that it waits for.
        ended: place in the trace of its last part; ``None`` until then.
        name: what it does.
        reads, writes: bytes of the whole operation.
    """

    key: OperationKey
    submitted: int
    after: Frontier
    name: str
    reads: list[Range]
    writes: list[Range]
    ended: int | None = None


@dataclass(slots=True, eq=False)
class Ownership:
    """One life of a device block.

    Attributes:
        block: its bytes.
        owner: where it was asked for.
        stream_id: the stream that owns it.
        born, died: places in the trace; ``died`` is ``None`` while it lives.
        told: streams that the allocator was told of.
    """

    block: Range
    owner: str
    stream_id: int
    born: int
    died: int | None = None
    told: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Violation:
    """A property that did not hold.

    Attributes:
        kind: see :class:`atom.lifetime.explore.ViolationKind`.
        text: what was seen.
        place: place in the trace.
    """

    kind: str
    text: str
    place: int


def ranges_of(span: Span) -> list[Range]:
    """The bytes of a span: a range, or one an element for a strided row."""
    if not span.nbytes:
        return []
    if span.contiguous or len(span.shape) != 1:
        return [(span.space, span.offset, span.offset + span.nbytes)]
    size = span.dtype.itemsize
    starts = [span.offset + index * span.strides[0] * size for index in range(span.shape[0])]
    return [(span.space, start, start + size) for start in starts]


def part_ranges(spans: Sequence[Span], part: Part) -> list[Range]:
    """The bytes that ``part`` touches of an operation's spans: half of them for half of a copy."""
    if part.parts == 1:
        return [piece for span in spans for piece in ranges_of(span)]
    ranges = []
    for span in spans:
        size = span.dtype.itemsize
        half = span.offset + span.nbytes // 2 // size * size
        end = span.offset + span.nbytes
        ranges.append((span.space, *((span.offset, half) if part.part == 0 else (half, end))))
    return [piece for piece in ranges if piece[1] < piece[2]]


class Clocks:
    """Which events happened before which, extended event by event.

    The order is the program order of each process, what enabled an event, and every pair of
    dependent events in the order of the trace.
    """

    def __init__(self) -> None:
        self._clocks: list[dict[int, int]] = []
        self._telling: list[int] = []
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._clocks)

    def truncate(self, length: int) -> None:
        """Forget the events from ``length`` on."""
        del self._clocks[length:]
        # a clock names the latest event of each process that happened before: not always the last
        self._last = {}
        for clock in self._clocks:
            for process, place in clock.items():
                self._last[process] = max(place, self._last.get(process, -1))
        while self._telling and self._telling[-1] >= length:
            self._telling.pop()

    def before(self, trace: Sequence[TraceEvent], one: int, other: int) -> bool:
        """Whether event ``one`` is ``other`` or happened before it."""
        return self._clocks[other].get(trace[one].process, -1) >= one

    def extend(self, trace: Sequence[TraceEvent]) -> list[int]:
        """Add the next event of ``trace``.

        Args:
            trace: the execution, at least one event longer than this.

        Returns:
            Places of the events that it races with: dependent, of another process, and not before
            it by anything else. Latest first.
        """
        place = len(self._clocks)
        event = trace[place]
        clock: dict[int, int] = {}
        previous = self._last.get(event.process)
        for cause in event.after if previous is None else [previous, *event.after]:
            _join(clock, self._clocks[cause])
        races = []
        if not event.touched.empty:
            for other in reversed(self._telling):
                process = trace[other].process
                if clock.get(process, -1) >= other or process == event.process:
                    continue
                if dependent(trace[other].touched, event.touched):
                    races.append(other)
                    _join(clock, self._clocks[other])
            self._telling.append(place)
        clock[event.process] = place
        self._clocks.append(clock)
        self._last[event.process] = place
        return races


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for process, place in other.items():
        if clock.get(process, -1) < place:
            clock[process] = place

"""Operations, streams and parts, as the virtual device's queues see them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from atom.device.arena import Span


class Mode(IntEnum):
    """Who decides what runs next."""

    CLOCK = 0  #: the profile's times
    SCHEDULE = 1  #: the caller


class OperationKind(IntEnum):
    """What an operation is."""

    KERNEL = 0
    ENGINE_COPY = 1
    KERNEL_COPY = 2
    TRAFFIC = 3
    MATMUL = 4
    SPIN = 5
    WAIT = 6


class Operation:
    """One queued operation. Holds byte ranges and numbers, never a tensor."""

    __slots__ = (
        "end",
        "engine",
        "finished",
        "issued",
        "kind",
        "lane",
        "name",
        "occupancy",
        "on_finish",
        "on_issue",
        "parts",
        "pending",
        "reads",
        "run",
        "seconds",
        "sequence",
        "start",
        "stream",
        "submitted",
        "writes",
    )

    def __init__(
        self,
        kind: OperationKind,
        name: str,
        seconds: float,
        *,
        occupancy: float = 0.0,
        engine: str | None = None,
        parts: int = 1,
        run: Callable[[int], None] | None = None,
        reads: tuple[Span, ...] = (),
        writes: tuple[Span, ...] = (),
    ) -> None:
        self.kind = kind
        self.name = name
        self.seconds = seconds
        self.occupancy = occupancy
        self.engine = engine
        self.parts = parts
        self.run = run
        self.reads = reads
        self.writes = writes
        self.pending = 0
        self.issued = False
        self.finished = False
        self.on_issue: list[Operation] = []
        self.on_finish: list[Operation] = []
        self.lane: int | None = None
        self.sequence = -1
        self.submitted = self.start = self.end = 0.0
        self.stream: StreamState | None = None

    def again(self) -> Operation:
        """A fresh copy, for the replay of a graph."""
        return Operation(
            self.kind,
            self.name,
            self.seconds,
            occupancy=self.occupancy,
            engine=self.engine,
            parts=self.parts,
            run=self.run,
            reads=self.reads,
            writes=self.writes,
        )


class StreamState:
    """A stream as the queues see it.

    Args:
        stream_id: identity within the device.
        index: order of creation within its group, with the default stream as the first of group 0.
        group: 0 for normal priority, 1 for high; each group has hardware queues of its own.
    """

    __slots__ = ("group", "index", "last", "parked", "queue", "stream_id")

    def __init__(self, stream_id: int, index: int, group: int) -> None:
        self.stream_id = stream_id
        self.index = index
        self.group = group
        self.queue: int | None = None
        self.last: Operation | None = None
        #: operations behind an unresolved event wait that have not entered the hardware queue
        self.parked: deque[Operation] = deque()


@dataclass(frozen=True)
class Part:
    """A piece of an operation that may run now (schedule mode). A copy has two.

    Attributes:
        sequence: place of the operation in the order of submission.
        part: 0, or 1 for a copy's second half.
        parts: pieces of the operation.
        name: the kernel's name, or what the copy moves.
        stream_id: the stream it was queued on.
        reads, writes: spans that it touches.
    """

    sequence: int
    part: int
    parts: int
    name: str
    stream_id: int
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]

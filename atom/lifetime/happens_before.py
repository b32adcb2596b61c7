"""Which work is known to be over, and by whom: vector clocks over streams and the host.

Each stream is an agent with a counter of its operations. The clock of a stream says, for every
other stream, up to which operation that stream's next operation is ordered after. The host has a
clock of the same kind: what it has seen complete. Whatever the host knows when it queues an
operation, that operation is ordered after as well.

All host threads count as one agent: two threads that race with each other are not told apart.
"""

from __future__ import annotations

from typing import Any, TypeAlias

StreamKey: TypeAlias = int
Clock: TypeAlias = dict[StreamKey, int]


def join(clock: Clock, other: Clock) -> None:
    """Raise ``clock`` to at least ``other``, element by element."""
    for stream, count in other.items():
        if count > clock.get(stream, 0):
            clock[stream] = count


class HappensBefore:
    """The order of operations on streams, as the program's own calls make it.

    Attributes:
        counts: operations queued on each stream so far.
        clocks: what each stream's next operation is ordered after.
        host: what the host has seen complete.
    """

    def __init__(self) -> None:
        self.counts: Clock = {}
        self.clocks: dict[StreamKey, Clock] = {}
        self.host: Clock = {}
        self._host_version = 0
        self._merged: dict[StreamKey, int] = {}
        self._events: dict[Any, tuple[StreamKey, Clock]] = {}

    def submit(self, stream: StreamKey) -> int:
        """Queue one operation on ``stream``; returns its number there, from 1."""
        count = self.counts.get(stream, 0) + 1
        self.counts[stream] = count
        if self._merged.get(stream) != self._host_version:
            self._catch_up(stream)
        return count

    def _catch_up(self, stream: StreamKey) -> Clock:
        clock = self.clocks.get(stream)
        if clock is None:
            clock = self.clocks[stream] = {}
        if self._merged.get(stream) != self._host_version:
            join(clock, self.host)
            self._merged[stream] = self._host_version
        return clock

    def ordered(self, first: StreamKey, number: int, second: StreamKey) -> bool:
        """Whether operation ``number`` of ``first`` comes before the next one of ``second``."""
        if first == second:
            return True
        clock = self.clocks.get(second)
        if clock is not None and number <= clock.get(first, 0):
            return True
        return number <= self.host.get(first, 0)

    def host_knows(self, stream: StreamKey, number: int) -> bool:
        """Whether the host has seen operation ``number`` of ``stream`` complete."""
        return number <= self.host.get(stream, 0)

    # -- edges
    def _present(self, stream: StreamKey) -> Clock:
        present = dict(self._catch_up(stream))
        present[stream] = self.counts.get(stream, 0)
        return present

    def record(self, event: Any, stream: StreamKey) -> int:
        """``event`` marks the present end of ``stream``; returns the number that it covers."""
        self._events[event] = (stream, self._present(stream))
        return self.counts.get(stream, 0)

    def wait(self, event: Any, stream: StreamKey) -> None:
        """``stream`` waits for the latest record of ``event``; nothing if it has none."""
        mark = self._events.get(event)
        if mark is not None:
            join(self._catch_up(stream), mark[1])

    def wait_stream(self, waiting: StreamKey, stream: StreamKey) -> None:
        """``waiting`` waits for the present end of ``stream``."""
        join(self._catch_up(waiting), self._present(stream))

    def observe(self, event: Any) -> None:
        """The host knows that the latest record of ``event`` has completed."""
        mark = self._events.get(event)
        if mark is not None:
            self._learn(mark[1])

    def observe_stream(self, stream: StreamKey) -> None:
        """The host knows that everything on ``stream`` has run."""
        self._learn(self._present(stream))

    def observe_all(self) -> None:
        """The host knows that everything has run."""
        self._learn(self.counts)

    def observe_operation(self, stream: StreamKey, number: int) -> None:
        """The host knows that operation ``number`` of ``stream`` has run, and so what is before."""
        self._learn({stream: number})

    def forget(self, event: Any) -> None:
        """The event is gone; its handle may come back for another one."""
        self._events.pop(event, None)

    def _learn(self, clock: Clock) -> None:
        before = dict(self.host)
        join(self.host, clock)
        if self.host != before:
            self._host_version += 1

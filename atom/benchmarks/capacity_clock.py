"""Time of a simulated engine: the host's clock, the device's queue, and events between them."""

from __future__ import annotations

from atom.device.interface import Event, Stream


class SimulatedClock:
    """Seconds since the start, of a host that waits and a device whose default stream runs behind.

    Attributes:
        now: the host's time.
        device_free: when the default stream has done all that was launched.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.device_free = 0.0

    def __call__(self) -> float:
        """The host's time."""
        return self.now

    def wait_until(self, time: float) -> None:
        """The host waits; a time that has passed costs nothing."""
        self.now = max(self.now, time)

    def launch(self, seconds: float) -> float:
        """Queue work on the default stream; returns when it ends."""
        self.device_free = max(self.device_free, self.now) + seconds
        return self.device_free


class TimedEvent(Event):
    """An event whose time of completion is known when it is recorded."""

    def __init__(self, clock: SimulatedClock, time: float = 0.0) -> None:
        self.clock = clock
        self.time = time

    def record(self, stream: Stream | None = None) -> None:
        """Mark the present end of the default stream."""
        self.time = self.clock.device_free

    def wait(self, stream: Stream | None = None) -> None:
        """Make the default stream wait for it."""
        self.clock.device_free = max(self.clock.device_free, self.time)

    def query(self) -> bool:
        """Whether its time has come."""
        return self.time <= self.clock.now

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self.clock.wait_until(self.time)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds to ``end``."""
        assert isinstance(end, TimedEvent)
        return 1e3 * (end.time - self.time)

"""Streams, events and graphs of the virtual device."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from atom.device.interface import Event, Stream
from atom.device.operations import Operation, StreamState
from atom.errors import DeviceError, FreedPinnedBuffer, WrongDevice

if TYPE_CHECKING:
    from atom.device.caching_allocator import PoolPair
    from atom.device.operation_factory import Prepared
    from atom.device.virtual import VirtualDevice


class VirtualStream:
    """A stream of one virtual device. See :class:`atom.device.interface.Stream`."""

    def __init__(self, device: VirtualDevice, state: StreamState) -> None:
        self.device = device
        self.state = state

    def __repr__(self) -> str:
        return f"VirtualStream({self.device.properties.name}, {self.stream_id})"

    @property
    def stream_id(self) -> int:
        """Identity within the device; 0 is the default stream."""
        return self.state.stream_id

    @property
    def hardware_queue(self) -> int:
        """Hardware queue that the profile's mapping gives this stream."""
        return self.device.model.queue_of(self.state)

    def wait_event(self, event: Event) -> None:
        """See :meth:`VirtualEvent.wait`."""
        self.device.own_event(event).wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Wait for everything queued on ``stream`` so far."""
        self.wait_event(self.device.own_stream(stream).record_event())

    def record_event(self, event: Event | None = None) -> VirtualEvent:
        """Record ``event`` (a new one if ``None``) here and return it."""
        own = self.device.new_event() if event is None else self.device.own_event(event)
        own.record(self)
        return own

    def synchronize(self) -> None:
        """Block the host until everything queued so far has run."""
        device = self.device
        device.refuse_in_capture("synchronising a stream")
        device.host.call(device.profile.synchronize_seconds)
        device.host.wait(self.state.last)
        if device.observer is not None:
            device.observer.stream_waited(self.stream_id)

    def query(self) -> bool:
        """Whether everything queued so far has run."""
        device = self.device
        device.refuse_in_capture("querying a stream")
        device.host.call(device.profile.query_seconds)
        idle = self.state.last is None or self.state.last.finished
        if idle and device.observer is not None:
            device.observer.stream_waited(self.stream_id)
        return idle


class VirtualEvent:
    """An event of one virtual device. See :class:`atom.device.interface.Event`."""

    def __init__(self, device: VirtualDevice, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self._recorded_at: float | None = None
        self._operation: Operation | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the present end of ``stream``."""
        device = self.device
        own = device.own_stream(stream)
        device.refuse_in_capture("recording an event")
        device.host.call(device.profile.record_seconds)
        self._recorded_at = device.host_seconds()
        self._operation = own.state.last
        if device.observer is not None:
            device.observer.event_recorded(self, own.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        """Make ``stream`` wait for the latest record. No-op if it was never recorded."""
        device = self.device
        own = device.own_stream(stream)
        device.refuse_in_capture("waiting on an event")
        device.host.call(device.profile.wait_submit_seconds)
        if device.observer is not None:
            device.observer.event_waited_by(self, own.stream_id)
        if not self._done():
            assert self._operation is not None
            device.model.submit_wait(self._operation, own.state, device.profile.wait_seconds)

    def _done(self) -> bool:
        return self._operation is None or self._operation.finished

    def query(self) -> bool:
        """Whether the latest record has completed. True if it was never recorded."""
        self.device.refuse_in_capture("querying an event")
        self.device.host.call(self.device.profile.query_seconds)
        done = self._done()
        if done and self.device.observer is not None:
            self.device.observer.event_observed(self)
        return done

    def synchronize(self) -> None:
        """Block the host until the latest record has completed."""
        device = self.device
        device.refuse_in_capture("synchronising an event")
        device.host.call(device.profile.synchronize_seconds)
        if not self._done():
            device.host.wait(self._operation)
        if device.observer is not None:
            device.observer.event_observed(self)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event's record to ``end``'s. Both need ``timing=True``.

        Raises:
            DeviceError: no timing, never recorded, or not completed.
            WrongDevice: ``end`` is another device's.
        """
        own = self.device.own_event(end)
        return (own._completed_at() - self._completed_at()) * 1e3

    def _completed_at(self) -> float:
        if not self.timing:
            raise DeviceError("elapsed_time needs events made by new_event(timing=True)")
        if self._recorded_at is None:
            raise DeviceError("elapsed_time: an event was never recorded")
        if self._operation is None:
            return self._recorded_at
        if not self._operation.finished:
            raise DeviceError("elapsed_time: an event has not completed; synchronise it first")
        return max(self._recorded_at, self._operation.end)


class VirtualGraph:
    """Captured work of one virtual device. See :class:`atom.device.interface.Graph`."""

    def __init__(self, device: VirtualDevice, pool: PoolPair) -> None:
        self.device = device
        self.work: list[Prepared] = []
        self.complete = False
        weakref.finalize(self, device.memory.dead_pools.append, pool).atexit = False

    def add(self, prepared: Prepared) -> None:
        """Keep work for the replays."""
        self.work.append(prepared)

    def replay(self, stream: Stream | None = None) -> None:
        """Queue the captured work again, on the same addresses.

        Raises:
            DeviceError: the capture has not ended or failed, or another one is underway.
            FreedPinnedBuffer: a captured pinned buffer was dropped since.
        """
        device = self.device
        own = device.own_stream(stream)
        device.refuse_in_capture("replaying a graph")
        if not self.complete:
            raise DeviceError("the graph's capture did not end well: there is nothing to replay")
        device.host.call(device.profile.graph_launch_seconds)
        for prepared in self.work:
            for buffer, generation in prepared.pinned:
                if buffer.generation != generation:
                    raise FreedPinnedBuffer(
                        f"graph replay: {prepared.operation.name!r} uses a pinned buffer of "
                        f"{buffer.size} bytes (from {buffer.site}) that was dropped after the "
                        "capture; keep pinned tensors of a graph alive while it is replayed"
                    )
        for prepared in self.work:
            device.enqueue(prepared._replace(operation=prepared.operation.again()), own)


def foreign(kind: str, thing: Any, device: VirtualDevice) -> WrongDevice:
    """The error for a stream, event or tensor of another device."""
    return WrongDevice(
        f"{kind} {thing!r} does not belong to this device ({device.properties.name}); make it "
        f"with the device that uses it"
    )

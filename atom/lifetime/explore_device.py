"""A virtual device under exploration: every host call and every part is a step that is chosen.

Each stream has a hardware queue of its own unless it is told otherwise, so that nothing but the
program's own stream order and events orders the work. A mapping of several streams onto one queue
only removes schedules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atom.device.caching_allocator import Block
from atom.device.interface import Stream
from atom.device.operations import Operation, OperationKind, Part, StreamState
from atom.device.pinned_allocator import PinnedBuffer
from atom.device.profiles import PROFILES, QueueMapping
from atom.device.virtual import VirtualDevice
from atom.device.virtual_streams import VirtualEvent, VirtualStream
from atom.errors import AtomError, DeviceError
from atom.lifetime.explore_trace import (
    HOST,
    NOTHING,
    Footprint,
    Frontier,
    OperationKey,
    Ownership,
    Queued,
    TraceEvent,
    Violation,
    part_ranges,
    ranges_of,
)

#: more than any program has streams
OWN_QUEUES = 64
_PROFILE = replace(PROFILES["MI355X"], mapping=QueueMapping.MODULO, jitter=0.0)
_MEMORY_BYTES = 64 * 2**20


class Deadlock(DeviceError):
    """The host waits for work that can never run."""


class Guide:
    """Chooses what runs next."""

    def choose(self, enabled: list[int], device: ExploredDevice) -> int:
        """One of ``enabled`` (``HOST`` or streams); ``device.events`` is what has run."""
        raise NotImplementedError


class _Mark(NamedTuple):
    """An allocator's event: the frontier of a stream when a block was freed."""

    frontier: Frontier
    operation: Operation | None


class ExploredEvent(VirtualEvent):
    """An event that tells the exploration what it is asked."""

    device: ExploredDevice
    frontier: Frontier = NOTHING

    def record(self, stream: Stream | None = None) -> None:
        """See :meth:`VirtualEvent.record`."""
        self.device.doing = "record an event"
        super().record(stream)

    def wait(self, stream: Stream | None = None) -> None:
        """See :meth:`VirtualEvent.wait`."""
        self.device.doing = "queue a wait for an event"
        super().wait(stream)

    def query(self) -> bool:
        """See :meth:`VirtualEvent.query`."""
        self.device.doing = "ask an event"
        done = super().query()
        self.device.polled(self.frontier)
        return done

    def synchronize(self) -> None:
        """See :meth:`VirtualEvent.synchronize`; one step, enabled when the event has completed."""
        self.device.host_waits(self.frontier, "wait for an event")
        super().synchronize()


class ExploredStream(VirtualStream):
    """A stream that tells the exploration what it is asked."""

    device: ExploredDevice

    def query(self) -> bool:
        """See :meth:`VirtualStream.query`."""
        self.device.doing = "ask a stream"
        done = super().query()
        self.device.polled(self.device.frontiers.get(self.stream_id, NOTHING))
        return done

    def synchronize(self) -> None:
        """See :meth:`VirtualStream.synchronize`."""
        frontier = self.device.frontiers.get(self.stream_id, NOTHING)
        self.device.host_waits(frontier, "wait for a stream")
        super().synchronize()


class ExploredDevice(VirtualDevice):
    """One execution. Also the :class:`Probe` that a program tells what it does.

    Args:
        guide: chooses what runs next.
        hardware_queues: streams go round them in turn, the default stream first.

    Attributes:
        events: what has run.
        queued: operations by name.
        ownerships: lives of device blocks, in order of birth.
        violations: what did not hold.
        may_wait: duties in which the host may block; ``None`` means any.
        doing: what the next host call does.
    """

    def __init__(self, guide: Guide, hardware_queues: int = OWN_QUEUES) -> None:
        self.events: list[TraceEvent] = []
        self.queued: dict[OperationKey, Queued] = {}
        self.frontiers: dict[int, Frontier] = {}
        self.ownerships: list[Ownership] = []
        self.violations: list[Violation] = []
        self.may_wait: frozenset[str] | None = None
        self.doing = "start"
        self._guide = guide
        #: queued since the last look; the model numbers an operation when it is submitted
        self._unnamed: list[tuple[Operation, OperationKey]] = []
        self._keys: dict[int, OperationKey] = {}
        self._counts: dict[int, int] = {}
        self._ended: set[OperationKey] = set()
        self._living: dict[int, Ownership] = {}
        self._section = ""
        self._chosen = False
        self._closed = False
        #: everything that the host has learnt from the device, in order
        self._heard: list[bytes | bool] = []
        self._progress: dict[int, int] = {HOST: 0}
        self._reach = {"device": 0, "pinned": 0}
        self._current = TraceEvent(HOST, "start", Footprint(), [])
        super().__init__(
            replace(_PROFILE, hardware_queues=hardware_queues),
            memory_bytes=_MEMORY_BYTES,
            pinned_bytes=_MEMORY_BYTES,
            mode="schedule",
            chooser=self._refuse_inner_wait,
        )
        self.on_host_call = self._host_call
        self.observe(_Listener(self))
        self.host.mark = self._mark  # type: ignore[method-assign]
        self.host.passed = self._passed  # type: ignore[method-assign]

    def state(self) -> Hashable:
        """Everything that decides what can still happen.

        The program is a function of what it has learnt from the device, and so are the queues and
        the allocators; beside that there are the work done and the bytes.
        """
        return (
            tuple(self._heard),
            tuple(sorted(self._progress.items())),
            self.memory.device.memory[: self._reach["device"]].tobytes(),
            self.memory.host.memory[: self._reach["pinned"]].tobytes(),
        )

    def close(self) -> None:
        """The program has ended: what dies from now on is of no interest."""
        self._closed = True

    # -- what a program tells (the Probe)
    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """The block does this duty: send, receive, drain, clean, ell."""
        before, self._section = self._section, name
        try:
            yield
        finally:
            self._section = before

    @property
    def current_section(self) -> str:
        """The duty that the program is in."""
        return self._section

    def host_read(self, tensor: Tensor, what: str = "read pinned bytes") -> None:
        """The host reads a pinned tensor, at once after this call."""
        self.doing = what
        self.host.call(0.0, exact=True)
        operand = self.memory.operand(tensor)
        if operand is None:
            raise DeviceError(f"{what}: not a tensor of this device")
        self._current.touched.reads += ranges_of(operand.span)
        self._heard.append(self.memory.view(operand.span).numpy().tobytes())

    def fail(self, kind: str, text: str) -> None:
        """A property does not hold, seen by the host's latest step."""
        self.violations.append(Violation(kind, text, max(len(self.events) - 1, 0)))

    # -- choosing
    def _refuse_inner_wait(self, ready: list[Part]) -> Part:
        raise DeviceError("an allocator waited for queued work: give the explored device memory")

    def host_waits(self, frontier: Frontier, what: str) -> None:
        """The host blocks until ``frontier`` has ended; one step, enabled from then on."""
        self.doing = what
        self.memory.collect()
        self._step_until_host(frontier)
        after = [self.queued[key].ended for key in frontier]
        self._current.after += [place for place in after if place is not None]
        self._chosen = True
        if self.may_wait is not None and self._section not in self.may_wait:
            duty = self._section or "no duty"
            self.fail("host blocked", f"the host has to {what} in its duty: {duty}")

    def _host_call(self) -> None:
        if self._chosen:
            self._chosen = False
        else:
            self._step_until_host(NOTHING)

    def _step_until_host(self, needs: Frontier) -> None:
        label, self.doing = self.doing, "host call"
        self._name_operations()
        self._progress[HOST] += 1
        while True:
            parts = {part.stream_id: part for part in self.model.ready()}
            enabled = list(parts)
            if needs <= self._ended:
                enabled.insert(0, HOST)
            if not enabled:
                raise Deadlock(f"the host would {label} for ever: nothing can run")
            process = self._guide.choose(enabled, self)
            if process == HOST:
                self._current = TraceEvent(HOST, label, Footprint(), [], section=self._section)
                self.events.append(self._current)
                return
            self._run_part(parts[process])

    def _name_operations(self) -> None:
        while self._unnamed:
            operation, key = self._unnamed.pop()
            self._keys[operation.sequence] = key

    def _run_part(self, part: Part) -> None:
        key = self._keys[part.sequence]
        queued = self.queued[key]
        event = TraceEvent(
            part.stream_id,
            part.name,
            Footprint(part_ranges(part.reads, part), part_ranges(part.writes, part)),
            [queued.submitted],
            part.part,
            part.parts,
            key,
        )
        if part.parts == 1:
            # it raises if it runs after the death of its pinned buffer
            event.touched.reads += [
                ("pinned owner", start, stop)
                for space, start, stop in (*queued.reads, *queued.writes)
                if space == "pinned"
            ]
        for other in queued.after:
            ended = self.queued[other].ended
            assert ended is not None
            event.after.append(ended)
        if part.part == part.parts - 1:
            event.touched.ends = key
            queued.ended = len(self.events)
            self._ended.add(key)
        self.events.append(event)
        self._progress[part.stream_id] = self._progress.get(part.stream_id, 0) + 1
        self.model.step(part)

    def run_out(self) -> None:
        """Run what the program left queued: a step that never ran would race with nothing."""
        self._name_operations()
        while parts := {part.stream_id: part for part in self.model.ready()}:
            chosen = self._guide.choose(list(parts), self)
            try:
                self._run_part(parts[chosen])
            except AtomError as error:
                self.fail("error", f"{type(error).__name__}: {error}")

    # -- what is asked
    def polled(self, frontier: Frontier) -> None:
        """The host's latest step asked whether ``frontier`` has ended."""
        self._current.touched.polls |= frontier
        self._heard.append(frontier <= self._ended)

    def _mark(self, stream_id: int) -> Any:
        return _Mark(self.frontiers.get(stream_id, NOTHING), self.host.streams[stream_id].last)

    def _passed(self, mark: Any) -> bool:
        self.polled(mark.frontier)
        return mark.operation is None or mark.operation.finished

    def synchronize(self) -> None:
        """See :meth:`VirtualDevice.synchronize`."""
        every: Frontier = frozenset().union(*self.frontiers.values())
        self.host_waits(every, "wait for the device")
        super().synchronize()

    # -- names for host calls, and the parts that explore
    def _make_stream(self, stream_id: int, index: int, group: int) -> VirtualStream:
        state = StreamState(stream_id, index, group)
        self.host.streams[stream_id] = state
        return ExploredStream(self, state)

    def new_event(self, timing: bool = False) -> ExploredEvent:
        """See :meth:`VirtualDevice.new_event`."""
        return ExploredEvent(self, timing)

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """See :meth:`VirtualDevice.pinned`."""
        self.doing = "allocate pinned memory"
        return super().pinned(shape, dtype)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """See :meth:`VirtualDevice.record_stream`."""
        self.doing = "tell the allocator of a stream"
        super().record_stream(tensor, stream)

    def _work_call(self, stream: Stream | None, what: str, seconds: float) -> VirtualStream:
        self.doing = "allocate" if what == "an allocation" else f"queue {what}"
        return super()._work_call(stream, what, seconds)

    # -- bookkeeping for the listener
    def was_queued(self, operation: Operation, stream_id: int) -> None:
        """An operation is being queued."""
        place = self._counts.get(stream_id, 0)
        self._counts[stream_id] = place + 1
        key = (stream_id, place)
        self._unnamed.append((operation, key))
        after = self.frontiers.get(stream_id, NOTHING)
        self.frontiers[stream_id] = frozenset((key,))
        self.queued[key] = Queued(
            key,
            len(self.events) - 1,
            after,
            operation.name,
            [piece for span in operation.reads for piece in ranges_of(span)],
            [piece for span in operation.writes for piece in ranges_of(span)],
        )

    def was_owned(self, block: Block | PinnedBuffer) -> None:
        """A tensor owns ``block``."""
        place = len(self.events) - 1
        space = "pinned" if isinstance(block, PinnedBuffer) else "device"
        self._reach[space] = max(self._reach[space], block.offset + block.size)
        if isinstance(block, PinnedBuffer):
            self._guard(block)
            return
        life = Ownership(
            ("device", block.offset, block.offset + block.size), block.site, block.stream_id, place
        )
        self.ownerships.append(life)
        self._living[block.offset] = life

    def has_died(self, block: Block | PinnedBuffer) -> None:
        """The last view of ``block`` died."""
        if self._closed:
            return
        if isinstance(block, PinnedBuffer):
            self._guard(block)
        elif block.offset in self._living:
            self._living.pop(block.offset).died = len(self.events) - 1

    def _guard(self, buffer: PinnedBuffer) -> None:
        # a kernel that comes after the death of its pinned buffer raises: that order can be told
        self._current.touched.writes.append(
            ("pinned owner", buffer.offset, buffer.offset + buffer.size)
        )

    def was_told(self, block: Block, stream_id: int) -> None:
        """``record_stream`` was called."""
        if block.offset in self._living:
            self._living[block.offset].told.add(stream_id)


class _Listener:
    """Passes on what the device tells an observer."""

    def __init__(self, device: ExploredDevice) -> None:
        self._device = device

    def owned(self, block: Any) -> None:
        """See ``DeviceObserver``."""
        self._device.was_owned(block)

    def died(self, block: Any) -> None:
        """See ``DeviceObserver``."""
        self._device.has_died(block)

    def stream_recorded(self, block: Any, stream_id: int) -> None:
        """See ``DeviceObserver``."""
        self._device.was_told(block, stream_id)

    def queued(self, operation: Operation, stream_id: int) -> None:
        """See ``DeviceObserver``."""
        if operation.kind is not OperationKind.WAIT:
            self._device.was_queued(operation, stream_id)

    def event_recorded(self, event: Any, stream_id: int) -> None:
        """See ``DeviceObserver``."""
        event.frontier = self._device.frontiers.get(stream_id, NOTHING)

    def event_waited_by(self, event: Any, stream_id: int) -> None:
        """See ``DeviceObserver``."""
        frontiers = self._device.frontiers
        frontiers[stream_id] = frontiers.get(stream_id, NOTHING) | event.frontier

    def event_observed(self, event: object) -> None:
        """See ``DeviceObserver``."""

    def stream_waited(self, stream_id: int) -> None:
        """See ``DeviceObserver``."""

    def device_waited(self) -> None:
        """See ``DeviceObserver``."""

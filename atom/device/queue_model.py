"""The virtual device's queues: which operation may start when, and how long it takes.

Operations form a graph of waits. An operation waits for the one ahead in its stream, for the event
of an event wait, and (by the profile's queue order) for the one ahead in its hardware queue. When
its waits are over it is *issued*: from then on it takes time (clock mode) or is ready to be chosen
(schedule mode). Kernels that fill the machine share it: with a total occupancy above 1 all of them
slow down by the same factor, so one work clock that runs at that factor serves all of them.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from atom.device.capture_guard import refuse_let_go
from atom.device.operations import Mode, Operation, OperationKind, Part, StreamState
from atom.device.profiles import BarrierScope, DeviceProfile, QueueMapping, QueueOrder
from atom.errors import DeviceError

SCHEDULE_STEP_SECONDS = 1e-6


class QueueModel:
    """Streams, hardware queues, copy engines and the device's clock.

    Args:
        profile: the parameters.
        queues: hardware queues.
        generator: draws of mapping and dispatch delays.
        mode: clock or schedule.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        queues: int,
        generator: random.Random,
        mode: Mode = Mode.CLOCK,
    ) -> None:
        self.profile = profile
        self.queues = queues
        self.mode = mode
        self.now = 0.0
        #: called with each operation that finished, for the timeline; ``None`` when off
        self.on_finished: Callable[[Operation], None] | None = None
        self.unfinished = 0
        self._generator = generator
        self._serial = profile.order is QueueOrder.SERIAL
        self._scoped = profile.barrier is BarrierScope.STREAM
        self._sequence = 0
        self._lanes: dict[int, Operation] = {}
        self._load: dict[int, int] = {}
        self._ready: deque[Operation] = deque()
        self._draining = False
        # fixed times: (time, sequence, part, operation)
        self._times: list[tuple[float, int, int, Operation]] = []
        # kernels that share the machine: (work clock at the end, sequence, operation)
        self._shared: list[tuple[float, int, Operation]] = []
        #: grows with each block that dies, see :meth:`_finish`
        self.died: list[Any] = []
        self._work_clock = 0.0
        self._occupied = 0.0
        self._engine_busy: dict[str, int] = {}
        self._engine_queue: dict[str, deque[Operation]] = {}
        self._choices: dict[int, tuple[Operation, int]] = {}

    # -- queues
    def queue_of(self, stream: StreamState) -> int:
        """Hardware queue of ``stream``; chosen at its first use."""
        if stream.queue is not None:
            return stream.queue
        mapping, count = self.profile.mapping, self.queues
        # each priority has queues of its own
        base = stream.group * count
        if mapping is QueueMapping.MODULO:
            queue = stream.index % count
        elif mapping is QueueMapping.RANDOM:
            queue = self._generator.randrange(count)
        elif mapping is QueueMapping.LEAST_LOAD:
            queue = min(range(count), key=lambda i: (self._load.get(base + i, 0), i))
        elif stream.group or count == 1:
            queue = stream.index % count
        else:
            queue = 0 if stream.stream_id == 0 else 1 + (stream.index - 1) % (count - 1)
        stream.queue = base + queue
        self._load[stream.queue] = self._load.get(stream.queue, 0) + 1
        return stream.queue

    # -- submission
    def submit(
        self, operation: Operation, stream: StreamState, *, own_lane: bool = False
    ) -> Operation:
        """Queue ``operation`` at the end of ``stream``."""
        self._enqueue(operation, stream)
        if not own_lane:
            operation.lane = self.queue_of(stream)
            if stream.parked:
                stream.parked.append(operation)
                operation.pending += 1
            else:
                self._enter_lane(operation)
        if operation.pending == 0:
            self._ready.append(operation)
            self._drain()
        return operation

    def submit_wait(self, event: Operation, stream: StreamState, seconds: float) -> None:
        """Make what follows in ``stream`` wait for ``event``."""
        operation = Operation(OperationKind.WAIT, "wait", seconds)
        self._enqueue(operation, stream)
        event.on_finish.append(operation)
        operation.pending += 1
        if self._scoped:
            stream.parked.append(operation)
        else:
            operation.lane = self.queue_of(stream)
            self._enter_lane(operation)

    def _enqueue(self, operation: Operation, stream: StreamState) -> None:
        operation.sequence = self._sequence
        self._sequence += 1
        self.unfinished += 1
        operation.submitted = self.now
        operation.stream = stream
        last = stream.last
        if last is not None and not last.finished:
            last.on_finish.append(operation)
            operation.pending += 1
        stream.last = operation

    def _enter_lane(self, operation: Operation) -> None:
        lane = operation.lane
        assert lane is not None
        tail = self._lanes.get(lane)
        if tail is not None:
            if self._serial:
                if not tail.finished:
                    tail.on_finish.append(operation)
                    operation.pending += 1
            elif not tail.issued:
                tail.on_issue.append(operation)
                operation.pending += 1
        self._lanes[lane] = operation

    # -- progress
    def _drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        try:
            while self._ready:
                self._issue(self._ready.popleft())
        finally:
            self._draining = False

    def _release(self, waiters: list[Operation]) -> None:
        for waiter in waiters:
            waiter.pending -= 1
            if waiter.pending == 0:
                self._ready.append(waiter)

    def _issue(self, operation: Operation) -> None:
        operation.issued = True
        if operation.on_issue:
            waiters, operation.on_issue = operation.on_issue, []
            self._release(waiters)
        if self.mode is Mode.SCHEDULE:
            operation.start = self.now
            if operation.kind is OperationKind.WAIT:
                self._finish(operation)
            else:
                self._choices[operation.sequence] = (operation, 0)
        elif operation.engine is not None:
            self._begin_copy(operation)
        elif operation.kind is OperationKind.WAIT and operation.seconds == 0:
            operation.start = self.now
            self._finish(operation)
        elif operation.occupancy > 0:
            operation.start = self.now
            self._set_clock(self.now)
            self._occupied += operation.occupancy
            end = self._work_clock + operation.seconds
            heapq.heappush(self._shared, (end, operation.sequence, operation))
        else:
            start = self.now
            profile = self.profile
            delay = profile.full_dispatch_seconds
            if delay and self._occupied >= 1 and operation.kind is not OperationKind.WAIT:
                spread = profile.full_dispatch_spread
                start += delay * (1 + spread * (2 * self._generator.random() - 1))
            self._begin(operation, start, 0.0)

    def _begin(self, operation: Operation, start: float, latency: float) -> None:
        operation.start = start
        end = start + latency + operation.seconds
        if operation.parts == 2:
            half = start + latency + operation.seconds / 2
            heapq.heappush(self._times, (half, operation.sequence, 0, operation))
        heapq.heappush(self._times, (end, operation.sequence, operation.parts - 1, operation))

    def _begin_copy(self, operation: Operation) -> None:
        engine = operation.engine
        assert engine is not None
        if self._engine_busy.get(engine, 0) >= self.profile.copy_engines:
            self._engine_queue.setdefault(engine, deque()).append(operation)
            return
        self._engine_busy[engine] = self._engine_busy.get(engine, 0) + 1
        self._begin(operation, self.now, self.profile.copy_latency_seconds)

    def _finish(self, operation: Operation) -> None:
        operation.finished = True
        operation.end = self.now
        # what dies with the body lived only because it was queued
        before = len(self.died)
        operation.run = None
        hidden = self.died[before:] if len(self.died) != before else None
        self.unfinished -= 1
        if operation.engine is not None and self.mode is Mode.CLOCK:
            waiting = self._engine_queue.get(operation.engine)
            if waiting:
                self._begin(waiting.popleft(), self.now, self.profile.copy_latency_seconds)
            else:
                self._engine_busy[operation.engine] -= 1
        waiters, operation.on_finish = operation.on_finish, []
        stream = operation.stream
        assert stream is not None
        if stream.parked and stream.parked[0] is operation:
            self._unpark(stream)
        self._release(waiters)
        if self.on_finished is not None:
            self.on_finished(operation)
        self._drain()
        if hidden:
            refuse_let_go(operation.name, hidden)

    def _unpark(self, stream: StreamState) -> None:
        stream.parked.popleft()
        while stream.parked and stream.parked[0].kind is not OperationKind.WAIT:
            operation = stream.parked.popleft()
            self._enter_lane(operation)
            self._release([operation])

    # -- clock mode
    def _set_clock(self, when: float) -> None:
        if when > self.now:
            if self._occupied > 1:
                self._work_clock += (when - self.now) / self._occupied
            else:
                self._work_clock += when - self.now
            self.now = when

    def _next_time(self) -> float:
        when = self._times[0][0] if self._times else float("inf")
        if self._shared:
            left = max(0.0, self._shared[0][0] - self._work_clock)
            shared = self.now + left * max(1.0, self._occupied)
            when = min(when, shared)
        return when

    def _advance_one(self) -> None:
        """Run the next thing that happens; something must be scheduled."""
        when = self._next_time()
        if self._times and self._times[0][0] <= when:
            _, _, part, operation = heapq.heappop(self._times)
            self._set_clock(when)
            self._run_part(operation, part)
            return
        end, _, operation = heapq.heappop(self._shared)
        self._set_clock(when)
        self._work_clock = max(self._work_clock, end)
        self._occupied -= operation.occupancy
        if not self._shared:
            # no drift from sums of shares
            self._occupied = 0.0
        self._run_part(operation, operation.parts - 1)

    def _run_part(self, operation: Operation, part: int) -> None:
        try:
            # no local name for it: the work must be its only owner when it is let go
            if operation.run is not None:
                operation.run(part)
        finally:
            if part == operation.parts - 1:
                self._finish(operation)

    def run_until(self, when: float) -> None:
        """Run everything that happens up to ``when`` and set the clock to it."""
        if self.mode is Mode.SCHEDULE:
            self.now = max(self.now, when)
            return
        while (self._times or self._shared) and self._next_time() <= when:
            self._advance_one()
        self._set_clock(when)

    def run_until_finished(self, operation: Operation | None) -> None:
        """Run until ``operation`` (``None``: everything) has finished. Clock mode.

        Raises:
            DeviceError: it can never finish.
        """
        while self.unfinished if operation is None else not operation.finished:
            if not self._times and not self._shared:
                raise DeviceError("the virtual device is stuck: queued work waits for itself")
            self._advance_one()

    # -- schedule mode
    def ready(self) -> list[Part]:
        """What may run now, in order of submission."""
        return [
            Part(
                sequence,
                part,
                operation.parts,
                operation.name,
                operation.stream.stream_id if operation.stream else -1,
                operation.reads,
                operation.writes,
            )
            for sequence, (operation, part) in sorted(self._choices.items())
        ]

    def step(self, part: Part) -> None:
        """Run ``part``.

        Raises:
            DeviceError: it is not ready.
        """
        found = self._choices.get(part.sequence)
        if found is None or found[1] != part.part:
            raise DeviceError(f"{part.name} (part {part.part} of {part.parts}) is not ready")
        operation = found[0]
        self.now += SCHEDULE_STEP_SECONDS
        if part.part == operation.parts - 1:
            del self._choices[part.sequence]
        else:
            self._choices[part.sequence] = (operation, part.part + 1)
        self._run_part(operation, part.part)

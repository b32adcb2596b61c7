"""The host's side of the virtual device: its clock, what its calls cost, and how it waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from atom.device.operations import Mode, Operation, Part, StreamState
from atom.device.profiles import DeviceProfile
from atom.device.queue_model import QueueModel
from atom.errors import DeviceError

Chooser: TypeAlias = Callable[[list[Part]], Part]


class VirtualHost:
    """Charges host calls to the virtual clock and lets the device catch up with it.

    It is also what the allocators know of queued work (``caching_allocator.Work``).

    Args:
        profile: host costs.
        model: the device's queues.
        seed: of the jitter.
        chooser: schedule mode: picks what runs while the host waits; ``None`` takes the oldest.
    """

    def __init__(
        self, profile: DeviceProfile, model: QueueModel, seed: int, chooser: Chooser | None
    ) -> None:
        self.seconds = 0.0
        self.streams: dict[int, StreamState] = {}
        #: sees what died since the last call
        self.collect: Callable[[], None] = lambda: None
        #: schedule mode: called at the start of each host call
        self.on_call: Callable[[], None] | None = None
        self._jitter = profile.jitter
        self._segment_seconds = profile.segment_seconds
        self._model = model
        self._schedule = model.mode is Mode.SCHEDULE
        self._generator = random.Random(seed)
        self._chooser = chooser
        self._owed = 0.0

    def call(self, seconds: float, *, exact: bool = False) -> None:
        """Start of every host call: see what died, charge the call, let the device catch up."""
        self.collect()
        if self._jitter and not exact:
            seconds *= 1 + self._jitter * (2 * self._generator.random() - 1)
        self.seconds += seconds + self._owed
        self._owed = 0.0
        if self._schedule and self.on_call is not None:
            self.on_call()
        self._model.run_until(self.seconds)

    def wait(self, mark: Operation | None) -> None:
        """Block the host until ``mark`` has finished."""
        if mark is None or mark.finished:
            return
        if self._schedule:
            self._choose_until(lambda: mark.finished)
        else:
            self._model.run_until_finished(mark)
        self.seconds = max(self.seconds, self._model.now)

    def wait_all(self) -> None:
        """Block the host until all work has run."""
        if self._schedule:
            self._choose_until(lambda: self._model.unfinished == 0)
        else:
            self._model.run_until_finished(None)
        self.seconds = max(self.seconds, self._model.now)

    def _choose_until(self, satisfied: Callable[[], bool]) -> None:
        while not satisfied():
            ready = self._model.ready()
            if not ready:
                raise DeviceError("the virtual device is stuck: queued work waits for itself")
            self._model.step(ready[0] if self._chooser is None else self._chooser(ready))

    def mark(self, stream_id: int) -> Operation | None:
        """The last operation of a stream (an event record)."""
        last = self.streams[stream_id].last
        return None if last is None or last.finished else last

    def passed(self, mark: Operation | None) -> bool:
        """Whether all work before the mark has run."""
        return mark is None or mark.finished

    def segment_cost(self) -> None:
        """Charge the host for getting or returning a segment, at the next host call."""
        self._owed += self._segment_seconds

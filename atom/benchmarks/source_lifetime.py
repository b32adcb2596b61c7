"""The source-lifetime experiment: each path with its protection, and without it as a control.

Method. One trial parks the copy stream behind a spin kernel, writes and sends one step's payload,
drops the source, lets the following step allocate and write its tensor (its own payload and a
prefill's metadata in turn), waits for that write, and receives. With protection the host gets the
step's values; without it every trial has to be stale, or the trial shows nothing. The spin runs on
a stream that does not share the default stream's hardware queue, which is found by trying.

A trial in which the copy was not parked any more when the following write had run, and which was
not stale, shows nothing either way: another process on the GPU, or a host that stood still. It is
run again; so many repetitions as there are trials are allowed for. A stale trial always counts.

Zero copy has no copy to park. Its source is a pinned slot: its control hands the slot to the
following step at once, and for ``clean()`` parks the default stream.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from atom.benchmarks.lifetime_controls import without_protection
from atom.benchmarks.lifetime_paths import (
    BATCH,
    EXPOSURE,
    FILL,
    PATHS,
    DraftIds,
    LifetimePath,
    Logprobs,
    SpecStatus,
    TransferPath,
    own_queue_stream,
    value_of,
    write_metadata,
)
from atom.benchmarks.lifetime_watch import Watch, watching
from atom.benchmarks.source_lifetime_rows import CONTROL as CONTROL
from atom.benchmarks.source_lifetime_rows import PROTECTED as PROTECTED
from atom.benchmarks.source_lifetime_rows import LifetimeRow, Window
from atom.config import CopyProtocol, LifetimeSettings
from atom.device import Device, Kernel, open_device
from atom.device.interface import Stream
from atom.errors import BadInput
from atom.lifetime.explore import no_cycle_collection
from atom.transfer.d2h_queue import D2HQueue
from atom.transfer.payload import Payload
from atom.transfer.pinned_ring import PinnedSlot

EXPERIMENT = "lifetime"
GRAPH_OUTPUT = "graph_output"
_WARM_TRIALS = 2
_GRAPH_WHY = (
    "no source of the engine: its five are allocated outside graphs, because holding a buffer that "
    "lives on and is written again does nothing"
)


@dataclass
class TrialSeen:
    """What one trial showed. Fields as in :class:`LifetimeRow`."""

    stale: bool
    address_reused: bool
    tag_caught: bool
    guard_caught: bool
    parked: bool


@dataclass(frozen=True)
class Point:
    """One path under one protocol in one arm."""

    path: str
    protocol: CopyProtocol
    arm: str

    @property
    def point_id(self) -> str:
        """``<path>/<protocol>/<arm>``."""
        return f"{self.path}/{self.protocol.value}/{self.arm}"

    @property
    def stays_parked(self) -> bool:
        """Whether the copy is still parked behind the following write, if all goes as planned.

        Not under zero copy, which has no copy, nor where something waits for it first.
        """
        if self.protocol is CopyProtocol.ZERO_COPY:
            return False
        waits = self.protocol is CopyProtocol.BLOCKING or self.path in (
            LifetimePath.CLEAN,
            GRAPH_OUTPUT,
        )
        return self.arm == CONTROL or not waits


def build_points(settings: LifetimeSettings) -> list[Point]:
    """The points of the settings, in the order in which they run.

    Raises:
        BadInput: an unknown path.
    """
    known = [path.value for path in LifetimePath] + [GRAPH_OUTPUT]
    for name in settings.paths:
        if name not in known:
            raise BadInput(f"paths: no path {name!r}; known: {', '.join(known)}")
    points = []
    for path in settings.paths or known:
        for protocol in settings.protocols or tuple(CopyProtocol):
            if path == GRAPH_OUTPUT and protocol is not CopyProtocol.HOLD:
                continue
            if protocol is not CopyProtocol.UNPATCHED:
                points.append(Point(path, protocol, PROTECTED))
            points.append(Point(path, protocol, CONTROL))
    return points


def copied_words(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """Kernel body: ``writes[0]`` gets ``reads[0]``."""
    writes[0].copy_(reads[0])


STEP_IN_GRAPH = Kernel("step_in_graph", copied_words)


class _Trials:
    """Trials of one point."""

    def __init__(
        self, device: Device, stream: Stream, point: Point, watch: Watch, park_seconds: float
    ) -> None:
        self.device = device
        self.stream = stream
        self.point = point
        self.watch = watch
        self.park_seconds = park_seconds
        self.zero_copy = point.protocol is CopyProtocol.ZERO_COPY
        self.build()

    def build(self) -> None:
        """Make what all trials share."""
        kinds = {path.kind: path for path in PATHS}
        self.path = kinds[LifetimePath(self.point.path)](
            self.device, self.point.protocol, stream=self.stream
        )

    def park(self) -> None:
        if not self.zero_copy:
            self.device.spin(self.park_seconds, stream=self.stream)

    def follow(self, path: TransferPath, step: int, number: int) -> Payload | Tensor:
        """The following step's tensor; in every other trial a prefill's metadata."""
        if number % 2 and not self.zero_copy:
            # no payload is made: only its size is wanted
            return write_metadata(self.device, self.layout)
        return path.step(step)

    def wait_default(self) -> bool:
        """Wait for the default stream. Returns whether the copy stream was still parked then."""
        marker = self.device.new_event()
        marker.record(self.device.default_stream)
        marker.synchronize()
        return not self.stream.query()

    def trial(self, number: int) -> TrialSeen:
        """Run one."""
        device, path = self.device, self.path
        step = 2 * number + 1
        self.watch.observations.clear()
        self.park()
        payload = path.step(step)
        self.layout = payload.layout
        address = device.address(payload.raw)
        path.send(payload)
        self.watch.sent(path.sent_slot(), step, payload.layout)
        del payload
        following = self.follow(path, step + 1, number)
        parked = self.wait_default()
        reused = self._address(following) == address
        with self.watch.reading(None):
            path.receive()
        device.synchronize()
        path.drain()
        return self.seen(reused, parked)

    def _address(self, following: Payload | Tensor) -> int:
        return self.device.address(following.raw if isinstance(following, Payload) else following)

    def seen(self, reused: bool, parked: bool) -> TrialSeen:
        """What the watch has seen in this trial."""
        foreign = [seen for seen in self.watch.observations.values() if seen.foreign]
        return TrialSeen(
            bool(foreign),
            reused,
            any(seen.tag_caught for seen in foreign),
            any(seen.guard_caught for seen in foreign),
            parked,
        )


class _CleanTrials(_Trials):
    """``clean()`` with the copies of all four queued kinds in flight."""

    def build(self) -> None:
        protocol = self.point.protocol
        self.ids = Logprobs(self.device, protocol, stream=self.stream)
        self.paths = [
            SpecStatus(self.device, protocol, stream=self.stream),
            DraftIds(self.device, protocol, stream=self.stream),
            self.ids,
        ]
        for path in self.paths[1:]:
            path.processor = self.paths[0].processor

    def trial(self, number: int) -> TrialSeen:
        device = self.device
        step = 2 * number + 1
        self.watch.observations.clear()
        device.spin(self.park_seconds, stream=None if self.zero_copy else self.stream)
        payloads = [path.step(step) for path in self.paths]
        addresses = {device.address(payload.raw) for payload in payloads}
        layouts = [payload.layout for payload in payloads]
        slots: list[PinnedSlot] = []
        sent = 0
        while payloads:
            payload, path = payloads.pop(0), self.paths[sent]
            path.send(payload)
            for slot, layout in path.sent_slots(payload):
                self.watch.sent(slot, step, layout)
                slots.append(slot)
            sent += 1
            del payload
        self.paths[0].processor.clean()
        self.ids.kept.clear()
        if self.zero_copy:
            # nothing follows: its tensors would be the next slots, behind the parked kernels
            parked, reused = not device.default_stream.query(), False
            self._peek(slots)
            device.synchronize()
        else:
            following = []
            for path, layout in zip(self.paths, layouts, strict=True):
                self.layout = layout
                following.append(self.follow(path, step + 1, number))
            reused = any(self._address(tensor) in addresses for tensor in following)
            parked = self.wait_default()
            device.synchronize()
            self._peek(slots)
        self.paths[-1].drain()
        return self.seen(reused, parked)

    def _peek(self, slots: list[PinnedSlot]) -> None:
        for slot in slots:
            self.watch.peek(slot)


class _GraphTrials(_Trials):
    """A graph's static output, held. ``protected``: the default stream waits before the replay."""

    def build(self) -> None:
        device = self.device
        self.queue = D2HQueue(device, self.stream, self.point.protocol, epoch_tag=False)
        self.values = device.empty((BATCH,), torch.int64)
        with device.capture() as self.graph:
            self.output = self.queue.new_payload(0, (BATCH,), torch.int64)
            device.launch(STEP_IN_GRAPH, (self.values,), (self.output.data,))

    def trial(self, number: int) -> TrialSeen:
        device, step = self.device, 2 * number + 1
        self.watch.observations.clear()
        self.park()
        self._replay(step)
        copy_done = self.queue.send(self.output)
        self.watch.sent(self.queue._slots[-1].target, step, self.output.layout)
        if self.point.arm == PROTECTED:
            device.default_stream.wait_event(copy_done)
        self._replay(step + 1)
        parked = self.wait_default()
        with self.watch.reading(None):
            self.queue.receive()
        device.synchronize()
        return self.seen(True, parked)

    def _replay(self, step: int) -> None:
        self.device.launch(FILL, (), (self.values,), scalars=(value_of(step),))
        self.graph.replay()


def run_point(
    device: Device, stream: Stream, point: Point, trials: int, park_seconds: float
) -> LifetimeRow:
    """Run one point's trials.

    Args:
        device: any.
        stream: the copy stream; see :func:`own_queue_stream`.
        point: what to run.
        trials: how often.
        park_seconds: how long the copy is parked.
    """
    graph = point.path == GRAPH_OUTPUT
    kind: type[_Trials] = _GraphTrials if graph else _Trials
    window, drops, why = Window.EVERY_STEP, False, _GRAPH_WHY
    unprotected = point.arm == CONTROL and not graph
    if not graph:
        path = LifetimePath(point.path)
        exposure = EXPOSURE[path]
        window, drops, why = exposure.window, exposure.engine_drops, exposure.why
        kind = _CleanTrials if path is LifetimePath.CLEAN else _Trials
    # rings of earlier points are cycles
    gc.collect()
    with (
        # In the middle of a trial it would free an older tensor, whose block the next step's tensor
        # would get, and take longer than the copy is parked.
        no_cycle_collection(),
        without_protection(path, point.protocol) if unprotected else nullcontext(),
        watching(device) as watch,
    ):
        runner = kind(device, stream, point, watch, park_seconds)
        seen: list[TrialSeen] = []
        for number in range(_WARM_TRIALS):
            # a first allocation may synchronise the device: warm trials do not count
            runner.trial(number % trials)
        again = trials
        while len(seen) < trials:
            found = runner.trial(len(seen))
            if again and point.stays_parked and not (found.parked or found.stale):
                again -= 1
                continue
            seen.append(found)
    return LifetimeRow(
        point_id=point.point_id,
        path=point.path,
        protocol=point.protocol,
        arm="control" if point.arm == CONTROL else "protected",
        trials=trials,
        stale=sum(trial.stale for trial in seen),
        address_reused=sum(trial.address_reused for trial in seen),
        tag_caught=sum(trial.tag_caught for trial in seen),
        guard_caught=sum(trial.guard_caught for trial in seen),
        parked=sum(trial.parked for trial in seen),
        window=window,
        engine_drops=drops,
        engine_why=why,
    )


def measure_lifetime(device: Device, settings: LifetimeSettings) -> Iterator[LifetimeRow]:
    """Run the points one after the other and yield each row.

    Raises:
        BadInput: an unknown path.
        DeviceError: every stream shares the default stream's hardware queue.
    """
    points = build_points(settings)
    stream = own_queue_stream(device, settings.park_seconds)
    for point in points:
        yield run_point(device, stream, point, settings.trials, settings.park_seconds)


def run_lifetime(settings: LifetimeSettings, device: Device | None = None) -> list[LifetimeRow]:
    """The whole experiment.

    Args:
        settings: what to run.
        device: where; ``None`` opens what the settings say.

    Raises:
        BadInput, DeviceError: see :func:`measure_lifetime`; no accelerator.
    """
    if device is None:
        device = open_device(settings.device, profile=settings.device_profile, seed=settings.seed)
    return list(measure_lifetime(device, settings))

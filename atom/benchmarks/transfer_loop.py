"""The bare transfer loop of the protocol-cost experiment: one kernel and one status a step.

A step makes a payload, queues the kernel that fills it, sends it and drops it; then it receives the
payload of ``lead`` steps before. Host times are the device's: of an accelerator, the host's own
clock; of the virtual device, its virtual clock. Payloads carry no epoch tag here, so that an arm
whose payloads go stale pays for no error text: what was received is looked at outside the timed
parts. What a tag costs is asked in the engine.
"""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom.benchmarks.protocol_cost_rows import PROTOCOLS, CostArm, Pressure
from atom.config import CopyProtocol
from atom.device.interface import AllocatorSample, Device, Event, Kernel, Stream
from atom.device.plain_copy import plain_host_copy
from atom.model_ops.guard import RECORD_WORDS
from atom.transfer.copy_protocol import UnpatchedWarning
from atom.transfer.d2h_queue import SpecStatusQueue
from atom.transfer.payload import Payload, PayloadKind, payload_layout

_SPARE_SLOTS = 4


def write_step(reads: Sequence[Tensor], writes: Sequence[Tensor], step: int) -> None:
    """Kernel body: ``step`` into every int32 word of ``writes[0]``, as a sampler its status."""
    writes[0].view(torch.int32).fill_(step)


WRITE_STATUS = Kernel("write_status", write_step)


class Sender(ABC):
    """One way to bring a status to the host, in the order in which it was sent."""

    @abstractmethod
    def make(self, step: int) -> Any:
        """A fresh payload."""

    @abstractmethod
    def memory(self, payload: Any) -> Tensor:
        """What the kernel fills: uint8, on the device."""

    @abstractmethod
    def send(self, payload: Any) -> None:
        """Queue its transfer; the caller drops it."""

    @abstractmethod
    def wait(self) -> int:
        """Wait until the oldest transfer has landed. Returns the step that it was sent in."""

    @abstractmethod
    def receive(self) -> Tensor:
        """The host's copy of the oldest status, int32."""


class QueueSender(Sender):
    """The engine's status queue, under a protocol.

    Args:
        device: where.
        stream: the copy stream.
        protocol: what protects the sources.
        batch: requests.
        lead: transfers that are under way at most, less one.
    """

    def __init__(
        self, device: Device, stream: Stream, protocol: CopyProtocol, batch: int, lead: int
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnpatchedWarning)
            self.queue = SpecStatusQueue(
                device, stream, protocol, epoch_tag=False, max_slots=lead + _SPARE_SLOTS
            )
        self.batch = batch

    def make(self, step: int) -> Payload:
        """See :class:`Sender`."""
        return self.queue.new_verdict(step, self.batch, record_words=RECORD_WORDS, opened=False)

    def memory(self, payload: Payload) -> Tensor:
        """See :class:`Sender`."""
        return payload.raw

    def send(self, payload: Payload) -> None:
        """See :class:`Sender`."""
        self.queue.send(payload)

    def wait(self) -> int:
        """See :class:`Sender`."""
        return self.queue._wait_oldest().step

    def receive(self) -> Tensor:
        """See :class:`Sender`."""
        return self.queue.receive()


class PlainSender(Sender):
    """``.to("cpu", non_blocking=True)`` with fresh events: :mod:`atom.device.plain_copy`."""

    def __init__(self, device: Device, stream: Stream, batch: int) -> None:
        self.device = device
        self.stream = stream
        shape = (SpecStatusQueue.STATUS_ROWS * batch + RECORD_WORDS,)
        layout = payload_layout(PayloadKind.SPEC_STATUS, shape, torch.int32, None, False)
        self.nbytes = layout.total_bytes
        self._sent: deque[tuple[int, Tensor, Event]] = deque()
        self._step = 0

    def make(self, step: int) -> Tensor:
        """See :class:`Sender`."""
        self._step = step
        return self.device.empty((self.nbytes,), torch.uint8)

    def memory(self, payload: Tensor) -> Tensor:
        """See :class:`Sender`."""
        return payload

    def send(self, payload: Tensor) -> None:
        """See :class:`Sender`."""
        host, done = plain_host_copy(self.device, payload, self.stream)
        self._sent.append((self._step, host, done))

    def wait(self) -> int:
        """See :class:`Sender`."""
        step, _, done = self._sent[0]
        done.synchronize()
        return step

    def receive(self) -> Tensor:
        """See :class:`Sender`."""
        _, host, done = self._sent.popleft()
        done.synchronize()
        return host.view(torch.int32).clone()


def new_sender(device: Device, stream: Stream, arm: CostArm, batch: int, lead: int) -> Sender:
    """The sender of an arm."""
    if arm is CostArm.PLAIN:
        return PlainSender(device, stream, batch)
    return QueueSender(device, stream, PROTOCOLS[arm], batch, lead)


@dataclass(frozen=True)
class CopyStreamWork:
    """What else the copy stream has to do.

    Attributes:
        pressure: what.
        store_bytes: size of a step's store.
        stuck_seconds: how long it is held up at a time.
        stuck_every: steps from one time to the next.
    """

    pressure: Pressure
    store_bytes: int
    stuck_seconds: float
    stuck_every: int

    def is_stuck(self, step: int) -> bool:
        """Whether the copy stream is held up with that step; not with the very first."""
        return self.pressure is Pressure.STUCK and step % self.stuck_every == self.stuck_every // 2

    def queue(self, device: Device, stream: Stream, step: int) -> None:
        """Queue what belongs to a step."""
        if self.pressure is Pressure.STORE:
            device.traffic(self.store_bytes, "d2h", stream=stream)
        elif self.is_stuck(step):
            device.spin(self.stuck_seconds, stream=stream)


@dataclass
class StepTimes:
    """Host seconds of a window, a step each; and the allocator, if it was watched.

    Attributes:
        step, make, send, wait, receive: as in ``CostRow``.
        stale: received payloads of another step.
        sent, received: the allocator behind each step's send and receive, with its host time.
        stuck: whether the copy stream was held up with the step.
    """

    step: list[float] = field(default_factory=list)
    make: list[float] = field(default_factory=list)
    send: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    receive: list[float] = field(default_factory=list)
    stale: int = 0
    sent: list[tuple[float, AllocatorSample]] = field(default_factory=list)
    received: list[tuple[float, AllocatorSample]] = field(default_factory=list)
    stuck: list[bool] = field(default_factory=list)


class TransferLoop:
    """The loop of one arm. Its slots, events and blocks stay warm from window to window.

    Args:
        device: where.
        stream: the copy stream.
        arm: which.
        batch: requests.
        lead: steps that the host is ahead of what it receives.
        work: of the copy stream.
        behind: whether that work goes behind the step's copy, in front of the payload's drop.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        arm: CostArm,
        batch: int,
        lead: int,
        work: CopyStreamWork,
        *,
        behind: bool = False,
    ) -> None:
        self.device = device
        self.stream = stream
        self.lead = lead
        self.work = work
        self.behind = behind
        self.sender = new_sender(device, stream, arm, batch, lead)
        self._under_way = 0

    def window(self, steps: int, *, watch: bool = False) -> StepTimes:
        """Run steps; then receive what is under way, and wait for the device.

        Args:
            steps: how many.
            watch: whether to sample the allocator behind each send and receive, which takes time.
        """
        device, sender, now = self.device, self.sender, self.device.host_seconds
        times = StepTimes()
        last = now()
        for step in range(steps):
            began = now()
            payload = sender.make(step)
            made = now()
            device.launch(WRITE_STATUS, (), (sender.memory(payload),), scalars=(step,))
            if not self.behind:
                self.work.queue(device, self.stream, step)
            before = now()
            sender.send(payload)
            sent = now()
            if self.behind:
                self.work.queue(device, self.stream, step)
            del payload
            self._under_way += 1
            times.make.append(made - began)
            times.send.append(sent - before)
            if watch:
                times.sent.append((now(), device.allocator_sample()))
                times.stuck.append(self.work.is_stuck(step))
            if self._under_way > self.lead:
                self._receive(times)
            if watch:
                times.received.append((now(), device.allocator_sample()))
            ended = now()
            times.step.append(ended - last)
            last = ended
        while self._under_way:
            self._receive(StepTimes())
        device.synchronize()
        return times

    def base(self) -> AllocatorSample:
        """The allocator with nothing under way. Blocks that wait for a stream go back first."""
        # that is looked at when the next block is asked for
        self.device.empty((1,), torch.uint8)
        return self.device.allocator_sample()

    def _receive(self, times: StepTimes) -> None:
        now = self.device.host_seconds
        began = now()
        expected = self.sender.wait()
        landed = now()
        status = self.sender.receive()
        ended = now()
        self._under_way -= 1
        times.wait.append(landed - began)
        times.receive.append(ended - landed)
        times.stale += int(status[0]) != expected


def kept_seconds(times: StepTimes, base: AllocatorSample) -> float:
    """Mean time that a sent payload's block stays out of the pool behind its drop.

    Blocks that are out, integrated over time and divided by the sends (Little's law). Between two
    samples the count is taken as that of the first.

    Args:
        times: of a watched window.
        base: the allocator before it.
    """
    moments = [one for pair in zip(times.sent, times.received, strict=True) for one in pair]
    total = 0.0
    for (at, sample), (until, _) in pairwise(moments):
        total += (sample.active_blocks - base.active_blocks) * (until - at)
    return total / max(1, len(times.sent))


@contextmanager
def quiet_collector() -> Iterator[Callable[[], None]]:
    """No garbage collection in the block but by the function that it yields.

    What exists at its start is not looked through: two libraries and a model are no garbage.
    """
    gc.collect()
    gc.freeze()
    was_on = gc.isenabled()
    gc.disable()

    def collect() -> None:
        gc.collect()

    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def microseconds(seconds: Sequence[float], name: str, quantile: bool = True) -> dict[str, float]:
    """Median and 99th percentile, as columns of a row."""
    values = np.asarray(seconds) * 1e6
    found = {f"{name}_us": float(np.median(values))}
    if quantile:
        found[f"{name}_p99_us"] = float(np.quantile(values, 0.99))
    return found


def memory_columns(samples: Sequence[AllocatorSample], base: AllocatorSample) -> dict[str, Any]:
    """Columns of watched steps."""
    held = [sample.active_bytes - base.active_bytes for sample in samples]
    return {
        "held_peak_bytes": max(held),
        "held_steady_bytes": float(np.median(held[len(held) // 2 :])),
        "new_segments": samples[-1].segments - base.segments,
        "retries": samples[-1].retries - base.retries,
    }

"""The one place where the copy protocols differ.

A transfer needs three edges: (a) the producer before the copy, (b) the copy before the host's read,
(c) the copy before the source's bytes are written again. :meth:`CopyStrategy.send` makes (a), the
receiver makes (b) by waiting on ``copy_done``, and :meth:`CopyStrategy.protect` is what a protocol
does about (c).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from atom.config import CopyProtocol
from atom.device.interface import CopyPath, Device, Event, Stream
from atom.errors import DeviceError
from atom.transfer.payload import Payload, PayloadLayout
from atom.transfer.pinned_ring import PinnedSlot


class UnpatchedWarning(UserWarning):
    """An engine part was made with the protocol that loses its copies' sources."""


@dataclass
class Lane:
    """What transfers of one kind share.

    Attributes:
        device: where everything runs.
        stream: the copy stream.
        stage: gives a pinned slot of at least that many bytes that no reader and no writer uses.
        unstage: takes a slot back that a failed send does not use.
        producer_stream: the stream that writes the sources and owns their blocks.
        copy_path: who moves the bytes.
        producer_event: reused by every send: a wait takes the latest record at the time of the
            call, so recording it again later does not move an earlier wait.
    """

    device: Device
    stream: Stream
    stage: Callable[[int], PinnedSlot]
    unstage: Callable[[PinnedSlot], None]
    producer_stream: Stream
    copy_path: CopyPath
    producer_event: Event

    @classmethod
    def make(
        cls,
        device: Device,
        stream: Stream,
        stage: Callable[[int], PinnedSlot],
        unstage: Callable[[PinnedSlot], None],
        copy_path: CopyPath = CopyPath.ENGINE,
        producer_event: Event | None = None,
    ) -> Lane:
        """A lane whose producer is the default stream. Creates an event if none is given."""
        event = device.new_event() if producer_event is None else producer_event
        return cls(device, stream, stage, unstage, device.default_stream, copy_path, event)


class Sent(NamedTuple):
    """A queued transfer.

    Attributes:
        slots: pinned slots, one a payload.
        copy_done: completes when all of them have landed.
        source: what must stay referenced until ``copy_done`` was waited on, or ``None``.
    """

    slots: tuple[PinnedSlot, ...]
    copy_done: Event
    source: tuple[Payload, ...] | None


def stage_all(lane: Lane, payloads: Sequence[Payload]) -> tuple[PinnedSlot, ...]:
    """One pinned slot a payload, or none: those taken before a failure are given back."""
    slots: list[PinnedSlot] = []
    try:
        for payload in payloads:
            slots.append(lane.stage(payload.layout.host_bytes))
    except BaseException:
        for slot in slots:
            lane.unstage(slot)
        raise
    return tuple(slots)


def _withdraw(lane: Lane, slots: Sequence[PinnedSlot]) -> None:
    """Wait for whatever a failed send has queued, then give its slots back."""
    # A device that fails here too has queued nothing more; the first error says why.
    with contextlib.suppress(Exception):
        lane.stream.synchronize()
    for slot in slots:
        lane.unstage(slot)


class CopyStrategy:
    """How one protocol allocates a payload, sends it and protects its source."""

    protocol: ClassVar[CopyProtocol]
    #: said once when an engine part starts with this protocol
    caution: ClassVar[str | None] = None

    def check(self, device: Device) -> None:
        """Refuse a device on which the protocol does not work. Called where a queue is made.

        Raises:
            DeviceError: with the reason and what to do.
        """

    def new_payload(
        self, lane: Lane, layout: PayloadLayout, step: int, *, opened: bool = True
    ) -> Payload:
        """A fresh payload for the producer, with its tags marked as not written yet.

        Args:
            lane: what it is for.
            layout: its layout.
            step: the step that produces it.
            opened: whether to queue the launch that opens it. A producer that opens its payloads
                itself, in a kernel that is queued before the one that writes the data, saves it.
        """
        payload = self.allocate(lane, layout, step)
        if opened:
            payload.open(lane.device, stream=lane.producer_stream)
        return payload

    def allocate(self, lane: Lane, layout: PayloadLayout, step: int) -> Payload:
        """The memory of a payload: a block of the caching allocator."""
        raw = lane.device.empty((layout.total_bytes,), torch.uint8, stream=lane.producer_stream)
        return Payload(layout, step, raw)

    def send(
        self, lane: Lane, payloads: tuple[Payload, ...], produced: Event | None = None
    ) -> Sent:
        """Queue the copies of ``payloads``, with one completion event for all of them.

        ``produced`` is an event that was recorded behind the producers; ``None`` records one now.
        A send that fails keeps no slot, and its caller may drop the payloads.
        """
        # All slots first: a full ring must be found out before any copy reads a source.
        slots = stage_all(lane, payloads)
        stream = lane.stream
        copy, path = lane.device.copy, lane.copy_path
        copy_done = slots[0].event
        try:
            if produced is None:
                produced = lane.producer_event
                produced.record(lane.producer_stream)
            stream.wait_event(produced)
            for payload, slot in zip(payloads, slots, strict=True):
                copy(slot.target(payload.layout), payload.copied, stream=stream, path=path)
            copy_done.record(stream)
            return Sent(slots, copy_done, self.protect(lane, payloads, copy_done))
        except BaseException:
            _withdraw(lane, slots)
            raise

    def protect(
        self, lane: Lane, payloads: tuple[Payload, ...], copy_done: Event
    ) -> tuple[Payload, ...] | None:
        """Act for edge (c), and return what is kept beside ``copy_done`` (``None``: nothing)."""
        raise NotImplementedError

    def announce(self, who: str) -> None:
        """Warn if this protocol is for experiments only."""
        if self.caution is not None:
            warnings.warn(f"{who}: {self.caution}", UnpatchedWarning, stacklevel=3)


class Unpatched(CopyStrategy):
    """Nothing is kept: the block is free as soon as the caller drops it."""

    protocol = CopyProtocol.UNPATCHED
    caution = (
        "protocol 'unpatched' drops the source of every queued copy; the host may read the next "
        "step's bytes. It is there for experiments only: use 'hold'."
    )

    def protect(
        self, lane: Lane, payloads: tuple[Payload, ...], copy_done: Event
    ) -> tuple[Payload, ...] | None:
        """Keep nothing."""
        return None


class RecordStream(CopyStrategy):
    """The allocator keeps a dropped block back until the copy stream has passed its free."""

    protocol = CopyProtocol.RECORD_STREAM

    def protect(
        self, lane: Lane, payloads: tuple[Payload, ...], copy_done: Event
    ) -> tuple[Payload, ...] | None:
        """Tell the allocator of the copy stream; keep nothing."""
        for payload in payloads:
            lane.device.record_stream(payload.raw, lane.stream)
        return None


class Hold(CopyStrategy):
    """The payloads stay referenced beside the event that their copy has anyway."""

    protocol = CopyProtocol.HOLD

    def protect(
        self, lane: Lane, payloads: tuple[Payload, ...], copy_done: Event
    ) -> tuple[Payload, ...] | None:
        """Keep the payloads."""
        return payloads


class Blocking(CopyStrategy):
    """The host waits for the copy inside the send."""

    protocol = CopyProtocol.BLOCKING

    def protect(
        self, lane: Lane, payloads: tuple[Payload, ...], copy_done: Event
    ) -> tuple[Payload, ...] | None:
        """Wait; there is nothing to keep afterwards."""
        copy_done.synchronize()
        return None


class ZeroCopy(CopyStrategy):
    """The producing kernels write a pinned slot. The copy stream is not used at all.

    Why the host sees what they wrote: :mod:`atom.device.host_visibility`. A slot belongs to one
    step, so its producers are launched outside graphs: a replay would write the slot that was there
    at the capture, every step, while the host reads it.
    """

    protocol = CopyProtocol.ZERO_COPY

    def check(self, device: Device) -> None:
        """Refuse a device whose kernels' writes the host may not read behind an event."""
        reason = device.why_no_host_writes()
        if reason is not None:
            raise DeviceError(f"zero_copy does not work here: {reason}; or use 'hold'")

    def allocate(self, lane: Lane, layout: PayloadLayout, step: int) -> Payload:
        """A payload over a reserved pinned slot; rows that stay on the device get a block there.

        Raises:
            DeviceError: a graph is being captured.
        """
        device = lane.device
        if device.capturing:
            raise DeviceError(
                f"{layout.kind.label} of step {step}: a zero_copy payload inside a graph capture "
                "would be written again by every replay, whoever reads it; make it, and launch "
                "what writes it, outside the graph"
            )
        rest = None
        # before the slot, which a failed allocation would lose
        if layout.rest_shape is not None:
            rest = device.empty(layout.rest_shape, layout.dtype, stream=lane.producer_stream)
        slot = lane.stage(layout.host_bytes)
        try:
            alias = slot.alias(device)[: layout.host_bytes]
        except BaseException:
            lane.unstage(slot)
            raise
        payload = Payload(layout, step, alias, rest=rest, slot=slot)
        slot.reserved_by = weakref.ref(payload)
        return payload

    def send(
        self, lane: Lane, payloads: tuple[Payload, ...], produced: Event | None = None
    ) -> Sent:
        """Record one event on the producer's stream.

        Raises:
            DeviceError: a payload does not alias a reserved slot (made elsewhere, or sent twice).
        """
        slots = []
        for payload in payloads:
            slot = payload.slot
            if slot is None or slot.reserved_by is None or slot.reserved_by() is not payload:
                raise DeviceError(
                    f"{payload.layout.kind.label} of step {payload.step} has no reserved pinned "
                    "slot: under zero_copy a payload comes from new_payload and is sent once"
                )
            slots.append(slot)
        copy_done = slots[0].event
        copy_done.record(lane.producer_stream)
        for slot in slots:
            slot.reserved_by = None
        return Sent(tuple(slots), copy_done, self.protect(lane, payloads, copy_done))

    def protect(
        self, lane: Lane, payloads: tuple[Payload, ...], copy_done: Event
    ) -> tuple[Payload, ...] | None:
        """Keep the payloads: the pinned allocator's own events guard copies, not kernel writes."""
        return payloads


STRATEGIES: dict[CopyProtocol, CopyStrategy] = {
    strategy.protocol: strategy
    for strategy in (Unpatched(), RecordStream(), Hold(), Blocking(), ZeroCopy())
}


def held_payloads(sources: Sequence[tuple[Payload, ...] | None]) -> int:
    """How many payloads the given sources keep alive."""
    return sum(len(source) for source in sources if source is not None)

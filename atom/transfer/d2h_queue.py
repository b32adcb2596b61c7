"""Queues of device-to-host transfers, each of one kind of payload.

Protocols differ in :mod:`atom.transfer.copy_protocol` alone; here transfers are only ordered
and owned. None of the classes is thread-safe: one host thread runs an engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from atom.config import CopyProtocol
from atom.device.interface import CopyPath, Device, Event, Stream
from atom.errors import AtomError
from atom.transfer.copy_protocol import STRATEGIES, Lane, held_payloads
from atom.transfer.payload import (
    Payload,
    PayloadKind,
    PayloadLayout,
    payload_layout,
    refuse_other_kind,
    stale_payload,
    tag_fault,
)
from atom.transfer.pinned_ring import PinnedRing, PinnedSlot


class NothingQueued(AtomError):
    """A receive found no transfer that was sent and not yet received."""


@dataclass(frozen=True)
class Received:
    """A transfer as the host found it, whatever it holds.

    Attributes:
        step: the step that was sent.
        data: host copy of the payload's data.
        raw: host copy of all bytes that travelled, uint8 ``[host_bytes]``, tags included.
        tag_ok: whether both tags are the expected ones; ``None`` if the layout has no tags.
        first_tag, last_tag: the int64 words found there; ``None`` without tags.
        fault: what is wrong with the tags, in words, or ``None``.
    """

    step: int
    data: Tensor
    raw: Tensor
    tag_ok: bool | None
    first_tag: int | None
    last_tag: int | None
    fault: str | None


class _D2HSlot:
    """A queued transfer: where it lands, when, and what must live until then."""

    __slots__ = ("copy_done", "layout", "source", "step", "target")

    def __init__(
        self,
        layout: PayloadLayout,
        step: int,
        target: PinnedSlot,
        copy_done: Event,
        source: tuple[Payload, ...] | None,
    ) -> None:
        self.layout = layout
        self.step = step
        self.target = target
        self.copy_done = copy_done
        self.source = source


def landed_fault(layout: PayloadLayout, step: int, slot: PinnedSlot) -> str | None:
    """What is wrong with the tags of a landed payload, or ``None``."""
    if not layout.tagged:
        return None
    first, last = slot.tags(layout)
    return tag_fault(layout, step, first, last)


class D2HQueue:
    """Transfers of one kind of payload, received in the order in which they were sent.

    Args:
        device: where the payloads live.
        stream: the copy stream.
        protocol: what protects the sources.
        kind: what the payloads hold; part of their tags.
        ring: pinned slots to share with other queues; ``None`` makes one.
        producer_event: event of edge (a) to share with other queues; ``None`` makes one.
        copy_path: who moves the bytes.
        epoch_tag: whether payloads made here carry tags.
        max_slots: bound of the ring that is made here.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        protocol: CopyProtocol = CopyProtocol.HOLD,
        *,
        kind: PayloadKind = PayloadKind.OTHER,
        ring: PinnedRing | None = None,
        producer_event: Event | None = None,
        copy_path: CopyPath = CopyPath.ENGINE,
        epoch_tag: bool = True,
        max_slots: int = 64,
    ) -> None:
        self.device = device
        self.stream = stream
        self.kind = kind
        self.epoch_tag = epoch_tag
        self.ring = PinnedRing(device, max_slots=max_slots) if ring is None else ring
        self._strategy = STRATEGIES[CopyProtocol(protocol)]
        self._strategy.check(device)
        self._lane = Lane.make(
            device, stream, self.ring.acquire, self.ring.release, copy_path, producer_event
        )
        self._slots: deque[_D2HSlot] = deque()

    def __len__(self) -> int:
        """Transfers sent and not yet received."""
        return len(self._slots)

    @property
    def protocol(self) -> CopyProtocol:
        """What protects the sources."""
        return self._strategy.protocol

    def layout(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rest_shape: tuple[int, ...] | None = None,
    ) -> PayloadLayout:
        """The layout of such a payload in this queue."""
        return payload_layout(self.kind, shape, dtype, rest_shape, self.epoch_tag)

    def new_payload(
        self,
        step: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rest_shape: tuple[int, ...] | None = None,
        opened: bool = True,
    ) -> Payload:
        """A fresh payload for the default stream to fill and stamp, where the protocol wants it.

        Args:
            step: the step that produces it; goes into its tags.
            shape: shape of the data.
            dtype: its type.
            rest_shape: rows of the same tensor that stay on the device.
            opened: see :meth:`atom.transfer.copy_protocol.CopyStrategy.new_payload`.
        """
        layout = payload_layout(self.kind, shape, dtype, rest_shape, self.epoch_tag)
        return self._strategy.new_payload(self._lane, layout, step, opened=opened)

    def send(self, payload: Payload, produced: Event | None = None) -> Event:
        """Queue the transfer; the payload's producers have been queued on the default stream.

        Args:
            payload: what to send.
            produced: an event recorded on the default stream behind the producers; ``None``
                records one now. Recorded earlier, it does not queue behind other streams' work
                that shares the default stream's hardware queue.

        Returns:
            The transfer's completion event. It is reused: right until this transfer is received.

        Raises:
            WrongPayload: ``payload`` is of another kind than this queue's.
            PinnedRingFull: no slot is left; nothing was queued.
        """
        refuse_other_kind(payload, self.kind, f"the {self.kind.label} queue")
        sent = self._strategy.send(self._lane, (payload,), produced)
        self._slots.append(
            _D2HSlot(payload.layout, payload.step, sent.slots[0], sent.copy_done, sent.source)
        )
        return sent.copy_done

    def receive(self) -> Tensor:
        """Wait for the oldest transfer, release its source and slot, return a host copy.

        Raises:
            NothingQueued: nothing was sent that is not received.
            StalePayload: the tags are not those of the step that was sent. The transfer counts as
                received.
        """
        slot = self._wait_oldest()
        target, layout = slot.target, slot.layout
        fault = landed_fault(layout, slot.step, target)
        data = target.data(layout).clone()
        # whoever wrote in between had marked the tags before
        fault = fault or landed_fault(layout, slot.step, target)
        self._release_oldest()
        if fault is not None:
            raise stale_payload(fault)
        return data

    def receive_raw(self) -> Received:
        """Like :meth:`receive`, but return whatever landed, for a trial to classify."""
        slot = self._wait_oldest()
        target, layout = slot.target, slot.layout
        fault = landed_fault(layout, slot.step, target)
        first, last = target.tags(layout) if layout.tagged else (None, None)
        received = Received(
            step=slot.step,
            data=target.data(layout).clone(),
            raw=target.target(layout).clone(),
            tag_ok=fault is None if layout.tagged else None,
            first_tag=first,
            last_tag=last,
            fault=fault,
        )
        self._release_oldest()
        return received

    def drain(self) -> int:
        """Wait for every transfer, then drop its output and source. Returns how many."""
        count = len(self._slots)
        self.wait()
        while self._slots:
            self._release_oldest()
        return count

    def wait(self) -> None:
        """Block the host until every queued transfer has landed; release nothing."""
        for slot in self._slots:
            slot.copy_done.synchronize()

    def live_sources(self) -> int:
        """Payloads that this queue keeps alive."""
        return held_payloads([slot.source for slot in self._slots])

    def _wait_oldest(self) -> _D2HSlot:
        if not self._slots:
            raise NothingQueued(f"no {self.kind.label} transfer is queued: send before receiving")
        slot = self._slots[0]
        slot.copy_done.synchronize()
        return slot

    def _release_oldest(self) -> None:
        # the caller has waited for it
        slot = self._slots.popleft()
        slot.source = None
        self.ring.release(slot.target, landed=True)


class SpecStatusQueue(D2HQueue):
    """The rejection sampler's status rows, ``num_rejected`` and ``num_bonus``.

    They are the first two rows of the verdict, a fresh tensor every step; its other rows stay on
    the device. Takes the arguments of :class:`D2HQueue` except ``kind``.
    """

    STATUS_ROWS = 2

    def __init__(
        self,
        device: Device,
        stream: Stream,
        protocol: CopyProtocol = CopyProtocol.HOLD,
        *,
        ring: PinnedRing | None = None,
        producer_event: Event | None = None,
        copy_path: CopyPath = CopyPath.ENGINE,
        epoch_tag: bool = True,
        max_slots: int = 64,
    ) -> None:
        super().__init__(
            device,
            stream,
            protocol,
            kind=PayloadKind.SPEC_STATUS,
            ring=ring,
            producer_event=producer_event,
            copy_path=copy_path,
            epoch_tag=epoch_tag,
            max_slots=max_slots,
        )

    def new_verdict(
        self,
        step: int,
        batch_size: int,
        *,
        rows: int = 2,
        record_words: int = 0,
        opened: bool = True,
    ) -> Payload:
        """A fresh int32 verdict of ``rows`` rows.

        Args:
            step: the step that produces it.
            batch_size: requests in the batch.
            rows: rows of the verdict, those that stay on the device included.
            record_words: words of the kernels' guard record that travel behind the status.
            opened: as of :meth:`D2HQueue.new_payload`.

        Returns:
            ``data`` is ``[2, batch_size]`` (num_rejected, num_bonus), or with a record flat,
            ``[2 * batch_size + record_words]``; ``rest`` the other rows,
            ``[rows - 2, batch_size]``, or ``None``.

        Raises:
            ValueError: fewer rows than the status has, or a negative count of words.
        """
        more = rows - self.STATUS_ROWS
        if more < 0 or record_words < 0:
            raise ValueError(
                f"a verdict has at least {self.STATUS_ROWS} rows and a record no negative size, "
                f"got {rows} and {record_words}"
            )
        rest_shape = (more, batch_size) if more else None
        shape: tuple[int, ...] = (self.STATUS_ROWS, batch_size)
        if record_words:
            shape = (self.STATUS_ROWS * batch_size + record_words,)
        return self.new_payload(step, shape, torch.int32, rest_shape=rest_shape, opened=opened)

    def receive_status(self) -> tuple[Tensor, Tensor]:
        """The oldest status: ``(num_rejected, num_bonus)``, int32 host ``[batch_size]`` each.

        Raises:
            NothingQueued, StalePayload: as :meth:`D2HQueue.receive`.
        """
        status = self.receive()
        return status[0], status[1]

    def receive_status_and_record(self, batch_size: int) -> tuple[list[int], list[int], list[int]]:
        """The oldest status with the guard record that came behind it.

        Args:
            batch_size: the one that its verdict was made with.

        Returns:
            ``(num_rejected, num_bonus, record)``; of the first two ``batch_size`` numbers each.

        Raises:
            NothingQueued, StalePayload: as :meth:`D2HQueue.receive`.
        """
        # the next step waits for this: one conversion, no views
        flat = self.receive().tolist()
        both = self.STATUS_ROWS * batch_size
        return flat[:batch_size], flat[batch_size:both], flat[both:]

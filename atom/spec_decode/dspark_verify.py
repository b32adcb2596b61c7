"""The verifier's per-request lengths, ``ell``, on their way to the host.

``ell`` is a fresh device tensor every step, copied on the engine's ``async_copy_stream`` into a
small ring of pinned slots. ``ell_by_req`` picks up what has landed and never waits; ``wait_ell``
waits for one step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from atom.config import CopyProtocol
from atom.device.interface import CopyPath, Device, Event, Stream
from atom.errors import AtomError, BadInput
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
from atom.transfer.pinned_ring import PinnedSlot, is_abandoned

MAX_ELL_INFLIGHT = 4
ELL_SLOTS = 4


class EllMismatch(AtomError):
    """``ell`` and the batch that it belongs to differ in length."""


class _Pending(NamedTuple):
    """An ``ell`` that the host has not picked up. It owns no source: see :class:`EllRing`."""

    req_ids: tuple[int, ...]
    slot: PinnedSlot
    copy_done: Event
    layout: PayloadLayout
    step: int


class _OneOff(NamedTuple):
    """A copy into a buffer outside the ring.

    The target stays with it, since a pending entry may be evicted while the copy still runs.
    """

    copy_done: Event
    source: tuple[Payload, ...] | None
    target: PinnedSlot


def _refuse_no_ell_map(values: object) -> None:
    if not isinstance(values, dict):
        raise BadInput(
            f"ell_by_req is a dictionary of request id to length, got {values!r}; {{}} empties it"
        )
    for pair in values.items():
        if any(not isinstance(number, int) or isinstance(number, bool) for number in pair):
            raise BadInput(f"ell_by_req holds integers by integer request id, got {pair!r}")


class EllRing:
    """Sends ``ell`` and collects it by request.

    A source is held beside its slot's event and released when the slot is used again after that
    event has completed; a one-off buffer keeps it beside the copy's own event. It is deliberately
    not held through the pending list: that list evicts entries whose copies may still run, and
    setting ``ell_by_req`` clears it.

    Args:
        device: where the engine runs.
        stream: the engine's copy stream.
        protocol: what protects the sources.
        slots: pinned slots of the ring.
        slot_requests: requests a slot is made for; a larger ``ell`` takes a one-off buffer.
        dtype: type of ``ell``.
        copy_path: who moves the bytes.
        epoch_tag: whether payloads carry tags.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        protocol: CopyProtocol = CopyProtocol.HOLD,
        *,
        slots: int = ELL_SLOTS,
        slot_requests: int = 512,
        dtype: torch.dtype = torch.int32,
        copy_path: CopyPath = CopyPath.ENGINE,
        epoch_tag: bool = True,
    ) -> None:
        if slots < 1 or slot_requests < 1:
            raise ValueError(
                f"slots and slot_requests are at least 1, got {slots}, {slot_requests}"
            )
        self.device = device
        self.stream = stream
        self.dtype = dtype
        self.epoch_tag = epoch_tag
        self._strategy = STRATEGIES[CopyProtocol(protocol)]
        self._strategy.check(device)
        self._lane = Lane.make(device, stream, self._ell_stage, self._ell_unstage, copy_path)
        slot_bytes = self._layout(slot_requests).host_bytes
        self._ell_slot_buffer = [self._new_buffer(slot_bytes, index) for index in range(slots)]
        self._ell_slot_event = [buffer.event for buffer in self._ell_slot_buffer]
        self._ell_slot_source: list[tuple[Payload, ...] | None] = [None] * slots
        self._ell_oneoff_inflight: list[_OneOff] = []
        self._ell_oneoff_reserved: list[PinnedSlot] = []
        self._ell_pending: list[_Pending] = []
        self._ell_by_req: dict[int, int] = {}
        self._ell_by_step: dict[int, dict[int, int]] = {}
        self._ell_fault: str | None = None

    @property
    def protocol(self) -> CopyProtocol:
        """What protects the sources."""
        return self._strategy.protocol

    def _layout(self, requests: int) -> PayloadLayout:
        return payload_layout(PayloadKind.ELL, (requests,), self.dtype, None, self.epoch_tag)

    def _new_buffer(self, nbytes: int, index: int) -> PinnedSlot:
        pinned = self.device.pinned((nbytes,), torch.uint8)
        return PinnedSlot(pinned, self.device.new_event(), index)

    def new_ell(self, step: int, requests: int, *, opened: bool = True) -> Payload:
        """A fresh ``ell`` for the default stream to fill and stamp: ``[requests]``."""
        layout = self._layout(requests)
        return self._strategy.new_payload(self._lane, layout, step, opened=opened)

    def record_ell(self, req_ids: Sequence[int], ell: Payload | None) -> None:
        """Queue the transfer of a step's ``ell``. A step without one (``None``) changes nothing.

        Args:
            req_ids: the batch's requests, in the order of ``ell``.
            ell: filled and stamped on the default stream.

        Raises:
            EllMismatch: not one request for each element.
            WrongPayload: ``ell`` is a payload of another kind.
        """
        if ell is None:
            return
        refuse_other_kind(ell, PayloadKind.ELL, "record_ell")
        if ell.layout.shape != (len(req_ids),):
            raise EllMismatch(
                f"ell of step {ell.step} has shape {ell.layout.shape} for {len(req_ids)} requests"
            )
        sent = self._strategy.send(self._lane, (ell,))
        slot = sent.slots[0]
        if slot.index >= 0:
            self._ell_slot_source[slot.index] = sent.source
        else:
            if slot in self._ell_oneoff_reserved:
                self._ell_oneoff_reserved.remove(slot)
            self._ell_oneoff_inflight.append(_OneOff(sent.copy_done, sent.source, slot))
        self._ell_pending.append(
            _Pending(tuple(req_ids), slot, sent.copy_done, ell.layout, ell.step)
        )
        # Evicted copies may still run: their sources stay with the slot or the one-off entry.
        del self._ell_pending[:-MAX_ELL_INFLIGHT]

    def _ell_stage(self, nbytes: int) -> PinnedSlot:
        """A pinned buffer that no queued copy writes and no pending entry reads.

        A ring slot is used again only after its event has completed, and that releases its source.
        """
        self._prune_oneoffs()
        for index, slot in enumerate(self._ell_slot_buffer):
            if slot.capacity < nbytes:
                break
            if slot.reserved_by is not None:
                if not is_abandoned(slot):
                    continue
                # The dropped payload's kernels may still be queued: usable after this record.
                slot.event.record(self._lane.producer_stream)
                slot.reserved_by = None
            if not self._ell_slot_event[index].query():
                continue
            if any(entry.slot is slot for entry in self._ell_pending):
                # landed, but not picked up yet: do that before its bytes are written again
                self._harvest()
            self._ell_slot_source[index] = None
            return slot
        slot = self._new_buffer(nbytes, -1)
        # Only zero_copy writes a buffer before its send; then this list keeps the buffer alive.
        self._ell_oneoff_reserved.append(slot)
        return slot

    def _ell_unstage(self, slot: PinnedSlot) -> None:
        """Forget a one-off buffer that a failed send does not use. A ring slot needs nothing."""
        if slot in self._ell_oneoff_reserved:
            self._ell_oneoff_reserved.remove(slot)

    def _prune_oneoffs(self) -> None:
        for slot in [slot for slot in self._ell_oneoff_reserved if is_abandoned(slot)]:
            slot.event.record(self._lane.producer_stream)
            self._ell_oneoff_reserved.remove(slot)
            self._ell_oneoff_inflight.append(_OneOff(slot.event, None, slot))
        self._ell_oneoff_inflight = [
            entry for entry in self._ell_oneoff_inflight if not entry.copy_done.query()
        ]

    def _harvest(self) -> None:
        """Move landed entries into the map; keep the first stale one's fault for its reader."""
        waiting = []
        for entry in self._ell_pending:
            if not entry.copy_done.query():
                waiting.append(entry)
                continue
            if entry.layout.tagged:
                fault = tag_fault(entry.layout, entry.step, *entry.slot.tags(entry.layout))
                if fault is not None:
                    self._ell_fault = self._ell_fault or fault
                    continue
            values = entry.slot.data(entry.layout).tolist()
            landed = dict(zip(entry.req_ids, values, strict=True))
            self._ell_by_req.update(landed)
            self._ell_by_step[entry.step] = landed
        for step in list(self._ell_by_step)[:-MAX_ELL_INFLIGHT]:
            del self._ell_by_step[step]
        self._ell_pending = waiting

    def wait_ell(self, step: int) -> dict[int, int]:
        """The ``ell`` that ``step`` recorded, by request; waits for its copy alone.

        It is taken out: neither a second call nor ``ell_by_req`` shows it again. Steps older than
        the last ``MAX_ELL_INFLIGHT`` are forgotten.

        Raises:
            EllMismatch: the step recorded none, or it is forgotten or taken already.
            StalePayload: a landed ``ell`` carries another step's tag; it is left out.
        """
        for entry in self._ell_pending:
            if entry.step == step:
                entry.copy_done.synchronize()
        self._harvest()
        found = self._ell_by_step.pop(step, None)
        self._raise_fault()
        if found is None:
            raise EllMismatch(
                f"no ell of step {step}: recorded are {sorted(self._ell_by_step)}, on their way "
                f"{[entry.step for entry in self._ell_pending]}; at most {MAX_ELL_INFLIGHT} steps "
                "are kept, and each is taken once"
            )
        for request in found:
            self._ell_by_req.pop(request, None)
        return found

    def _raise_fault(self) -> None:
        if self._ell_fault is not None:
            fault, self._ell_fault = self._ell_fault, None
            raise stale_payload(fault)

    @property
    def ell_by_req(self) -> dict[int, int]:
        """Latest landed ``ell`` of each request.

        Raises:
            StalePayload: a landed ``ell`` carries another step's tag; it is left out of the map.
        """
        self._harvest()
        self._raise_fault()
        return self._ell_by_req

    @ell_by_req.setter
    def ell_by_req(self, values: dict[int, int]) -> None:
        """Replace the map and forget what is pending. No source is freed by that.

        Raises:
            BadInput: not a dictionary of integers; the map stays as it was.
        """
        _refuse_no_ell_map(values)
        self._ell_by_req = values
        self._ell_pending = []
        self._ell_by_step = {}
        self._ell_fault = None

    def drain(self) -> None:
        """Wait for every copy, then drop all sources and one-off buffers.

        What has landed stays readable through ``ell_by_req``.
        """
        for event in self._ell_slot_event:
            event.synchronize()
        for entry in self._ell_oneoff_inflight:
            entry.copy_done.synchronize()
        self._ell_slot_source = [None] * len(self._ell_slot_source)
        self._prune_oneoffs()

    def live_sources(self) -> int:
        """Payloads that the ring keeps alive."""
        oneoffs = [entry.source for entry in self._ell_oneoff_inflight]
        return held_payloads(self._ell_slot_source) + held_payloads(oneoffs)

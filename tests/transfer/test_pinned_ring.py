"""The ring's law: no slot is handed out that a reader or queued work still uses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom.config import CopyProtocol
from atom.device.interface import Device
from atom.device.virtual import VirtualDevice
from atom.transfer.d2h_queue import D2HQueue
from atom.transfer.payload import Payload, PayloadKind, payload_layout
from atom.transfer.pinned_ring import PinnedRing, PinnedRingFull, PinnedSlot


class SwitchedEvent:
    """An event whose work is done when the test says so."""

    def __init__(self) -> None:
        self.done = True
        self.waits = self.asked = 0

    def synchronize(self) -> None:
        self.waits += not self.done
        self.done = True

    def query(self) -> bool:
        self.asked += 1
        return self.done

    def record(self, stream: object = None) -> None:
        self.done = False


class HostOnly:
    """As much of a device as a ring needs."""

    default_stream = object()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def new_event(self) -> SwitchedEvent:
        return SwitchedEvent()


def make_ring(max_slots: int = 64) -> PinnedRing:
    return PinnedRing(cast(Device, HostOnly()), max_slots=max_slots)


def switch(slot: PinnedSlot) -> SwitchedEvent:
    return cast(SwitchedEvent, slot.event)


operations = st.lists(
    st.tuples(st.sampled_from(["acquire", "release", "finish"]), st.integers(0, 2000)), max_size=60
)


@given(operations, st.integers(1, 6))
def test_never_a_busy_slot(script: list[tuple[str, int]], max_slots: int) -> None:
    ring = make_ring(max_slots)
    held: list[PinnedSlot] = []
    working: list[PinnedSlot] = []
    for operation, number in script:
        if operation == "acquire":
            try:
                slot = ring.acquire(number)
            except PinnedRingFull:
                # refused only when every slot has a reader; for work alone the ring waits
                assert len(ring) == len(held) == max_slots
                continue
            working = [other for other in working if not switch(other).done]
            assert slot not in held
            assert slot not in working
            assert slot.capacity >= number
            held.append(slot)
            working.append(slot)
            switch(slot).record()
        elif operation == "release" and held:
            # even a reader that did not wait must not expose the slot
            ring.release(held.pop(number % len(held)))
        elif operation == "finish" and working:
            switch(working.pop(number % len(working))).done = True
        assert ring.busy == len(held)
        assert len(ring) <= max_slots
        assert ring.acquires - ring.releases == ring.busy


def test_slots_and_events_are_reused() -> None:
    ring = make_ring()
    events = set()
    for _ in range(10):
        slot = ring.acquire(100)
        events.add(id(slot.event))
        ring.release(slot)
    assert (len(ring), ring.grown, len(events)) == (1, 1, 1)


def test_a_slot_that_was_waited_for_is_handed_out_without_a_question() -> None:
    ring = make_ring(1)
    slot = ring.acquire(8)
    ring.release(slot, landed=True)
    assert ring.acquire(8) is slot
    assert switch(slot).asked == 0
    # what is known of one trip says nothing of the next
    ring.release(slot)
    assert ring.acquire(8) is slot
    assert switch(slot).asked == 1


def test_a_full_ring_says_what_to_do() -> None:
    ring = make_ring(2)
    ring.acquire(8)
    ring.acquire(8)
    with pytest.raises(PinnedRingFull, match=r"all 2 slots.*[Rr]eceive.*max_slots"):
        ring.acquire(8)


def test_another_size_replaces_a_free_slot() -> None:
    ring = make_ring(1)
    ring.release(ring.acquire(8))
    assert ring.acquire(4096).capacity == 4096
    assert len(ring) == 1


def test_a_slot_is_given_back_once() -> None:
    ring = make_ring()
    slot = ring.acquire(8)
    ring.release(slot)
    with pytest.raises(ValueError, match="twice"):
        ring.release(slot)


def test_a_dropped_reservation_comes_back_after_its_kernels() -> None:
    ring = make_ring(1)
    slot = ring.acquire(64)
    layout = payload_layout(PayloadKind.OTHER, (4,), torch.int32)
    payload = Payload(layout, 1, slot.tensor[: layout.host_bytes], slot=slot)
    slot.reserved_by = weakref.ref(payload)
    with pytest.raises(PinnedRingFull):
        ring.acquire(64)
    del payload
    gc.collect()
    # its producer may still be queued: the event recorded now is not done yet
    assert switch(slot).waits == 0
    assert ring.acquire(64) is slot
    assert switch(slot).waits == 1
    assert ring.reclaimed == 1


def test_slots_of_dropped_payloads_come_back_before_the_ring_is_full() -> None:
    # in schedule mode nothing runs until the host waits, as on a GPU that is behind
    device = VirtualDevice("MI355X", mode="schedule")
    ring = PinnedRing(device, max_slots=3)
    queue = D2HQueue(device, device.new_stream(), CopyProtocol.ZERO_COPY, ring=ring)
    for step in range(12):
        device.spin(1e-6)
        queue.new_payload(step, (8,), torch.int32)
        device.synchronize()
    assert len(ring) <= 3
    assert ring.reclaimed >= 9


def test_a_ring_with_another_free_slot_waits_for_nothing() -> None:
    ring = make_ring(2)
    first, second = ring.acquire(8), ring.acquire(8)
    for slot in (first, second):
        ring.release(slot)
    switch(first).record()
    assert ring.acquire(8) is second
    assert switch(first).waits == 0

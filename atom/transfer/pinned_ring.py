"""Pinned host slots with reused events.

A slot leaves the ring with :meth:`PinnedRing.acquire` and comes back with
:meth:`PinnedRing.release` once its reader has copied the bytes out. A slot is never handed out
while a reader still needs it or while queued device work may still write it.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from atom.device.interface import Device, Event
from atom.errors import AtomError
from atom.transfer.payload import Payload, PayloadLayout

_MIN_CAPACITY = 64
# A slot's cached views are dropped past this many layouts: batch sizes are few, but not bounded.
_MAX_VIEWS = 64


class PinnedRingFull(AtomError):
    """Every slot of a pinned ring is held by a reader that has not finished."""


class PinnedSlot:
    """A pinned buffer and the event of the work that writes it.

    Attributes:
        tensor: uint8 ``[capacity]``, pinned.
        event: reused for every trip of the slot.
        index: place in its owner's list; -1 for a one-off buffer.
        reserved_by: weak reference to the zero-copy payload that aliases the slot before its send.
        landed: whether the event is known to have completed: it was waited on, and not recorded
            since.
    """

    __slots__ = ("_alias", "_views", "_words", "event", "index", "landed", "reserved_by", "tensor")

    def __init__(self, tensor: Tensor, event: Event, index: int = -1) -> None:
        self.tensor = tensor
        self.event = event
        self.index = index
        self.reserved_by: weakref.ref[Payload] | None = None
        self.landed = False
        self._alias: Tensor | None = None
        # Python ints straight from the buffer: a tensor read costs some microseconds a word.
        self._words = memoryview(tensor.numpy()).cast("q")
        self._views: dict[PayloadLayout, tuple[Tensor, Tensor]] = {}

    @property
    def capacity(self) -> int:
        """Bytes of the buffer."""
        return int(self.tensor.numel())

    def alias(self, device: Device) -> Tensor:
        """The buffer as kernels see it (uint8 ``[capacity]``), made once."""
        if self._alias is None:
            self._alias = device.mapped(self.tensor)
        return self._alias

    def _parts(self, layout: PayloadLayout) -> tuple[Tensor, Tensor]:
        parts = self._views.get(layout)
        if parts is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            parts = self.tensor[: layout.host_bytes], layout.data(self.tensor)
            self._views[layout] = parts
        return parts

    def target(self, layout: PayloadLayout) -> Tensor:
        """uint8 ``[host_bytes]``: where the copy of such a payload lands."""
        return self._parts(layout)[0]

    def data(self, layout: PayloadLayout) -> Tensor:
        """The payload's data inside the slot: a view, right until the slot is released."""
        return self._parts(layout)[1]

    def tags(self, layout: PayloadLayout) -> tuple[int, int]:
        """First and last int64 of the landed payload."""
        return self._words[0], self._words[layout.host_bytes // 8 - 1]


class PinnedRing:
    """Pinned slots by capacity (a power of two), handed out first in, first out.

    One host thread uses a ring. Slots are made on demand up to ``max_slots``.

    Args:
        device: where the pinned memory and the events come from.
        max_slots: most slots, over all capacities.

    Attributes:
        acquires: slots handed out so far.
        releases: slots given back so far.
        grown: slots made so far.
        skipped: times that a free slot was passed over because its event had not completed.
        reclaimed: slots taken back from zero-copy payloads that were dropped unsent.
    """

    def __init__(self, device: Device, *, max_slots: int = 64) -> None:
        if max_slots < 1:
            raise ValueError(f"max_slots must be at least 1, got {max_slots}")
        self.device = device
        self.max_slots = max_slots
        self.acquires = self.releases = self.grown = self.skipped = self.reclaimed = 0
        self._free: dict[int, deque[PinnedSlot]] = {}
        self._busy: set[PinnedSlot] = set()
        self._slots = 0

    def __len__(self) -> int:
        """Slots that exist."""
        return self._slots

    @property
    def busy(self) -> int:
        """Slots that are handed out."""
        return len(self._busy)

    def acquire(self, nbytes: int) -> PinnedSlot:
        """A slot of at least ``nbytes`` that nobody reads and no queued work writes.

        Raises:
            PinnedRingFull: ``max_slots`` exist and none can be handed out.
        """
        capacity = max(_MIN_CAPACITY, 1 << (nbytes - 1).bit_length()) if nbytes else _MIN_CAPACITY
        slot = self._take(capacity)
        if slot is None:
            # not only once the ring is full: their kernels may still be queued then
            self._reclaim_abandoned()
            slot = self._take(capacity)
        if slot is None and self._slots >= self.max_slots:
            self._wait_for_one_free()
            slot = self._take(capacity)
            if slot is None:
                self._drop_one_free()
        if slot is None:
            slot = self._grow(capacity)
        self._busy.add(slot)
        self.acquires += 1
        return slot

    def release(self, slot: PinnedSlot, *, landed: bool = False) -> None:
        """Give a slot back. Its reader has copied the bytes out.

        Args:
            slot: handed out by this ring.
            landed: whether its reader waited on the event of the work that wrote it. Else the
                event is asked before the slot is handed out again, which costs the host more
                than any other part of a send that is no copy.

        Raises:
            ValueError: the slot is not handed out by this ring (given back twice?).
        """
        try:
            self._busy.remove(slot)
        except KeyError:
            raise ValueError("this slot is not handed out by this ring: released twice?") from None
        slot.reserved_by = None
        slot.landed = landed
        self._free[slot.capacity].append(slot)
        self.releases += 1

    def _take(self, capacity: int) -> PinnedSlot | None:
        free = self._free.get(capacity)
        if not free:
            return None
        for _ in range(len(free)):
            slot = free.popleft()
            if slot.landed or slot.event.query():
                return slot
            self.skipped += 1
            free.append(slot)
        return None

    def _grow(self, capacity: int) -> PinnedSlot:
        if self._slots >= self.max_slots:
            raise PinnedRingFull(
                f"all {self.max_slots} slots of the pinned ring are in use (a slot of {capacity} "
                "bytes was wanted): payloads are sent faster than they are received. Receive or "
                "drain the queued ones, or raise max_slots."
            )
        slot = PinnedSlot(
            self.device.pinned((capacity,), torch.uint8), self.device.new_event(), self.grown
        )
        self._free.setdefault(capacity, deque())
        self._slots += 1
        self.grown += 1
        return slot

    def _wait_for_one_free(self) -> None:
        """Wait for a slot that nobody holds, but that queued work may still use.

        That is a dropped payload's kernel, or a staged input whose copy has not run: a host that
        runs too far ahead is slowed down. A transfer to the host that its reader gave back is not
        among them: it was waited on.
        """
        for free in self._free.values():
            if free:
                free[0].event.synchronize()
                return

    def _drop_one_free(self) -> None:
        """Make room for another capacity."""
        for free in self._free.values():
            for slot in free:
                if slot.event.query():
                    free.remove(slot)
                    self._slots -= 1
                    return

    def _reclaim_abandoned(self) -> None:
        for slot in [slot for slot in self._busy if is_abandoned(slot)]:
            # The dropped payload's kernel may still be queued: the slot becomes usable after it.
            slot.event.record(self.device.default_stream)
            self.release(slot)
            self.reclaimed += 1


def is_abandoned(slot: PinnedSlot) -> bool:
    """Whether a zero-copy payload reserved the slot and was dropped before its send."""
    return slot.reserved_by is not None and slot.reserved_by() is None

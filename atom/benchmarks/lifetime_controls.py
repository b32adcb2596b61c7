"""What each protocol is without its protection, for the control arms."""

from __future__ import annotations

from contextlib import AbstractContextManager

from atom.benchmarks.lifetime_mutations import Change, changed
from atom.benchmarks.lifetime_paths import LifetimePath
from atom.config import CopyProtocol
from atom.model_engine.output_transfer import TokenIDProcessor
from atom.spec_decode.dspark_verify import EllRing
from atom.transfer.copy_protocol import Blocking, Hold, RecordStream
from atom.transfer.d2h_queue import D2HQueue
from atom.transfer.pinned_ring import PinnedRing

_NO_WAIT_IN_CLEAN = (
    Change(TokenIDProcessor, "_wait_for_copies", "entry.copy_done.synchronize()", "pass"),
    Change(D2HQueue, "wait", "slot.copy_done.synchronize()", "pass"),
)
_BUSY = "next((s for s in self._busy if s.capacity == capacity), None)"
#: a zero-copy source is its pinned slot: without protection the slot serves the next step at once
_SLOT_AT_ONCE = (
    Change(
        PinnedRing,
        "acquire",
        "slot = self._take(capacity)\n    if slot is None and",
        f"slot = {_BUSY} or self._take(capacity)\n    if slot is None and",
    ),
    Change(PinnedRing, "release", "self._busy.remove(slot)", "self._busy.discard(slot)"),
    Change(EllRing, "_ell_stage", "self._prune_oneoffs()", "pass"),
    Change(EllRing, "_ell_stage", "slot.reserved_by is not None", "False"),
    Change(EllRing, "_ell_stage", "not self._ell_slot_event[index].query()", "False"),
    Change(
        EllRing, "_ell_stage", "any(entry.slot is slot for entry in self._ell_pending)", "False"
    ),
    Change(
        EllRing,
        "_ell_stage",
        "slot = self._new_buffer(nbytes, -1)",
        "slot = self._ell_oneoff_inflight[-1].target if self._ell_oneoff_inflight "
        "else self._new_buffer(nbytes, -1)",
    ),
)
_WITHOUT: dict[CopyProtocol, tuple[Change, ...]] = {
    CopyProtocol.UNPATCHED: (),
    CopyProtocol.RECORD_STREAM: (
        Change(
            RecordStream, "protect", "lane.device.record_stream(payload.raw, lane.stream)", "pass"
        ),
    ),
    CopyProtocol.HOLD: (Change(Hold, "protect", "return payloads", "return None"),),
    CopyProtocol.BLOCKING: (Change(Blocking, "protect", "copy_done.synchronize()", "pass"),),
    CopyProtocol.ZERO_COPY: _SLOT_AT_ONCE,
}


def without_protection(path: LifetimePath, protocol: CopyProtocol) -> AbstractContextManager[None]:
    """The transfer code with ``protocol``'s protection taken away, for the block.

    For ``clean`` that is its wait. Under ``hold`` its holds stay intact, and under ``zero_copy``
    its slots: there the wait alone is what protects. The other protocols hold nothing at that
    time, so their own protection goes as well.
    """
    changes = _WITHOUT[protocol]
    if path is LifetimePath.CLEAN:
        held = protocol in (CopyProtocol.HOLD, CopyProtocol.ZERO_COPY)
        changes = (*_NO_WAIT_IN_CLEAN, *(() if held else changes))
    return changed(changes)

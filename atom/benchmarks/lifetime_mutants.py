"""The mutations of the transfer protocols, and the programs that should kill each."""

from __future__ import annotations

from collections.abc import Sequence

from atom.benchmarks.lifetime_mutations import Change, Mutation
from atom.benchmarks.lifetime_paths import LifetimePath as Path
from atom.config import CopyProtocol as Protocol
from atom.model_engine.output_transfer import TokenIDProcessor
from atom.spec_decode import dspark_verify
from atom.spec_decode.dspark_verify import EllRing
from atom.transfer.copy_protocol import Blocking, CopyStrategy, Hold, RecordStream, ZeroCopy
from atom.transfer.d2h_queue import D2HQueue
from atom.transfer.payload import Payload, PayloadKind
from atom.transfer.pinned_ring import PinnedRing

QUEUES = (Path.SPEC_STATUS, Path.DRAFT_IDS)
IDS = (Path.SAMPLED_IDS, Path.LOGPROBS)
ELL = (Path.ELL_SLOT, Path.ELL_ONE_OFF)


class _Held(tuple[int, ...]):
    """Request ids that carry what is held with them."""

    source: tuple[Payload, ...] | None


def _held(req_ids: Sequence[int], source: tuple[Payload, ...] | None) -> _Held:
    held = _Held(req_ids)
    held.source = source
    return held


_NAMES = {"held_with_pending": _held, "PayloadKind": PayloadKind}
_SEND_RECORD = "copy_done.record(stream)"
_SOURCE = "self._ell_slot_source = [None] * len(self._ell_slot_source)"
_PENDING_HOLDS = (
    # a rewritten function sees the globals of its making
    Change(dspark_verify, "MAX_ELL_INFLIGHT", None, 2),
    Change(
        EllRing,
        "record_ell",
        "self._ell_slot_source[slot.index] = sent.source",
        "self._ell_slot_source[slot.index] = None",
    ),
    Change(
        EllRing, "record_ell", "tuple(req_ids),", "held_with_pending(req_ids, sent.source),", _NAMES
    ),
)

_SLOT_EARLY = (
    Change(
        PinnedRing,
        "_grow",
        "if self._slots >= self.max_slots:",
        "if self._slots >= self.max_slots:\n"
        "        order = sorted(self._busy, key=lambda slot: slot.index)\n"
        "        return order[self.acquires % self.max_slots]\n"
        "    if False:",
    ),
    Change(PinnedRing, "release", "self._busy.remove(slot)", "self._busy.discard(slot)"),
)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "hold keeps nothing",
        "c",
        "the source is dropped when its copy is queued, as before the fix",
        (Change(Hold, "protect", "return payloads", "return None"),),
        (*QUEUES, *IDS, *ELL),
    ),
    Mutation(
        "hold keeps nothing, tags behind the data alone",
        "c",
        "the same, and a payload is not opened before its data: tags are written behind it alone",
        (
            Change(Hold, "protect", "return payloads", "return None"),
            Change(CopyStrategy, "new_payload", "if opened:", "if False:"),
        ),
        (*QUEUES, *IDS, *ELL),
    ),
    Mutation(
        "hold keeps the first payload",
        "c",
        "of ids and logprobs only the ids are held",
        (Change(Hold, "protect", "return payloads", "return payloads[:1]"),),
        (Path.LOGPROBS,),
    ),
    Mutation(
        "release before the wait (queue)",
        "c",
        "receive drops the source, then waits for its copy",
        (
            Change(
                D2HQueue,
                "_wait_oldest",
                "slot.copy_done.synchronize()",
                "slot.source = None; slot.copy_done.synchronize()",
            ),
        ),
        QUEUES,
    ),
    Mutation(
        "release before the wait (ids)",
        "c",
        "take_async_output drops the entry's source, then waits for its copy",
        (
            Change(
                TokenIDProcessor,
                "take_async_output",
                "entry = self.cpu_tensor_handle[0]",
                "entry = self.cpu_tensor_handle[0] = "
                "self.cpu_tensor_handle[0]._replace(source=None)",
            ),
        ),
        IDS,
    ),
    Mutation(
        "release all at the first receive",
        "c",
        "a receive drops the sources of every queued transfer",
        (
            Change(
                D2HQueue,
                "_wait_oldest",
                "slot.copy_done.synchronize()",
                "slot.copy_done.synchronize(); [setattr(s, 'source', None) for s in self._slots]",
            ),
        ),
        QUEUES,
    ),
    Mutation(
        "ell held through the pending list, evicted",
        "c",
        "ell lives as long as its pending entry; the list (of two here) evicts it",
        _PENDING_HOLDS,
        (Path.ELL_SLOT,),
    ),
    Mutation(
        "ell held through the pending list, map set",
        "c",
        "ell lives as long as its pending entry; setting ell_by_req clears the list",
        _PENDING_HOLDS,
        (Path.ELL_SLOT,),
        options=(("forget", True),),
    ),
    Mutation(
        "ell_by_req setter releases",
        "c",
        "setting the map drops the slots' sources and the one-off entries",
        (
            Change(
                EllRing,
                "ell_by_req",
                "self._ell_pending = []",
                f"self._ell_pending = []; {_SOURCE}; self._ell_oneoff_inflight = []",
            ),
        ),
        ELL,
        options=(("forget", True),),
    ),
    Mutation(
        "a step without ell releases",
        "c",
        "record_ell(None) drops the slots' sources",
        (
            Change(
                EllRing,
                "record_ell",
                "if ell is None:\n        return",
                f"if ell is None:\n        {_SOURCE}\n        return",
            ),
        ),
        (Path.ELL_SLOT,),
    ),
    Mutation(
        "one-off pruned early",
        "c",
        "one-off entries are dropped without asking their event",
        (
            Change(
                EllRing,
                "_prune_oneoffs",
                "if not entry.copy_done.query()",
                "if False",
            ),
        ),
        (Path.ELL_ONE_OFF,),
    ),
    Mutation(
        "ell slot reused early",
        "c",
        "the ring (of two) hands out its slots in turn without asking their events",
        (
            Change(
                EllRing,
                "_ell_stage",
                "enumerate(self._ell_slot_buffer):",
                "sorted(enumerate(self._ell_slot_buffer), "
                "key=lambda pair: pair[0] != len(self._ell_pending) % 2):",
            ),
            Change(EllRing, "_ell_stage", "not self._ell_slot_event[index].query()", "False"),
        ),
        (Path.ELL_SLOT,),
    ),
    Mutation(
        "pinned slot reused early",
        "ring",
        "a full ring (of two) hands out its oldest slot, which nobody has read",
        _SLOT_EARLY,
        (Path.SPEC_STATUS, Path.SAMPLED_IDS),
        options=(("small_ring", True), ("again", False)),
    ),
    Mutation(
        "pinned slot reused early (zero_copy)",
        "ring",
        "the same where the kernels write the slots: the following step's payload is the third",
        _SLOT_EARLY,
        (Path.SPEC_STATUS, Path.SAMPLED_IDS),
        (Protocol.ZERO_COPY,),
        options=(("small_ring", True), ("again", False)),
    ),
    Mutation(
        "clean() without its wait",
        "c",
        "the entries of ids and logprobs are dropped under their copies",
        (Change(TokenIDProcessor, "clean", "self._wait_for_copies()", "pass"),),
        (Path.CLEAN,),
    ),
    Mutation(
        "drain without its wait (queue)",
        "c",
        "drain drops sources and outputs under copies in flight",
        (Change(D2HQueue, "drain", "self.wait()", "pass"),),
        QUEUES,
        options=(("drain_only", True),),
    ),
    Mutation(
        "drain without its wait (ell)",
        "c",
        "the ring's drain drops its sources under copies in flight",
        (
            Change(
                EllRing,
                "drain",
                "for event in self._ell_slot_event:\n        event.synchronize()",
                "pass",
            ),
        ),
        (Path.ELL_SLOT,),
    ),
    Mutation(
        "event recorded too early",
        "b, c",
        "copy_done is recorded before the copy is queued",
        (
            Change(
                CopyStrategy,
                "send",
                "copy(slot.target(payload.layout)",
                "slot.event.record(stream); copy(slot.target(payload.layout)",
            ),
            Change(CopyStrategy, "send", _SEND_RECORD, "pass"),
        ),
        (*QUEUES, *IDS, *ELL),
        (Protocol.HOLD, Protocol.BLOCKING),
    ),
    Mutation(
        "event covers the first copy only",
        "b, c",
        "of two copies of one send, copy_done is recorded behind the first",
        (
            Change(
                CopyStrategy,
                "send",
                "stream=stream, path=path)",
                "stream=stream, path=path); slot is not slots[0] or slot.event.record(stream)",
            ),
            Change(CopyStrategy, "send", _SEND_RECORD, "pass"),
        ),
        (Path.LOGPROBS,),
    ),
    Mutation(
        "wrong stream recorded",
        "b, c",
        "copy_done is recorded on the producer's stream",
        (Change(CopyStrategy, "send", _SEND_RECORD, "copy_done.record(lane.producer_stream)"),),
        (*QUEUES, *IDS, *ELL),
        (Protocol.HOLD, Protocol.BLOCKING),
    ),
    Mutation(
        "producer edge dropped",
        "a",
        "the copy stream does not wait for the producer",
        (Change(CopyStrategy, "send", "stream.wait_event(produced)", "pass"),),
        (*QUEUES, *IDS, *ELL),
        (Protocol.HOLD, Protocol.RECORD_STREAM, Protocol.BLOCKING),
    ),
    Mutation(
        "host reads without waiting (queue)",
        "b",
        "receive does not wait for the copy",
        (Change(D2HQueue, "_wait_oldest", "slot.copy_done.synchronize()", "pass"),),
        QUEUES,
        (Protocol.HOLD, Protocol.RECORD_STREAM, Protocol.ZERO_COPY),
    ),
    Mutation(
        "host reads without waiting (ids)",
        "b",
        "take_async_output does not wait for the copies",
        (Change(TokenIDProcessor, "take_async_output", "entry.copy_done.synchronize()", "pass"),),
        IDS,
        (Protocol.HOLD, Protocol.RECORD_STREAM, Protocol.ZERO_COPY),
    ),
    Mutation(
        "host reads without asking (ell)",
        "b",
        "pending entries are picked up whether or not they have landed",
        (Change(EllRing, "_harvest", "if not entry.copy_done.query():", "if False:"),),
        ELL,
        (Protocol.HOLD, Protocol.ZERO_COPY),
    ),
    Mutation(
        "record_stream without ell",
        "c",
        "the fix's first version as it was reviewed: ell is not covered",
        (
            Change(
                RecordStream,
                "protect",
                "for payload in payloads:",
                "for payload in payloads:\n"
                "        if payload.layout.kind is PayloadKind.ELL:\n"
                "            continue",
                _NAMES,
            ),
        ),
        ELL,
        (Protocol.RECORD_STREAM,),
    ),
    Mutation(
        "record_stream of the wrong stream",
        "c",
        "the allocator is told of the producer's stream, which owns the block anyway",
        (
            Change(
                RecordStream,
                "protect",
                "record_stream(payload.raw, lane.stream)",
                "record_stream(payload.raw, lane.producer_stream)",
            ),
        ),
        (*QUEUES, *IDS, *ELL),
        (Protocol.RECORD_STREAM,),
    ),
    Mutation(
        "blocking does not wait",
        "c",
        "the send goes on while its copy is queued",
        (Change(Blocking, "protect", "copy_done.synchronize()", "pass"),),
        (*QUEUES, *IDS, *ELL),
        (Protocol.BLOCKING,),
    ),
    Mutation(
        "hold waits in the send",
        "host",
        "right bytes, but the host blocks where it must not",
        (Change(Hold, "protect", "return payloads", "copy_done.synchronize(); return payloads"),),
        (*QUEUES, *IDS, *ELL),
    ),
    Mutation(
        "ell kept after the drain",
        "kept",
        "the ring's drain does not drop its sources",
        (Change(EllRing, "drain", _SOURCE, "pass"),),
        (Path.ELL_SLOT,),
    ),
    Mutation(
        "slot given back before it is read",
        "none",
        "receive gives its pinned slot back, then copies the bytes out",
        (
            Change(
                D2HQueue,
                "receive",
                "data = target.data(layout)",
                "self._release_oldest()\n    data = target.data(layout)",
            ),
            Change(D2HQueue, "receive", "self._release_oldest()\n    if fault", "if fault"),
        ),
        QUEUES,
        (Protocol.HOLD, Protocol.ZERO_COPY),
        equivalent="one host thread runs an engine, and it asks for no slot between the two lines; "
        "with a second thread that sends it would not be equivalent",
    ),
    Mutation(
        "popped entry keeps its source",
        "none",
        "a received transfer's source is not cleared",
        (Change(D2HQueue, "_release_oldest", "slot.source = None", "pass"),),
        QUEUES,
        equivalent="the entry itself was popped and dies at the end of the call, and its source "
        "with it",
    ),
    Mutation(
        "free slot handed out without asking",
        "none",
        "the ring takes a free slot without asking its event",
        (Change(PinnedRing, "_take", "if slot.landed or slot.event.query():", "if True:"),),
        (*QUEUES, *IDS),
        (Protocol.HOLD, Protocol.RECORD_STREAM, Protocol.ZERO_COPY),
        equivalent="a slot comes back only after its event was waited on, and is not asked then; "
        "the question matters for zero-copy payloads that are dropped unsent",
    ),
    Mutation(
        "zero_copy keeps nothing",
        "none",
        "a zero-copy send keeps no payload",
        (Change(ZeroCopy, "protect", "return payloads", "return None"),),
        (*QUEUES, *IDS, *ELL),
        (Protocol.ZERO_COPY,),
        equivalent="the slot, which the ring or the one-off entry keeps, owns the pinned bytes; "
        "rows that stay on the device are reused in stream order",
    ),
)

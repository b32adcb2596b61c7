"""The sources' contract, read off instrumented runs of the transfer code on the virtual device.

Nothing here is typed in: where a reference lives is found by walking the objects from their owner,
who lets go of it is the call stack at the moment of the block's death, and what the host knew by
then is the device's own account of events.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from atom.benchmarks.lifetime_paths import (
    BATCH,
    PATHS,
    EllSlot,
    Logprobs,
    SpecStatus,
    TransferPath,
    own_queue_stream,
)
from atom.config import CopyProtocol
from atom.device.caching_allocator import Block
from atom.device.interface import Event
from atom.device.virtual import VirtualDevice
from atom.transfer.d2h_queue import D2HQueue
from atom.transfer.payload import Payload, PayloadKind
from atom.workbook.lifetime_log import TransferLog, where_it_lives
from atom.workbook.published_tables import load_published


class CountingDevice(VirtualDevice):
    """A virtual device that counts the events made on it."""

    events_made = 0

    def new_event(self, timing: bool = False) -> Any:
        """See :class:`VirtualDevice`."""
        self.events_made += 1
        return super().new_event(timing)


@dataclass(frozen=True)
class SourceFact:
    """What one instrumented step showed of a source.

    Attributes:
        path: the way to the host.
        kind: what travels.
        lives_in: where the only reference is while the copy is queued; ``None``: there is none.
        alive_after_send: whether the block outlives the caller's reference.
        known_by: function that saw the copy's own event complete, and how it asked.
        released_in: functions on the stack when the block died, in the transfer code.
        after_event: whether the host knew of the copy's end before the block died.
        copies: copies queued by one send.
        copied_bytes, block_bytes: what travels of the source, and how large it is.
        events_recorded: events recorded on the copy stream by one send.
        events_made: events created by one send after the first.
        told: calls of ``record_stream`` by one send.
        left: payloads still kept after a drain.
    """

    path: str
    kind: PayloadKind
    lives_in: str | None
    alive_after_send: bool
    known_by: str
    released_in: tuple[str, ...]
    after_event: bool
    copies: int
    copied_bytes: int
    block_bytes: int
    events_recorded: int
    events_made: int
    told: int
    left: int


def trace_source(kind: type[TransferPath], protocol: CopyProtocol) -> SourceFact:
    """Send one source under a protocol, let it be released, and say what was seen.

    A step goes through first, so that buffers and events exist. ``ell`` is let go when a later
    step stages its own; everything else by its receive.
    """
    device = CountingDevice("MI355X")
    path = kind(device, protocol, stream=own_queue_stream(device))
    path.send(path.step(1))
    path.receive()
    path.drain()
    device.synchronize()
    _forget(path)
    log = TransferLog()
    path.park()
    payload = path.step(2)
    device.observe(log)
    made = device.events_made
    block = device.memory.block_of(payload.raw)
    path.send(payload)
    sent = len(log.moments)
    made = device.events_made - made
    recorded = log.of("recorded", path.stream.stream_id)
    owner = path.ring if isinstance(path, EllSlot) else path.processor
    lives_in = where_it_lives(owner, payload, type(owner).__name__)
    layout = payload.layout
    reference = weakref.ref(payload.raw)
    _forget(path)
    del payload
    alive = reference() is not None
    with log.noting_returns():
        _let_go(path, device)
    died = log.place("died", block)
    known = None
    if recorded:
        # an event is used again: what was seen of it before this send says nothing
        known = log.place("observed", recorded[-1].about, sent)
    before = log.moments[:sent]
    released = () if died is None else log.moments[died].callers
    fact = SourceFact(
        path=kind.kind.value,
        kind=layout.kind,
        lives_in=lives_in,
        alive_after_send=alive,
        known_by="" if known is None else log.moments[known].callers[-1],
        released_in=released,
        after_event=known is not None and died is not None and known < died,
        copies=sum(moment.what == "copied" for moment in before),
        copied_bytes=layout.host_bytes,
        block_bytes=layout.total_bytes,
        events_recorded=len(recorded),
        events_made=made,
        told=sum(moment.what == "told" for moment in before),
        left=_left(path),
    )
    device.observe(None)
    return fact


def _forget(path: TransferPath) -> None:
    # this path keeps the ids beside its logprobs, for its own trials
    if isinstance(path, Logprobs):
        path.kept.clear()


def _let_go(path: TransferPath, device: VirtualDevice) -> None:
    if not isinstance(path, EllSlot):
        try:
            path.receive()
        except Exception as error:
            # unpatched may well find foreign tags; here only lifetimes are looked at
            if "where step" not in str(error):
                raise
        return
    # its copy ends, and the following step asks for a buffer
    device.synchronize()
    path.send(path.step(3))


def _left(path: TransferPath) -> int:
    path.drain()
    return path.live()


def source_facts(protocol: CopyProtocol = CopyProtocol.HOLD) -> list[SourceFact]:
    """Every path with a send and a receive of its own, in the order of the paths."""
    return [trace_source(kind, protocol) for kind in PATHS]


def facts_table(facts: list[SourceFact]) -> pd.DataFrame:
    """The table of the sources, as a page shows it."""
    return pd.DataFrame(
        {
            "source": fact.kind.label,
            "path": fact.path,
            "where the reference lives": fact.lives_in or "nowhere",
            "copy's end seen in": fact.known_by,
            "let go in": " > ".join(fact.released_in) or "the caller",
            "after its event": "yes" if fact.after_event else "no",
            "events on the copy stream": fact.events_recorded,
            "new events": fact.events_made,
            "left after drain": fact.left,
        }
        for fact in facts
    )


_PUBLISHED_NAMES = {
    "sampled token ids": "token ids",
    "sampled logprobs": "logprobs",
    "spec status": "spec status",
    "draft ids": "draft ids",
    "DSpark ell": "ell",
}


def beside_published(facts: list[SourceFact]) -> pd.DataFrame:
    """The published table of the five sources, and what was found of each."""
    rows = []
    for line in load_published("copy_sources").itertuples():
        name = str(line.source)
        own = [fact for fact in facts if fact.kind.label == _PUBLISHED_NAMES[name]]
        rows.append(
            {
                "source": name,
                "published: kept by": line.kept_by,
                "found: reference in": ", ".join(str(fact.lives_in) for fact in own),
                "published: released after": line.released_after,
                "found: event seen in": ", ".join(fact.known_by for fact in own),
            }
        )
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class SharedEntry:
    """Ids and logprobs of one step. Counts over one send and its receive."""

    entries: int
    events: int
    copies: int
    deaths_together: bool
    after_event: bool


def shared_entry() -> SharedEntry:
    """Send ids with logprobs under ``hold`` and receive them."""
    device = VirtualDevice("MI355X")
    path = Logprobs(device, CopyProtocol.HOLD, stream=own_queue_stream(device))
    path.park()
    log = TransferLog()
    payload = path.step(1)
    blocks = [device.memory.block_of(one.raw) for one in (path.kept[0], payload)]
    device.observe(log)
    path.send(payload)
    entries = len(path.processor.cpu_tensor_handle)
    _forget(path)
    del payload
    path.receive()
    recorded = log.of("recorded", path.stream.stream_id)
    deaths = [moment for moment in log.of("died") if moment.about in blocks]
    seen = log.place("observed", recorded[-1].about)
    first = min(log.moments.index(moment) for moment in deaths)
    return SharedEntry(
        entries=entries,
        events=len({id(moment.about) for moment in recorded}),
        copies=len(log.of("copied")),
        deaths_together=len(deaths) == 2 and len({moment.callers for moment in deaths}) == 1,
        after_event=seen is not None and seen < first,
    )


def drain_waits_first(steps: int = 3) -> bool:
    """Whether a queue's drain sees every pending copy end before the first source dies."""
    device = VirtualDevice("MI355X")
    path = SpecStatus(device, CopyProtocol.HOLD, stream=own_queue_stream(device))
    log = TransferLog()
    path.park()
    device.observe(log)
    for step in range(1, steps + 1):
        path.send(path.step(step))
    events = [moment.about for moment in log.of("recorded", path.stream.stream_id)]
    if log.of("died"):
        return False
    path.processor.spec_status.drain()
    seen = [log.place("observed", event) for event in events]
    deaths = [log.moments.index(moment) for moment in log.of("died")]
    if len(deaths) != steps or any(place is None for place in seen):
        return False
    return max(place for place in seen if place is not None) < min(deaths)


def clean_rebuilds_last() -> bool:
    """Whether ``clean()`` has seen all copies end, and all sources gone, before it rebuilds."""
    device = VirtualDevice("MI355X")
    first = SpecStatus(device, CopyProtocol.HOLD, stream=own_queue_stream(device))
    paths: list[TransferPath] = [first]
    for kind in PATHS:
        if kind.kind in ("draft_ids", "logprobs"):
            path = kind(device, CopyProtocol.HOLD, stream=first.stream)
            path.processor = first.processor
            paths.append(path)
    log = TransferLog()
    first.park()
    device.observe(log)
    for path in paths:
        path.send(path.step(1))
        _forget(path)
    events = [moment.about for moment in log.of("recorded", first.stream.stream_id)]
    processor, before = first.processor, len(log.moments)
    if log.of("died"):
        return False
    build, built = processor._build_queues, []

    def note_and_build() -> None:
        built.append(len(log.moments) - before)
        build()

    processor._build_queues = note_and_build  # type: ignore[method-assign]
    processor.clean()
    after = log.moments[before:]
    seen = {id(moment.about) for moment in after if moment.what == "observed"}
    deaths = [number for number, moment in enumerate(after) if moment.what == "died"]
    entry_waits = [
        number
        for number, moment in enumerate(after)
        if moment.what == "observed" and "_wait_for_copies" in moment.callers[-1]
    ]
    # four payloads: status, draft ids, ids with logprobs
    return (
        len(deaths) == len(paths) + 1
        and len(built) == 1
        and max(deaths) < built[0]
        and all(id(event) in seen for event in events)
        and bool(entry_waits)
        and max(entry_waits) < min(deaths)
    )


@dataclass(frozen=True)
class VerdictLife:
    """Verdicts of some steps under one protocol, each looked at when its step has ended.

    Attributes:
        protocol: what protects them.
        steps: how many.
        fresh: blocks that the steps asked for.
        lent: verdicts of which the copy reads a part, and not all.
        alive: verdicts that outlive their step.
    """

    protocol: CopyProtocol
    steps: int
    fresh: int
    lent: int
    alive: int


def verdict_lives(protocol: CopyProtocol, steps: int = 3) -> VerdictLife:
    """Make and send a verdict a step, end the step, and see whether the verdict is still there."""
    device = VirtualDevice("MI355X")
    path = SpecStatus(device, protocol, stream=own_queue_stream(device))
    path.park()
    log = TransferLog()
    device.observe(log)
    lent = alive = 0
    for step in range(1, steps + 1):
        payload = path.step(step)
        verdict = weakref.ref(payload.raw)
        lent += _within(payload.copied, payload.raw)
        path.send(payload)
        del payload
        alive += verdict() is not None
    fresh = sum(isinstance(moment.about, Block) for moment in log.of("owned"))
    device.synchronize()
    device.observe(None)
    return VerdictLife(protocol, steps, fresh, lent, alive)


def _within(view: torch.Tensor, whole: torch.Tensor) -> bool:
    start, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    return start <= view.data_ptr() and view.data_ptr() + view.nbytes < end


def later_user(protocol: CopyProtocol) -> int:
    """What the host gets of step 1 from a queue that no engine part uses; 1 is right."""
    device = VirtualDevice("MI355X")
    queue = D2HQueue(device, own_queue_stream(device), protocol, epoch_tag=False)
    path = SpecStatus(device, protocol, stream=queue.stream)
    device.spin(0.01, stream=queue.stream)

    def produced(step: int) -> Payload:
        payload = queue.new_payload(step, (BATCH,), torch.int32)
        path.produce(payload, step)
        return payload

    queue.send(produced(1))
    following = produced(2)
    found = queue.receive()
    device.synchronize()
    del following
    return int(found[0])


def evicted_ell_stays(forget: bool) -> tuple[bool, bool]:
    """Let ``ell``'s pending entry go while its copy is queued.

    Args:
        forget: replace the map; else more steps push the entry out of the list.

    Returns:
        Whether the entry is gone, and whether the source still lives.
    """
    device = VirtualDevice("MI355X")
    path = EllSlot(device, CopyProtocol.HOLD, stream=own_queue_stream(device))
    path.park()
    payload = path.step(1)
    source = weakref.ref(payload.raw)
    path.send(payload)
    del payload
    entry: Event = path.ring._ell_pending[0].copy_done
    if forget:
        path.ring.ell_by_req = {}
    else:
        for step in range(2, 7):
            path.send(path.step(step))
    gone = all(pending.copy_done is not entry for pending in path.ring._ell_pending)
    alive = source() is not None
    device.synchronize()
    return gone, alive

"""The paths as programs for the exploration: some steps in flight, the next step's tensors, reads.

A program sends ``depth`` steps and drops each source, lets the following step allocate and write
its tensors, and receives. It is the real transfer code; nothing here waits for anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from atom.benchmarks.lifetime_paths import (
    DraftIds,
    EllOneOff,
    EllSlot,
    LifetimePath,
    Logprobs,
    SmallEllSlot,
    SpecStatus,
    TokenIds,
    TransferPath,
    write_metadata,
)
from atom.benchmarks.lifetime_watch import Watch, section, watching
from atom.config import CopyProtocol
from atom.errors import BadInput
from atom.lifetime.explore_device import ExploredDevice
from atom.transfer.payload import Payload
from atom.transfer.pinned_ring import PinnedSlot

BATCH = 4
MAY_WAIT = frozenset({"receive", "drain", "clean", "ell"})
_RING = 2

#: what a program reports of each transfer that it read
Report = Callable[[Watch], None]


class Following(StrEnum):
    """What the following step writes into a block that it gets."""

    PAYLOAD = "payload"  #: its own payload: legal values, another step's tags
    PREFILL = "prefill"  #: a prefill's metadata: no tags, values far outside a count


@dataclass(frozen=True)
class LifetimeProgram:
    """One program. Callable with an explored device.

    Attributes:
        path: which path; ``clean`` sends all queued kinds at once.
        protocol: what protects the sources.
        depth: steps in flight.
        following: what the following step writes.
        epoch_tag: whether payloads carry tags.
        forget: ``ell`` only: the map is set while the copies are in flight.
        again: one more step goes through after the drain, as in a run that goes on.
        drain_only: queues only: nothing is received, the drain alone has to wait.
        small_ring: a pinned ring of two slots, which three steps in flight overfill. The real ring
            refuses that; for a mutation that does not.
    """

    path: LifetimePath
    protocol: CopyProtocol
    depth: int = 1
    following: Following = Following.PAYLOAD
    epoch_tag: bool = True
    forget: bool = False
    again: bool = True
    drain_only: bool = False
    small_ring: bool = False

    def __post_init__(self) -> None:
        """Refuse a depth that is not positive.

        Raises:
            BadInput: naming it.
        """
        if self.depth < 1:
            raise BadInput(f"depth={self.depth}; expected at least 1 step in flight")

    def to_json(self) -> dict[str, Any]:
        """Plain values; see :meth:`from_json`."""
        return {name: getattr(value, "value", value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LifetimeProgram:
        """The program of :meth:`to_json`'s values.

        Raises:
            BadInput: an unknown name or value.
        """
        try:
            given = dict(values)
            given["path"] = LifetimePath(given["path"])
            given["protocol"] = CopyProtocol(given["protocol"])
            given["following"] = Following(given.get("following", "payload"))
            return cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"not a program of the seven paths: {error}") from None

    def __call__(self, device: ExploredDevice) -> Hashable:
        """Run once; returns what the host read."""
        return self.observe(device, None)

    def observe(self, device: ExploredDevice, report: Report | None) -> Hashable:
        """Run once and pass the watch to ``report`` at the end."""
        blocking = self.protocol is CopyProtocol.BLOCKING
        device.may_wait = MAY_WAIT | {"send"} if blocking else MAY_WAIT
        with watching(device) as watch:
            try:
                self._run(device, watch)
            finally:
                if report is not None:
                    report(watch)
        return watch.outcome()

    def _run(self, device: ExploredDevice, watch: Watch) -> None:
        if self.path is LifetimePath.CLEAN:
            _Clean(self, device, watch).run()
        elif self.path in (LifetimePath.ELL_SLOT, LifetimePath.ELL_ONE_OFF):
            _Ell(self, device, watch).run()
        else:
            _Queue(self, device, watch).run()


class _Run:
    """What the programs have in common."""

    def __init__(self, program: LifetimeProgram, device: ExploredDevice, watch: Watch) -> None:
        self.program = program
        self.device = device
        self.watch = watch
        self.stream = device.new_stream()
        self.blocks: list[weakref.ref[Tensor]] = []
        #: the following step's tensors, which live on
        self.following: list[Any] = []

    def make(self, path: type[TransferPath]) -> TransferPath:
        slots = _RING if self.program.small_ring else 64
        return path(
            self.device,
            self.program.protocol,
            stream=self.stream,
            epoch_tag=self.program.epoch_tag,
            batch=BATCH,
            max_slots=slots,
        )

    def send(self, path: TransferPath, payload: Payload) -> list[PinnedSlot]:
        """Send, and tell the watch where it goes. The caller drops the payload."""
        self.blocks.append(weakref.ref(payload.raw))
        with section(self.device, "send"):
            path.send(payload)
        slots = []
        for slot, layout in path.sent_slots(payload):
            self.watch.sent(slot, payload.step, layout)
            slots.append(slot)
        return slots

    def follow(self, path: TransferPath, step: int) -> None:
        """The following step allocates and writes."""
        if self.program.following is Following.PAYLOAD:
            self.following.append(path.step(step))
            return
        layout = path.new(step).layout
        self.following.append(write_metadata(self.device, layout))

    def released(self, paths: list[TransferPath]) -> None:
        """After a drain nothing may be held."""
        held = sum(path.live() for path in paths)
        living = sum(block() is not None for block in self.blocks)
        if held or living:
            self.device.fail(
                "unreleased",
                f"after the drain {held} sources are still held and {living} blocks still live",
            )
        self.blocks.clear()

    def end(self) -> None:
        """Let everything run, so that an execution has one end."""
        with section(self.device, "drain"):
            self.device.synchronize()


class _Queue(_Run):
    """Spec status, sampled ids, logprobs, draft ids: sent and received in order."""

    def run(self) -> None:
        classes: tuple[type[TransferPath], ...] = (SpecStatus, TokenIds, Logprobs, DraftIds)
        path = self.make(next(c for c in classes if c.kind is self.program.path))
        depth = self.program.depth
        slots: list[PinnedSlot] = []
        for step in range(1, depth + 1):
            payload = path.step(step)
            slots += self.send(path, payload)
            del payload
        if self.program.drain_only:
            self.drain_only(path, slots)
            return
        slots.clear()
        self.follow(path, depth + 1)
        for step in range(1, depth + 1):
            self.receive(path, step)
            for _ in range(depth if step == 1 else 0):
                # enough to get every block that is free by now
                self.follow(path, depth + 1)
        with section(self.device, "drain"):
            path.drain()
        self.released([path])
        if self.program.again:
            self.following.clear()
            payload = path.step(depth + 2)
            self.send(path, payload)
            del payload
            self.receive(path, depth + 2)
            with section(self.device, "drain"):
                path.drain()
            self.released([path])
        self.end()

    def drain_only(self, path: TransferPath, slots: list[PinnedSlot]) -> None:
        with section(self.device, "drain"):
            path.drain()
        self.released([path])
        for slot in slots:
            self.watch.peek(slot)
        self.end()

    def receive(self, path: TransferPath, step: int) -> None:
        with section(self.device, "receive"), self.watch.reading(step):
            path.receive()


class _Ell(_Run):
    """``ell``: picked up without waiting, and once more after a drain."""

    def run(self) -> None:
        small = self.program.path is LifetimePath.ELL_SLOT
        path = self.make(SmallEllSlot if small else EllOneOff)
        assert isinstance(path, EllSlot)
        depth = self.program.depth
        slots: list[PinnedSlot] = []
        for step in range(1, depth + 1):
            payload = path.step(step)
            slots += self.send(path, payload)
            del payload
        path.ring.record_ell((), None)
        if self.program.forget:
            path.ring.ell_by_req = {}
        self.follow(path, depth + 1)
        self.resolve(path)
        with section(self.device, "drain"):
            path.drain()
        self.resolve(path)
        if self.program.protocol is not CopyProtocol.ZERO_COPY:
            # What landed counts, also where nobody picks it up. A zero-copy slot that was read may
            # serve the following step by now.
            for slot in dict.fromkeys(slots):
                self.watch.peek(slot)
        slots.clear()
        self.following.clear()
        self.released([path])
        self.end()

    def resolve(self, path: EllSlot) -> None:
        with section(self.device, "ell"), self.watch.reading(None):
            path.ring.ell_by_req  # noqa: B018


class _Clean(_Run):
    """``clean()`` with copies of all four queued kinds in flight."""

    def run(self) -> None:
        # ids and logprobs go last: waiting for the draft ids' copies does not cover theirs
        status, drafts, logprobs = (self.make(c) for c in (SpecStatus, DraftIds, Logprobs))
        assert isinstance(logprobs, Logprobs)
        drafts.processor = logprobs.processor = status.processor
        paths = [status, drafts, logprobs]
        depth = self.program.depth
        slots: list[PinnedSlot] = []
        for step in range(1, depth + 1):
            payloads = [path.step(step) for path in paths]
            for path, payload in zip(paths, payloads, strict=True):
                slots += self.send(path, payload)
            del payload
            payloads.clear()
        with section(self.device, "clean"):
            status.processor.clean()
        logprobs.kept.clear()
        zero_copy = self.program.protocol is CopyProtocol.ZERO_COPY
        if zero_copy:
            # its slots serve the following step at once: what landed shows now or never
            self.look(slots)
        logprobs.drain()
        self.released(paths)
        for path in paths:
            self.follow(path, depth + 1)
        self.end()
        if not zero_copy:
            self.look(slots)

    def look(self, slots: list[PinnedSlot]) -> None:
        for slot in slots:
            self.watch.peek(slot)


def programs(
    paths: tuple[LifetimePath, ...] = tuple(LifetimePath),
    protocols: tuple[CopyProtocol, ...] = tuple(CopyProtocol),
    depths: tuple[int, ...] = (1, 2),
) -> list[LifetimeProgram]:
    """The programs of every combination."""
    return [
        LifetimeProgram(path, protocol, depth)
        for path in paths
        for protocol in protocols
        for depth in depths
    ]

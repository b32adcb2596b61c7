"""The seven ways of a step's outputs to the host, each behind the same calls. Any device.

They are the five sources of the copy stream (spec status, sampled ids, logprobs, draft ids and
``ell``, whose two kinds of target are apart), and ``clean()``, which drops everything at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from atom.benchmarks.source_lifetime_rows import Window
from atom.config import CopyProtocol
from atom.device.interface import Device, Kernel, Stream
from atom.errors import DeviceError
from atom.model_engine.output_transfer import TokenIDProcessor, UnpatchedWarning
from atom.spec_decode.dspark_verify import EllRing
from atom.transfer.payload import Payload, PayloadLayout
from atom.transfer.pinned_ring import PinnedSlot

BATCH = 32
PARK_SECONDS = 0.02


class LifetimePath(StrEnum):
    """A way to the host."""

    SPEC_STATUS = "spec_status"
    SAMPLED_IDS = "sampled_ids"
    LOGPROBS = "logprobs"
    DRAFT_IDS = "draft_ids"
    ELL_SLOT = "ell_slot"
    ELL_ONE_OFF = "ell_one_off"
    CLEAN = "clean"


@dataclass(frozen=True)
class Exposure:
    """What the engine before the fix does with a source while its copy is queued.

    Attributes:
        window: when the race is open.
        engine_drops: whether that engine itself drops the source inside the window.
        why: what drops it, or what keeps it by accident.
    """

    window: Window
    engine_drops: bool
    why: str


#: A control shows that a path can race. Whether the engine exposes it is another question.
EXPOSURE: dict[LifetimePath, Exposure] = {
    LifetimePath.SPEC_STATUS: Exposure(
        Window.MIDDLE_PREFILL,
        True,
        "the verdict is a local of the step, and a middle prefill chunk launches without reading "
        "the status first",
    ),
    LifetimePath.SAMPLED_IDS: Exposure(
        Window.EVERY_STEP,
        True,
        "dropped when a drafter runs; without one prev_token_ids keeps them for the next step, by "
        "accident",
    ),
    LifetimePath.LOGPROBS: Exposure(
        Window.EVERY_STEP, True, "nothing on the device uses them after the send"
    ),
    LifetimePath.DRAFT_IDS: Exposure(
        Window.EVERY_STEP,
        False,
        "the next step's verification reads them on the device, which keeps them until its launch: "
        "safe by accident",
    ),
    LifetimePath.ELL_SLOT: Exposure(
        Window.EVERY_STEP, True, "the pending list keeps the pinned slot only"
    ),
    LifetimePath.ELL_ONE_OFF: Exposure(
        Window.EVERY_STEP, True, "the pending list keeps the pinned buffer only"
    ),
    LifetimePath.CLEAN: Exposure(
        Window.CLEAN, True, "the queues are rebuilt without waiting for their copies"
    ),
}


def fill_body(reads: Sequence[Tensor], writes: Sequence[Tensor], value: int) -> None:
    """Kernel body: fill ``writes[0]``."""
    writes[0].fill_(value)


FILL = Kernel("fill", fill_body)


def own_queue_stream(device: Device, seconds: float = PARK_SECONDS) -> Stream:
    """A stream whose hardware queue is not the default stream's, found by trying.

    It is parked with a spin kernel; if the default stream's work completes meanwhile, parking it
    delays nothing else.

    Raises:
        DeviceError: every stream of the pool shares the default stream's hardware queue.
    """
    for _ in range(32):
        stream = device.new_stream()
        device.synchronize()
        device.spin(seconds, stream=stream)
        # an event of an idle stream is done at once and would tell nothing
        device.spin(1e-6)
        marker = device.new_event()
        marker.record(device.default_stream)
        marker.synchronize()
        apart = not stream.query()
        device.synchronize()
        if apart:
            return stream
    raise DeviceError(
        "every stream shares the default stream's hardware queue: a parked copy would park the "
        "next step too. Raise the number of hardware queues"
    )


#: what a prefill step's metadata holds: its token budget
PREFILL_VALUE = 16384


def write_metadata(device: Device, layout: PayloadLayout) -> Tensor:
    """A following prefill's metadata: a tensor as large as such a payload, all of it written.

    Values are the token budget, as the log showed.
    """
    fill = PREFILL_VALUE
    if layout.dtype.itemsize == 4:
        # both halves of a word
        fill = PREFILL_VALUE << 32 | PREFILL_VALUE
    metadata = device.empty((layout.total_bytes // 8,), torch.int64)
    device.launch(FILL, (), (metadata,), scalars=(fill,))
    return metadata


def value_of(step: int) -> int:
    """What a step writes everywhere: 1 to 3, legal for a count, other than its neighbours'."""
    return 1 + step % 3


class TransferPath:
    """One source's way to the host.

    Args:
        device: any.
        protocol: what protects the sources.
        stream: copy stream; ``None`` finds one with a hardware queue of its own.
        epoch_tag: whether payloads carry tags.
        batch: requests.
        max_slots: bound of the pinned ring.
    """

    kind: ClassVar[LifetimePath]
    #: payloads the protocol holds for one send
    sources: ClassVar[int] = 1

    def __init__(
        self,
        device: Device,
        protocol: CopyProtocol,
        *,
        stream: Stream | None = None,
        epoch_tag: bool = True,
        batch: int = BATCH,
        max_slots: int = 64,
    ) -> None:
        self.device = device
        self.protocol = protocol
        self.batch = batch
        self.epoch_tag = epoch_tag
        self.stream = own_queue_stream(device) if stream is None else stream
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnpatchedWarning)
            self.processor = TokenIDProcessor(
                device, protocol, copy_stream=self.stream, epoch_tag=epoch_tag, max_slots=max_slots
            )
        self.build()

    def build(self) -> None:
        """Make what the path needs beside the processor."""

    def new(self, step: int) -> Payload:
        """A fresh payload."""
        raise NotImplementedError

    def send(self, payload: Payload) -> None:
        """Queue its transfer."""
        raise NotImplementedError

    def receive(self) -> list[int]:
        """The values that the host gets, oldest transfer first.

        Raises:
            StalePayload: a tag is another step's.
        """
        raise NotImplementedError

    def sent_slot(self) -> PinnedSlot:
        """Where the transfer that was sent last lands."""
        raise NotImplementedError

    def sent_slots(self, payload: Payload) -> list[tuple[PinnedSlot, PayloadLayout]]:
        """Where everything of ``payload``'s transfer lands, which was sent last."""
        return [(self.sent_slot(), payload.layout)]

    def drain(self) -> None:
        """Wait for what is queued and forget it."""
        self.processor.clean()

    def live(self) -> int:
        """Payloads that the code keeps alive."""
        return self.processor.live_sources()

    def value_of(self, step: int) -> int:
        """What a step writes everywhere."""
        return value_of(step)

    def produce(self, payload: Payload, value: int) -> None:
        """What a step's kernels do: fill, then stamp."""
        self.device.launch(FILL, (), (payload.data,), scalars=(value,))
        payload.stamp(self.device)

    def step(self, step: int) -> Payload:
        """A filled and stamped payload."""
        payload = self.new(step)
        self.produce(payload, self.value_of(step))
        return payload

    def park(self, seconds: float = PARK_SECONDS) -> None:
        """Put a spin kernel in front of the next copy."""
        self.device.spin(seconds, stream=self.stream)


class SpecStatus(TransferPath):
    """The rejection sampler's status: the first two rows of the verdict."""

    kind = LifetimePath.SPEC_STATUS

    def new(self, step: int) -> Payload:
        """See :class:`TransferPath`."""
        return self.processor.spec_status.new_verdict(step, self.batch, rows=4)

    def send(self, payload: Payload) -> None:
        """See :class:`TransferPath`."""
        self.processor.spec_status.send(payload)

    def receive(self) -> list[int]:
        """See :class:`TransferPath`."""
        rejected, bonus = self.processor.spec_status.receive_status()
        return [*rejected.tolist(), *bonus.tolist()]

    def sent_slot(self) -> PinnedSlot:
        """See :class:`TransferPath`."""
        return self.processor.spec_status._slots[-1].target


class DraftIds(TransferPath):
    """The drafter's ids."""

    kind = LifetimePath.DRAFT_IDS

    def new(self, step: int) -> Payload:
        """See :class:`TransferPath`."""
        queue = self.processor.draft_ids
        return queue.new_payload(step, (self.batch, 3), torch.int64)

    def send(self, payload: Payload) -> None:
        """See :class:`TransferPath`."""
        self.processor.draft_ids.send(payload)

    def receive(self) -> list[int]:
        """See :class:`TransferPath`."""
        return list(self.processor.draft_ids.receive().flatten().tolist())

    def sent_slot(self) -> PinnedSlot:
        """See :class:`TransferPath`."""
        return self.processor.draft_ids._slots[-1].target


class TokenIds(TransferPath):
    """Sampled ids, without logprobs."""

    kind = LifetimePath.SAMPLED_IDS

    def new(self, step: int) -> Payload:
        """See :class:`TransferPath`."""
        return self.processor.new_token_ids(step, (self.batch,))

    def send(self, payload: Payload) -> None:
        """See :class:`TransferPath`."""
        self.processor.send_to_cpu_async(payload)

    def receive(self) -> list[int]:
        """See :class:`TransferPath`."""
        ids, logprobs = self.processor.recv_async_output()
        assert logprobs is None
        return list(ids.tolist())

    def sent_slot(self) -> PinnedSlot:
        """See :class:`TransferPath`."""
        return self.processor.cpu_tensor_handle[-1].cpu_tensors[-1]


class Logprobs(TokenIds):
    """Logprobs, which travel with the sampled ids and share their event."""

    kind = LifetimePath.LOGPROBS
    sources = 2

    def build(self) -> None:
        """Keep the ids referenced here, so that only the logprobs can race."""
        self.kept: list[Payload] = []

    def new(self, step: int) -> Payload:
        """Logprobs, and the ids that they travel with."""
        payload = self.processor.new_logprobs(step, (self.batch, 5))
        self.kept.append(self.processor.new_token_ids(step, (self.batch,)))
        return payload

    def step(self, step: int) -> Payload:
        """See :class:`TransferPath`."""
        payload = self.new(step)
        self.produce(self.kept[-1], self.value_of(step))
        self.produce(payload, self.value_of(step))
        return payload

    def send(self, payload: Payload) -> None:
        """See :class:`TransferPath`."""
        ids = next(ids for ids in self.kept if ids.step == payload.step)
        self.processor.send_to_cpu_async(ids, payload)

    def sent_slots(self, payload: Payload) -> list[tuple[PinnedSlot, PayloadLayout]]:
        """The ids' slot as well."""
        entry = self.processor.cpu_tensor_handle[-1]
        layouts = [layout for layout, _ in entry.expected]
        return list(zip(entry.cpu_tensors, layouts, strict=True))

    def receive(self) -> list[int]:
        """See :class:`TransferPath`."""
        _, logprobs = self.processor.recv_async_output()
        assert logprobs is not None
        return [int(value) for value in logprobs.flatten().tolist()]

    def drain(self) -> None:
        """See :class:`TransferPath`."""
        super().drain()
        self.kept.clear()


class EllSlot(TransferPath):
    """``ell`` into a slot of its ring."""

    kind = LifetimePath.ELL_SLOT
    slots: ClassVar[int] = 4
    slot_requests: ClassVar[int] = 64

    def build(self) -> None:
        """Make the ring."""
        self.ring = EllRing(
            self.device,
            self.stream,
            self.protocol,
            slots=self.slots,
            slot_requests=self.slot_requests,
            epoch_tag=self.epoch_tag,
        )

    def requests(self, step: int) -> range:
        """Requests of a step's batch: other ones each step, so that every step can be told."""
        return range(step * self.batch, (step + 1) * self.batch)

    def new(self, step: int) -> Payload:
        """See :class:`TransferPath`."""
        return self.ring.new_ell(step, self.batch)

    def send(self, payload: Payload) -> None:
        """See :class:`TransferPath`."""
        self.last_step = payload.step
        self.ring.record_ell(self.requests(payload.step), payload)

    def receive(self) -> list[int]:
        """The values of the last step that was sent."""
        self.ring.drain()
        found = self.ring.ell_by_req
        return [found[request] for request in self.requests(self.last_step)]

    def sent_slot(self) -> PinnedSlot:
        """See :class:`TransferPath`."""
        return self.ring._ell_pending[-1].slot

    def drain(self) -> None:
        """See :class:`TransferPath`."""
        self.ring.drain()

    def live(self) -> int:
        """See :class:`TransferPath`."""
        return self.ring.live_sources()


class EllOneOff(EllSlot):
    """``ell`` of a batch that no slot is made for, into a buffer of its own."""

    kind = LifetimePath.ELL_ONE_OFF
    slot_requests = 2


class SmallEllSlot(EllSlot):
    """A ring of two slots, so that three steps in flight go around it."""

    slots = 2


#: the paths with a send and a receive of their own; ``clean()`` has none
PATHS: tuple[type[TransferPath], ...] = (
    SpecStatus,
    DraftIds,
    TokenIds,
    Logprobs,
    EllSlot,
    EllOneOff,
)

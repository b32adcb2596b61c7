"""The transfers under test, each behind the same four calls. Runs on any device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from atom.config import CopyProtocol
from atom.device.interface import Device, Event, Kernel, Stream
from atom.model_engine.output_transfer import TokenIDProcessor, UnpatchedWarning
from atom.spec_decode.dspark_verify import EllRing
from atom.transfer.payload import Payload

BATCH = 32
PARK_SECONDS = 0.02


def fill_body(reads: Sequence[Tensor], writes: Sequence[Tensor], value: int) -> None:
    writes[0].fill_(value)


FILL = Kernel("fill", fill_body)


def own_queue_stream(device: Device) -> Stream:
    """A stream whose hardware queue is not the default stream's: parking it delays nothing else."""
    for _ in range(32):
        stream = device.new_stream()
        device.synchronize()
        device.spin(PARK_SECONDS, stream=stream)
        marker = device.new_event()
        marker.record(device.default_stream)
        marker.synchronize()
        apart = not stream.query()
        device.synchronize()
        if apart:
            return stream
    raise AssertionError("every stream shares the default stream's hardware queue")


class TransferPath:
    """One source's way to the host."""

    #: payloads the protocol holds for one send
    sources = 1

    def __init__(
        self,
        device: Device,
        protocol: CopyProtocol,
        *,
        stream: Stream | None = None,
        epoch_tag: bool = True,
    ) -> None:
        self.device = device
        self.protocol = protocol
        self.stream = own_queue_stream(device) if stream is None else stream
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnpatchedWarning)
            self.processor = TokenIDProcessor(
                device, protocol, copy_stream=self.stream, epoch_tag=epoch_tag
            )
        self.build(epoch_tag)

    def build(self, epoch_tag: bool) -> None:
        """Make what the path needs beside the processor."""

    def new(self, step: int) -> Payload:
        """A fresh payload."""
        raise NotImplementedError

    def send(self, payload: Payload) -> None:
        """Queue its transfer."""
        raise NotImplementedError

    def receive(self) -> list[int]:
        """The values that the host gets; raises StalePayload."""
        raise NotImplementedError

    def live(self) -> int:
        return self.processor.live_sources()

    def produce(self, payload: Payload, value: int) -> None:
        """What a step's kernels do: fill, then stamp."""
        self.device.launch(FILL, (), (payload.data,), scalars=(value,))
        payload.stamp(self.device)

    def step(self, step: int) -> Payload:
        """A filled and stamped payload; its value is its step."""
        payload = self.new(step)
        self.produce(payload, step)
        return payload

    def park(self) -> None:
        self.device.spin(PARK_SECONDS, stream=self.stream)


class SpecStatus(TransferPath):
    def new(self, step: int) -> Payload:
        return self.processor.spec_status.new_verdict(step, BATCH, rows=4)

    def send(self, payload: Payload) -> None:
        self.processor.spec_status.send(payload)

    def receive(self) -> list[int]:
        rejected, bonus = self.processor.spec_status.receive_status()
        assert rejected.dtype == bonus.dtype == torch.int32
        return torch.cat((rejected, bonus)).tolist()


class DraftIds(TransferPath):
    def new(self, step: int) -> Payload:
        return self.processor.draft_ids.new_payload(step, (BATCH, 3), torch.int64)

    def send(self, payload: Payload) -> None:
        self.processor.draft_ids.send(payload)

    def receive(self) -> list[int]:
        return self.processor.draft_ids.receive().flatten().tolist()


class TokenIds(TransferPath):
    def new(self, step: int) -> Payload:
        return self.processor.new_token_ids(step, (BATCH,))

    def send(self, payload: Payload) -> None:
        self.processor.send_to_cpu_async(payload)

    def receive(self) -> list[int]:
        ids, logprobs = self.processor.recv_async_output()
        assert logprobs is None
        return ids.tolist()


class Logprobs(TransferPath):
    sources = 2

    def build(self, epoch_tag: bool) -> None:
        # the ids stay referenced here, so that only the logprobs can race
        self.kept: list[Payload] = []

    def new(self, step: int) -> Payload:
        return self.processor.new_logprobs(step, (BATCH, 5))

    def send(self, payload: Payload) -> None:
        ids = self.processor.new_token_ids(payload.step, (BATCH,))
        self.produce(ids, payload.step)
        self.kept.append(ids)
        self.processor.send_to_cpu_async(ids, payload)

    def receive(self) -> list[int]:
        _, logprobs = self.processor.recv_async_output()
        assert logprobs is not None
        return [int(value) for value in logprobs.flatten().tolist()]


class EllSlot(TransferPath):
    slot_requests = 64

    def build(self, epoch_tag: bool) -> None:
        self.ring = EllRing(
            self.device,
            self.stream,
            self.protocol,
            slot_requests=self.slot_requests,
            epoch_tag=epoch_tag,
        )

    def new(self, step: int) -> Payload:
        return self.ring.new_ell(step, BATCH)

    def send(self, payload: Payload) -> None:
        self.ring.record_ell(range(BATCH), payload)

    def receive(self) -> list[int]:
        self.ring.drain()
        found = self.ring.ell_by_req
        return [found[request] for request in range(BATCH)]

    def live(self) -> int:
        return self.ring.live_sources()


class EllOneOff(EllSlot):
    slot_requests = 8


PATHS: tuple[type[TransferPath], ...] = (
    SpecStatus,
    DraftIds,
    TokenIds,
    Logprobs,
    EllSlot,
    EllOneOff,
)


class SpyEvent:
    """Runs ``seen`` just after the wait on the event has ended; may leave the wait out."""

    def __init__(self, event: Event, seen: object, *, waits: bool = True) -> None:
        self._event, self._seen, self._waits = event, seen, waits

    def synchronize(self) -> None:
        if self._waits:
            self._event.synchronize()
        if callable(self._seen):
            self._seen()

    def query(self) -> bool:
        return self._event.query() if self._waits else True

"""Side-stream transfers of a step's outputs to the host.

Everything that a step sends to the host travels on one stream, ``async_copy_stream``, whose
contract is written where it is made. Not thread-safe: one host thread runs an engine.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from atom.config import CopyProtocol
from atom.device.interface import CopyPath, Device, Event, Stream
from atom.transfer.copy_protocol import STRATEGIES, Lane, UnpatchedWarning, held_payloads
from atom.transfer.d2h_queue import (
    D2HQueue,
    NothingQueued,
    Received,
    SpecStatusQueue,
    landed_fault,
)
from atom.transfer.payload import (
    Payload,
    PayloadKind,
    PayloadLayout,
    payload_layout,
    refuse_other_kind,
    stale_payload,
)
from atom.transfer.pinned_ring import PinnedRing, PinnedSlot

__all__ = [
    "CpuTensorEntry",
    "D2HQueue",
    "NothingQueued",
    "Received",
    "SpecStatusQueue",
    "TokenIDProcessor",
    "UnpatchedWarning",
]


class CpuTensorEntry(NamedTuple):
    """Sampled ids and logprobs of one step on their way to the host.

    Attributes:
        cpu_tensors: pinned slots of the ids and, if sent, the logprobs.
        copy_done: completes when both have landed.
        source: ``(gpu ids, gpu logprobs)`` as the protocol keeps them, or ``None``.
        expected: layout and step of each.
    """

    cpu_tensors: tuple[PinnedSlot, ...]
    copy_done: Event
    source: tuple[Payload, ...] | None
    expected: tuple[tuple[PayloadLayout, int], ...]


class TokenIDProcessor:
    """Everything that a step sends to the host on ``async_copy_stream``.

    Args:
        device: where the engine runs.
        protocol: what protects the sources; ``unpatched`` warns.
        copy_stream: stream to use as ``async_copy_stream``; ``None`` makes one.
        copy_path: who moves the bytes.
        epoch_tag: whether payloads carry tags.
        max_slots: bound of the shared pinned ring.

    Attributes:
        cpu_tensor_handle: ids and logprobs sent and not yet received, oldest first.
        draft_ids: queue of draft ids.
        spec_status: queue of the rejection sampler's status.
    """

    def __init__(
        self,
        device: Device,
        protocol: CopyProtocol = CopyProtocol.HOLD,
        *,
        copy_stream: Stream | None = None,
        copy_path: CopyPath = CopyPath.ENGINE,
        epoch_tag: bool = True,
        max_slots: int = 64,
    ) -> None:
        self.device = device
        self.protocol = CopyProtocol(protocol)
        self.copy_path = copy_path
        self.epoch_tag = epoch_tag
        self._strategy = STRATEGIES[self.protocol]
        self._strategy.announce(type(self).__name__)
        # Contract of this stream. A transfer on it needs three edges:
        #   (a) the source's producer before the copy: the stream waits on the producer's event;
        #   (b) the copy before the host's read: every reader waits on the transfer's copy_done;
        #   (c) the copy before the source's bytes are written again.
        # The unpatched engine has (a) and (b) alone. Whoever queues a copy here keeps its source
        # referenced until (b) has been observed, which gives (c) for a block that would otherwise
        # be freed: nothing else tells the allocator that this stream still reads it.
        # Holding does nothing for a buffer that lives on and is written again (a graph's static
        # output, a ring slot, a persistent tensor): there the next writer must wait on copy_done.
        # So sources are allocated outside graphs, fresh every step.
        self.async_copy_stream = device.new_stream() if copy_stream is None else copy_stream
        self.ring = PinnedRing(device, max_slots=max_slots)
        self._lane = Lane.make(
            device, self.async_copy_stream, self.ring.acquire, self.ring.release, copy_path
        )
        self._build_queues()

    def _build_queues(self) -> None:
        self.cpu_tensor_handle: deque[CpuTensorEntry] = deque()
        self.draft_ids = D2HQueue(
            self.device,
            self.async_copy_stream,
            self.protocol,
            kind=PayloadKind.DRAFT_IDS,
            ring=self.ring,
            producer_event=self._lane.producer_event,
            copy_path=self.copy_path,
            epoch_tag=self.epoch_tag,
        )
        self.spec_status = SpecStatusQueue(
            self.device,
            self.async_copy_stream,
            self.protocol,
            ring=self.ring,
            producer_event=self._lane.producer_event,
            copy_path=self.copy_path,
            epoch_tag=self.epoch_tag,
        )

    # -- sampled ids and logprobs
    def new_token_ids(
        self,
        step: int,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.int64,
        *,
        opened: bool = True,
    ) -> Payload:
        """A fresh payload for sampled ids."""
        layout = payload_layout(PayloadKind.TOKEN_IDS, shape, dtype, None, self.epoch_tag)
        return self._strategy.new_payload(self._lane, layout, step, opened=opened)

    def new_logprobs(
        self,
        step: int,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        *,
        opened: bool = True,
    ) -> Payload:
        """A fresh payload for the sampled ids' logprobs."""
        layout = payload_layout(PayloadKind.LOGPROBS, shape, dtype, None, self.epoch_tag)
        return self._strategy.new_payload(self._lane, layout, step, opened=opened)

    def send_to_cpu_async(self, token_ids: Payload, logprobs: Payload | None = None) -> Event:
        """Queue sampled ids, and logprobs if there are any, with one completion event.

        Raises:
            WrongPayload: a payload is not what its argument says.
            PinnedRingFull: no slots are left for all of them; nothing was queued.
        """
        refuse_other_kind(token_ids, PayloadKind.TOKEN_IDS, "send_to_cpu_async")
        if logprobs is not None:
            refuse_other_kind(logprobs, PayloadKind.LOGPROBS, "send_to_cpu_async")
        payloads = (token_ids,) if logprobs is None else (token_ids, logprobs)
        sent = self._strategy.send(self._lane, payloads)
        expected = tuple((payload.layout, payload.step) for payload in payloads)
        self.cpu_tensor_handle.append(
            CpuTensorEntry(sent.slots, sent.copy_done, sent.source, expected)
        )
        return sent.copy_done

    def recv_async_output(self) -> tuple[Tensor, Tensor | None]:
        """Wait for the oldest ids and logprobs, then pop their entry, which drops the sources.

        Returns:
            Host copies ``(ids, logprobs or None)``.

        Raises:
            NothingQueued: nothing was sent that is not received.
            StalePayload: a tag is not that of the step that was sent; the entry is popped.
        """
        tensors, fault = self.take_async_output()
        if fault is not None:
            raise stale_payload(fault)
        return tensors[0], tensors[1] if len(tensors) > 1 else None

    def take_async_output(self) -> tuple[list[Tensor], str | None]:
        """Like :meth:`recv_async_output`, but whatever landed, and what is wrong with its tags.

        Raises:
            NothingQueued: nothing was sent that is not received.
        """
        if not self.cpu_tensor_handle:
            raise NothingQueued("no sampled ids are queued: send_to_cpu_async comes first")
        entry = self.cpu_tensor_handle[0]
        entry.copy_done.synchronize()
        fault = None
        tensors = []
        for slot, (layout, step) in zip(entry.cpu_tensors, entry.expected, strict=True):
            fault = fault or landed_fault(layout, step, slot)
            tensors.append(slot.data(layout).clone())
            # whoever wrote in between had marked the tags before
            fault = fault or landed_fault(layout, step, slot)
        self._pop_entry()
        return tensors, fault

    def _pop_entry(self) -> None:
        # the caller has waited for them
        for slot in self.cpu_tensor_handle.popleft().cpu_tensors:
            self.ring.release(slot, landed=True)

    # -- lifetime
    def clean(self) -> None:
        """Forget all queued outputs: wait for every copy, drain both queues, then rebuild them.

        Without the wait, dropping the handles would free sources under copies in flight.
        """
        self._wait_for_copies()
        while self.cpu_tensor_handle:
            self._pop_entry()
        self.draft_ids.drain()
        self.spec_status.drain()
        self._build_queues()

    def _wait_for_copies(self) -> None:
        for entry in self.cpu_tensor_handle:
            entry.copy_done.synchronize()

    def live_sources(self) -> int:
        """Payloads kept alive by the handle and both queues; 0 once everything is received."""
        held = held_payloads([entry.source for entry in self.cpu_tensor_handle])
        return held + self.draft_ids.live_sources() + self.spec_status.live_sources()

    @property
    def copies_in_flight(self) -> int:
        """Transfers sent and not yet received."""
        return len(self.cpu_tensor_handle) + len(self.draft_ids) + len(self.spec_status)

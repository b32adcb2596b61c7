"""An engine that counts stale payloads, believes them if it is to, and stores beside its steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atom.benchmarks.lifetime_paths import own_queue_stream
from atom.device.interface import Stream
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.output_transfer import D2HQueue, SpecStatusQueue
from atom.model_engine.scheduled_batch import ScheduledBatch
from atom.transfer.payload import PayloadKind, stale_payload

_MIB = 2**20


class _Observed(D2HQueue):
    """A queue that counts what is stale, and hands it out all the same if it is to believe it."""

    def observe(self, believes: bool) -> None:
        """Begin."""
        self.believes = believes
        self.stale = 0

    def receive(self) -> Tensor:
        """See :meth:`D2HQueue.receive`."""
        received = self.receive_raw()
        if received.fault is not None:
            self.stale += 1
            if not self.believes:
                raise stale_payload(received.fault)
        return received.data


class _ObservedStatuses(_Observed, SpecStatusQueue):
    """Statuses."""


class ObservedRunner(ModelRunner):
    """A runner whose stale payloads are counted, and that can store in bulk ahead of its steps."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        processor = self.processor
        shared: dict[str, Any] = {
            "ring": processor.ring,
            "copy_path": processor.copy_path,
            "epoch_tag": processor.epoch_tag,
        }
        head = (processor.device, processor.async_copy_stream, processor.protocol)
        self.statuses = _ObservedStatuses(*head, **shared)
        self.drafts = _Observed(*head, kind=PayloadKind.DRAFT_IDS, **shared)
        processor.spec_status, processor.draft_ids = self.statuses, self.drafts
        processor.recv_async_output = self._take_tokens  # type: ignore[method-assign]
        self.stale_tokens = 0
        self.observe(believes=False)
        self._pressure: list[Stream] = []
        self._pressure_bytes = 0
        self._every = 1
        self._launched = 0

    def observe(self, *, believes: bool) -> None:
        """Say whether stale payloads are taken as they come."""
        self.believes = believes
        self.statuses.observe(believes)
        self.drafts.observe(believes)

    def press(self, mib: float, every: int, streams: int) -> None:
        """Store so much on other streams ahead of every so many steps; 0 stores nothing."""
        self._every = every
        self._pressure_bytes = round(mib * _MIB / streams)
        if not self._pressure_bytes:
            return
        self._pressure = [own_queue_stream(self.device) for _ in range(streams)]
        for stream in self._pressure:
            # a first transfer of that size makes its buffers, which may synchronise
            self.device.traffic(self._pressure_bytes, "d2h", stream=stream)
        self.device.synchronize()

    def launch(self, batch: ScheduledBatch, forced_bonus: Any) -> None:
        """See :meth:`ModelRunner.launch`."""
        self._launched += 1
        if self._pressure_bytes and self._launched % self._every == 0:
            for stream in self._pressure:
                self.device.traffic(self._pressure_bytes, "d2h", stream=stream)
        super().launch(batch, forced_bonus)

    def _take_tokens(self) -> tuple[Tensor, Tensor | None]:
        tensors, fault = self.processor.take_async_output()
        if fault is not None:
            self.stale_tokens += 1
            if not self.believes:
                raise stale_payload(fault)
        return tensors[0], tensors[1] if len(tensors) > 1 else None

    def stale(self) -> dict[str, int]:
        """Counts of stale payloads by name of ``AccuracyRow``."""
        return {
            "stale_statuses": self.statuses.stale,
            "stale_tokens": self.stale_tokens,
            "stale_drafts": self.drafts.stale,
        }

"""Feeds the happens-before core from a virtual device."""

from __future__ import annotations

import weakref
from typing import Any

from atom.device.arena import Span
from atom.device.caching_allocator import Block
from atom.device.operations import Operation, OperationKind
from atom.device.virtual import VirtualDevice
from atom.lifetime.monitor import Monitor
from atom.lifetime.shadow import View
from atom.lifetime.sites import CALLERS, UNKNOWN, here

_COPIES = (OperationKind.ENGINE_COPY, OperationKind.KERNEL_COPY)
#: streams of the n-th device are numbered from n times this
STREAMS_A_DEVICE = 1 << 20


def virtual_stream_name(key: int) -> str:
    """How findings call a virtual stream."""
    number = key % STREAMS_A_DEVICE
    return "the default stream" if number == 0 else f"stream {number}"


class VirtualObserver:
    """Observes one device; see ``atom.device.observer``.

    Args:
        device: the device. It is observed from now on, and until :meth:`detach`.
        monitor: the core.
        index: number of the device, so that streams of several devices stay apart.
    """

    def __init__(self, device: VirtualDevice, monitor: Monitor, index: int = 0) -> None:
        self._monitor = monitor
        self._first = index * STREAMS_A_DEVICE
        self._device = weakref.ref(device)
        memory = device.memory
        self._starts = {
            "device": memory.device.memory.ctypes.data,
            "pinned": memory.host.memory.ctypes.data,
        }
        self._own_pools = memory.blocks._public
        for block in memory.blocks.live.values():
            self._adopt(block)
        for buffer in memory.buffers._buffers.values():
            if buffer.generation % 2:
                self._adopt(buffer)
        device.observe(self)

    def detach(self) -> None:
        """Stop observing."""
        device = self._device()
        if device is not None and device.observer is self:
            device.observe(None)

    def _base(self, block: Any) -> int:
        space = "device" if isinstance(block, Block) else "pinned"
        return int(self._starts[space]) + int(block.offset)

    def _adopt(self, block: Any, *, seen: bool = False) -> None:
        site = here(CALLERS) if seen else UNKNOWN
        base = self._base(block)
        if isinstance(block, Block):
            private = block.pair is not self._own_pools
            owner = self._first + block.stream_id
            self._monitor.allocate(base, block.size, owner, site, private=private)
        else:
            self._monitor.allocate(base, block.size, None, site, pinned=True)

    def owned(self, block: Any) -> None:
        """A tensor owns the block."""
        self._adopt(block, seen=True)

    def died(self, block: Any) -> None:
        """The block's last view died."""
        self._monitor.free(self._base(block), here(CALLERS))

    def stream_recorded(self, block: Any, stream_id: int) -> None:
        """``record_stream`` was called."""
        self._monitor.record_stream(self._base(block), self._first + stream_id)

    def queued(self, operation: Operation, stream_id: int) -> None:
        """Work was queued."""
        monitor = self._monitor
        stream = self._first + stream_id
        number = monitor.submit(stream)
        if not operation.reads and not operation.writes:
            return
        site = here(CALLERS)
        copy = operation.kind in _COPIES
        name = f"copy {operation.name.split()[0]}" if copy else operation.name
        for write, spans in ((False, operation.reads), (True, operation.writes)):
            for span in spans:
                lo = self._starts[span.space] + span.offset
                block = monitor.locate(lo) if span.nbytes else None
                if block is not None:
                    monitor.access(
                        block,
                        lo,
                        lo + span.nbytes,
                        write,
                        stream,
                        number,
                        name,
                        site,
                        _view(span),
                        copy=copy,
                    )

    def event_recorded(self, event: object, stream_id: int) -> None:
        """An event was recorded."""
        monitor = self._monitor
        if not hasattr(event, "_watched"):
            # an id may come back for another event
            event._watched = True  # type: ignore[attr-defined]
            weakref.finalize(event, monitor.order.forget, id(event)).atexit = False
        monitor.record(id(event), self._first + stream_id, here(1))

    def event_waited_by(self, event: object, stream_id: int) -> None:
        """A stream waits for an event."""
        self._monitor.order.wait(id(event), self._first + stream_id)

    def event_observed(self, event: object) -> None:
        """The host saw an event complete."""
        self._monitor.order.observe(id(event))

    def stream_waited(self, stream_id: int) -> None:
        """The host saw a stream run dry."""
        self._monitor.order.observe_stream(self._first + stream_id)

    def device_waited(self) -> None:
        """The host saw everything run."""
        order = self._monitor.order
        for stream in list(order.counts):
            if stream // STREAMS_A_DEVICE == self._first // STREAMS_A_DEVICE:
                order.observe_stream(stream)


def _view(span: Span) -> View:
    size = span.dtype.itemsize
    strides = None if span.contiguous else tuple(stride * size for stride in span.strides)
    return View(span.dtype, span.shape, size, strides)

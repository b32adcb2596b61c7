"""The virtual device: a GPU in host memory, on which the fault happens as on hardware.

Its caching allocators hand out torch CPU tensors over one arena with PyTorch's rules, so a block is
reused exactly when PyTorch would reuse it. Work is queued and runs when the device's virtual clock
(or, in schedule mode, the caller) says so. Host calls cost virtual time; Python's own time does
not count, see :meth:`VirtualDevice.host_work`.

Design choice. A launch is opaque: it names byte ranges of the arena and a body that runs on views
of them later. The alternative, device tensors on torch's Python PrivateUse1 backend, would let
unchanged torch code queue itself, but that interface is experimental between torch 2.11 and 2.14
and costs about 138 us an operation. Opaque launches do not depend on torch's version and are exact.

Honesty rules, each held by an error or a test: queued work holds no tensor (``TensorCaptured``);
operands lie in this device's arenas; nothing guards a pinned buffer against kernels
(``FreedPinnedBuffer`` when a queued one reaches a dropped buffer); a copy moves its bytes in two
parts, so that a reader can see half of it.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from atom.device.argument_checks import (
    check_amount,
    check_count,
    check_kernel,
    check_tensor,
)
from atom.device.caching_allocator import Block
from atom.device.interface import CopyPath, Event, Kernel, Scalar, Stream
from atom.device.operation_factory import OperationFactory, Prepared
from atom.device.operations import Mode, OperationKind, StreamState
from atom.device.profiles import GIBIBYTE, DeviceProfile, find_profile, profile_properties
from atom.device.queue_model import QueueModel
from atom.device.virtual_host import Chooser, VirtualHost
from atom.device.virtual_memory import Operand, VirtualMemory, refuse_view
from atom.device.virtual_streams import VirtualEvent, VirtualGraph, VirtualStream, foreign
from atom.device.virtual_watch import WatchedDevice
from atom.errors import BadInput, DeviceError, WrongDevice

STREAMS_A_PRIORITY = 32
_devices: weakref.WeakSet[VirtualDevice] = weakref.WeakSet()


class VirtualDevice(WatchedDevice):
    """A GPU in host memory. See the module's text and :class:`atom.device.interface.Device`.

    Args:
        profile: a profile or the name of one.
        seed: of jitter, random mapping and dispatch delays; equal seeds give equal runs.
        memory_bytes: device memory. Pages are used when they are written; the default is less
            than the card's, so that a run that fills it stays within a small host.
        pinned_bytes: pinned host memory.
        hardware_queues: overrides the profile's count.
        mode: ``clock`` runs work by the profile's times. ``schedule`` runs nothing by itself:
            :meth:`ready` lists what may run, :meth:`step` runs one part, and a host wait asks
            ``chooser`` until it is satisfied.
        chooser: given the ready parts, returns one of them; ``None`` takes the oldest.

    Raises:
        BadInput: unknown profile or mode, a seed or size that is no whole number or below 1.
    """

    def __init__(
        self,
        profile: DeviceProfile | str = "MI355X",
        *,
        seed: int = 0,
        memory_bytes: int = 8 * GIBIBYTE,
        pinned_bytes: int = 8 * GIBIBYTE,
        hardware_queues: int | None = None,
        mode: str = "clock",
        chooser: Chooser | None = None,
    ) -> None:
        found = find_profile(profile)
        if hardware_queues is not None:
            found = replace(found, hardware_queues=hardware_queues)
        if not isinstance(mode, str) or mode.upper() not in Mode.__members__:
            raise BadInput(f"mode={mode!r}; allowed: clock, schedule")
        seed = check_count("seed", seed)
        memory_bytes = check_count("memory_bytes", memory_bytes, 1)
        pinned_bytes = check_count("pinned_bytes", pinned_bytes, 1)
        self.profile = found
        self.properties = profile_properties(found, memory_bytes=memory_bytes)
        self.model = QueueModel(
            found,
            found.hardware_queues,
            random.Random(2 * seed + 1),
            Mode[mode.upper()],
        )
        self.host = VirtualHost(found, self.model, 2 * seed, chooser)
        self.memory = VirtualMemory(
            memory_bytes, pinned_bytes, self.host, self.host_seconds, self._block_died
        )
        self.host.collect = self.memory.collect
        self.model.died = self.memory.dead
        self._factory = OperationFactory(found, self.memory, self._operand)
        self._graph: VirtualGraph | None = None
        self._pools: tuple[list[VirtualStream], list[VirtualStream]] = ([], [])
        self._handed = [0, 0]
        self.default_stream: VirtualStream = self._make_stream(0, 0, 0)
        _devices.add(self)

    def __repr__(self) -> str:
        return f"VirtualDevice({self.profile.name}, {self.profile.hardware_queues} queues)"

    # -- streams and events
    def _make_stream(self, stream_id: int, index: int, group: int) -> VirtualStream:
        state = StreamState(stream_id, index, group)
        self.host.streams[stream_id] = state
        return VirtualStream(self, state)

    def new_stream(self, priority: int = 0) -> VirtualStream:
        """A stream from the pool: 32 a priority (normal, or high below 0), then the first again."""
        group = 1 if check_count("priority", priority) < 0 else 0
        pool, place = self._pools[group], self._handed[group]
        self._handed[group] = (place + 1) % STREAMS_A_PRIORITY
        if place == len(pool):
            # the default stream is the first of the normal ones
            stream_id = 1 + group * STREAMS_A_PRIORITY + place
            pool.append(self._make_stream(stream_id, place + 1 - group, group))
        return pool[place]

    def new_event(self, timing: bool = False) -> VirtualEvent:
        """An event; ``timing`` makes :meth:`VirtualEvent.elapsed_time` usable."""
        return VirtualEvent(self, timing)

    def own_stream(self, stream: Stream | None) -> VirtualStream:
        """``stream``, or the default stream for ``None``.

        Raises:
            WrongDevice: it belongs to another device.
        """
        if stream is None:
            return self.default_stream
        if isinstance(stream, VirtualStream) and stream.device is self:
            return stream
        raise foreign("stream", stream, self)

    def own_event(self, event: Event) -> VirtualEvent:
        """``event``.

        Raises:
            WrongDevice: it belongs to another device.
        """
        if isinstance(event, VirtualEvent) and event.device is self:
            return event
        raise foreign("event", event, self)

    # -- the host's time
    def host_seconds(self) -> float:
        """The virtual clock as the host sees it."""
        return self.host.seconds

    def host_work(self, seconds: float) -> None:
        """The host works for ``seconds`` on its own while the device goes on."""
        self.host.call(check_amount("host_work: seconds", seconds), exact=True)

    @property
    def on_host_call(self) -> Callable[[], None] | None:
        """Schedule mode: called at the start of each host call; it may call :meth:`step`."""
        return self.host.on_call

    @on_host_call.setter
    def on_host_call(self, hook: Callable[[], None] | None) -> None:
        self.host.on_call = hook

    def synchronize(self) -> None:
        """Block the host until all work on all streams has run."""
        self.refuse_in_capture("synchronising the device")
        self.host.call(self.profile.synchronize_seconds)
        self.host.wait_all()
        if self.observer is not None:
            self.observer.device_waited()

    # -- memory
    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, *, stream: Stream | None = None
    ) -> Tensor:
        """An uninitialised contiguous device tensor from the caching allocator.

        Raises:
            BadInput: a negative extent.
            DeviceOutOfMemory: with the sizes and what holds the memory.
            DeviceError: inside a capture, for another stream than the default one.
        """
        own = self._work_call(stream, "an allocation", self.profile.allocate_seconds)
        return self.memory.empty(shape, dtype, own.stream_id)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised pinned host tensor.

        Raises:
            BadInput: a negative extent.
            DeviceOutOfMemory: the pinned arena is full.
        """
        self.host.call(self.profile.allocate_seconds)
        return self.memory.pinned(shape, dtype)

    def mapped(self, pinned: Tensor) -> Tensor:
        """``pinned`` as kernels see it: an alias over the same bytes, which keeps it alive.

        Raises:
            DeviceError: it is not a contiguous pinned tensor of this device.
        """
        return self.memory.mapped(pinned)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Tell the allocator that ``stream`` uses ``tensor``: its free waits for that stream."""
        own = self.own_stream(stream)
        self.host.call(self.profile.query_seconds)
        if not isinstance(tensor, Tensor) or tensor.numel():
            block = self._block(tensor)
            self.memory.blocks.record_stream(block, own.stream_id)
            if self.observer is not None:
                self.observer.stream_recorded(block, own.stream_id)

    def _block(self, tensor: Tensor) -> Block:
        block = self.memory.block_of(check_tensor("the tensor", tensor))
        if block is None:
            raise self._not_ours(tensor, "the tensor")
        return block

    def label(self, tensor: Tensor, owner: str) -> Tensor:
        """Name ``tensor``'s block in timelines and out-of-memory errors; returns ``tensor``."""
        if check_tensor("the tensor", tensor).numel():
            self._block(tensor).label = owner
        return tensor

    def memory_stats(self) -> dict[str, int]:
        """PyTorch's allocator statistics, by PyTorch's names."""
        self.memory.collect()
        return self.memory.blocks.statistics()

    def empty_cache(self) -> None:
        """Give unused cached segments back."""
        self.refuse_in_capture("emptying the cache")
        self.host.call(self.profile.segment_seconds)
        self.memory.blocks.empty_cache()

    def address(self, tensor: Tensor) -> int:
        """Address of the first byte of ``tensor``'s view, the same in every run."""
        return self.memory.address(tensor)

    def _operand(self, tensor: Tensor, what: str) -> Operand:
        plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg():
            refuse_view(tensor, what)
        operand = self.memory.operand(tensor)
        if operand is None:
            raise self._not_ours(tensor, what)
        return operand

    def _not_ours(self, tensor: Tensor, what: str) -> Exception:
        for other in _devices:
            if other is not self and other.memory.operand(tensor) is not None:
                return WrongDevice(f"{what} lies on another device, {other!r}, not on {self!r}")
        return BadInput(
            f"{what} (shape {tuple(tensor.shape)}, {tensor.dtype}) is an ordinary host tensor; "
            "expected one made by this device's empty() or pinned()"
        )

    # -- work
    def enqueue(self, prepared: Prepared, stream: VirtualStream) -> None:
        """Queue ``prepared``, or keep it for the graph that is being captured."""
        if self._graph is not None:
            self._graph.add(prepared)
            return
        operation = prepared.operation
        if operation.kind in (OperationKind.ENGINE_COPY, OperationKind.KERNEL_COPY):
            for buffer, _ in prepared.pinned:
                self.memory.buffers.record_copy(buffer, stream.stream_id)
        if self.observer is not None:
            self.observer.queued(operation, stream.stream_id)
        self.model.submit(operation, stream.state, own_lane=prepared.own_lane)

    def launch(
        self,
        kernel: Kernel,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        scalars: tuple[Scalar, ...] = (),
        stream: Stream | None = None,
        flops: float = 0.0,
    ) -> None:
        """Queue ``kernel`` on ``stream``; it takes effect at its end.

        Raises:
            TensorCaptured: the body or a scalar reaches a tensor; if it is hidden, at the end.
            BadInput: an operand is an ordinary tensor.
            DeviceError: an operand is a pinned tensor that is not ``mapped``.
            WrongDevice: the stream or an operand is another device's.
            FreedPinnedBuffer: an earlier queued kernel reached a dropped pinned buffer.
        """
        own = self._work_call(stream, check_kernel(kernel).name, self.profile.launch_seconds)
        self.enqueue(self._factory.kernel(kernel, reads, writes, scalars, flops), own)

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        *,
        stream: Stream | None = None,
        path: CopyPath = CopyPath.ENGINE,
    ) -> None:
        """Queue a copy; the first half of the bytes arrives at half of its time.

        Raises:
            BadInput: unequal sizes or types, a view with gaps, an ordinary host tensor, or both
                ends on the host.
            WrongDevice: the stream or an end is another device's.
        """
        own = self._work_call(stream, "copy", self.profile.copy_submit_seconds)
        prepared = self._factory.copy(target, source, path)
        if prepared is not None:
            self.enqueue(prepared, own)

    def traffic(
        self,
        nbytes: int,
        direction: str,
        *,
        stream: Stream | None = None,
        path: CopyPath = CopyPath.ENGINE,
    ) -> None:
        """Queue a bulk transfer that takes time and its engine but moves no bytes.

        Raises:
            BadInput: an unknown direction or fewer than one byte.
        """
        own = self._work_call(stream, "traffic", self.profile.copy_submit_seconds)
        self.enqueue(self._factory.traffic(nbytes, direction, path), own)

    def matmul(self, size: int, *, stream: Stream | None = None) -> None:
        """Queue a ``size x size x size`` bfloat16 matmul; takes time and moves no bytes."""
        own = self._work_call(stream, "matmul", self.profile.launch_seconds)
        self.enqueue(self._factory.matmul(size), own)

    def spin(self, seconds: float, *, stream: Stream | None = None) -> None:
        """Queue a kernel that does nothing for ``seconds``."""
        own = self._work_call(stream, "spin", self.profile.launch_seconds)
        self.enqueue(self._factory.spin(seconds), own)

    def _work_call(self, stream: Stream | None, what: str, seconds: float) -> VirtualStream:
        own = self.own_stream(stream)
        self._refuse_foreign_capture(own, what)
        self.host.call(seconds)
        return own

    # -- graphs
    @contextmanager
    def capture(self) -> Iterator[VirtualGraph]:
        """Record the block's work on the default stream into a graph instead of running it.

        As ``torch.cuda.graph`` does, it first synchronises and empties the cache.

        Raises:
            DeviceError: another capture is underway, or the block waits, or works on another
                stream.
        """
        self.refuse_in_capture("a capture")
        self.synchronize()
        self.empty_cache()
        graph = VirtualGraph(self, self.memory.blocks.begin_capture())
        self._graph = graph
        try:
            yield graph
            graph.complete = True
        finally:
            # what died inside the capture was freed inside it
            self.memory.collect()
            self._graph = None
            self.memory.blocks.end_capture()

    @property
    def capturing(self) -> bool:
        """Whether :meth:`capture` is under way."""
        return self._graph is not None

    def refuse_in_capture(self, what: str) -> None:
        """Refuse what a capture cannot hold.

        Raises:
            DeviceError: a capture is underway.
        """
        if self._graph is not None:
            raise DeviceError(f"{what} is not possible inside a graph capture; end it first")

    def _refuse_foreign_capture(self, stream: VirtualStream, what: str) -> None:
        if self._graph is not None and stream is not self.default_stream:
            raise DeviceError(
                f"{what} on stream {stream.stream_id} while the default stream is captured: a "
                "capture holds the default stream's work only"
            )

"""The seam: the one interface through which all code reaches a device.

Everything that touches a stream, an event, a pinned buffer or a device allocation goes through
:class:`Device`. Two implementations exist: ``accelerator.Accelerator`` (``torch.cuda`` for CUDA
and HIP) and ``virtual.VirtualDevice`` (a GPU in host memory). The same transfer, engine and
benchmark code runs on both.

Rules that callers follow so that one code path is right on both devices:

* Streams are explicit: every call takes ``stream=`` (``None`` means the default stream). There is
  no current-stream state.
* A kernel's body is a module-level function of views, ``body(reads, writes, *scalars)``. It never
  closes over a tensor: queued work names memory, it does not own it.
* Device tensors are read by the host only after a copy into a pinned tensor was waited on.
* Views (slicing, ``view``, ``reshape`` without a copy) of device tensors may be made freely; any
  arithmetic on them goes through :meth:`Device.launch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# these stand there so that settings and records can be read without torch
from atom.config import CopyPath as CopyPath
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.machines import DeviceKind as DeviceKind

Scalar = int | float | bool
#: of PyTorch's statistics, those of an :class:`AllocatorSample`
SAMPLED = ("active_bytes", "active", "reserved_bytes", "segment")
KernelBody = Callable[..., None]


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is.

    Attributes:
        name: marketing name, e.g. ``NVIDIA H200``; for a virtual device the profile's name.
        kind: what stands behind it.
        evidence: the label of every figure that this device produces.
        machine: lower-case slug used in ``data/runs/<machine>/``, e.g. ``h200``.
        memory_bytes: device memory in bytes.
        hardware_queues: streams are mapped to that many queues; ``None`` if not known.
        queue_variable: environment variable that sets it, ``None`` if there is none.
        driver: driver version, or ``None``.
        runtime: e.g. ``CUDA 13.0`` or ``HIP 7.2``; ``virtual`` for a virtual device.
    """

    name: str
    kind: DeviceKind
    evidence: Evidence
    machine: str
    memory_bytes: int
    hardware_queues: int | None
    queue_variable: str | None
    driver: str | None
    runtime: str


@dataclass(frozen=True)
class Kernel:
    """Device work with a plain reference.

    Attributes:
        name: shown in timelines and errors.
        body: ``body(reads, writes, *scalars)``, torch operations that write in place into
            ``writes``. ``reads`` and ``writes`` are tuples of tensors. A module-level function.
        occupancy: share of the machine that it fills while it runs, 0 to 1 (virtual device only).
    """

    name: str
    body: KernelBody
    occupancy: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no kernel can have.

        Raises:
            BadInput: naming the attribute.
        """
        if type(self.name) is not str:
            raise BadInput(f"Kernel name={self.name!r}; expected a str")
        if not callable(self.body):
            raise BadInput(f"kernel {self.name!r}: body={self.body!r}; expected a function")
        # the comparison also refuses nan
        if type(self.occupancy) not in (int, float) or not 0 <= self.occupancy <= 1:
            raise BadInput(f"kernel {self.name!r}: occupancy={self.occupancy!r}; allowed: 0 to 1")


class AllocatorSample(NamedTuple):
    """The caching allocator at one moment.

    Attributes:
        active_bytes: bytes of blocks that are not back in the pool: in tensors, or dropped and
            waiting for a recorded stream.
        active_blocks: how many.
        reserved_bytes: bytes of segments.
        segments: how many.
        retries: allocations so far that first had to give cached segments back.
    """

    active_bytes: int
    active_blocks: int
    reserved_bytes: int
    segments: int
    retries: int


class Event(Protocol):
    """A marker in a stream. A wait takes the latest record at the time of the call."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark the present end of ``stream``."""

    def wait(self, stream: Stream | None = None) -> None:
        """Make ``stream`` wait for the latest record. No-op if it was never recorded."""

    def query(self) -> bool:
        """Whether the latest record has completed. True if it was never recorded."""

    def synchronize(self) -> None:
        """Block the host until the latest record has completed."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event's record to ``end``'s. Both need ``timing=True``."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    @property
    def stream_id(self) -> int:
        """Identity within the device; 0 is the default stream."""

    def wait_event(self, event: Event) -> None:
        """See :meth:`Event.wait`."""

    def wait_stream(self, stream: Stream) -> None:
        """Wait for everything queued on ``stream`` so far."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event`` (a new one if ``None``) here and return it."""

    def synchronize(self) -> None:
        """Block the host until everything queued so far has run."""

    def query(self) -> bool:
        """Whether everything queued so far has run."""


class Graph(Protocol):
    """Captured work. Its allocations come from a private pool and stay while the graph lives."""

    def replay(self, stream: Stream | None = None) -> None:
        """Queue the captured work again, on the same addresses."""


class Device(ABC):
    """A device. See the module's text for the rules that callers follow."""

    properties: DeviceProperties
    default_stream: Stream

    # -- streams and events
    @abstractmethod
    def new_stream(self, priority: int = 0) -> Stream:
        """A stream of its own (PyTorch's pool hands out 32 a priority, then aliases the first)."""

    @abstractmethod
    def new_event(self, timing: bool = False) -> Event:
        """An event; ``timing`` makes :meth:`Event.elapsed_time` usable."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all work on all streams has run."""

    @abstractmethod
    def host_seconds(self) -> float:
        """The clock that host costs are measured with: ``perf_counter``, or the virtual clock."""

    # -- memory
    @abstractmethod
    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, *, stream: Stream | None = None
    ) -> Tensor:
        """An uninitialised contiguous device tensor of the caching allocator, owned by ``stream``.

        Raises:
            DeviceOutOfMemory: with the sizes and what holds the memory.
        """

    @abstractmethod
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised pinned host tensor (a plain CPU tensor for reading)."""

    @abstractmethod
    def mapped(self, pinned: Tensor) -> Tensor:
        """``pinned`` as kernels see it: an alias over the same bytes that a kernel may write."""

    def why_no_host_writes(self) -> str | None:
        """Why a kernel's writes into mapped memory are not the host's to read behind an event.

        See :mod:`atom.device.host_visibility`; ``None``: they are.
        """
        return None

    @property
    def capturing(self) -> bool:
        """Whether :meth:`capture` is under way."""
        return False

    @abstractmethod
    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Tell the allocator that ``stream`` uses ``tensor``: its free waits for that stream."""

    @abstractmethod
    def memory_stats(self) -> dict[str, int]:
        """PyTorch's allocator statistics, by PyTorch's names."""

    def allocator_sample(self) -> AllocatorSample:
        """The few of :meth:`memory_stats` that can be read at every step."""
        found = self.memory_stats()
        active, blocks, reserved, segments = (
            found.get(f"{name}.all.current", 0) for name in SAMPLED
        )
        retries = found.get("num_alloc_retries", 0)
        return AllocatorSample(active, blocks, reserved, segments, retries)

    @abstractmethod
    def empty_cache(self) -> None:
        """Give unused cached segments back."""

    def address(self, tensor: Tensor) -> int:
        """Device address of the first byte of ``tensor``'s view."""
        return tensor.data_ptr()

    # -- work
    @abstractmethod
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
        """Queue ``kernel`` on ``stream``. ``flops`` feeds the virtual device's duration only."""

    @abstractmethod
    def copy(
        self,
        target: Tensor,
        source: Tensor,
        *,
        stream: Stream | None = None,
        path: CopyPath = CopyPath.ENGINE,
    ) -> None:
        """Queue a copy of equal byte length, in either direction or within the device.

        It never blocks the host. Host tensors must be pinned. The copy holds no reference to
        ``source``: keeping it alive is the caller's duty.
        """

    @abstractmethod
    def spin(self, seconds: float, *, stream: Stream | None = None) -> None:
        """Queue a kernel that does nothing for about ``seconds`` (it parks the stream)."""

    @abstractmethod
    def traffic(
        self,
        nbytes: int,
        direction: str,
        *,
        stream: Stream | None = None,
        path: CopyPath = CopyPath.ENGINE,
    ) -> None:
        """Queue a bulk transfer whose bytes nobody reads: an offload store or load.

        An accelerator copies between persistent buffers of its own; the virtual device takes the
        time and the engine of such a copy but moves no bytes, so that a trial stays cheap.

        Args:
            nbytes: bytes to move, at least 1.
            direction: ``"d2h"`` (a store) or ``"h2d"`` (a load).
            stream: ``None`` means the default stream.
            path: who moves the bytes.

        Raises:
            BadInput: an unknown direction or fewer than one byte.
        """

    @abstractmethod
    def matmul(self, size: int, *, stream: Stream | None = None) -> None:
        """Queue a ``size x size x size`` bfloat16 matmul on persistent operands of the device."""

    @abstractmethod
    def capture(self) -> AbstractContextManager[Graph]:
        """``with device.capture() as graph:`` records the launches and copies of the block, made
        on the default stream, instead of running them. Allocations inside come from the graph's
        private pool."""

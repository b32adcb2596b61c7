"""What the sanitizer asks of torch's device layer. Tests put another layer in its place."""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Protocol

import torch
from torch import Tensor

from atom.lifetime.happens_before import StreamKey

#: registries of ``torch.cuda._gpu_trace`` and the front end's method that each one calls
REGISTRIES = {
    "EventDeletionCallbacks": "event_deleted",
    "EventRecordCallbacks": "event_recorded",
    "EventWaitCallbacks": "event_waited",
    "MemoryAllocationCallbacks": "allocated",
    "MemoryDeallocationCallbacks": "freed",
    "DeviceSynchronizationCallbacks": "device_waited",
    "StreamSynchronizationCallbacks": "stream_waited",
    "EventSynchronizationCallbacks": "event_observed",
}


class TorchLayer(Protocol):
    """The private parts of torch that the front end leans on."""

    def refusal(self) -> str | None:
        """Why the front end cannot work at all, or ``None``."""

    def activate(self) -> None:
        """Make torch call the ``_gpu_trace`` callbacks."""

    def is_device(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies on a device."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a host tensor is page-locked."""

    def current_device(self) -> int:
        """Index of the current device."""

    def current_stream(self, index: int) -> StreamKey:
        """The current stream of device ``index``."""

    def stream_key(self, stream: Any) -> StreamKey:
        """The key of a stream object, or of a raw handle from a callback."""

    def live_blocks(self) -> list[tuple[int, int, StreamKey, bool]]:
        """``(address, bytes, owner, private pool)`` of what is allocated already."""

    def reserved(self) -> int:
        """Bytes that the allocator holds from the driver; -1 if unknown."""

    def patches(self) -> tuple[Any, Any, Any] | None:
        """The ``Event``, ``Stream`` and ``CUDAGraph`` classes to patch."""


class CudaLayer:
    """``torch.cuda``: CUDA and HIP."""

    #: whether a tensor is one of CUDA's; asked several times an operation
    is_device = staticmethod(operator.attrgetter("is_cuda"))

    def __init__(self) -> None:
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def missing(self) -> list[str]:
        """Names of private functions that this torch does not have."""
        import torch.cuda._gpu_trace as trace

        absent = [
            f"torch.cuda._gpu_trace.{name}" for name in REGISTRIES if not hasattr(trace, name)
        ]
        for name in ("_activate_gpu_trace", "_cuda_getCurrentRawStream"):
            if not hasattr(torch._C, name):
                absent.append(f"torch._C.{name}")
        return absent

    def refusal(self) -> str | None:
        """CPU builds, old torch, and allocators whose callbacks do not fire."""
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is a CPU build: it has no device work to watch"
        absent = self.missing()
        if absent:
            return f"torch {torch.__version__} lacks {', '.join(absent)}"
        backend = ""
        with contextlib.suppress(Exception):
            backend = torch.cuda.get_allocator_backend()
        if backend == "cudaMallocAsync":
            return (
                "the cudaMallocAsync allocator calls no allocation callbacks, so blocks and their "
                "deaths cannot be seen: run with the native allocator "
                "(PYTORCH_CUDA_ALLOC_CONF=backend:native)"
            )
        return None

    def activate(self) -> None:
        """Switch the callbacks on; torch cannot switch them off again."""
        torch._C._activate_gpu_trace()

    def is_pinned(self, tensor: Tensor) -> bool:
        """``Tensor.is_pinned``."""
        return tensor.device.type == "cpu" and tensor.is_pinned()

    def current_device(self) -> int:
        """``torch.cuda.current_device`` without its checks."""
        return int(torch._C._cuda_getDevice())

    def current_stream(self, index: int) -> StreamKey:
        """Raw handle; the default stream of device n is -n."""
        assert self._raw_stream is not None
        return self._raw_stream(index) or -index

    def stream_key(self, stream: Any) -> StreamKey:
        """Raw handle of a stream; -n for the default stream of device n."""
        if isinstance(stream, int):
            if stream:
                return stream
            return -torch.cuda.current_device() if torch.cuda.device_count() > 1 else 0
        handle = getattr(stream, "cuda_stream", None)
        if handle is None:
            # torch.Stream: the same stream by its id
            index, kind = stream.device_index, stream.device_type
            made = torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=index, device_type=kind
            )
            handle = made.cuda_stream
        return int(handle) or -(stream.device_index or 0)

    def live_blocks(self) -> list[tuple[int, int, StreamKey, bool]]:
        """From the allocator's snapshot; nothing before CUDA starts."""
        if not torch.cuda.is_initialized():
            return []
        found = []
        for segment in torch.cuda.memory_snapshot():
            address = segment["address"]
            owner = segment.get("stream") or -int(segment.get("device", 0))
            private = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
            for block in segment["blocks"]:
                where = block.get("address", address)
                if block["state"] == "active_allocated":
                    found.append((where, block["size"], owner, private))
                address += block["size"]
        return found

    def reserved(self) -> int:
        """``torch.cuda.memory_reserved`` of the current device."""
        return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else -1

    def patches(self) -> tuple[Any, Any, Any] | None:
        """Torch's own classes."""
        return torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph


class NoDevice:
    """A torch that drives no device: only host reads are watched (for virtual devices)."""

    def refusal(self) -> str | None:
        """Never: there is nothing to refuse."""
        return None

    def activate(self) -> None:
        """Nothing to do."""

    def is_device(self, tensor: Tensor) -> bool:
        """No tensor does."""
        return False

    def is_pinned(self, tensor: Tensor) -> bool:
        """No tensor is."""
        return False

    def current_device(self) -> int:
        """There is none."""
        return 0

    def current_stream(self, index: int) -> StreamKey:
        """There is none."""
        return 0

    def stream_key(self, stream: Any) -> StreamKey:
        """There is none."""
        return 0

    def live_blocks(self) -> list[tuple[int, int, StreamKey, bool]]:
        """Nothing."""
        return []

    def reserved(self) -> int:
        """Unknown."""
        return -1

    def patches(self) -> tuple[Any, Any, Any] | None:
        """Nothing to patch."""
        return None

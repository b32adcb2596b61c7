"""A stand-in for ``torch.cuda`` on a machine without one: memory, streams, events and graphs.

Device tensors are CPU tensors of an arena whose blocks are reused last in first out. Work runs at
once; what counts is what the sanitizer is told, through torch's own ``_gpu_trace`` registries.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.cuda._gpu_trace as gpu_trace
from torch import Tensor

BLOCK = 4096
_ids = itertools.count(1000)


class FakeEvent:
    """``torch.cuda.Event``: never done by itself, so that only waiting makes it so."""

    def __init__(self, layer: FakeCuda) -> None:
        self.cuda_event = next(_ids)
        self.layer = layer
        self.done = False

    def record(self, stream: int) -> None:
        gpu_trace.EventRecordCallbacks.fire_callbacks(self.cuda_event, stream)

    def wait(self, stream: int) -> None:
        gpu_trace.EventWaitCallbacks.fire_callbacks(self.cuda_event, stream)

    def synchronize(self) -> None:
        gpu_trace.EventSynchronizationCallbacks.fire_callbacks(self.cuda_event)

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return 1.0


class FakeStream:
    """``torch.cuda.Stream``."""

    def __init__(self, handle: int, done: bool = True) -> None:
        self.handle = handle
        self.done = done

    def query(self) -> bool:
        return self.done


class FakeGraph:
    """``torch.cuda.CUDAGraph``."""

    def capture_begin(self) -> None:
        return None

    def capture_end(self) -> None:
        return None

    def replay(self) -> None:
        return None


class FakeCuda:
    """See the module's text; also a ``TorchLayer``."""

    def __init__(self, refusal: str | None = None) -> None:
        self._memory = np.zeros(64 * BLOCK, dtype=np.uint8)
        self._pinned = np.zeros(16 * BLOCK, dtype=np.uint8)
        self._free = list(range(0, self._memory.size, BLOCK))[::-1]
        self._free_pinned = list(range(0, self._pinned.size, BLOCK))[::-1]
        self._start = self._memory.ctypes.data
        self._pinned_start = self._pinned.ctypes.data
        self._owned: dict[int, Any] = {}
        self._refusal = refusal
        self.stream = 0
        self.events = 0

    # -- what programs use
    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        offset = self._free.pop()
        tensor = self._make(self._memory, offset, shape, dtype)
        gpu_trace.MemoryAllocationCallbacks.fire_callbacks(self._start + offset)
        return tensor

    def pinned(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return self._make(self._pinned, self._free_pinned.pop(), shape, dtype)

    def _make(
        self, memory: np.ndarray, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        count = int(np.prod(shape)) * dtype.itemsize
        owner = memory[offset : offset + count]
        on_device = memory is self._memory

        def died(_: object) -> None:
            del self._owned[offset + (0 if on_device else BLOCK * 1000)]
            if on_device:
                gpu_trace.MemoryDeallocationCallbacks.fire_callbacks(self._start + offset)
                self._free.append(offset)
            else:
                self._free_pinned.append(offset)

        self._owned[offset + (0 if on_device else BLOCK * 1000)] = weakref.ref(owner, died)
        return torch.from_numpy(owner).view(dtype).reshape(shape)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def join(self, waiting: int, stream: int) -> None:
        event = FakeEvent(self)
        event.record(stream)
        event.wait(waiting)

    def synchronize(self) -> None:
        gpu_trace.DeviceSynchronizationCallbacks.fire_callbacks()

    # -- TorchLayer
    def refusal(self) -> str | None:
        return self._refusal

    def activate(self) -> None:
        return None

    def is_device(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        return 0 <= tensor.data_ptr() - self._start < self._memory.size

    def is_pinned(self, tensor: Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._pinned_start < self._pinned.size

    def current_device(self) -> int:
        return 0

    def current_stream(self, index: int) -> int:
        return self.stream

    def stream_key(self, stream: Any) -> int:
        if isinstance(stream, FakeStream):
            return stream.handle
        return stream if isinstance(stream, int) else int(stream.stream_id)

    def live_blocks(self) -> list[tuple[int, int, int, bool]]:
        return [
            (self._start + offset, BLOCK, 0, False)
            for offset in self._owned
            if offset < self._memory.size
        ]

    def reserved(self) -> int:
        return -1

    def patches(self) -> tuple[Any, Any, Any]:
        return FakeEvent, FakeStream, FakeGraph

"""The virtual device's pinned host allocator, with the rules of PyTorch's caching host allocator.

Sizes round up to a power of two, and each size has its own free list, last in first out. A freed
buffer that copies used comes back only when the events made at its free are done; the events are
looked at oldest first when a buffer is asked for, and the first one that is not done stops the
look. Kernels that write a buffer through its mapped alias are **not** known to the allocator:
nothing guards those, so their reach into a freed buffer is found by its generation.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from atom.device.arena import SegmentSpace
from atom.device.caching_allocator import Work
from atom.errors import DeviceOutOfMemory

#: buffers below it share a page in the arena's bookkeeping only; addresses stay apart
ALIGNMENT_BYTES = 512


@dataclass(eq=False, slots=True)
class PinnedBuffer:
    """A pinned host buffer.

    Attributes:
        offset, size: place in the pinned arena in bytes.
        generation: rises with every allocation and every free; odd while somebody owns it.
        streams: streams of copies that used it since its allocation.
        events: marks that have to pass before it can be handed out again.
        site: ``file:line`` that asked for it last.
    """

    offset: int
    size: int
    generation: int = 0
    streams: set[int] = field(default_factory=set)
    events: int = 0
    site: str = ""
    reference: Any = None


class PinnedAllocator:
    """See the module's text.

    Args:
        size: bytes of the pinned arena.
        work: the queued work that reuse may have to wait for.
    """

    def __init__(self, size: int, work: Work) -> None:
        self._space = SegmentSpace(size)
        self._work = work
        self._free: dict[int, list[PinnedBuffer]] = {}
        self._waiting: deque[tuple[Any, PinnedBuffer]] = deque()
        self._offsets: list[int] = []
        self._buffers: dict[int, PinnedBuffer] = {}
        self._slab = (0, 0)
        self.allocations = 0
        self.reuses = 0

    def allocate(self, nbytes: int, *, site: str = "") -> PinnedBuffer:
        """A buffer of at least ``nbytes`` (at least 1).

        Raises:
            DeviceOutOfMemory: the pinned arena is full.
        """
        self._process_events()
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.get(size)
        if free:
            buffer = free.pop()
            self.reuses += 1
        else:
            buffer = PinnedBuffer(self._take(size, nbytes), size)
            bisect.insort(self._offsets, buffer.offset)
            self._buffers[buffer.offset] = buffer
            self._work.segment_cost()
        buffer.generation += 1
        buffer.site = site
        self.allocations += 1
        return buffer

    def _take(self, size: int, nbytes: int) -> int:
        reach = max(size, ALIGNMENT_BYTES)
        start, left = self._slab
        if reach <= left:
            self._slab = (start + reach, left - reach)
            return start
        slab = max(reach, 2 * 2**20)
        offset = self._space.take(slab)
        if offset is None:
            owned = sum(b.size for b in self._buffers.values() if b.generation % 2)
            raise DeviceOutOfMemory(
                f"out of pinned host memory: {nbytes} bytes requested (a buffer of {size}); "
                f"capacity {self._space.size}, owned {owned}, largest hole {self._space.largest}; "
                "drop pinned tensors or give the device more pinned_bytes"
            )
        self._slab = (offset + reach, slab - reach)
        return offset

    def find(self, offset: int) -> PinnedBuffer | None:
        """The buffer that holds byte ``offset`` of the arena."""
        index = bisect.bisect_right(self._offsets, offset) - 1
        if index < 0:
            return None
        buffer = self._buffers[self._offsets[index]]
        return buffer if offset < buffer.offset + buffer.size else None

    def record_copy(self, buffer: PinnedBuffer, stream_id: int) -> None:
        """A copy on ``stream_id`` uses ``buffer``."""
        buffer.streams.add(stream_id)

    def free(self, buffer: PinnedBuffer) -> None:
        """The owner let go of ``buffer``."""
        buffer.generation += 1
        buffer.reference = None
        if not buffer.streams:
            self._free.setdefault(buffer.size, []).append(buffer)
            return
        for stream_id in sorted(buffer.streams):
            self._waiting.append((self._work.mark(stream_id), buffer))
            buffer.events += 1
        buffer.streams.clear()

    def _process_events(self) -> None:
        while self._waiting and self._work.passed(self._waiting[0][0]):
            buffer = self._waiting.popleft()[1]
            buffer.events -= 1
            if buffer.events == 0:
                self._free.setdefault(buffer.size, []).append(buffer)

"""The virtual device's caching allocator, with the rules of PyTorch's CUDA caching allocator.

Rules (c10/cuda/CUDACachingAllocator.cpp): sizes round up to 512 bytes; requests up to 1 MiB come
from a small pool of 2 MiB segments, others from a large pool of 20 MiB segments, or of their own
size rounded up to 2 MiB from 10 MiB on; a free block serves its own stream only, best fit by size
and then address; the rest of a block is split off when it is at least 512 bytes (small pool) or
more than 1 MiB (large pool); a freed block merges with free neighbours. A block that other streams
were recorded on returns only after the events made at its free are done, which is looked at when
the next block is asked for.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from atom.device.allocator_statistics import AllocatorStatistics
from atom.device.arena import SegmentSpace
from atom.errors import DeviceError, DeviceOutOfMemory

MINIMUM_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
OWN_SEGMENT_FROM_BYTES = 10 * 2**20
SEGMENT_ROUNDING_BYTES = 2 * 2**20


def round_size(nbytes: int) -> int:
    """Bytes of the block that serves a request of ``nbytes``."""
    return max(MINIMUM_BLOCK_BYTES, -(-nbytes // MINIMUM_BLOCK_BYTES) * MINIMUM_BLOCK_BYTES)


def segment_size(block_bytes: int) -> int:
    """Bytes of the segment that is asked for when no cached block fits."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_FROM_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


class Work(Protocol):
    """What the allocator needs to know of queued work."""

    def mark(self, stream_id: int) -> Any:
        """A mark at the present end of the stream (an event record)."""

    def passed(self, mark: Any) -> bool:
        """Whether all work before the mark has run."""

    def wait(self, mark: Any) -> None:
        """Block the host until the mark has passed."""

    def wait_all(self) -> None:
        """Block the host until all work has run."""

    def segment_cost(self) -> None:
        """Charge the host for getting or returning a segment."""


@dataclass(eq=False)
class Pool:
    """Free blocks of one size class: a sorted list of (size, offset, block) for each stream."""

    small: bool
    free: dict[int, list[tuple[int, int, Block]]] = field(default_factory=dict)


@dataclass(eq=False)
class PoolPair:
    """The small and the large pool of the device or of one graph."""

    small: Pool = field(default_factory=lambda: Pool(True))
    large: Pool = field(default_factory=lambda: Pool(False))
    released: bool = False
    segments: int = 0


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment: with its user, waiting for events, or free.

    Attributes:
        offset, size: place in the arena in bytes.
        stream_id: the stream that owns the segment.
        requested: bytes that the caller asked for.
        used_by: other streams that were recorded on it.
        events: marks that have to pass before it is free.
        site: ``file:line`` that asked for it.
        label: what the caller calls it.
        allocated_at: host seconds.
    """

    offset: int
    size: int
    stream_id: int
    pool: Pool
    pair: PoolPair
    previous: Block | None = None
    next: Block | None = None
    requested: int = 0
    allocated: bool = False
    used_by: set[int] = field(default_factory=set)
    events: int = 0
    site: str = ""
    label: str = ""
    allocated_at: float = 0.0
    reference: Any = None


class CachingAllocator:
    """See the module's text.

    Args:
        size: bytes of the arena.
        work: the queued work that frees may have to wait for.
        clock: host seconds, stamped on blocks.
    """

    def __init__(self, size: int, work: Work, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._space = SegmentSpace(size)
        self._work = work
        self._clock = clock
        self._public = PoolPair()
        self._private: list[PoolPair] = []
        self._capture: PoolPair | None = None
        self._deferred: list[Block] = []
        self._waiting: dict[int, deque[tuple[Any, Block]]] = {}
        self._statistics = AllocatorStatistics()
        #: blocks with a user, by offset
        self.live: dict[int, Block] = {}

    # -- allocation
    def allocate(self, nbytes: int, stream_id: int, *, site: str = "") -> Block:
        """A block of at least ``nbytes`` (at least 1) for ``stream_id``.

        Raises:
            DeviceOutOfMemory: also after every cached segment was returned.
        """
        self._process_events()
        size = round_size(nbytes)
        pair = self._capture or self._public
        pool = pair.small if size <= SMALL_REQUEST_BYTES else pair.large
        block = self._best_fit(pool, size, stream_id)
        if block is None:
            block = self._new_segment(pair, pool, size, stream_id)
        if block is None and self._capture is None:
            self._statistics.retries += 1
            self._release_cached()
            block = self._new_segment(pair, pool, size, stream_id)
        if block is None:
            self._statistics.failures += 1
            raise DeviceOutOfMemory(self._explain(nbytes, size, site))
        self._split(block, size)
        block.requested = nbytes
        block.allocated = True
        block.site = site
        block.label = ""
        block.allocated_at = self._clock()
        self.live[block.offset] = block
        kind = block.pool.small
        self._statistics.count("allocation", kind, 1)
        self._statistics.count("allocated_bytes", kind, block.size)
        self._statistics.count("requested_bytes", kind, nbytes)
        self._statistics.count("active", kind, 1)
        self._statistics.count("active_bytes", kind, block.size)
        return block

    def _best_fit(self, pool: Pool, size: int, stream_id: int) -> Block | None:
        free = pool.free.get(stream_id)
        if not free:
            return None
        index = bisect.bisect_left(free, (size, -1))
        if index == len(free):
            return None
        block = free.pop(index)[2]
        self._count_split(block, -1)
        return block

    def _new_segment(self, pair: PoolPair, pool: Pool, size: int, stream_id: int) -> Block | None:
        nbytes = segment_size(size)
        offset = self._space.take(nbytes)
        if offset is None:
            return None
        self._work.segment_cost()
        pair.segments += 1
        self._statistics.count("segment", pool.small, 1)
        self._statistics.count("reserved_bytes", pool.small, nbytes)
        return Block(offset, nbytes, stream_id, pool, pair)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if not (rest >= MINIMUM_BLOCK_BYTES if block.pool.small else rest > SMALL_REQUEST_BYTES):
            return
        remainder = Block(
            block.offset + size, rest, block.stream_id, block.pool, block.pair, block, block.next
        )
        if block.next is not None:
            block.next.previous = remainder
        block.next = remainder
        block.size = size
        self._insert(remainder)

    # -- free
    def record_stream(self, block: Block, stream_id: int) -> None:
        """``stream_id`` uses ``block``: its free waits for that stream. The owner has no effect."""
        if stream_id != block.stream_id:
            block.used_by.add(stream_id)

    def free(self, block: Block) -> None:
        """The user let go of ``block``."""
        block.allocated = False
        block.reference = None
        del self.live[block.offset]
        kind = block.pool.small
        self._statistics.count("allocation", kind, -1)
        self._statistics.count("allocated_bytes", kind, -block.size)
        if not block.used_by:
            self._return(block)
        elif self._capture is not None:
            self._deferred.append(block)
        else:
            self._insert_events(block)

    def _insert_events(self, block: Block) -> None:
        for stream_id in sorted(block.used_by):
            mark = self._work.mark(stream_id)
            self._waiting.setdefault(stream_id, deque()).append((mark, block))
            block.events += 1
        block.used_by.clear()

    def _process_events(self) -> None:
        if self._capture is not None:
            # an event query is not allowed while a graph is captured
            return
        if self._deferred:
            deferred, self._deferred = self._deferred, []
            for block in deferred:
                self._insert_events(block)
        for waiting in self._waiting.values():
            while waiting and self._work.passed(waiting[0][0]):
                block = waiting.popleft()[1]
                block.events -= 1
                if block.events == 0:
                    self._return(block)

    def _return(self, block: Block) -> None:
        kind = block.pool.small
        self._statistics.count("active", kind, -1)
        self._statistics.count("active_bytes", kind, -block.size)
        self._statistics.count("requested_bytes", kind, -block.requested)
        for neighbour in (block.previous, block.next):
            if neighbour is not None and self._is_free(neighbour):
                self._remove(neighbour)
                if neighbour is block.previous:
                    block.offset = neighbour.offset
                    block.previous = neighbour.previous
                    if block.previous is not None:
                        block.previous.next = block
                else:
                    block.next = neighbour.next
                    if block.next is not None:
                        block.next.previous = block
                block.size += neighbour.size
        self._insert(block)

    @staticmethod
    def _is_free(block: Block) -> bool:
        return not block.allocated and not block.events and not block.used_by

    def _insert(self, block: Block) -> None:
        free = block.pool.free.setdefault(block.stream_id, [])
        bisect.insort(free, (block.size, block.offset, block))
        self._count_split(block, 1)

    def _remove(self, block: Block) -> None:
        free = block.pool.free[block.stream_id]
        del free[bisect.bisect_left(free, (block.size, block.offset))]
        self._count_split(block, -1)

    # -- giving segments back
    def empty_cache(self) -> None:
        """Return every segment that is wholly free, waiting for recorded streams first.

        Raises:
            DeviceError: inside a capture.
        """
        if self._capture is not None:
            raise DeviceError("empty_cache inside a graph capture: end the capture first")
        self._release_cached()

    def _release_cached(self) -> None:
        self._process_events()
        for waiting in self._waiting.values():
            for mark, _ in waiting:
                self._work.wait(mark)
        self._process_events()
        # returning memory to the driver waits for the device, as cudaFree does
        self._work.wait_all()
        for pair in [self._public, *(pair for pair in self._private if pair.released)]:
            for pool in (pair.small, pair.large):
                for free in pool.free.values():
                    for _, offset, block in list(free):
                        if block.previous is None and block.next is None:
                            self._remove(block)
                            self._space.give(offset, block.size)
                            self._work.segment_cost()
                            pair.segments -= 1
                            self._statistics.count("segment", pool.small, -1)
                            self._statistics.count("reserved_bytes", pool.small, -block.size)
        self._private = [p for p in self._private if not p.released or p.segments]

    # -- private pools
    def begin_capture(self) -> PoolPair:
        """Allocations come from a new private pool until :meth:`end_capture`."""
        self._capture = PoolPair()
        self._private.append(self._capture)
        return self._capture

    def end_capture(self) -> None:
        """Allocations come from the device's own pools again."""
        self._capture = None

    def release_pool(self, pair: PoolPair) -> None:
        """The graph of ``pair`` died: its free segments may go back when memory is needed."""
        pair.released = True

    # -- statistics
    def _count_split(self, block: Block, sign: int) -> None:
        if block.previous is not None or block.next is not None:
            self._statistics.count("inactive_split", block.pool.small, sign)
            self._statistics.count("inactive_split_bytes", block.pool.small, sign * block.size)

    def statistics(self) -> dict[str, int]:
        """Counters by PyTorch's names."""
        return self._statistics.figures()

    def _explain(self, nbytes: int, size: int, site: str) -> str:
        figures = self.statistics()
        reserved = figures["reserved_bytes.all.current"]
        allocated = figures["allocated_bytes.all.current"]
        waiting = figures["active_bytes.all.current"] - allocated
        pairs = [self._public, *self._private]
        cached = [
            block_size
            for pair in pairs
            for pool in (pair.small, pair.large)
            for free in pool.free.values()
            for block_size, _, _ in free
        ]
        holders = sorted(self.live.values(), key=lambda block: -block.size)
        lines = [
            f"out of device memory: {nbytes} bytes requested (a block of {size}, a segment of "
            f"{segment_size(size)}){f' at {site}' if site else ''}",
            f"  capacity {self._space.size}, reserved {reserved}, allocated {allocated}, waiting "
            f"for recorded streams {waiting}",
            f"  free: {self._space.size - reserved} not reserved (largest hole "
            f"{self._space.largest}), {sum(cached)} cached in blocks (largest "
            f"{max(cached, default=0)})",
            f"  held by {len(holders)} live blocks, largest first:",
        ]
        lines += [
            f"    {block.size} bytes, stream {block.stream_id}, "
            f"{block.label + ', ' if block.label else ''}{block.site or 'unknown place'}"
            for block in holders[:5]
        ]
        return "\n".join(
            [*lines, "  drop tensors, lower the batch, or give the device more memory"]
        )

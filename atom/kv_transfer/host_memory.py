"""The pinned memory of a host pool: slabs, and the pieces of them that an entry lies in.

Pinned allocators round a buffer up to a power of two, so a pool is made of slabs of a power of two
and wastes nothing but the rest of its last one.

Pinning takes time: one thread clears every page. PyTorch can share that out among threads
(``PYTORCH_CUDA_ALLOC_CONF=pinned_use_cuda_host_register:True,pinned_num_register_threads:8``). A
slab is taken from the memory node that its GPU hangs on, if the process may run there.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from atom.device.interface import Device
from atom.errors import AtomError
from atom.kv_transfer.pool_entry import Entry

#: largest slab
_SLAB_BYTES = 2**30


class Extents:
    """Hands out ranges of ``[0, size)``, in pieces if need be: lowest free address first.

    Args:
        size: bytes.
        border: no piece crosses a multiple of it.
    """

    def __init__(self, size: int, border: int) -> None:
        self.free_bytes = size
        self._border = border
        self._starts = list(range(0, size, border))
        self._ends = [min(start + border, size) for start in self._starts]

    def take(self, nbytes: int) -> tuple[tuple[int, int], ...]:
        """Pieces ``(start, length)`` of ``nbytes`` together: one if a gap fits, else the first.

        Raises:
            MemoryAccountFault: fewer are free.
        """
        if nbytes > self.free_bytes:
            raise MemoryAccountFault(f"{nbytes} bytes asked for, {self.free_bytes} are free")
        self.free_bytes -= nbytes
        starts, ends = self._starts, self._ends
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end - start >= nbytes:
                self._cut(place, nbytes)
                return ((start, nbytes),)
        pieces: list[tuple[int, int]] = []
        while nbytes:
            length = min(nbytes, ends[0] - starts[0])
            pieces.append((starts[0], length))
            self._cut(0, length)
            nbytes -= length
        return tuple(pieces)

    def _cut(self, place: int, length: int) -> None:
        self._starts[place] += length
        if self._starts[place] == self._ends[place]:
            del self._starts[place], self._ends[place]

    def give(self, pieces: tuple[tuple[int, int], ...]) -> None:
        """Take back what :meth:`take` gave; neighbours grow together."""
        starts, ends = self._starts, self._ends
        for start, length in pieces:
            end = start + length
            place = bisect.bisect_left(starts, start)
            joins_next = place < len(starts) and starts[place] == end and end % self._border
            joins_last = place > 0 and ends[place - 1] == start and start % self._border
            if joins_last and joins_next:
                ends[place - 1] = ends[place]
                del starts[place], ends[place]
            elif joins_last:
                ends[place - 1] = end
            elif joins_next:
                starts[place] = start
            else:
                starts.insert(place, start)
                ends.insert(place, end)
            self.free_bytes += length


class MemoryAccountFault(AtomError):
    """More pinned memory was asked for than there is: pool and memory disagree."""


class EntryMemory(Protocol):
    """Host memory in which a pool's entries lie. ``Entry.place`` belongs to it."""

    def take(self, entry: Entry) -> None:
        """Give a new entry its place."""

    def give(self, entry: Entry) -> None:
        """The entry is gone: take its place back."""

    def views(self, entry: Entry, start: int, length: int) -> Iterator[tuple[Tensor, int]]:
        """Bytes ``start`` to ``start + length`` of an entry.

        Yields:
            A pinned uint8 view, and how far behind ``start`` it begins.
        """


class HostMemory:
    """Pinned memory of a pool, in slabs; see :class:`EntryMemory`.

    Args:
        device: it is pinned for.
        nbytes: size.

    Attributes:
        extents: which of it is taken.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._slab = min(_SLAB_BYTES, 1 << max(nbytes - 1, 1).bit_length())
        self.nbytes = nbytes
        self.extents = Extents(nbytes, self._slab)
        self._slabs = [
            device.pinned((min(self._slab, nbytes - start),), torch.uint8)
            for start in range(0, nbytes, self._slab)
        ]

    def take(self, entry: Entry) -> None:
        """See :class:`EntryMemory`; an entry's place is its pieces ``(start, length)``."""
        entry.place = self.extents.take(entry.occupied)

    def give(self, entry: Entry) -> None:
        """See :class:`EntryMemory`."""
        self.extents.give(entry.place)

    def views(self, entry: Entry, start: int, length: int) -> Iterator[tuple[Tensor, int]]:
        """See :class:`EntryMemory`."""
        done = 0
        for origin, size in entry.place:
            if start >= size:
                start -= size
                continue
            count = min(size - start, length - done)
            slab, offset = divmod(origin + start, self._slab)
            yield self._slabs[slab][offset : offset + count], done
            done += count
            start = 0
            if done == length:
                return

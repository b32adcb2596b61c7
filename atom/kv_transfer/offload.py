"""Stores KV chunks and state images into pinned host memory and loads them back, beside compute.

It moves bytes and says when they have moved; what is in the host pool and who owns a block is its
caller's business. Not thread-safe: one host thread runs an engine.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from atom.device.interface import Device, DeviceKind, Event, Stream
from atom.errors import DeviceOutOfMemory
from atom.kv_transfer.host_memory import EntryMemory
from atom.kv_transfer.host_pool import Entry
from atom.kv_transfer.pack_kernels import (
    PACK_BLOCKS,
    PACK_ROWS,
    PACK_STATE,
    UNPACK_BLOCKS,
    UNPACK_ROWS,
    UNPACK_STATE,
    padded,
    row_numbers,
    words_of,
)
from atom.transfer.pinned_ring import PinnedRing, PinnedRingFull

_PIECE_BYTES = 32 * 2**20


class ChunkCopy(NamedTuple):
    """Blocks of a KV chunk, to be stored into or loaded from its entry.

    Attributes:
        entry: its entry, with its place in host memory.
        blocks: KV blocks of the device.
        places: which blocks of the chunk they are, ascending.
    """

    entry: Entry
    blocks: tuple[int, ...]
    places: tuple[int, ...]


class StateCopy(NamedTuple):
    """A state image, to be stored from or loaded into a checkpoint slot."""

    entry: Entry
    slot: int


@dataclass(eq=False)
class TransferJob:
    """One staging block's worth of copies on its way.

    Attributes:
        chunks, states: what it moves.
        nbytes: how much.
        done: completes when all of it has arrived.
        sources_read: of a store: completes when the pools have been read, which is earlier.
        held: staging and index tensors, kept until ``done`` was seen.
    """

    chunks: tuple[ChunkCopy, ...]
    states: tuple[StateCopy, ...]
    nbytes: int
    done: Event
    sources_read: Event | None = None
    held: list[Tensor] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        """What it stores or loads."""
        return [chunk.entry for chunk in self.chunks] + [state.entry for state in self.states]


class Offload:
    """The copies of a CPU tier.

    Args:
        device: where the pools lie.
        kv_pools: KV pools ``[layers, 2, blocks, block size, HKV, DH]``; the MTP layer's has one.
        checkpoints: conv rows ``[layers, slots, W - 1, D]``, states ``[layers, slots, HV, K, V]``.
        memory: pinned memory of the host pool.
        chunk_blocks: KV blocks of a chunk.
        most_bytes_in_flight: of stores under way; also of staging that a load holds at once.
        piece_bytes: about how much goes through one staging block.
        by_rows: which KV kernels; ``None`` takes those of the device's kind.
    """

    def __init__(
        self,
        device: Device,
        kv_pools: Sequence[Tensor],
        checkpoints: tuple[Tensor, Tensor],
        memory: EntryMemory,
        *,
        chunk_blocks: int,
        most_bytes_in_flight: int = 512 * 2**20,
        piece_bytes: int = _PIECE_BYTES,
        by_rows: bool | None = None,
    ) -> None:
        self.device = device
        self.memory = memory
        self.chunk_blocks = chunk_blocks
        self.most_bytes_in_flight = most_bytes_in_flight
        self._piece_bytes = piece_bytes
        self._pools = tuple(kv_pools)
        self._checkpoints = checkpoints
        self._by_rows = device.properties.kind is not DeviceKind.VIRTUAL
        if by_rows is not None:
            self._by_rows = by_rows
        self._words = [words_of(pool) for pool in self._pools]
        self._block_bytes = [
            pool.numel() * pool.element_size() // pool.shape[2] for pool in self._pools
        ]
        conv, recurrent = checkpoints
        self.state_bytes = padded(_slot_bytes(conv)) + _slot_bytes(recurrent)
        # Contract of the two streams. Each copy needs three edges:
        #   (a) producer before copy. A store waits on an event of the default stream, recorded
        #       behind the work that filled the blocks. A load takes only entries whose store was
        #       seen to end.
        #   (b) copy before reader. An entry is loadable after `done` was seen. Whoever computes on
        #       loaded blocks either saw `done`, or made the default stream wait on it (`join`).
        #   (c) copy before the bytes are written again. Blocks, checkpoint slots and entries live
        #       on in pools, where no reference keeps their bytes: their owner pins them until
        #       `sources_read` or `done` was seen. And since the last owner of a load's target may
        #       still have work queued on the default stream, a load writes behind an event of it.
        # Staging blocks belong to the one stream that uses them. They are held beside the copy's
        # own event all the same; a load larger than the bound lets the older ones go in stream
        # order.
        self.store_stream: Stream = device.new_stream()
        self.load_stream: Stream = device.new_stream()
        self._ids = PinnedRing(device, max_slots=256)
        self._produced = device.new_event()
        self._events: list[Event] = []
        self.stores: deque[TransferJob] = deque()
        self.loads: deque[TransferJob] = deque()
        self.store_bytes_in_flight = 0
        self.stored_bytes = self.loaded_bytes = 0

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a KV entry."""
        return self.chunk_blocks * sum(self._block_bytes)

    def has_room(self, nbytes: int, planned: int = 0) -> bool:
        """Whether a store keeps within what may be in flight; one is always let through.

        Args:
            nbytes: its bytes.
            planned: bytes of stores that are about to be queued.
        """
        busy = self.store_bytes_in_flight + planned
        return not busy or busy + nbytes <= self.most_bytes_in_flight

    # -- store
    def store(self, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]) -> list[TransferJob]:
        """Queue stores behind what the default stream has been given so far.

        Args:
            chunks: whole chunks, pinned until ``sources_read``.
            states: checkpoint slots, likewise; entries are pinned until ``done``.

        Returns:
            The jobs, in the order in which they will end. Without room for a staging block, what
            is in none of them was not queued.
        """
        self._produced.record(self.device.default_stream)
        self.store_stream.wait_event(self._produced)
        jobs = []
        with contextlib.suppress(DeviceOutOfMemory):
            for piece in self._pieces(chunks, states):
                jobs.append(self._store_piece(*piece))
        return jobs

    def _store_piece(
        self, chunks: tuple[ChunkCopy, ...], states: tuple[StateCopy, ...]
    ) -> TransferJob:
        stream, device = self.store_stream, self.device
        nbytes = self._size(chunks, states)
        staging = device.empty((nbytes,), torch.uint8, stream=stream)
        job = TransferJob(chunks, states, nbytes, self._event(), self._event(), [staging])
        self._move_blocks(staging, chunks, stream, job.held, pack=True)
        for state, part in self._state_parts(staging, chunks, states):
            device.launch(PACK_STATE, self._slot(state.slot), (part,), stream=stream)
        assert job.sources_read is not None
        job.sources_read.record(stream)
        for entry, start, part in self._ranges(staging, chunks, states):
            for host, offset in self.memory.views(entry, start, part.numel()):
                device.copy(host, part[offset : offset + host.numel()], stream=stream)
        job.done.record(stream)
        self.stores.append(job)
        self.store_bytes_in_flight += job.nbytes
        self.stored_bytes += job.nbytes
        return job

    # -- load
    def load(self, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]) -> TransferJob:
        """Queue loads; the host's memory is read at once, the pools are written behind what the
        default stream has been given so far.

        Args:
            chunks: blocks to fill. Blocks and entries are pinned until ``done`` of the last job.
            states: checkpoint slots to fill, likewise.

        Returns:
            The last of the jobs; the others end before.

        Raises:
            DeviceOutOfMemory: there is no room for staging; nothing is under way.
        """
        before = len(self.loads)
        try:
            return self._load(chunks, states)
        except DeviceOutOfMemory:
            # what was queued still writes its targets
            self.load_stream.synchronize()
            while len(self.loads) > before:
                self._retire(self.loads.pop())
            raise

    def _load(self, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]) -> TransferJob:
        self._produced.record(self.device.default_stream)
        waits = True
        staged: list[tuple[TransferJob, Tensor]] = []
        last: TransferJob | None = None
        held = 0
        for piece in self._pieces(chunks, states):
            nbytes = self._size(*piece)
            if staged and held + nbytes > self.most_bytes_in_flight:
                jobs = [job for job, _ in staged]
                self._unpack(staged, waits)
                waits, held = False, 0
                # the next staging block may lie there: this stream alone uses both, in order
                for job in jobs:
                    job.held.clear()
            last = TransferJob(*piece, nbytes, self._event())
            self.loads.append(last)
            staged.append((last, self._fetch(last)))
            held += nbytes
        self._unpack(staged, waits)
        assert last is not None
        return last

    def _fetch(self, job: TransferJob) -> Tensor:
        staging = self.device.empty((job.nbytes,), torch.uint8, stream=self.load_stream)
        job.held.append(staging)
        for entry, start, part in self._ranges(staging, job.chunks, job.states):
            for host, offset in self.memory.views(entry, start, part.numel()):
                piece = part[offset : offset + host.numel()]
                self.device.copy(piece, host, stream=self.load_stream)
        self.loaded_bytes += job.nbytes
        return staging

    def _unpack(self, staged: list[tuple[TransferJob, Tensor]], waits: bool) -> None:
        stream = self.load_stream
        if waits:
            stream.wait_event(self._produced)
        while staged:
            job, staging = staged.pop(0)
            self._move_blocks(staging, job.chunks, stream, job.held, pack=False)
            for state, part in self._state_parts(staging, job.chunks, job.states):
                self.device.launch(UNPACK_STATE, (part,), self._slot(state.slot), stream=stream)
            job.done.record(stream)

    def join(self, job: TransferJob) -> None:
        """Make the default stream wait for a load: what it is given from now on sees the blocks."""
        self.device.default_stream.wait_event(job.done)

    # -- ends
    def finished_reads(self) -> Iterator[TransferJob]:
        """Stores whose sources were read, each once, oldest first."""
        for job in self.stores:
            if job.sources_read is None:
                continue
            if not job.sources_read.query():
                return
            self._events.append(job.sources_read)
            job.sources_read = None
            yield job

    def finished_stores(self) -> Iterator[TransferJob]:
        """Stores that have ended, each once, oldest first; after :meth:`finished_reads`."""
        while self.stores and self.stores[0].sources_read is None and self.stores[0].done.query():
            job = self.stores.popleft()
            self.store_bytes_in_flight -= job.nbytes
            self._retire(job)
            yield job

    def finished_loads(self) -> Iterator[TransferJob]:
        """Loads that have ended, each once, oldest first."""
        while self.loads and self.loads[0].done.query():
            job = self.loads.popleft()
            self._retire(job)
            yield job

    def _retire(self, job: TransferJob) -> None:
        job.held.clear()
        self._events.append(job.done)

    def wait_for_reads(self) -> None:
        """Block the host until the oldest store has read its sources."""
        for job in self.stores:
            if job.sources_read is not None:
                job.sources_read.synchronize()
                return

    def wait_for_load(self) -> None:
        """Block the host until the oldest load has ended."""
        if self.loads:
            self.loads[0].done.synchronize()

    def close(self) -> None:
        """Wait for all copies."""
        # a device that failed has nothing left to wait for
        with contextlib.suppress(Exception):
            self.store_stream.synchronize()
            self.load_stream.synchronize()
        self.stores.clear()
        self.loads.clear()

    # -- parts
    def _event(self) -> Event:
        return self._events.pop() if self._events else self.device.new_event()

    def _slot(self, slot: int) -> tuple[Tensor, Tensor]:
        conv, recurrent = self._checkpoints
        return conv[:, slot], recurrent[:, slot]

    def _size(self, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]) -> int:
        blocks = sum(len(chunk.blocks) for chunk in chunks)
        return self._kv_region(blocks) + len(states) * padded(self.state_bytes)

    def _kv_region(self, blocks: int) -> int:
        return sum(padded(blocks * size) for size in self._block_bytes)

    def _pieces(
        self, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]
    ) -> Iterator[tuple[tuple[ChunkCopy, ...], tuple[StateCopy, ...]]]:
        """Whole chunks and states, as many as fit into a staging block, one at least."""
        group: list[ChunkCopy] = []
        blocks = 0
        for chunk in chunks:
            blocks += len(chunk.blocks)
            if group and self._kv_region(blocks) > self._piece_bytes:
                yield tuple(group), ()
                group, blocks = [], len(chunk.blocks)
            group.append(chunk)
        rest = list(states)
        if group and (not rest or self._size(group, rest[:1]) > self._piece_bytes):
            yield tuple(group), ()
            group = []
        while rest:
            yield tuple(group), (rest.pop(0),)
            group = []

    def _move_blocks(
        self,
        staging: Tensor,
        chunks: Sequence[ChunkCopy],
        stream: Stream,
        held: list[Tensor],
        *,
        pack: bool,
    ) -> None:
        blocks = [block for chunk in chunks for block in chunk.blocks]
        if not blocks:
            return
        start = 0
        launch = self.device.launch
        for pool, words, size in zip(self._pools, self._words, self._block_bytes, strict=True):
            part = staging[start : start + len(blocks) * size]
            start += padded(len(blocks) * size)
            if self._by_rows:
                rows = self._send_rows(pool, blocks, stream)
                held.append(rows)
                if pack:
                    launch(PACK_ROWS, (rows, words), (part,), stream=stream)
                else:
                    launch(UNPACK_ROWS, (rows, part), (words,), stream=stream)
                continue
            views = tuple(pool[:, :, block] for block in blocks)
            if pack:
                launch(PACK_BLOCKS, views, (part,), stream=stream)
            else:
                launch(UNPACK_BLOCKS, (part,), views, stream=stream)

    def _send_rows(self, pool: Tensor, blocks: Sequence[int], stream: Stream) -> Tensor:
        numbers = row_numbers(pool.shape[0], pool.shape[2], blocks)
        rows = self.device.empty(numbers.shape, torch.int64, stream=stream)
        try:
            slot = self._ids.acquire(numbers.nbytes)
        except PinnedRingFull:
            # a load of very many pieces: its first ones are on their way
            stream.synchronize()
            slot = self._ids.acquire(numbers.nbytes)
        staged = slot.tensor[: numbers.nbytes].view(torch.int64)
        staged.numpy()[:] = numbers
        self.device.copy(rows, staged, stream=stream)
        slot.event.record(stream)
        self._ids.release(slot)
        return rows

    def _ranges(
        self, staging: Tensor, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]
    ) -> Iterator[tuple[Entry, int, Tensor]]:
        """Each contiguous piece: its entry, where in the entry it begins, and its staging bytes."""
        blocks = sum(len(chunk.blocks) for chunk in chunks)
        region = origin = 0
        for size in self._block_bytes:
            cursor = region
            for chunk in chunks:
                for first, count in _runs(chunk.places):
                    part = staging[cursor : cursor + count * size]
                    yield chunk.entry, origin + first * size, part
                    cursor += count * size
            region += padded(blocks * size)
            origin += self.chunk_blocks * size
        for state, part in self._state_parts(staging, chunks, states):
            yield state.entry, 0, part

    def _state_parts(
        self, staging: Tensor, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]
    ) -> Iterator[tuple[StateCopy, Tensor]]:
        start = self._kv_region(sum(len(chunk.blocks) for chunk in chunks))
        for state in states:
            yield state, staging[start : start + self.state_bytes]
            start += padded(self.state_bytes)


def _slot_bytes(pool: Tensor) -> int:
    return prod((pool.shape[0], *pool.shape[2:])) * pool.element_size()


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours among ascending numbers: the first of each run, and how many."""
    start = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield places[start], index - start
            start = index

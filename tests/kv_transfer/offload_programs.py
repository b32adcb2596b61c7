"""Programs over the tier's copies for exploration and sanitizer: right ones, and faulty ones.

A step on the default stream fills a KV block and a checkpoint slot. They are stored, their owner
ends, and whoever gets them next fills them again. Later they are loaded into another block and
slot, from which the default stream computes. The faults: a store whose blocks are given away
before it has read them, and a load whose blocks are given away before it has written them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atom.device.interface import Device, Kernel
from atom.kv_transfer.host_memory import HostMemory
from atom.kv_transfer.host_pool import Entry, EntryKind, HostPool, PoolKey
from atom.kv_transfer.offload import ChunkCopy, Offload, StateCopy

BLOCKS, SLOTS = 4, 2


def fill_body(reads: Sequence[Tensor], writes: Sequence[Tensor], value: int) -> None:
    for tensor in writes:
        tensor.fill_(value)


def read_body(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    for place, tensor in enumerate(reads):
        writes[0][2 * place] = tensor.min().long()
        writes[0][2 * place + 1] = tensor.max().long()


FILL = Kernel("compute", fill_body)
READ = Kernel("attend", read_body)


class Bench:
    """Pools of two layers, a host pool for one chunk of one block and one state."""

    def __init__(self, device: Device, *, by_rows: bool | None = None) -> None:
        self.device = device
        self.kv = device.empty((1, 2, BLOCKS, 1, 1, 4), torch.float32)
        self.conv = device.empty((1, SLOTS, 1, 4), torch.float32)
        self.recurrent = device.empty((1, SLOTS, 1, 2, 2), torch.float32)
        self.pool = HostPool(2 * 64, alignment=64)
        self.offload = Offload(
            device,
            (self.kv,),
            (self.conv, self.recurrent),
            HostMemory(device, self.pool.capacity_bytes),
            chunk_blocks=1,
            by_rows=by_rows,
        )
        self.result = device.empty((6,), torch.int64)
        self.host = device.pinned((6,), torch.int64)

    def reserve(self, kind: EntryKind) -> Entry:
        offload = self.offload
        nbytes = offload.chunk_bytes if kind is EntryKind.KV else offload.state_bytes
        entry = self.pool.reserve(PoolKey(kind, 1), nbytes)
        assert isinstance(entry, Entry)
        offload.memory.take(entry)
        return entry

    def compute(self, value: int, block: int, slot: int | None = None) -> None:
        """A step of a request: it fills its block, and its checkpoint."""
        writes = [self.kv[:, :, block]]
        if slot is not None:
            writes += [self.conv[:, slot], self.recurrent[:, slot]]
        self.device.launch(FILL, (), tuple(writes), scalars=(value,))

    def attend(self, block: int, slot: int) -> None:
        """A step that reads a block and a checkpoint."""
        reads = (self.kv[:, :, block], self.conv[:, slot], self.recurrent[:, slot])
        self.device.launch(READ, reads, (self.result,))


@dataclass(frozen=True)
class OffloadProgram:
    """Store, evict, load, compute.

    Attributes:
        waits_for_reads: the stored block is given away after the store has read it only.
        waits_for_load: an aborted request's block is given away after its load has ended only.
        aborts: the request ends before its load does; its block goes to another.
        joins: the default stream waits for the load; else the host does, if it ``host_waits``.
        load_waits: the load writes behind the default stream's earlier work.
        store_waits: the store reads behind the work that filled its blocks.
        lands_late: the entry is loaded after its store was seen to end only.
        by_rows: see :class:`Offload`.
    """

    waits_for_reads: bool = True
    waits_for_load: bool = True
    aborts: bool = False
    joins: bool = True
    host_waits: bool = True
    load_waits: bool = True
    store_waits: bool = True
    lands_late: bool = True
    by_rows: bool | None = None

    def __call__(self, device: Device) -> Hashable:
        """Run once; returns what the last step read, as the host got it."""
        bench = Bench(device, by_rows=self.by_rows)
        offload, pool = bench.offload, bench.pool
        bench.compute(7, 0, 0)
        if not self.store_waits:
            offload.store_stream.wait_event = lambda event: None  # type: ignore[method-assign]
        kv, state = bench.reserve(EntryKind.KV), bench.reserve(EntryKind.STATE)
        [job] = offload.store([ChunkCopy(kv, (0,), (0,))], [StateCopy(state, 0)])
        if self.waits_for_reads:
            offload.wait_for_reads()
        # the request has ended: another gets the block, and another the checkpoint slot
        bench.compute(9, 0, 0)
        if self.lands_late:
            job.done.synchronize()
            list(offload.finished_reads())
            for ended in offload.finished_stores():
                for entry in ended.entries:
                    pool.land(entry)
        # the target's last owner may still have work queued on the default stream
        bench.compute(8, 1, 1)
        if not self.load_waits:
            offload.load_stream.wait_event = lambda event: None  # type: ignore[method-assign]
        last = offload.load([ChunkCopy(kv, (1,), (0,))], [StateCopy(state, 1)])
        if self.aborts:
            if self.waits_for_load:
                offload.wait_for_load()
            bench.compute(5, 1, 1)
        elif self.joins:
            offload.join(last)
        else:
            if self.host_waits:
                last.done.synchronize()
        bench.attend(1, 1)
        device.copy(bench.host, bench.result)
        device.synchronize()
        read = getattr(device, "host_read", None)
        if read is not None:
            read(bench.host)
        list(offload.finished_loads())
        return tuple(bench.host.tolist())


RIGHT = {
    "join": OffloadProgram(),
    "host wait": OffloadProgram(joins=False),
    "abort": OffloadProgram(aborts=True),
}
FAULTY = {
    "store reads a block that was given away": OffloadProgram(waits_for_reads=False),
    "load writes a block that was given away": OffloadProgram(aborts=True, waits_for_load=False),
    "load writes before the last owner's work": OffloadProgram(load_waits=False),
    "store reads before the block is filled": OffloadProgram(store_waits=False),
    "load reads an entry whose store is under way": OffloadProgram(lands_late=False),
    "nobody waits for the load": OffloadProgram(joins=False, host_waits=False),
}


def expected_of(program: OffloadProgram) -> tuple[int, ...]:
    """What the last step reads if every order is kept."""
    return (5 if program.aborts else 7,) * 6

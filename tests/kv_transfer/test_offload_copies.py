"""What is stored comes back, bit by bit, in whatever pieces; both pairs of kernels agree."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_engines import POOL, make_engine, sessions, tier

from atom.device import open_device
from atom.device.interface import Device
from atom.kv_transfer.host_memory import Extents, HostMemory, MemoryAccountFault
from atom.kv_transfer.host_pool import Entry, EntryKind, HostPool, PoolKey
from atom.kv_transfer.offload import ChunkCopy, Offload, StateCopy

DEVICES = ["virtual", pytest.param("accelerator", marks=pytest.mark.gpu)]
BLOCKS, CHUNK, SLOTS = 24, 4, 5


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    border=st.sampled_from([1, 4, 16, 64]),
    actions=st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=40),
)
def test_extents_hand_out_every_byte_once(
    size: int, border: int, actions: list[tuple[bool, int]]
) -> None:
    extents = Extents(size, border)
    taken: list[tuple[tuple[int, int], ...]] = []
    used: set[int] = set()
    for gives, number in actions:
        if gives and taken:
            pieces = taken.pop(number % len(taken))
            used -= {byte for start, length in pieces for byte in range(start, start + length)}
            extents.give(pieces)
        elif number > size - len(used):
            with pytest.raises(MemoryAccountFault):
                extents.take(number)
        else:
            pieces = extents.take(number)
            own = [byte for start, length in pieces for byte in range(start, start + length)]
            assert len(own) == number
            assert used.isdisjoint(own)
            assert all(0 <= byte < size for byte in own)
            assert all(s // border == (s + length - 1) // border for s, length in pieces)
            used.update(own)
            taken.append(pieces)
        assert extents.free_bytes == size - len(used)
    for pieces in taken:
        extents.give(pieces)
    # neighbours have grown together: one gap a slab
    assert len(extents._starts) == -(-size // border)


class Bench:
    """Pools with known random content on a device."""

    def __init__(self, device: Device, *, by_rows: bool | None = None, **sizes: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.device = device
        self.tensors: list[torch.Tensor] = []
        for shape, dtype in (
            ((2, 2, BLOCKS, 4, 2, 8), torch.bfloat16),
            ((1, 2, BLOCKS, 4, 2, 8), torch.bfloat16),
            ((3, SLOTS, 3, 10), torch.bfloat16),
            ((3, SLOTS, 2, 4, 4), torch.float32),
        ):
            tensor = device.empty(shape, dtype)
            self.put(tensor, torch.randn(shape, generator=generator).to(dtype))
            self.tensors.append(tensor)
        self.main, self.mtp, self.conv, self.recurrent = self.tensors
        self.pool = HostPool(64 * 4096, alignment=64)
        self.memory = HostMemory(device, self.pool.capacity_bytes)
        self.offload = Offload(
            device,
            (self.main, self.mtp),
            (self.conv, self.recurrent),
            self.memory,
            chunk_blocks=CHUNK,
            by_rows=by_rows,
            **sizes,
        )

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        staged = self.device.pinned(tuple(values.shape), values.dtype)
        staged.copy_(values)
        self.device.copy(target, staged)
        self.device.synchronize()

    def get(self, source: torch.Tensor) -> torch.Tensor:
        host = self.device.pinned(tuple(source.shape), source.dtype)
        self.device.copy(host, source)
        self.device.synchronize()
        return host.clone()

    def entry(self, kind: EntryKind, digest: Any) -> Entry:
        offload = self.offload
        nbytes = offload.chunk_bytes if kind is EntryKind.KV else offload.state_bytes
        entry = self.pool.reserve(PoolKey(kind, digest), nbytes)
        assert isinstance(entry, Entry)
        # a gap behind each: an entry is put together from pieces
        half = entry.occupied // 2
        extents = self.memory.extents
        first = extents.take(half)
        extents.take(64)
        entry.place = (*first, *extents.take(entry.occupied - half))
        return entry

    def finish(self) -> None:
        self.device.synchronize()
        list(self.offload.finished_reads())
        for job in self.offload.finished_stores():
            for entry in job.entries:
                self.pool.land(entry)
        list(self.offload.finished_loads())
        assert not self.offload.stores
        assert not self.offload.loads


@pytest.mark.parametrize("choice", DEVICES)
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"piece_bytes": 1}, {"most_bytes_in_flight": 1}])
def test_what_was_stored_comes_back(choice: str, by_rows: bool, sizes: dict[str, int]) -> None:
    bench = Bench(open_device(choice), by_rows=by_rows, **{"piece_bytes": 5000, **sizes})
    before = [bench.get(tensor) for tensor in bench.tensors]
    order = random.Random(3).sample(range(BLOCKS), BLOCKS)
    sources, targets = order[:12], order[12:]
    entries = [bench.entry(EntryKind.KV, number) for number in range(3)]
    states = [bench.entry(EntryKind.STATE, number) for number in range(2)]
    whole = tuple(range(CHUNK))
    bench.offload.store(
        [
            ChunkCopy(entry, tuple(sources[CHUNK * n : CHUNK * (n + 1)]), whole)
            for n, entry in enumerate(entries)
        ],
        [StateCopy(entry, slot) for slot, entry in enumerate(states)],
    )
    bench.finish()
    # of the second chunk, its first, third and fourth block
    wanted = [(0, 1, 2, 3), (0, 2, 3), (1,)]
    places = iter(targets)
    filled: dict[int, int] = {}
    chunks = []
    for number, chosen in enumerate(wanted):
        blocks = tuple(next(places) for _ in chosen)
        chunks.append(ChunkCopy(entries[number], blocks, chosen))
        filled |= {
            block: sources[CHUNK * number + place]
            for block, place in zip(blocks, chosen, strict=True)
        }
    bench.offload.load(chunks, [StateCopy(states[0], 3), StateCopy(states[1], 4)])
    bench.finish()
    after = [bench.get(tensor) for tensor in bench.tensors]
    for tensor in (0, 1):
        expected = before[tensor].clone()
        for block, source in filled.items():
            expected[:, :, block] = before[tensor][:, :, source]
        assert torch.equal(after[tensor], expected)
    for tensor in (2, 3):
        expected = before[tensor].clone()
        expected[:, 3:5] = before[tensor][:, 0:2]
        assert torch.equal(after[tensor], expected)
    assert bench.offload.store_bytes_in_flight == 0


def test_both_kernels_write_the_same_entry() -> None:
    contents = []
    for by_rows in (True, False):
        bench = Bench(open_device("virtual"), by_rows=by_rows)
        entry = bench.entry(EntryKind.KV, 1)
        bench.offload.store([ChunkCopy(entry, (7, 3, 20, 11), (0, 1, 2, 3))], [])
        bench.finish()
        views = bench.offload.memory.views(entry, 0, entry.nbytes)
        contents.append(torch.cat([view.clone() for view, _ in views]))
        # the layout that the module's text promises
        first = contents[-1][: 4 * 2 * 8 * 2].view(torch.bfloat16).view(4, 2, 8)
        assert torch.equal(first, bench.get(bench.main)[0, 0, 7])
    assert torch.equal(*contents)


def test_an_engine_by_rows_gives_the_same_tokens() -> None:
    expected = sessions(make_engine(max_model_len=256, prefix_caching=False))
    engine = make_engine(**POOL)
    tier(engine).offload._by_rows = True
    assert sessions(engine) == expected
    assert engine.stats()["offload_loaded_chunks"] > 0


def test_nothing_waits_for_a_copy_but_its_own_reader() -> None:
    """A parked store and a parked load: the default stream goes on."""
    device = open_device("virtual")
    bench = Bench(device)
    kv = bench.entry(EntryKind.KV, 1)
    bench.offload.store([ChunkCopy(kv, (0, 1, 2, 3), (0, 1, 2, 3))], [])
    bench.finish()
    for stream in (bench.offload.store_stream, bench.offload.load_stream):
        device.spin(1.0, stream=stream)
    before = device.host_seconds()
    other = bench.entry(EntryKind.KV, 2)
    bench.offload.store([ChunkCopy(other, (4, 5, 6, 7), (0, 1, 2, 3))], [])
    job = bench.offload.load([ChunkCopy(kv, (8, 9, 10, 11), (0, 1, 2, 3))], [])
    device.spin(0.001)
    device.default_stream.synchronize()
    assert device.host_seconds() - before < 0.5
    assert not job.done.query()
    bench.offload.join(job)
    device.default_stream.synchronize()
    assert job.done.query()
    assert device.host_seconds() - before > 0.9


def test_a_load_of_more_pieces_than_index_slots_goes_on() -> None:
    bench = Bench(open_device("virtual"), by_rows=True, piece_bytes=1)
    bench.offload._ids.max_slots = 3
    entries = [bench.entry(EntryKind.KV, number) for number in range(3)]
    whole = tuple(range(CHUNK))
    before = bench.get(bench.main)
    for number, entry in enumerate(entries):
        blocks = tuple(range(CHUNK * number, CHUNK * (number + 1)))
        bench.offload.store([ChunkCopy(entry, blocks, whole)], [])
    bench.finish()
    bench.device.spin(0.5, stream=bench.offload.load_stream)
    chunks = [
        ChunkCopy(entry, tuple(range(12 + CHUNK * number, 16 + CHUNK * number)), whole)
        for number, entry in enumerate(entries)
    ]
    bench.offload.load(chunks, [])
    bench.finish()
    assert torch.equal(bench.get(bench.main)[:, :, 12:24], before[:, :, :12])

"""The CPU tier on an accelerator: the tokens of the CPU, and copies that no step waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_engines import (
    GREEDY,
    POOL,
    PROMPTS,
    assert_all_given_back,
    make_engine,
    sessions,
    tier,
)
from test_offload_copies import BLOCKS, CHUNK, Bench

from atom.config import DeviceChoice
from atom.device import open_device
from atom.device.interface import Device
from atom.errors import BadInput, DeviceOutOfMemory
from atom.kv_transfer.host_memory import HostMemory
from atom.kv_transfer.host_pool import Entry, EntryKind, HostPool, PoolKey, PoolPolicy
from atom.kv_transfer.lmcache_backend import import_lmcache
from atom.kv_transfer.offload import ChunkCopy, Offload
from atom.kv_transfer.pack_kernels import words_of
from atom.kv_transfer.pool_entry import OffloadBackend
from atom.model_engine.engine_builder import build_engine, load_model
from atom.model_engine.engine_settings import EngineSettings
from atom.models.weights import LoadedModel

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "state_checkpoint_tokens": 32,
}


def _why_no_lmcache() -> str | None:
    try:
        import_lmcache()
    except BadInput as error:
        return str(error)
    return None


needs_lmcache = pytest.mark.skipif(_why_no_lmcache() is not None, reason=_why_no_lmcache() or "")


@pytest.fixture(scope="module")
def accelerator() -> Device:
    return open_device(DeviceChoice.ACCELERATOR)


@pytest.fixture(scope="module")
def tiny(accelerator: Device) -> LoadedModel:
    return load_model("preset:tiny", accelerator, max_positions=4096)


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """Tokens on the virtual device, without prefix cache, drafts or chunks."""
    return sessions(
        make_engine(
            max_model_len=256, prefix_caching=False, draft_tokens=0, max_num_batched_tokens=512
        )
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"offload_policy": PoolPolicy.PAIRED},
        {"cpu_pool_bytes": 20 * 4096},
        {"offload_in_flight_bytes": 4096},
        {"num_kv_blocks": 12, "num_state_checkpoints": 1, "graphs": False},
        pytest.param({"offload_backend": OffloadBackend.LMCACHE}, marks=needs_lmcache),
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()) or "plain",
)
def test_the_tokens_are_those_without_a_pool(
    accelerator: Device,
    tiny: LoadedModel,
    expected: list[list[list[int]]],
    changes: dict[str, Any],
) -> None:
    settings = EngineSettings(**{**SIZES, **POOL, **changes})
    engine = build_engine(tiny.model, tiny.mtp, settings, accelerator)
    assert sessions(engine, quiet=True) == expected
    stats = engine.stats()
    assert stats["offload_stored_chunks"] > 0
    if "cpu_pool_bytes" not in changes and "offload_in_flight_bytes" not in changes:
        assert stats["offload_loaded_chunks"] > 0
    assert_all_given_back(engine)
    assert tier(engine).offload._by_rows
    engine.close()


def test_a_step_waits_for_no_parked_copy(accelerator: Device) -> None:
    bench = Bench(accelerator)
    kv = bench.entry(EntryKind.KV, 1)
    whole = tuple(range(CHUNK))
    # the first of each also loads kernels and gets memory, for which a driver may wait
    bench.offload.store([ChunkCopy(kv, whole, whole)], [])
    bench.offload.load([ChunkCopy(kv, whole, whole)], [])
    bench.finish()
    for stream in (bench.offload.store_stream, bench.offload.load_stream):
        accelerator.spin(0.2, stream=stream)
    other = bench.entry(EntryKind.KV, 2)
    started = accelerator.host_seconds()
    bench.offload.store([ChunkCopy(other, (4, 5, 6, 7), whole)], [])
    job = bench.offload.load([ChunkCopy(kv, (8, 9, 10, 11), whole)], [])
    accelerator.spin(0.001)
    accelerator.default_stream.synchronize()
    assert accelerator.host_seconds() - started < 0.15
    assert not job.done.query()
    bench.offload.join(job)
    accelerator.default_stream.synchronize()
    assert job.done.query()
    bench.finish()
    assert BLOCKS > 11


def test_an_engine_decodes_while_a_store_is_parked(accelerator: Device, tiny: LoadedModel) -> None:
    """Graphs, samplers and status copies wait for no store; the store's blocks are kept."""
    engine = build_engine(
        tiny.model,
        tiny.mtp,
        EngineSettings(**{**SIZES, **POOL, "num_kv_blocks": 64}),
        accelerator,
    )
    # kernels, graphs and staging memory are there from now on
    expected = engine.generate(PROMPTS[:2], GREEDY)
    manager = tier(engine)
    accelerator.synchronize()
    manager.poll()
    manager.blocks.withdraw_since(0)
    manager.checkpoints.withdraw_since(0)
    manager.pool.withdraw_since(0)
    before = manager.tier_counts.stored_chunks
    accelerator.spin(1.0, stream=manager.offload.store_stream)
    started = accelerator.host_seconds()
    assert engine.generate(PROMPTS[:2], GREEDY) == expected
    assert accelerator.host_seconds() - started < 0.8
    assert manager.offload.stores
    assert manager.tier_counts.stored_chunks == before
    assert_all_given_back(engine)
    assert manager.tier_counts.stored_chunks > before
    engine.close()


def test_blocks_beyond_every_32_bit_offset_come_back(accelerator: Device) -> None:
    """A KV pool of over 2**31 words of 8 bytes, of which the last blocks are moved."""
    free, _ = torch.cuda.mem_get_info()
    row_bytes, blocks = 2**16, 2**17 + 64
    pool_bytes = 2 * blocks * row_bytes
    if free < pool_bytes + 2**31:
        pytest.skip(f"needs {(pool_bytes + 2**31) / 2**30:.0f} GiB of free device memory")
    kv = accelerator.empty((1, 2, blocks, 1, 2, row_bytes // 4), torch.bfloat16)
    assert words_of(kv).numel() > 2**31
    conv = accelerator.empty((1, 1, 3, 16), torch.bfloat16)
    recurrent = accelerator.empty((1, 1, 1, 4, 4), torch.float32)
    pool = HostPool(2**24)
    memory = HostMemory(accelerator, pool.capacity_bytes)
    offload = Offload(accelerator, (kv,), (conv, recurrent), memory, chunk_blocks=4)
    assert offload._by_rows
    last = tuple(range(blocks - 4, blocks))
    for number, block in enumerate(last):
        kv[0, 0, block] = number + 1.0
        kv[0, 1, block] = -number - 1.0
    kv[:, :, :4] = 0.0
    entry = pool.reserve(PoolKey(EntryKind.KV, 1), offload.chunk_bytes)
    assert isinstance(entry, Entry)
    memory.take(entry)
    offload.store([ChunkCopy(entry, last, (0, 1, 2, 3))], [])
    accelerator.synchronize()
    offload.load([ChunkCopy(entry, (0, 1, 2, 3), (0, 1, 2, 3))], [])
    accelerator.synchronize()
    assert torch.equal(kv[:, :, :4], kv[:, :, blocks - 4 :])
    # and back to the far end, from the near one
    kv[:, :, blocks - 4 :] = 0.0
    offload.load([ChunkCopy(entry, last, (0, 1, 2, 3))], [])
    accelerator.synchronize()
    assert kv[0, 0, last[2]].unique().tolist() == [3.0]
    assert kv[0, 1, last[3]].unique().tolist() == [-4.0]


def test_a_pool_is_pinned_slab_by_slab(accelerator: Device) -> None:
    """No byte is lost to powers of two but in the last slab; prints what pinning costs."""
    nbytes = 2 * 2**30 + 3 * 2**20
    started = accelerator.host_seconds()
    memory = HostMemory(accelerator, nbytes)
    seconds = accelerator.host_seconds() - started
    print(f"pinned at {nbytes / 2**30 / seconds:.2f} GiB/s")
    assert [slab.numel() for slab in memory._slabs] == [2**30, 2**30, 3 * 2**20]
    assert all(slab.is_pinned() and slab[2**20 :].is_pinned() for slab in memory._slabs)


def test_more_pinned_memory_than_there_is_says_so(
    accelerator: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")

    # not for real: a kernel that runs out of memory kills whom it likes
    monkeypatch.setattr(torch, "empty", refusing)
    with pytest.raises(DeviceOutOfMemory, match=r"no pinned host memory for shape \(64,\)"):
        accelerator.pinned((64,), torch.uint8)


@pytest.mark.parametrize("mebibytes", [64, 512])
def test_copies_run_at_the_speed_of_the_link(accelerator: Device, mebibytes: int) -> None:
    """A bound that a copy through pageable memory, or one block at a time, does not reach."""
    chunk_blocks, block_bytes = 16, 16 * 2 * 256 * 2 * 2 * 4
    chunks = mebibytes * 2**20 // (chunk_blocks * block_bytes)
    blocks = chunks * chunk_blocks
    kv = accelerator.empty((4, 2, blocks, 16, 2, 256), torch.bfloat16)
    conv = accelerator.empty((1, 1, 3, 16), torch.bfloat16)
    recurrent = accelerator.empty((1, 1, 1, 4, 4), torch.float32)
    pool = HostPool(mebibytes * 2**20)
    memory = HostMemory(accelerator, pool.capacity_bytes)
    offload = Offload(
        accelerator,
        (kv,),
        (conv, recurrent),
        memory,
        chunk_blocks=chunk_blocks,
        most_bytes_in_flight=2**30,
    )
    copies = []
    for number in range(chunks):
        entry = pool.reserve(PoolKey(EntryKind.KV, number), offload.chunk_bytes)
        assert isinstance(entry, Entry)
        memory.take(entry)
        first = number * chunk_blocks
        own = tuple(range(first, first + chunk_blocks))
        copies.append(ChunkCopy(entry, own, tuple(range(chunk_blocks))))
    speeds = {}
    for repeat in range(2):
        for name in ("store", "load"):
            accelerator.synchronize()
            started = accelerator.host_seconds()
            if name == "store":
                offload.store(copies, [])
            else:
                offload.load(copies, [])
            accelerator.synchronize()
            # the first time pins staging memory and compiles nothing
            speeds[name] = mebibytes * 2**20 / (accelerator.host_seconds() - started) / 1e9
            list(offload.finished_reads())
            list(offload.finished_stores())
            list(offload.finished_loads())
        print(repeat, {name: f"{speed:.1f} GB/s" for name, speed in speeds.items()})
    assert min(speeds.values()) > 5

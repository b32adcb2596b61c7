"""The CPU tier on an accelerator: the tokens of the CPU, and copies that no step waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_engines import POOL, assert_all_given_back, make_engine, sessions, tier
from test_offload_copies import BLOCKS, CHUNK, Bench

from atom.config import DeviceChoice
from atom.device import open_device
from atom.device.interface import Device
from atom.kv_transfer.host_pool import EntryKind, PoolPolicy
from atom.kv_transfer.offload import ChunkCopy
from atom.model_engine.engine_builder import build_engine, load_model
from atom.model_engine.engine_settings import EngineSettings
from atom.models.weights import LoadedModel

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "state_checkpoint_tokens": 32,
}


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


@pytest.mark.parametrize("mebibytes", [64, 512])
def test_copies_run_at_the_speed_of_the_link(accelerator: Device, mebibytes: int) -> None:
    """A bound that a copy through pageable memory, or one block at a time, does not reach."""
    from atom.kv_transfer.host_memory import HostMemory
    from atom.kv_transfer.host_pool import Entry, HostPool, PoolKey
    from atom.kv_transfer.offload import Offload

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
        entry.place = memory.extents.take(entry.occupied)
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

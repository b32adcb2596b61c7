"""``shared_lru`` against LMCache's own local CPU backend, object by object.

The backend runs in this process over plain host memory; nothing of LMCache's GPU copies is run.
Its pool is contiguous, so unlike objects leave gaps that cost it further evictions: with one size
of object the two have to agree on every eviction, with two sizes they are compared in hit rates.
Recorded sessions are read from the folder that ``ATOM_TRACES`` names.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_host_pool import generated_lookups
from test_lmcache_simulator import CHUNK, recorded_lookups

from atom.kv_transfer.host_pool import Entry, EntryKind, HostPool, PoolKey
from atom.kv_transfer.replay import Lookup

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
_WHY = "LMCache's backend cannot be imported (pip install lmcache==0.5.6 with its dependencies)"
_NAMES = {
    "CacheEngineKey": "lmcache.utils",
    "LMCacheEngineConfig": "lmcache.v1.config",
    "HostMemoryAllocator": "lmcache.v1.memory_allocators.host_memory_allocator",
    "PinMonitor": "lmcache.v1.pin_monitor",
    "LocalCPUBackend": "lmcache.v1.storage_backend.local_cpu_backend",
}
try:
    lmcache: Any = SimpleNamespace(
        **{name: getattr(import_module(module), name) for name, module in _NAMES.items()}
    )
except Exception as error:
    pytest.skip(f"{_WHY}: {type(error).__name__}", allow_module_level=True)

UNIT = 4096


class Theirs:
    """The backend, driven as its storage manager drives it."""

    def __init__(self, capacity: int) -> None:
        config = lmcache.LMCacheEngineConfig.from_defaults(local_cpu=True, cache_policy="LRU")
        lmcache.PinMonitor.GetOrCreate(config)
        self.allocator = lmcache.HostMemoryAllocator(capacity)
        self.backend = lmcache.LocalCPUBackend(
            config, memory_allocator=self.allocator, dst_device="cpu"
        )
        self._numbers: dict[Hashable, int] = {}
        self._names: dict[int, PoolKey] = {}
        self.gone: list[PoolKey] = []
        remove = self.backend.remove

        def noted(key: Any, force: bool = True) -> bool:
            self.gone.append(self._names[key.chunk_hash])
            return bool(remove(key, force))

        self.backend.remove = noted

    def key(self, key: PoolKey) -> Any:
        number = self._numbers.setdefault(key, len(self._numbers) + 1)
        self._names[number] = key
        return lmcache.CacheEngineKey("model", 1, 0, number, torch.uint8)

    def look_up(self, keys: list[PoolKey]) -> int:
        """Leading keys that are there; notes their use."""
        hits = 0
        while hits < len(keys) and self.backend.contains(self.key(keys[hits]), pin=True):
            hits += 1
        self.backend.touch_cache()
        for key in keys[:hits]:
            self.backend.unpin(self.key(key))
        return hits

    def store(self, key: PoolKey, nbytes: int) -> None:
        theirs = self.key(key)
        if self.backend.contains(theirs):
            return
        made = self.backend.allocate(torch.Size([nbytes]), torch.uint8, busy_loop=False)
        if made is not None:
            self.backend.submit_put_task(theirs, made)
            made.ref_count_down()

    def order(self) -> list[PoolKey]:
        return [self._names[key.chunk_hash] for key in self.backend.get_keys()]


class Ours:
    """The pool, in the same order of calls."""

    def __init__(self, capacity: int) -> None:
        self.gone: list[PoolKey] = []
        self.pool = HostPool(capacity, on_evict=lambda entry: self.gone.append(entry.key))

    def look_up(self, keys: list[PoolKey]) -> int:
        hits = 0
        while hits < len(keys) and keys[hits] in self.pool:
            hits += 1
        for key in reversed(keys[:hits]):
            self.pool.touch(key)
        return hits

    def store(self, key: PoolKey, nbytes: int) -> None:
        made = self.pool.reserve(key, nbytes)
        if isinstance(made, Entry):
            self.pool.land(made)

    def order(self) -> list[PoolKey]:
        return list(self.pool.eviction_order())


def run(cache: Theirs | Ours, requests: list[Lookup], states: int) -> float:
    """Hit rate in tokens; a request stores its chunks, then ``states`` units behind the last."""
    hit = total = 0
    for request in requests:
        keys = [PoolKey(EntryKind.KV, digest) for digest in request.digests]
        hits = cache.look_up(keys)
        total += request.num_tokens
        hit += hits * CHUNK
        for key in keys:
            cache.store(key, UNIT)
        if states and keys:
            cache.store(PoolKey(EntryKind.STATE, keys[-1].digest), states * UNIT)
    return hit / total


def requests() -> list[Lookup]:
    folder = os.environ.get("ATOM_TRACES")
    return recorded_lookups(Path(folder)) if folder else generated_lookups(24, 12, 6)


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_with_one_size_every_eviction_is_the_same(share: float) -> None:
    found = requests()
    distinct = len({digest for request in found for digest in request.digests})
    capacity = int(distinct * share) * UNIT
    theirs, ours = Theirs(capacity), Ours(capacity)
    rates = run(theirs, found, 0), run(ours, found, 0)
    print(len(found), distinct, share, rates, len(ours.gone))
    assert rates[0] == rates[1]
    assert ours.gone
    assert theirs.gone == ours.gone
    assert theirs.order() == ours.order()


def test_with_states_the_hit_rates_are_close() -> None:
    found = requests()
    distinct = len({digest for request in found for digest in request.digests})
    capacity = int(distinct * 0.3) * UNIT
    theirs, ours = Theirs(capacity), Ours(capacity)
    rates = run(theirs, found, 5), run(ours, found, 5)
    print(rates, len(theirs.gone), len(ours.gone))
    # its gaps cost it evictions, never ours more than its
    assert len(ours.gone) <= len(theirs.gone)
    assert abs(rates[0] - rates[1]) < 0.05

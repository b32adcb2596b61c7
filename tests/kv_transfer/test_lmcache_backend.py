"""LMCache's own local CPU backend: ``shared_lru`` against it, and an engine over it.

The backend runs in this process over plain host memory; nothing of LMCache's GPU copies is run.
Its pool is contiguous, so unlike objects leave gaps that cost it further evictions: with one size
of object the two have to agree on every eviction, with two sizes they are compared in hit rates.
Recorded sessions are read from the folder that ``ATOM_TRACES`` names.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lookups import CHUNK, lookups
from offload_engines import (
    GREEDY,
    POOL,
    PROMPTS,
    assert_all_given_back,
    make_engine,
    sessions,
    tier,
)

from atom.device import open_device
from atom.errors import BadInput
from atom.kv_transfer.host_pool import Entry, EntryKind, HostPool, PoolKey, PoolPolicy, Refusal
from atom.kv_transfer.lmcache_backend import LMCachePool, import_lmcache
from atom.kv_transfer.pool_entry import OffloadBackend
from atom.kv_transfer.replay import Lookup
from atom.model_engine.engine_settings import EngineSettings

_NAMES = {
    "CacheEngineKey": "lmcache.utils",
    "LMCacheEngineConfig": "lmcache.v1.config",
    "HostMemoryAllocator": "lmcache.v1.memory_allocators.host_memory_allocator",
    "PinMonitor": "lmcache.v1.pin_monitor",
    "LocalCPUBackend": "lmcache.v1.storage_backend.local_cpu_backend",
}
lmcache: Any = None
_why = ""
try:
    import_lmcache()
    lmcache = SimpleNamespace(
        **{name: getattr(import_module(module), name) for name, module in _NAMES.items()}
    )
except BadInput as error:
    _why = str(error)
needs_lmcache = pytest.mark.skipif(lmcache is None, reason=_why)

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


class Through(Ours):
    """The engine's pool over the backend, in the same order of calls."""

    def __init__(self, capacity: int) -> None:
        self.gone = []
        self.pool = LMCachePool(open_device("virtual"), capacity)
        self.pool.on_evict = lambda entry: self.gone.append(entry.key)


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


def capacity_of(found: list[Lookup], share: float) -> int:
    distinct = len({digest for request in found for digest in request.digests})
    return int(distinct * share) * UNIT


@needs_lmcache
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_with_one_size_every_eviction_is_the_same(share: float) -> None:
    found = lookups(6)
    capacity = capacity_of(found, share)
    theirs, ours, through = Theirs(capacity), Ours(capacity), Through(capacity)
    caches: tuple[Theirs | Ours, ...] = (theirs, ours, through)
    rates = [run(cache, found, 0) for cache in caches]
    print(len(found), capacity // UNIT, share, rates, len(ours.gone))
    assert len(set(rates)) == 1
    assert ours.gone
    assert theirs.gone == ours.gone == through.gone
    assert theirs.order() == ours.order() == through.order()


@needs_lmcache
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_with_states_only_their_gaps_differ(share: float) -> None:
    found = lookups(6)
    capacity = capacity_of(found, share)
    theirs, ours, through = Theirs(capacity), Ours(capacity), Through(capacity)
    caches: tuple[Theirs | Ours, ...] = (theirs, ours, through)
    rates = [run(cache, found, 5) for cache in caches]
    print(share, rates, len(theirs.gone), len(ours.gone), first_difference(theirs.gone, ours.gone))
    # through the engine's pool it is the backend itself
    assert rates[0] == rates[2]
    assert theirs.gone == through.gone
    assert theirs.order() == through.order()
    # its gaps cost it evictions, never ours more than its
    assert len(ours.gone) <= len(theirs.gone)
    assert abs(rates[0] - rates[1]) < 0.05


def first_difference(left: list[PoolKey], right: list[PoolKey]) -> int:
    """Evictions that are the same before the first that is not."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))


@needs_lmcache
def test_the_account_is_theirs_to_the_byte() -> None:
    """Random stores, loads and withdrawals: nothing under a pin moves, every byte comes back."""
    pool = LMCachePool(open_device("virtual"), 40 * UNIT)
    draw = random.Random(7)
    held: list[Entry] = []
    writing: list[Entry] = []
    content: dict[Entry, int] = {}
    for number in range(1500):
        match draw.randrange(6):
            case 0 | 1:
                kind = draw.choice(list(EntryKind))
                made = pool.reserve(
                    PoolKey(kind, draw.randrange(60)),
                    draw.choice([UNIT, 5 * UNIT - 100]),
                    step=number,
                )
                if isinstance(made, Entry):
                    writing.append(made)
                    content[made] = number % 251
                    for view, _ in pool.views(made, 0, made.nbytes):
                        view.fill_(content[made])
            case 2 if writing:
                pool.land(writing.pop(draw.randrange(len(writing))))
            case 3:
                found = pool.find(PoolKey(draw.choice(list(EntryKind)), draw.randrange(60)))
                if found is not None and found.landed and len(held) < 4:
                    pool.pin(found)
                    pool.touch(found.key)
                    held.append(found)
            case 4 if held:
                entry = held.pop(draw.randrange(len(held)))
                (view, _), *rest = pool.views(entry, 0, entry.nbytes)
                assert not rest
                assert view.unique().tolist() == [content[entry]]
                pool.unpin(entry)
            case 5 if draw.random() < 0.1:
                pool.withdraw_since(number - 20)
        assert pool.used_bytes == pool.their_bytes <= pool.capacity_bytes
        evictable = set(pool.eviction_order())
        assert not evictable & {entry.key for entry in held if not entry.withdrawn}
    for entry in writing:
        pool.land(entry)
    for entry in held:
        pool.unpin(entry)
    counts = pool.counts.values()
    assert all(count.evicted and count.stored and count.withdrawn for count in counts)
    assert any(count.refused.get(Refusal.PINNED) for count in counts)
    pool.withdraw(list(pool._entries.values()))
    assert pool.used_bytes == pool.their_bytes == 0


@needs_lmcache
@pytest.mark.parametrize("units", [2048, 60, 20], ids=lambda units: f"{units} units")
def test_an_engine_over_it_gives_the_same_tokens(units: int) -> None:
    expected = sessions(make_engine(max_model_len=256, prefix_caching=False))
    engine = make_engine(
        **{
            **POOL,
            "offload_backend": OffloadBackend.LMCACHE,
            "cpu_pool_bytes": units * UNIT,
        }
    )
    assert sessions(engine, quiet=True) == expected
    stats = engine.stats()
    assert stats["offload_stored_chunks"] > 0
    assert stats["offload_stored_states"] > 0
    failed = sum(count for name, count in stats.items() if name.startswith("offload_failed"))
    if units >= 60:
        assert stats["offload_loaded_chunks"] > 0
        assert stats["offload_loaded_states"] > 0
    if units <= 60:
        # what was evicted is computed again, and counted
        assert failed > 0
    else:
        assert not failed
    assert isinstance(tier(engine).pool, LMCachePool)
    assert_all_given_back(engine)
    engine.close()


@needs_lmcache
def test_its_bytes_are_what_is_computed_on() -> None:
    """The control of the comparison above: other bytes in its pool give other tokens."""

    def second_turn(spoil: bool) -> list[list[int]]:
        engine = make_engine(**{**POOL, "offload_backend": OffloadBackend.LMCACHE})
        sessions(engine, 1, quiet=True)
        pool = tier(engine).pool
        assert isinstance(pool, LMCachePool)
        if spoil:
            pool.backend.memory_allocator.buffer.zero_()
        return engine.generate(PROMPTS, GREEDY)

    assert second_turn(spoil=False) != second_turn(spoil=True)


def test_without_it_the_engine_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lmcache"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lmcache", None)
    with pytest.raises(BadInput, match=r"cannot be imported.*host_pool"):
        make_engine(**{**POOL, "offload_backend": OffloadBackend.LMCACHE})


def test_it_has_no_other_policy() -> None:
    with pytest.raises(ValueError, match="offload_policy to shared_lru"):
        EngineSettings(
            **{**POOL, "offload_backend": "lmcache", "offload_policy": PoolPolicy.PAIRED}
        )

"""LMCache's own pool in place of the host pool: its ``LocalCPUBackend``, in this process.

KV chunks and state images go through it as objects of bytes: it allocates them from one block of
pinned memory, and its own ``LRU`` decides which go. Where they lie on the device, the copies and
the counts are this package's, so a load that finds its object evicted falls back to recompute as
with the host pool.

What differs from :class:`HostPool` with ``shared_lru``:

* An object lies in one piece. Unlike sizes leave gaps, and LMCache evicts objects one by one until
  a gap is wide enough; an allocation that fails in the end has evicted them all the same.
* It takes its place in the order when its store has ended, not when it was reserved: LMCache does
  not know it before.

``lmcache`` is optional; versions up to 0.5.6 were read. Its declared dependencies bring CUDA
packages and another NumPy, so give it an environment of its own. What it imports for this is less::

    pip install --no-deps lmcache==0.5.6
    pip install sortedcontainers cachetools py-cpuinfo numba aiofile aiofiles aiohttp msgspec \
        cryptography

Run on plain host memory: this class, and engines over it on the virtual device. NOT run on a GPU:
none of it. LMCache's allocator of pinned memory (its C++ extension) and its copies between device
and host are used nowhere: the memory is PyTorch's pinned memory, and the copies are those of
:class:`Offload`. PyTorch rounds a pinned block up to a power of two, so on an accelerator choose a
size that is one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atom.device.interface import Device
from atom.errors import BadInput
from atom.kv_transfer.host_pool import Entry, HostPool, PoolKey

_PARTS = {
    "CacheEngineKey": "lmcache.utils",
    "LMCacheEngineConfig": "lmcache.v1.config",
    "LocalCPUBackend": "lmcache.v1.storage_backend.local_cpu_backend",
    "MemoryFormat": "lmcache.v1.memory_management",
    "TensorMemoryAllocator": "lmcache.v1.memory_allocators.tensor_memory_allocator",
}


def import_lmcache() -> Any:
    """The parts of LMCache that this module uses, by name.

    Raises:
        BadInput: it cannot be imported; says what is missing and what to do.
    """
    # it reports usage over the network, and logs each eviction that a full pool needs
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    try:
        found = {name: getattr(import_module(module), name) for name, module in _PARTS.items()}
    # what it imports can fail in any way, at import
    except Exception as error:
        raise BadInput(
            f"offload_backend lmcache: LMCache cannot be imported ({type(error).__name__}: "
            f"{error}). Install it as atom/kv_transfer/lmcache_backend.py says "
            "(pip install 'atom-workbook[lmcache]' in an environment of its own), or set "
            "offload_backend to host_pool"
        ) from None
    return SimpleNamespace(**found)


class _Object(NamedTuple):
    """An entry in LMCache's terms: its key and its memory object."""

    key: Any
    memory: Any


class LMCachePool(HostPool):
    """The account of a host pool over LMCache's objects; also their memory (``EntryMemory``).

    Each pin of an entry is a reference to its memory object, as LMCache's own readers take one;
    its time-limited pins are not used. A writer's reference is the first.

    Args:
        device: its memory is pinned for it.
        capacity_bytes: size of the pool, rounded down to 4096.
        chunk_tokens: tokens of a chunk; 256 is LMCache's default.

    Raises:
        BadInput: LMCache cannot be imported, or a number is out of range.
        DeviceOutOfMemory: the host cannot pin so much.
    """

    def __init__(self, device: Device, capacity_bytes: int, *, chunk_tokens: int = 256) -> None:
        super().__init__(capacity_bytes)
        self._lmcache = import_lmcache()
        config = self._lmcache.LMCacheEngineConfig.from_defaults(
            local_cpu=True,
            chunk_size=chunk_tokens,
            max_local_cpu_size=self.capacity_bytes / 2**30,
            cache_policy="LRU",
        )
        buffer = device.pinned((self.capacity_bytes,), torch.uint8)
        #: LMCache's backend; ``remove`` is wrapped, so that its evictions reach the account
        self.backend = self._lmcache.LocalCPUBackend(
            config,
            memory_allocator=self._lmcache.TensorMemoryAllocator(buffer, self.alignment),
            dst_device="cpu",
        )
        self._by_their_key: dict[Any, Entry] = {}
        remove = self.backend.remove

        def noted(key: Any, force: bool = True) -> bool:
            done = bool(remove(key, force))
            if done and not force:
                self._evict(self._by_their_key[key])
            return done

        self.backend.remove = noted
        for budget in self._budgets.values():
            budget.order = _TheirOrder(self)

    # -- the account, over their objects
    def _make_room(self, entry: Entry) -> bool:
        memory = self.backend.allocate(
            torch.Size([entry.nbytes]),
            torch.uint8,
            fmt=self._lmcache.MemoryFormat.BINARY,
            busy_loop=False,
        )
        if memory is not None:
            entry.place = _Object(self._their_key(entry.key), memory)
        return memory is not None

    def _their_key(self, key: PoolKey) -> Any:
        digest = key.digest
        if not isinstance(digest, bytes):
            digest = blake2b(repr(digest).encode(), digest_size=16).digest()
        number = int.from_bytes(digest, "big")
        return self._lmcache.CacheEngineKey(f"atom-{key.kind}", 1, 0, number, torch.uint8)

    def land(self, entry: Entry) -> None:
        """See :meth:`HostPool.land`; LMCache takes the object in."""
        if not entry.withdrawn:
            key, memory = entry.place
            self._by_their_key[key] = entry
            self.backend.submit_put_task(key, memory)
        super().land(entry)

    def pin(self, entry: Entry) -> None:
        """See :meth:`HostPool.pin`."""
        super().pin(entry)
        entry.place.memory.ref_count_up()

    def unpin(self, entry: Entry) -> None:
        """See :meth:`HostPool.unpin`."""
        place = entry.place
        super().unpin(entry)
        place.memory.ref_count_down()

    def withdraw(self, entries: Iterable[Entry]) -> int:
        """See :meth:`HostPool.withdraw`."""
        gone = list(entries)
        for entry in gone:
            if entry.landed:
                # its bytes are free with the last reference
                self.backend.remove(entry.place.key, force=True)
        return super().withdraw(gone)

    def _forget(self, entry: Entry) -> None:
        super()._forget(entry)
        if entry.landed:
            del self._by_their_key[entry.place.key]

    # -- the memory
    def take(self, entry: Entry) -> None:
        """See :class:`EntryMemory`: the object came with the entry."""

    def give(self, entry: Entry) -> None:
        """See :class:`EntryMemory`: LMCache has taken it back, or does so with the last pin."""

    def views(self, entry: Entry, start: int, length: int) -> Iterator[tuple[Tensor, int]]:
        """See :class:`EntryMemory`; one piece."""
        yield entry.place.memory.raw_data[start : start + length], 0

    @property
    def their_bytes(self) -> int:
        """Bytes that LMCache's allocator has given out."""
        return int(self.backend.memory_allocator.total_allocated_size)


class _TheirOrder:
    """LMCache's order as an :class:`EvictionOrder`; it evicts by itself."""

    def __init__(self, pool: LMCachePool) -> None:
        self._pool = pool

    def add(self, entry: Entry) -> None:
        """LMCache takes it in when it lands."""

    def touch(self, entry: Entry) -> None:
        """What its ``touch_cache`` does for each key of a look-up."""
        if entry.landed:
            backend = self._pool.backend
            with backend.cpu_lock:
                backend.cache_policy.update_on_hit(entry.place.key, backend.hot_cache)

    def discard(self, entry: Entry) -> None:
        """LMCache knows already."""

    def victims(self, needed: int) -> list[Entry] | None:
        """Never asked: ``LMCachePool`` makes room in its own way."""
        raise NotImplementedError("LMCache evicts by itself")

    def __iter__(self) -> Iterator[Entry]:
        """See :class:`EvictionOrder`."""
        entries = [self._pool._by_their_key[key] for key in self._pool.backend.get_keys()]
        return iter([entry for entry in entries if not entry.pins])

"""What a host pool holds: entries, their keys, and the names of its policies."""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum
from typing import Any, NamedTuple

#: entries begin and end on a page of host memory; their sizes are rounded up to it
ALIGNMENT_BYTES = 4096


class EntryKind(StrEnum):
    """What an entry holds."""

    KV = "kv"  #: keys and values of one chunk of tokens, all attention layers and the MTP layer
    STATE = "state"  #: conv and recurrent states of all gated-delta-net layers behind a chunk


class PoolPolicy(StrEnum):
    """Who goes when room is needed."""

    SHARED_LRU = "shared_lru"  #: one LRU: KV pressure evicts a state behind its codec's back
    PAIRED = "paired"  #: a state lives and dies with its KV prefix; the end of a prefix goes first
    ISOLATED = "isolated"  #: an LRU and a share of the bytes for each kind


class OffloadBackend(StrEnum):
    """Who keeps the entries."""

    HOST_POOL = "host_pool"  #: this package's pool, under any policy
    LMCACHE = "lmcache"  #: LMCache's ``LocalCPUBackend`` in this process, under its own LRU


class Refusal(StrEnum):
    """Why an entry was not taken in. Nothing was evicted for it, but under LMCache's ``pinned``."""

    PRESENT = "present"  #: it is there already
    TOO_LARGE = "too large"  #: more than the pool, or its kind's share
    PINNED = "pinned"  #: too much is in use by copies under way
    NO_PREFIX = "no prefix"  #: paired: the chunk that it goes on from is not there


class PoolKey(NamedTuple):
    """Names an entry.

    Attributes:
        kind: what it holds.
        digest: chained hash of the chunk's tokens and all before; of a state, of the chunk that it
            stands behind.
    """

    kind: EntryKind
    digest: Hashable


class Entry:
    """One entry of a pool.

    Attributes:
        key: its name.
        nbytes: bytes of its content.
        occupied: bytes that it takes from the pool: ``nbytes`` rounded up to the alignment.
        parent: digest of the chunk before (of a KV chunk), or ``None``.
        step: step that computed the content; see :meth:`HostPool.withdraw_since`.
        pins: copies under way that read or write it.
        landed: whether its content is complete.
        withdrawn: whether it is forgotten and only waits for its last pin.
        stamp: time of its last use, by the pool's own count.
        place: whatever the owner of the memory wants to remember.
    """

    __slots__ = (
        "children",
        "key",
        "landed",
        "nbytes",
        "occupied",
        "parent",
        "pins",
        "place",
        "queued",
        "stamp",
        "state",
        "step",
        "withdrawn",
    )

    def __init__(
        self, key: PoolKey, nbytes: int, occupied: int, parent: Hashable | None, step: int
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.occupied = occupied
        self.parent = parent
        self.step = step
        self.pins = 0
        self.landed = False
        self.withdrawn = False
        self.stamp = 0
        self.place: Any = None
        # of the paired policy: chunks that go on from this one, the state behind it, and whether
        # the entry stands in the policy's heap
        self.children = 0
        self.state: Entry | None = None
        self.queued = False

    def __repr__(self) -> str:
        return f"Entry({self.key.kind}, {self.nbytes} bytes, {self.pins} pins)"

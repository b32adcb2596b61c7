"""A pool under recorded look-ups, without an engine: hit rates of a policy and a size.

With KV alone and ``shared_lru`` the rule is that of LMCache's own cache simulator: a request's hit
is the run of leading chunks that are in the pool; then all its full chunks are used in order, and
those that are missing are taken in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from atom.kv_transfer.host_pool import EntryKind, HostPool, PoolKey


@dataclass(frozen=True, slots=True)
class Lookup:
    """One request.

    Attributes:
        digests: chained hashes of its prompt's full chunks, in order.
        num_tokens: tokens of its prompt.
    """

    digests: Sequence[Hashable]
    num_tokens: int


@dataclass
class ReplayCounts:
    """What a replay showed.

    Attributes:
        requests, tokens: looked up.
        kv_tokens: tokens of leading chunks that were in the pool.
        hit_tokens: tokens that need not be computed: as ``kv_tokens`` without states, else up to
            the last state within them.
        state_loads: requests whose KV reached a place at which a state had once been stored.
        state_failures: those of them whose last such state had been evicted.
    """

    requests: int = 0
    tokens: int = 0
    kv_tokens: int = 0
    hit_tokens: int = 0
    state_loads: int = 0
    state_failures: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that need not be computed."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def state_failure_rate(self) -> float:
        """Share of the state loads that failed."""
        return self.state_failures / self.state_loads if self.state_loads else 0.0


def replay(
    pool: HostPool,
    lookups: Iterable[Lookup],
    *,
    chunk_tokens: int,
    kv_bytes: int,
    state_bytes: int = 0,
) -> ReplayCounts:
    """Look requests up, and store what they computed.

    Args:
        pool: used as it is; a second replay goes on from the first.
        lookups: requests in order.
        chunk_tokens: tokens of a chunk.
        kv_bytes: bytes of a KV chunk.
        state_bytes: bytes of a state image; 0 for a model without states. A request stores one
            behind its last full chunk.

    Returns:
        Counts of this replay.
    """
    counts = ReplayCounts()
    for lookup in lookups:
        counts.requests += 1
        counts.tokens += lookup.num_tokens
        keys = [PoolKey(EntryKind.KV, digest) for digest in lookup.digests]
        reach = 0
        while reach < len(keys) and keys[reach] in pool:
            reach += 1
        counts.kv_tokens += reach * chunk_tokens
        hit = _last_state(pool, lookup, reach, counts) if state_bytes else reach
        counts.hit_tokens += hit * chunk_tokens
        before: Hashable | None = None
        for key in keys:
            pool.insert(key, kv_bytes, parent=before)
            before = key.digest
        if state_bytes and keys:
            pool.insert(PoolKey(EntryKind.STATE, keys[-1].digest), state_bytes)
    return counts


def _last_state(pool: HostPool, lookup: Lookup, reach: int, counts: ReplayCounts) -> int:
    """Leading chunks behind which a state is in the pool; notes a use and a failure."""
    tried = False
    for place in range(reach, 0, -1):
        key = PoolKey(EntryKind.STATE, lookup.digests[place - 1])
        found = pool.touch(key)
        if not tried and (found or pool.was_evicted(key)):
            tried = True
            counts.state_loads += 1
            counts.state_failures += not found
        if found:
            return place
    return 0

"""Hit-rate curves of ``shared_lru`` with KV alone equal those of LMCache's own cache simulator.

``pip install lmcache==0.5.6 --no-deps sortedcontainers`` is enough for it. Recorded sessions are
read from the folder that ``ATOM_TRACES`` names; without one, generated ones serve.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from lookups import CHUNK, lookups

from atom.kv_transfer.host_pool import EntryKind, HostPool
from atom.kv_transfer.replay import replay

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
simulator: Any = pytest.importorskip(
    "lmcache.tools.cache_simulator.simulator",
    reason="lmcache is not installed: pip install lmcache==0.5.6 --no-deps sortedcontainers",
)


def test_the_curve_is_the_simulators() -> None:
    requests = lookups()
    kv_bytes = 16 * 4096
    events = [
        {
            "chunk_hashes": [str(digest) for digest in request.digests],
            "seq_len": request.num_tokens,
            "chunk_size": CHUNK,
        }
        for request in requests
    ]
    distinct = len({digest for request in requests for digest in request.digests})
    rates = []
    for share in (0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0):
        capacity = max(int(distinct * share), 1) * kv_bytes + 4096
        theirs = simulator.simulate(events, capacity, kv_bytes, fast=True)
        pool = HostPool(capacity)
        ours = replay(pool, requests, chunk_tokens=CHUNK, kv_bytes=kv_bytes)
        assert ours.requests == theirs["total_requests"]
        assert ours.tokens == theirs["total_tokens"]
        assert ours.hit_tokens == theirs["total_hit_tokens"]
        assert ours.hit_rate == theirs["token_hit_rate"]
        assert pool.counts[EntryKind.KV].evicted == theirs["eviction_count"]
        assert len(pool) == theirs["cache_size_at_end_chunks"]
        rates.append(ours.hit_rate)
    # a curve that does not move would compare nothing
    assert rates[0] < rates[3] < rates[-1]
    print(len(requests), distinct, [f"{rate:.4f}" for rate in rates])

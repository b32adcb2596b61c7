"""The host pool against a plain model, and the laws that each policy promises."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lookups import generated_lookups
from pool_model import Item, PlainPool

from atom.errors import BadInput
from atom.kv_transfer.host_pool import (
    Entry,
    EntryKind,
    HostPool,
    PoolFault,
    PoolKey,
    PoolPolicy,
    Refusal,
)
from atom.kv_transfer.replay import replay

KV, STATE = EntryKind.KV, EntryKind.STATE
ALIGNMENT = 8
# digests are tuples: a chunk's parent is all of it but the last
DIGESTS: list[tuple[int, ...]] = [(a,) for a in range(3)] + [
    (a, b) for a in range(3) for b in range(2)
]
DIGESTS += [(0, 0, c) for c in range(3)]
KEYS = [PoolKey(kind, digest) for kind in EntryKind for digest in DIGESTS]


def parent_of(key: PoolKey) -> Any:
    assert isinstance(key.digest, tuple)
    return key.digest[:-1] or None if key.kind is KV else None


class PoolMachine(RuleBasedStateMachine):
    """Does the same to a pool and to the plain model."""

    policy = PoolPolicy.SHARED_LRU
    capacity = 100

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[PoolKey] = []
        self.pool = HostPool(
            self.capacity,
            self.policy,
            state_share=0.4,
            alignment=ALIGNMENT,
            on_evict=lambda entry: self.gone.append(entry.key),
        )
        self.model = PlainPool(self.capacity, self.policy, 0.4, ALIGNMENT)
        self.pinned: list[tuple[Entry, Item]] = []

    @rule(key=st.sampled_from(KEYS), nbytes=st.integers(1, 60), step=st.integers(1, 4))
    def reserve(self, key: PoolKey, nbytes: int, step: int) -> None:
        before = self.pool.used_bytes, len(self.gone)
        found = self.pool.reserve(key, nbytes, parent=parent_of(key), step=step)
        expected = self.model.reserve(key, nbytes, parent_of(key), step)
        if isinstance(found, Refusal):
            assert found is expected
            assert before == (self.pool.used_bytes, len(self.gone))
        else:
            assert expected is None
            item = self.model.find(key)
            assert item is not None
            self.pinned.append((found, item))

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: PoolKey) -> None:
        assert self.pool.touch(key) == self.model.touch(key)

    @rule(key=st.sampled_from(KEYS))
    def pin(self, key: PoolKey) -> None:
        entry, item = self.pool.find(key), self.model.find(key)
        assert (entry is None) == (item is None)
        if entry is not None and item is not None:
            self.pool.pin(entry)
            item.pins += 1
            self.pinned.append((entry, item))

    @precondition(lambda self: self.pinned)
    @rule(place=st.integers(0, 100))
    def unpin(self, place: int) -> None:
        entry, item = self.pinned.pop(place % len(self.pinned))
        self.pool.unpin(entry)
        self.model.unpin(item)

    @rule(step=st.integers(2, 5))
    def withdraw(self, step: int) -> None:
        place = len(self.gone)
        self.pool.withdraw_since(step)
        self.model.withdraw_since(step)
        # the order in which one call withdraws is nobody's business
        self.gone[place:] = sorted(self.gone[place:])
        self.model.log[place:] = sorted(self.model.log[place:])

    @invariant()
    def same(self) -> None:
        pool, model = self.pool, self.model
        assert self.gone == model.log
        assert {key for key in KEYS if key in pool} == {item.key for item in model.items}
        assert pool.used_bytes == sum(i.size for i in [*model.items, *model.doomed])
        for kind in EntryKind:
            of_kind = [i for i in [*model.items, *model.doomed] if i.key.kind is kind]
            assert pool.kind_bytes(kind) == sum(i.size for i in of_kind)
            assert pool.kind_entries(kind) == len(of_kind)
            if self.policy is PoolPolicy.ISOLATED:
                assert pool.kind_bytes(kind) <= pool.share_bytes(kind)
        assert pool.used_bytes <= pool.capacity_bytes
        for entry, item in self.pinned:
            assert entry.withdrawn == item.withdrawn
            assert entry.withdrawn or pool.find(entry.key) is entry

    @invariant()
    def order_is_what_would_happen(self) -> None:
        expected: list[Item] = []
        for kind in (STATE, KV) if self.policy is PoolPolicy.ISOLATED else (KV,):
            while True:
                following = self.model._next(kind, expected, None)
                if not following:
                    break
                expected += following
        assert list(self.pool.eviction_order()) == [item.key for item in expected]

    @invariant()
    def paired_states_can_be_reached(self) -> None:
        if self.policy is PoolPolicy.PAIRED:
            for key in KEYS:
                digest = key.digest
                assert isinstance(digest, tuple)
                if key in self.pool:
                    assert all(
                        PoolKey(KV, digest[:count]) in self.pool
                        for count in range(1, len(digest) + 1)
                    )


class PairedMachine(PoolMachine):
    policy = PoolPolicy.PAIRED


class IsolatedMachine(PoolMachine):
    policy = PoolPolicy.ISOLATED


_FEW = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestShared = PoolMachine.TestCase
TestShared.settings = _FEW
TestPaired = PairedMachine.TestCase
TestPaired.settings = _FEW
TestIsolated = IsolatedMachine.TestCase
TestIsolated.settings = _FEW


def test_sizes_are_rounded_up_and_no_byte_is_lost_to_gaps() -> None:
    pool = HostPool(3 * 4096 + 5)
    assert pool.capacity_bytes == 3 * 4096
    assert pool.occupied_bytes(1) == 4096
    assert pool.occupied_bytes(4097) == 8192
    for number in range(3):
        assert pool.insert(PoolKey(KV, number), 1)
    # two entries that are no neighbours make room for one of two units
    pool.touch(PoolKey(KV, 1))
    assert pool.insert(PoolKey(STATE, 9), 8192)
    assert PoolKey(KV, 1) in pool
    assert pool.used_bytes == pool.capacity_bytes


def test_kv_pressure_evicts_a_state_behind_its_kv_only_where_they_share_one_lru() -> None:
    def run(policy: PoolPolicy) -> HostPool:
        pool = HostPool(8 * 4096, policy, state_share=0.25)
        pool.insert(PoolKey(KV, "a"), 4096)
        pool.insert(PoolKey(STATE, "a"), 4096)
        for number in range(5):
            pool.insert(PoolKey(KV, number), 4096)
        # a KV hit does not use the state
        pool.touch(PoolKey(KV, "a"))
        pool.insert(PoolKey(KV, 5), 4096)
        pool.insert(PoolKey(KV, 6), 4096)
        return pool

    shared = run(PoolPolicy.SHARED_LRU)
    assert PoolKey(KV, "a") in shared
    assert PoolKey(STATE, "a") not in shared
    assert shared.was_evicted(PoolKey(STATE, "a"))
    for policy in (PoolPolicy.PAIRED, PoolPolicy.ISOLATED):
        pool = run(policy)
        assert PoolKey(KV, "a") in pool
        assert PoolKey(STATE, "a") in pool


def test_a_paired_prefix_goes_from_its_end() -> None:
    gone: list[PoolKey] = []
    pool = HostPool(5 * 4096, PoolPolicy.PAIRED, on_evict=lambda entry: gone.append(entry.key))
    for number in range(4):
        pool.insert(PoolKey(KV, number), 4096, parent=number - 1 if number else None)
    pool.insert(PoolKey(STATE, 3), 4096)
    pool.insert(PoolKey(KV, "other"), 4096)
    assert gone == [PoolKey(STATE, 3), PoolKey(KV, 3)]
    assert pool.reserve(PoolKey(STATE, 3), 4096) is Refusal.NO_PREFIX
    assert pool.counts[STATE].refused == {Refusal.NO_PREFIX: 1}


@pytest.mark.parametrize("policy", PoolPolicy)
def test_pinned_entries_stay_and_the_account_refuses_misuse(policy: PoolPolicy) -> None:
    pool = HostPool(4 * 4096, policy, state_share=0.5)
    first = pool.reserve(PoolKey(KV, 0), 4096)
    second = pool.reserve(PoolKey(KV, 1), 4096)
    assert isinstance(first, Entry)
    assert isinstance(second, Entry)
    if policy is PoolPolicy.ISOLATED:
        assert pool.reserve(PoolKey(KV, 2), 4096) is Refusal.PINNED
        assert pool.reserve(PoolKey(KV, 2), 3 * 4096) is Refusal.TOO_LARGE
    else:
        assert pool.reserve(PoolKey(KV, 2), 3 * 4096) is Refusal.PINNED
    pool.land(first)
    with pytest.raises(PoolFault, match="unpinned twice"):
        pool.unpin(first)
    assert pool.withdraw([second]) == 1
    assert pool.used_bytes == 2 * 4096
    with pytest.raises(PoolFault, match="nothing to pin"):
        pool.pin(second)
    pool.land(second)
    assert pool.used_bytes == 4096
    with pytest.raises(PoolFault, match="1 byte or more"):
        pool.reserve(PoolKey(KV, 3), 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity_bytes": 100}, "capacity_bytes: expected 4096"),
        ({"capacity_bytes": 8192, "state_share": 1.0}, "state_share"),
        ({"capacity_bytes": 8192, "alignment": 0}, "alignment"),
    ],
)
def test_impossible_pools_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        HostPool(**arguments)


@pytest.mark.parametrize("policy", PoolPolicy)
def test_a_larger_pool_hits_more(policy: PoolPolicy) -> None:
    lookups = generated_lookups(12, 8, 4)
    sizes: dict[str, int] = {"chunk_tokens": 256, "kv_bytes": 4096, "state_bytes": 4 * 4096}
    rates = []
    for chunks in (30, 100, 300, 1000):
        counts = replay(HostPool(chunks * 4096, policy), lookups, **sizes)
        assert counts.hit_tokens <= counts.kv_tokens <= counts.tokens
        rates.append(counts.hit_rate)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    counts = replay(HostPool(100 * 4096, PoolPolicy.PAIRED), lookups, **sizes)
    assert counts.state_failures == 0


@pytest.mark.parametrize("policy", PoolPolicy)
def test_an_hour_of_serving_is_replayed_in_seconds(policy: PoolPolicy) -> None:
    # a sixth of the requests of the published hour, each of the published length
    lookups = generated_lookups(32, 14, 16)
    pool = HostPool(4000 * 4096, policy)
    started = time.process_time()
    counts = replay(pool, lookups, chunk_tokens=256, kv_bytes=4096, state_bytes=8 * 4096)
    assert counts.requests == 448
    assert time.process_time() - started < 10

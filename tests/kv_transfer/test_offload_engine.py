"""An engine with a CPU pool gives the tokens of one without, whatever it loads, loses or drops."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_engines import (
    GREEDY,
    POOL,
    PROMPTS,
    TIGHT,
    assert_all_given_back,
    make_engine,
    sessions,
    tier,
)

from atom.device.interface import DeviceKind
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput, DeviceOutOfMemory
from atom.kv_transfer.host_memory import HostMemory
from atom.kv_transfer.host_pool import EntryKind, PoolKey, PoolPolicy
from atom.kv_transfer.tier_counts import Cause
from atom.model_engine.engine_builder import check_offload
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.sequence import SamplingParams

SMALLER: dict[str, Any] = {"cpu_pool_bytes": 24 * 4096, "num_kv_blocks": 12}


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """Tokens of an engine that keeps nothing."""
    engine = make_engine(max_model_len=256, prefix_caching=False)
    return sessions(engine)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"offload_chunk_tokens": 16},
        {"offload_policy": PoolPolicy.PAIRED},
        # three or four entries: most loads fail
        {"cpu_pool_bytes": 20 * 4096},
        {"cpu_pool_bytes": 20 * 4096, "offload_policy": PoolPolicy.PAIRED},
        {"cpu_pool_bytes": 32 * 4096, "offload_policy": PoolPolicy.ISOLATED},
        {"offload_in_flight_bytes": 4096},
        {"num_kv_blocks": 12, "num_state_checkpoints": 1},
        {"recurrent_states": "replay"},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()) or "plain",
)
def test_the_tokens_are_those_without_a_pool(
    changes: dict[str, Any], expected: list[list[list[int]]]
) -> None:
    engine = make_engine(**{**POOL, **changes})
    assert sessions(engine) == expected
    stats = engine.stats()
    assert stats["offload_stored_chunks"] > 0
    if "cpu_pool_bytes" not in changes and "offload_in_flight_bytes" not in changes:
        # without loads the comparison would show nothing
        assert stats["offload_loaded_chunks"] > 0
        assert stats["offload_loaded_states"] > 0
    assert_all_given_back(engine)
    engine.close()


def test_the_pool_hits_what_the_device_has_lost(expected: list[list[list[int]]]) -> None:
    without, with_pool = make_engine(**TIGHT), make_engine(**POOL)
    assert sessions(without) == sessions(with_pool) == expected[:2]
    assert with_pool.stats()["hit_tokens"] > 2 * without.stats()["hit_tokens"]


def test_loaded_bytes_are_what_is_computed_on() -> None:
    """The control of the comparison above: other bytes in the pool give other tokens."""

    def second_turn(spoil: bool) -> list[list[int]]:
        engine = make_engine(**POOL)
        sessions(engine, 1)
        assert_all_given_back(engine)
        if spoil:
            memory = tier(engine).offload.memory
            assert isinstance(memory, HostMemory)
            for slab in memory._slabs:
                slab.zero_()
        return engine.generate(PROMPTS, GREEDY)

    assert second_turn(spoil=False) != second_turn(spoil=True)


@pytest.mark.parametrize(
    ("order", "changes"),
    [
        ("newest", {}),
        ("copies last", {}),
        ("oldest", SMALLER),
        ("copies first", SMALLER),
    ],
)
def test_no_schedule_changes_the_tokens(
    order: str, changes: dict[str, Any], expected: list[list[list[int]]]
) -> None:
    def choose(ready: list[Any]) -> Any:
        if order == "newest":
            return ready[-1]
        if order == "oldest":
            return ready[0]
        copies = [part for part in ready if "offload" in part.name or part.parts == 2]
        kernels = [part for part in ready if part not in copies]
        first, then = (copies, kernels) if order == "copies first" else (kernels, copies)
        return (first or then)[0]

    device = VirtualDevice("MI355X", mode="schedule", chooser=choose)
    engine = make_engine(device, **{**POOL, **changes})
    assert sessions(engine, quiet=True) == expected
    if not changes:
        assert engine.stats()["offload_loaded_chunks"] > 0
    assert_all_given_back(engine)
    engine.close()


@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_aborts_and_random_schedules_leave_nothing_behind(data: Any) -> None:
    def choose(ready: list[Any]) -> Any:
        return ready[data.draw(st.integers(0, len(ready) - 1))] if len(ready) > 1 else ready[0]

    device = VirtualDevice("MI355X", mode="schedule", chooser=choose)
    size = data.draw(st.sampled_from([24, 60, 400]))
    engine = make_engine(device, **{**POOL, "cpu_pool_bytes": size * 4096})
    alone = data.draw(st.integers(0, len(PROMPTS) - 1))
    for _ in range(2):
        names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:4]]
        for _ in range(400):
            if not engine.has_unfinished_requests():
                break
            if data.draw(st.integers(0, 9)) == 0:
                engine.abort_request(names[data.draw(st.integers(0, len(names) - 1))])
            engine.step()
        assert not engine.has_unfinished_requests()
    fresh = make_engine(**TIGHT)
    assert engine.generate([PROMPTS[alone]], GREEDY) == fresh.generate([PROMPTS[alone]], GREEDY)
    assert_all_given_back(engine)
    engine.close()


def test_a_state_that_was_evicted_is_counted_and_computed_again(
    expected: list[list[list[int]]],
) -> None:
    engine = make_engine(**POOL)
    assert sessions(engine, 1) == expected[:1]
    assert_all_given_back(engine)
    pool = tier(engine).pool
    for entry in [e for key, e in pool._entries.items() if key.kind is EntryKind.STATE]:
        pool._evict(entry)
    assert engine.generate(PROMPTS, GREEDY) == expected[0]
    stats = engine.stats()
    assert stats["offload_failed_state_evicted"] > 0
    assert "offload_failed_kv_evicted" not in stats
    assert_all_given_back(engine)


def test_a_chunk_that_was_evicted_is_counted_and_stored_again(
    expected: list[list[list[int]]],
) -> None:
    engine = make_engine(**POOL)
    assert sessions(engine, 1) == expected[:1]
    assert_all_given_back(engine)
    manager = tier(engine)
    chunks = [key for key in manager.pool._entries if key.kind is EntryKind.KV]
    for key in chunks:
        manager.pool._evict(manager.pool._entries[key])
    assert engine.generate(PROMPTS, GREEDY) == expected[0]
    stats = engine.stats()
    assert stats["offload_failed_kv_evicted"] > 0
    assert_all_given_back(engine)
    assert all(key in manager.pool for key in chunks)


def test_back_pressure_drops_stores_and_says_so(expected: list[list[list[int]]]) -> None:
    # nothing runs but what the host waits for, so stores pile up
    device = VirtualDevice(
        "MI355X",
        mode="schedule",
        chooser=lambda ready: next(
            (part for part in ready if "offload" not in part.name and part.parts == 1), ready[0]
        ),
    )
    engine = make_engine(device, **{**POOL, "offload_in_flight_bytes": 3 * 4096})
    assert sessions(engine, 1) == expected[:1]
    drops = tier(engine).tier_counts.drops
    assert drops[EntryKind.KV, Cause.BACK_PRESSURE] > 0
    engine.close()


def test_a_device_without_room_for_staging_goes_on(
    expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**POOL)
    assert sessions(engine, 1) == expected[:1]
    manager = tier(engine)
    device, offload = manager.offload.device, manager.offload
    empty = device.empty

    def full(*args: Any, stream: Any = None, **kwargs: Any) -> Any:
        if stream in (offload.store_stream, offload.load_stream):
            raise DeviceOutOfMemory("no room for staging")
        return empty(*args, stream=stream, **kwargs)

    monkeypatch.setattr(device, "empty", full)
    assert engine.generate(PROMPTS, GREEDY) == expected[0]
    counts = manager.tier_counts
    assert counts.failures[EntryKind.KV, Cause.DEVICE] > 0
    longer = [[*prompt, *range(40)] for prompt in PROMPTS]
    fresh = make_engine(max_model_len=256, prefix_caching=False)
    assert engine.generate(longer, GREEDY) == fresh.generate(longer, GREEDY)
    assert counts.drops[EntryKind.KV, Cause.DEVICE] > 0
    assert_all_given_back(engine)


def test_what_a_faulty_step_stored_is_withdrawn(expected: list[list[list[int]]]) -> None:
    engine = make_engine(**POOL)
    assert sessions(engine, 1) == expected[:1]
    manager = tier(engine)
    assert len(manager.pool) > 0
    manager.withdraw_since(1)
    assert len(manager.pool) == 0
    assert engine.generate(PROMPTS, GREEDY) == expected[0]
    assert_all_given_back(engine)
    kinds = {key.kind for key in manager.pool._entries}
    assert kinds == set(EntryKind)
    assert PoolKey(EntryKind.KV, b"") not in manager.pool


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix_caching": False}, "prefix_caching"),
        ({"offload_chunk_tokens": 24}, "block_size 16"),
        ({"offload_chunk_tokens": 128}, "no state would stand"),
        ({"cpu_pool_bytes": 10}, "cpu_pool_bytes"),
        ({"offload_policy": "lru"}, "offload_policy"),
    ],
)
def test_impossible_tiers_are_refused(changes: dict[str, Any], words: str) -> None:
    values = {"state_checkpoint_tokens": 64, "cpu_pool_bytes": 2**20, "offload_chunk_tokens": 32}
    with pytest.raises(BadInput, match=words):
        EngineSettings.parse({**values, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpu_pool_bytes": 3 * 4096}, "kv entries take 16,384 bytes each, and 12,288 are there"),
        ({"cpu_pool_bytes": 4 * 4096}, "state entries take 20,480 bytes each"),
        ({"cpu_pool_bytes": 8 * 4096, "offload_policy": PoolPolicy.ISOLATED}, "and 8,192 are"),
    ],
)
def test_a_pool_without_room_for_an_entry_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make_engine(**{**POOL, **changes})


def test_loads_of_the_next_in_the_queue_begin_while_the_head_waits_for_its_own(
    expected: list[list[list[int]]],
) -> None:
    device = VirtualDevice("MI355X", mode="schedule")
    engine = make_engine(device, **{**POOL, "num_kv_blocks": 60, "num_state_checkpoints": 8})
    assert sessions(engine, 1, quiet=True) == expected[:1]
    manager = tier(engine)
    manager.poll()
    # the device's own cache forgets everything: the next look-ups find the pool
    manager.blocks.withdraw_since(0)
    manager.checkpoints.withdraw_since(0)
    long = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    engine.add_request([3] * 20, long)
    while engine.counters.decode_steps < 2:
        engine.step()
    names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    engine.step()
    engine.step()
    begun = {number for number, load in manager._loads.items() if load.job is not None}
    assert len(begun) >= 2
    # one of them ends before it is admitted
    assert engine.abort_request(names[1])
    tokens: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    for number, name in enumerate(names):
        assert tokens[name] == ([] if number == 1 else expected[0][number])
    assert engine.stats()["offload_loads"] >= 2
    assert_all_given_back(engine)
    engine.close()


def test_a_shared_lru_loses_states_whose_kv_stays_young() -> None:
    """The published failure: KV comes back, its state is gone; not so where they are paired."""
    failed, loaded = {}, {}
    for policy in (PoolPolicy.SHARED_LRU, PoolPolicy.PAIRED):
        engine = make_engine(
            **{
                **POOL,
                "num_kv_blocks": 24,
                "num_state_checkpoints": 4,
                "cpu_pool_bytes": 60 * 4096,
                "offload_policy": policy,
            }
        )
        prompts = [[*range(10, 74), number] for number in range(3)]
        one = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        for turn in range(10):
            # a prefix that the device serves each time, and others that fill the pool
            engine.generate([[*prompts[turn % 3], turn]], one)
            engine.generate([[100 + 7 * turn + place % 9 for place in range(70)]], one)
        engine.runner.device.synchronize()  # type: ignore[attr-defined]
        manager = tier(engine)
        manager.poll()
        manager.blocks.withdraw_since(0)
        manager.checkpoints.withdraw_since(0)
        before = manager.tier_counts.loaded_states
        engine.generate([prompts[0]], one)
        loaded[policy] = manager.tier_counts.loaded_states - before
        failed[policy] = manager.tier_counts.failures[EntryKind.STATE, Cause.EVICTED]
        assert_all_given_back(engine)
    assert failed[PoolPolicy.SHARED_LRU] > 0
    assert failed[PoolPolicy.PAIRED] == 0
    assert (loaded[PoolPolicy.SHARED_LRU], loaded[PoolPolicy.PAIRED]) == (0, 1)


def test_more_than_the_host_has_is_refused_before_anything_is_pinned() -> None:
    chosen = EngineSettings(**{**POOL, "max_num_batched_tokens": 64, "cpu_pool_bytes": 2**43})
    properties = replace(VirtualDevice("MI355X").properties, kind=DeviceKind.CUDA)
    with pytest.raises(DeviceOutOfMemory, match=r"cpu_pool_bytes: 8192\.0 GiB .* are free"):
        check_offload(chosen, SimpleNamespace(properties=properties))  # type: ignore[arg-type]
    # a virtual device pins nothing
    check_offload(chosen, VirtualDevice("MI355X"))

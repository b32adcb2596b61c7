"""The plan of the throughput sweep: which points, in which order, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from atom.benchmarks.throughput_settings import (
    Special,
    ThroughputSettings,
    build_points,
    engine_settings,
)
from atom.config import CopyProtocol, GuardMode
from atom.errors import BadInput
from atom.kv_transfer.pool_entry import OffloadBackend, PoolPolicy
from atom.model_engine.engine_settings import StatusCheck

ALL = [special.value for special in Special]


def settings(**values: Any) -> ThroughputSettings:
    return ThroughputSettings.parse({"concurrency": [2, 4, 8], **values})


def test_the_grid_has_each_point_once_and_an_arm_without_pool_once() -> None:
    axes = {"offload_policy": ["shared_lru", "paired"], "protocol": ["hold", "unpatched"]}
    points = build_points(settings(**axes))
    assert len({point.point_id for point in points}) == len(points) == 2 * 3 * (2 * 2 + 1)
    without = Counter(point.arm.name for point in points if point.pool_gib is None)
    assert without == {"hold": 3, "unpatched": 3}
    assert [point.order for point in points] == list(range(len(points)))


def test_the_order_is_drawn_by_the_seed_and_the_grid_comes_first() -> None:
    points = build_points(settings(special=ALL))
    names = [point.point_id for point in points]
    assert names == [point.point_id for point in build_points(settings(special=ALL))]
    other = [point.point_id for point in build_points(settings(special=ALL, seed=7))]
    assert names != other
    assert sorted(names) == sorted(other)
    # concurrencies and pools stand mixed in the grid's first round
    grid = points[: 3 * 3]
    assert {(point.concurrency, point.pool_gib) for point in grid} == {
        (concurrency, pool) for concurrency in (2, 4, 8) for pool in (0.0005, 0.002, None)
    }
    assert [point.concurrency for point in grid] != sorted(point.concurrency for point in grid)
    assert [point.repeat for point in points[9:12]] == [1, 1, 1]
    assert {point.concurrency for point in points[9:12]} == {4}


def test_special_arms_stand_where_the_issue_wants_them() -> None:
    points = build_points(settings(special=ALL))
    places: dict[str, set[tuple[int, float | None]]] = {}
    for point in points:
        places.setdefault(point.arm.name, set()).add((point.concurrency, point.pool_gib))
    heavy = {(8, 0.002), (4, 0.002)}
    assert places["zero_copy"] == places["hold, chunk 16"] == places["hold, paired"] == heavy
    assert places["unpatched, guard"] == heavy
    # {offload, none} x {drafts, none}, and the second crash point
    assert places["unpatched"] == heavy | {(4, None)}
    assert places["unpatched, no MTP"] == {(4, 0.002), (4, None)}
    arms = {point.arm.name: point.arm for point in points}
    bare = arms["unpatched"]
    assert (bare.guard, bare.status_check) == (GuardMode.NONE, StatusCheck.DEBUG)
    assert not bare.epoch_tag
    guarded = arms["unpatched, guard"]
    assert (guarded.guard, guarded.epoch_tag) == (GuardMode.REPORT, False)
    assert arms["hold"].epoch_tag
    assert arms["hold"].guard is GuardMode.REPORT


def test_another_backend_is_an_arm_at_the_heavy_points() -> None:
    one = settings(special=["backends"], offload_policy=["paired"])
    found = [point for point in build_points(one) if "lmcache" in point.arm.name]
    assert {point.arm.name for point in found} == {"hold, shared_lru, lmcache"}
    assert {(point.concurrency, point.pool_gib) for point in found} == {(8, 0.002), (4, 0.002)}
    engine = engine_settings(one, found[0].arm, 8, 0.002)
    assert engine.offload_backend is OffloadBackend.LMCACHE


def test_an_engine_gets_what_its_arm_says() -> None:
    one = settings(special=ALL)
    arms = {point.arm.name: point.arm for point in build_points(one)}
    engine = engine_settings(one, arms["hold, chunk 256"], 8, 0.002)
    assert engine.offload_chunk_tokens == engine.state_checkpoint_tokens == 256
    assert engine.cpu_pool_bytes == int(0.002 * 2**30)
    assert engine.max_num_seqs == 8
    assert engine_settings(one, arms["hold, paired"], 8, 0.002).offload_policy is PoolPolicy.PAIRED
    none = engine_settings(one, arms["unpatched, no MTP"], 4, None)
    assert (none.draft_tokens, none.forced_acceptance_length, none.cpu_pool_bytes) == (
        0,
        None,
        None,
    )
    assert none.copy_protocol is CopyProtocol.UNPATCHED


def test_only_chooses_by_arm_identity_or_pattern() -> None:
    chosen = build_points(settings(special=ALL, only=["zero_copy", "hold/c2/*/0"]))
    assert {point.arm.name for point in chosen} == {"zero_copy", "hold"}
    assert len(chosen) == 2 + 3
    with pytest.raises(BadInput, match=r"only: 'holt' fits no point; arms: hold.*hold/c"):
        build_points(settings(only=["holt"]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"concurrency": [0]}, "concurrency.0: input should be greater than or equal to 1"),
        ({"concurrency": [4, 4]}, "a value stands twice"),
        ({"pool_gib": [1.0000001, 1.0000002]}, "a value stands twice"),
        ({"central_concurrency": [77]}, "central_concurrency: 77 is none of concurrency"),
        ({"pool_gib": [], "no_offload": False}, "no point is left"),
        ({"num_kv_blocks": 8}, "num_kv_blocks 8 of 16 tokens do not hold one request"),
        ({"chunk_tokens": [24]}, "arm hold:.*\n?.*offload_chunk_tokens 24 is no multiple"),
        ({"other_chunk_tokens": [24], "special": ["chunks"]}, "arm hold, chunk 24"),
        ({"forced_acceptance_length": 5.0}, "forced_acceptance_length 5.0 is more than the 4"),
        ({"gpus": [0], "scheduler": "tcp://x:1"}, "leave them out beside a scheduler"),
        ({"special": ["chunk"]}, "special.0: input should be 'repeats'"),
        ({"poolgib": [1.0]}, "did you mean 'pool_gib'"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        settings(**values)

"""The memory plan: what it counts, what it refuses with sizes, and what an engine then takes."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from engines import SMALL, make_engine

from atom.config import RecurrentStates
from atom.device.interface import Device
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput
from atom.model_engine import engine_builder
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.memory_plan import MemoryPlan, plan_memory
from atom.models.caches import bytes_per_block, bytes_per_group
from atom.models.presets import preset

GIBIBYTE = 2**30


def plan(device: Device | None = None, **changes: Any) -> MemoryPlan:
    """The plan of the tiny model under :data:`SMALL`, on a card of 1 GiB unless it is given."""
    device = device or VirtualDevice("MI355X", memory_bytes=GIBIBYTE)
    free = changes.pop("free_bytes", None)
    weights = changes.pop("weight_bytes", 10**6)
    settings = EngineSettings(**{**SMALL, **changes})
    return plan_memory(
        preset("tiny"),
        settings,
        device,
        dtype=torch.float32,
        weight_bytes=weights,
        with_mtp=settings.draft_tokens > 0,
        free_bytes=free,
    )


def test_the_parts_add_up_and_are_those_of_the_pools() -> None:
    made = plan(num_kv_blocks=100)
    config = preset("tiny")
    assert made.num_blocks == 100
    assert made.block_bytes == bytes_per_block(config, torch.float32, block_size=16, with_mtp=True)
    assert made.kv_bytes == 100 * made.block_bytes
    group = bytes_per_group(config, torch.float32, draft_tokens=3)
    assert made.state_bytes == SMALL["max_num_seqs"] * group
    assert made.planned_bytes == (
        made.weight_bytes
        + made.working_bytes
        + made.state_bytes
        + made.checkpoint_bytes
        + made.kv_bytes
    )
    assert made.planned_bytes <= made.usable_bytes < made.total_bytes


def test_without_drafts_or_prefix_cache_their_parts_are_gone() -> None:
    full, plain = plan(), plan(draft_tokens=0, prefix_caching=False)
    assert plain.block_bytes < full.block_bytes
    assert plain.state_bytes < full.state_bytes
    assert plain.num_checkpoints == plain.checkpoint_bytes == 0 < full.checkpoint_bytes


def test_replay_keeps_one_state_a_request_and_its_drafts() -> None:
    per_draft, replay = plan(), plan(recurrent_states=RecurrentStates.REPLAY)
    config = preset("tiny")
    rings = 8 * 8 * (config.key_dim + config.value_dim + 2 * config.linear_num_value_heads) * 4
    states = config.linear_num_value_heads * config.linear_key_head_dim
    states *= 8 * config.linear_value_head_dim * 4
    layers = len(config.linear_layers)
    assert replay.state_bytes == per_draft.state_bytes + layers * (rings - 3 * states)
    assert replay.checkpoint_bytes == per_draft.checkpoint_bytes


def test_the_description_names_every_part_with_its_size() -> None:
    made = plan(num_kv_blocks=100)
    text = made.describe()
    lines = text.splitlines()
    assert lines[0].startswith("memory plan: ")
    assert "that this engine may fill" in lines[0]
    shown = {}
    for line in lines[1:]:
        found = re.match(r"(.+?)\s{2,}([\d,.]+) MiB", line)
        assert found, line
        shown[found[1]] = float(found[2].replace(",", ""))
    assert list(shown) == ["weights", "working space", "states", "state checkpoints", "KV blocks"]
    assert sum(shown.values()) == pytest.approx(made.planned_bytes / 2**20, abs=0.3)
    assert f"100 of {made.block_bytes:,} bytes" in text
    assert "8 requests" in text


def test_the_plan_is_printed_before_anything_is_allocated(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Watched(VirtualDevice):
        def empty(self, *given: Any, **named: Any) -> torch.Tensor:
            order.append("allocated")
            return super().empty(*given, **named)

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("memory plan:"):
                order.append("printed")

    handler = Listening()
    logger = logging.getLogger(engine_builder.__name__)
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger=logger.name):
            make_engine(Watched("MI355X")).close()
    finally:
        logger.removeHandler(handler)
    assert order[0] == "printed"
    assert "allocated" in order


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_blocks": 2**23}, "8,388,608 KV blocks"),
        ({"max_num_seqs": 1024, "max_num_batched_tokens": 2**20}, "working space"),
        ({"num_state_checkpoints": 2**16}, "checkpoints"),
        ({"weight_bytes": GIBIBYTE}, f"weights {GIBIBYTE:,}"),
        # free memory, not the card's size, is what counts
        ({"free_bytes": GIBIBYTE + 10**6}, "1,000,000 of"),
        # the context alone needs more than is free
        ({"free_bytes": GIBIBYTE // 2}, "0 of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_over_commit_is_refused_with_the_sizes_and_what_to_lower(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadInput, match="does not fit") as refusal:
        plan(**changes)
    text = str(refusal.value)
    assert named in text
    needed, allowed = (
        int(number.replace(",", ""))
        for number in re.findall(r"([\d,]+) bytes are needed and ([\d,]+) of", text)[0]
    )
    assert needed > allowed
    assert "Lower max_num_seqs" in text
    assert "memory_utilization" in text


def test_the_refusal_is_exact_to_a_block() -> None:
    """The control of the refusals above: one block fewer fits."""
    unlimited = plan(num_kv_blocks=1)
    room = 1 + (unlimited.usable_bytes - unlimited.planned_bytes) // unlimited.block_bytes
    assert plan(num_kv_blocks=room).num_blocks == room
    with pytest.raises(BadInput, match="does not fit"):
        plan(num_kv_blocks=room + 1)


def test_a_refused_engine_allocates_nothing() -> None:
    device = VirtualDevice("MI355X")
    with pytest.raises(BadInput, match="does not fit"):
        make_engine(device, num_kv_blocks=2**23)
    assert device.memory_stats()["allocated_bytes.all.peak"] == 0


def test_a_virtual_pool_is_capped_since_its_memory_is_the_hosts() -> None:
    made = plan(VirtualDevice("MI355X"), num_kv_blocks=None, max_model_len=2**20)
    assert made.num_blocks == 4096
    assert made.kv_bytes < 10**9


def test_a_small_device_fills_what_is_left() -> None:
    small = VirtualDevice("MI355X", memory_bytes=32 * 2**20)
    made = plan(small, num_kv_blocks=None, max_model_len=2**20)
    assert 1 <= made.num_blocks < 4096
    assert made.usable_bytes - made.block_bytes < made.planned_bytes <= made.usable_bytes
    less = plan(small, num_kv_blocks=None, max_model_len=2**20, memory_utilization=0.5)
    assert less.num_blocks < made.num_blocks


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_tokens": 0},
        {},
        {"dspark": True},
        {"recurrent_states": RecurrentStates.REPLAY},
    ],
    ids=str,
)
def test_an_engine_takes_no_more_than_its_plan(changes: dict[str, Any]) -> None:
    device = VirtualDevice("MI355X")
    engine = make_engine(device, **changes)
    made = engine.runner.plan  # type: ignore[attr-defined]
    engine.generate([[5] * 60, [6] * 9])
    # weights of a virtual device lie in plain host memory
    peak = device.memory_stats()["allocated_bytes.all.peak"]
    assert peak <= made.planned_bytes - made.weight_bytes
    # and the plan is no wild guess: pools are most of it
    pools = made.kv_bytes + made.state_bytes + made.checkpoint_bytes
    assert pools < peak
    engine.close()

"""Small engines with a CPU pool, and multi-turn sessions that overflow the device's own cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model_engine"))
from engines import make_engine, random_prompts

from atom.kv_transfer.host_memory import HostMemory
from atom.kv_transfer.lmcache_backend import LMCachePool
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.sequence import SamplingParams
from atom.model_engine.tiered_blocks import TieredBlockManager

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
#: of a seed with which the two likeliest tokens of both turns are 0.01 apart or more at every
#: place: no other order of float32 sums decides between them
PROMPTS = random_prompts(6, (33, 70, 100), seed=3)
#: two or three of the sessions fit
TIGHT: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 14, "num_state_checkpoints": 3}
POOL: dict[str, Any] = {**TIGHT, "cpu_pool_bytes": 8 * 2**20, "offload_chunk_tokens": 32}


def sessions(engine: LLMEngine, turns: int = 2, *, quiet: bool = False) -> list[list[list[int]]]:
    """Each session's prompt grows by its answer and one token, turn by turn.

    ``quiet``: all copies end between turns.
    """
    prompts = [list(prompt) for prompt in PROMPTS]
    answers = []
    for turn in range(turns):
        tokens = engine.generate(prompts, GREEDY)
        if quiet:
            engine.runner.device.synchronize()  # type: ignore[attr-defined]
        answers.append(tokens)
        prompts = [
            [*prompt, *answer, 7 + turn] for prompt, answer in zip(prompts, tokens, strict=True)
        ]
    return answers


def tier(engine: LLMEngine) -> TieredBlockManager:
    """The engine's block manager."""
    manager = engine.scheduler.block_manager
    assert isinstance(manager, TieredBlockManager)
    return manager


def assert_all_given_back(engine: LLMEngine) -> None:
    """Nothing runs: no block, checkpoint, entry or staging block is held."""
    manager = tier(engine)
    engine.runner.device.synchronize()  # type: ignore[attr-defined]
    manager.poll()
    assert not manager.offload.stores
    assert not manager.offload.loads
    assert manager.blocks.num_used == 0
    assert not any(manager.checkpoints.pins(s) for s in range(manager.checkpoints.num_slots))
    assert manager.num_free_groups == manager.num_groups
    pool = manager.pool
    assert all(entry.landed and not entry.pins for entry in pool._entries.values())
    if isinstance(pool, LMCachePool):
        assert pool.their_bytes == pool.used_bytes
    else:
        memory = manager.offload.memory
        assert isinstance(memory, HostMemory)
        assert memory.extents.free_bytes == pool.capacity_bytes - pool.used_bytes
    assert manager.offload.store_bytes_in_flight == 0


__all__ = [
    "GREEDY",
    "POOL",
    "PROMPTS",
    "TIGHT",
    "assert_all_given_back",
    "make_engine",
    "sessions",
    "tier",
]

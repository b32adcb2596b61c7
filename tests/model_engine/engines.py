"""Small engines on the virtual device, for tests."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from atom.device.virtual import VirtualDevice
from atom.model_engine.engine_builder import build_engine, load_model
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.sequence import SamplingParams
from atom.models.weights import LoadedModel

SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 160,
    "num_kv_blocks": 128,
    "state_checkpoint_tokens": 32,
    "num_state_checkpoints": 8,
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@lru_cache(maxsize=2)
def tiny_model(seed: int = 0) -> LoadedModel:
    """The tiny preset, loaded once: weights are read, never written."""
    return load_model("preset:tiny", VirtualDevice("MI355X"), seed=seed, max_positions=4096)


def make_engine(device: VirtualDevice | None = None, **settings: Any) -> LLMEngine:
    """An engine over the tiny model; ``settings`` go over :data:`SMALL`."""
    loaded = tiny_model()
    chosen = EngineSettings(**{**SMALL, **settings})
    return build_engine(loaded.model, loaded.mtp, chosen, device or VirtualDevice("MI355X"))


def random_prompts(count: int, lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Prompts of random ids."""
    generator = random.Random(seed)
    return [
        [generator.randrange(512) for _ in range(generator.choice(lengths))] for _ in range(count)
    ]


def run_to_end(engine: LLMEngine, limit: int = 2000) -> list[RequestOutput]:
    """Step until nothing is left."""
    outputs: list[RequestOutput] = []
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            return outputs
        outputs += engine.step()
    raise AssertionError(f"not done after {limit} steps: {engine.stats()}")

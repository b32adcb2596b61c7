"""A cache that a neighbour filled: what is found, and what is computed."""

from __future__ import annotations

from atom.benchmarks.throughput_settings import ThroughputSettings
from atom.benchmarks.warm_start import answer_rounds
from atom.device import open_device


def test_only_the_neighbours_own_prompts_are_found() -> None:
    settings = ThroughputSettings(
        sessions=8, block_tokens=1, max_context_tokens=448, num_kv_blocks=44
    )
    cold, warm = (
        answer_rounds(settings, open_device("virtual"), warm=flag, prompts=2)
        for flag in (False, True)
    )
    assert cold.prompt_tokens == warm.prompt_tokens > 0
    assert (cold.found_tokens, cold.computed_tokens) == (0, cold.prompt_tokens)
    assert warm.found_share > 0.5
    assert warm.computed_tokens == warm.prompt_tokens - warm.found_tokens

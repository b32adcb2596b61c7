"""What a cache that another server has filled does to a load: tokens found, and tokens computed.

Two rounds of the same prompts go through an engine with a CPU pool. The first round fills it, as a
neighbour's load would whose cache answers this server too. The second round is the load that is
measured: once with the prompts of the first, once with others of the same lengths. Counts, no
times.
"""

from __future__ import annotations

from dataclasses import dataclass

from atom.benchmarks.agentic_sessions import prompt_token_ids
from atom.benchmarks.throughput_point import read_sessions, start_engine
from atom.benchmarks.throughput_settings import ThroughputPoint, ThroughputSettings, grid_arms
from atom.device import Device
from atom.model_engine.sequence import SamplingParams

_OUTPUT_TOKENS = 4


@dataclass(frozen=True)
class WarmStart:
    """The second round of one engine.

    Attributes:
        warm: whether the first round had the same prompts.
        prompt_tokens: asked for.
        found_tokens: of those, found in either tier.
        computed_tokens: prompt tokens that were computed.
    """

    warm: bool
    prompt_tokens: int
    found_tokens: int
    computed_tokens: int

    @property
    def found_share(self) -> float:
        """Found of all."""
        return self.found_tokens / self.prompt_tokens


def answer_rounds(
    settings: ThroughputSettings, device: Device, *, warm: bool, prompts: int = 4
) -> WarmStart:
    """Run both rounds on an engine of the largest pool of ``settings``.

    Args:
        settings: of a throughput sweep; its first arm and largest pool.
        device: to run on.
        warm: whether both rounds have the same prompts.
        prompts: first requests of as many sessions.

    Raises:
        BadInput: the settings give no sessions, or an engine that does not fit.
    """
    point = ThroughputPoint(grid_arms(settings)[0], prompts, max(settings.pool_gib))
    sessions = read_sessions(settings).sessions[:prompts]
    engine = start_engine(settings, point, device)
    params = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    try:
        before: dict[str, float] = {}
        for salt in ("neighbour", "neighbour" if warm else "own"):
            before = engine.stats()
            ids = [
                prompt_token_ids(session.turns[0], vocab_size=engine.vocab_size or 2, salt=salt)
                for session in sessions
            ]
            for prompt in ids:
                # one at a time: the rounds differ in what they find, and in nothing else
                engine.generate([prompt], params)
        after = engine.stats()
    finally:
        engine.close()
    found = {
        name: int(after[name] - before[name])
        for name in ("lookup_tokens", "hit_tokens", "prompt_tokens")
    }
    return WarmStart(warm, found["lookup_tokens"], found["hit_tokens"], found["prompt_tokens"])

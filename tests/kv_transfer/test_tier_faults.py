"""Pins taken away in a whole engine: the comparison of tokens notices both kinds of fault."""

from __future__ import annotations

from typing import Any

import pytest
from offload_engines import GREEDY, POOL, PROMPTS, make_engine, sessions, tier

from atom.device.virtual import VirtualDevice
from atom.model_engine.sequence import SamplingParams


class CopiesLast:
    """Runs whatever is no copy of the tier first, while ``parked``."""

    def __init__(self) -> None:
        self.parked = True

    def __call__(self, ready: list[Any]) -> Any:
        others = [part for part in ready if part.stream_id not in self.streams]
        return (others or ready)[0] if self.parked else ready[0]

    def park(self, engine: Any) -> None:
        offload = tier(engine).offload
        self.streams = {offload.store_stream.stream_id, offload.load_stream.stream_id}

    streams: frozenset[int] | set[int] = frozenset()


def parked_engine(**changes: Any) -> tuple[Any, CopiesLast]:
    chooser = CopiesLast()
    device = VirtualDevice("MI355X", mode="schedule", chooser=chooser)
    engine = make_engine(device, **{**POOL, **changes})
    chooser.park(engine)
    return engine, chooser


def expected(prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return make_engine(max_model_len=256, prefix_caching=False).generate(prompts, params)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_still_reads_a_block_that_was_freed(pinned: bool) -> None:
    engine, _ = parked_engine()
    manager = tier(engine)
    if not pinned:
        store, unpin = manager._store, manager._unpin_sources

        def careless(chunks: Any, states: Any) -> None:
            store(chunks, states)
            unpin(chunks, states)

        manager._store = careless  # type: ignore[method-assign]
        manager._unpin_sources = lambda chunks, states: None  # type: ignore[method-assign]
        # nor does it wait for what it does not know of
        manager._wait_for_pins = lambda: False  # type: ignore[method-assign]
    others = [[511 - token for token in prompt] for prompt in PROMPTS]
    right = expected(PROMPTS)
    assert engine.generate(PROMPTS, GREEDY) == right
    engine.generate(others, GREEDY)
    engine.runner.device.synchronize()
    manager.poll()
    again = engine.generate(PROMPTS, GREEDY)
    assert engine.stats()["offload_loaded_chunks"] > 0
    assert (again == right) == pinned


@pytest.mark.parametrize("pinned", [True, False])
def test_a_load_still_writes_a_block_that_was_given_away(pinned: bool) -> None:
    engine, chooser = parked_engine(num_kv_blocks=24)
    manager = tier(engine)
    chooser.parked = False
    sessions(engine, 1, quiet=True)
    manager.poll()
    chooser.parked = True
    # the device's own cache forgets everything: the next look-up finds the pool
    manager.blocks.withdraw_since(0)
    manager.checkpoints.withdraw_since(0)
    loaded = max(PROMPTS, key=len)
    running, newcomer = [3] * 20, [5] * 120
    engine.add_request(running, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    while engine.counters.decode_steps < 3:
        engine.step()
    name = engine.add_request(loaded, GREEDY)
    while not manager.offload.loads:
        engine.step()
    if not pinned:
        [load] = manager._landing

        def careless(request_id: int) -> None:
            manager._loads.pop(request_id)
            manager.blocks.release([*load.present, *load.blocks.values()])
            manager._landing.clear()

        manager._disown = careless  # type: ignore[method-assign]
    engine.abort_request(name)
    manager._disown = type(manager)._disown.__get__(manager)  # type: ignore[method-assign]
    longer = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    engine.add_request(newcomer, longer, request_id="newcomer")
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "newcomer":
                tokens += output.new_token_ids
                # its prompt is in the blocks; now the parked load runs
                chooser.parked = False
    assert (tokens == expected([newcomer], longer)[0]) == pinned

"""How many engine steps lie between a send and its receive, by kind: counts, not times.

A decode step's status is received before the next step that has an output, its ids and drafts
behind the next one. A middle chunk of a long prompt has no output: nothing is received for it. So a
window is one step long among decode steps, and longer across chunks. Counted on the virtual device,
of the code, and the same on any.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from atom.config import CopyProtocol
from atom.device.virtual import VirtualDevice
from atom.model_engine.engine_builder import build_engine, load_model
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.sequence import SamplingParams

_PROMPT = 6
_BUDGET = 16
_CHUNKS = 3
_STEPS = 24


def receive_windows(profile: str = "MI355X", *, seed: int = 42) -> dict[str, Counter[int]]:
    """Steps from send to receive, counted: first among decode steps, then with a long prompt.

    Returns:
        ``{"status, decode steps": {1: n}, "status, with a long prompt": ..., "ids, ..."}``.
    """
    device = VirtualDevice(profile)
    longest = 160
    loaded = load_model("preset:tiny", device, seed=seed, max_positions=longest)
    settings = EngineSettings(
        copy_protocol=CopyProtocol.HOLD,
        max_num_seqs=3,
        max_num_batched_tokens=_BUDGET,
        max_model_len=longest,
        num_kv_blocks=40,
        prefix_caching=False,
        seed=seed,
    )
    engine = build_engine(loaded.model, loaded.mtp, settings, device)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    step, phase = 0, "decode steps"
    found: dict[str, Counter[int]] = {}

    def watch(owner: Any, send: str, receive: str, kind: str) -> None:
        sent: deque[int] = deque()
        first, second = getattr(owner, send), getattr(owner, receive)

        def sending(*arguments: Any) -> Any:
            sent.append(step)
            return first(*arguments)

        def receiving(*arguments: Any) -> Any:
            key = f"{kind}, {phase}"
            found.setdefault(key, Counter())[step - sent.popleft()] += 1
            return second(*arguments)

        setattr(owner, send, sending)
        setattr(owner, receive, receiving)

    processor = runner.processor
    watch(processor.spec_status, "send", "receive", "status")
    watch(processor, "send_to_cpu_async", "recv_async_output", "ids")

    def run(steps: int, until: Callable[[], bool]) -> None:
        nonlocal step
        for _ in range(steps):
            engine.step()
            step += 1
            if until():
                return

    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    for number in range(2):
        engine.add_request([number + 1] * _PROMPT, params, request_id=str(number))
    run(_STEPS, lambda: engine.counters.decode_steps >= 1)
    found.clear()
    run(8, lambda: False)
    phase = "with a long prompt"
    engine.add_request([7] * (_BUDGET * _CHUNKS), params, request_id="long")
    run(2 * _CHUNKS + 2, lambda: False)
    engine.close()
    return found

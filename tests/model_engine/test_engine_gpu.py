"""The engine on an accelerator: the tokens of the CPU, the fault, the guard, memory, shutdown.

Everything runs in this process: no arm here can reach memory that is not mapped.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
from engines import GREEDY, SMALL, make_engine, random_prompts, run_to_end

from atom.benchmarks.engine_fault import PARK_SECONDS, Seen, load_fault_model, row_of
from atom.benchmarks.engine_fault import run_arm as run_fault_arm
from atom.benchmarks.engine_fault_arms import ARMS, GUARD_ALONE, REFERENCE, EngineFaultSettings
from atom.benchmarks.greedy_equality import load_models, measure_greedy_equality
from atom.benchmarks.greedy_equality_rows import (
    CONTROL,
    MTP,
    NULL,
    REPLAY,
    GreedyEqualitySettings,
    Precision,
)
from atom.benchmarks.lifetime_paths import own_queue_stream
from atom.config import CopyProtocol, DeviceChoice
from atom.device import open_device
from atom.device.interface import Device, DeviceKind
from atom.model_engine.engine_builder import build_engine, load_model
from atom.model_engine.engine_settings import EngineSettings, StatusCheck
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.sequence import SamplingParams
from atom.models.weights import LoadedModel
from atom.transfer.copy_protocol import UnpatchedWarning

pytestmark = pytest.mark.gpu

#: of a seed with which the two likeliest tokens are 0.005 apart or more at every place, which is
#: far more than another order of float32 sums moves them
PROMPTS = random_prompts(7, (5, 17, 33, 70, 100), seed=2)
SAFE = [protocol for protocol in CopyProtocol if protocol is not CopyProtocol.UNPATCHED]
BUDGET = 8192
FAULT = EngineFaultSettings(
    device=DeviceChoice.ACCELERATOR,
    model="preset:m395",
    token_budgets=(BUDGET,),
    chunks=2,
    # the request of the bad count still runs when the guard speaks
    output_tokens=48,
)
EQUALITY = GreedyEqualitySettings(
    device=DeviceChoice.ACCELERATOR,
    model="preset:m395",
    precision=Precision.BFLOAT16,
    requests=16,
    output_tokens=48,
    only=(NULL, MTP, REPLAY, "MTP-3, chunks", CONTROL),
)


@pytest.fixture(scope="module")
def accelerator() -> Device:
    return open_device(DeviceChoice.ACCELERATOR)


@pytest.fixture(scope="module")
def tiny(accelerator: Device) -> LoadedModel:
    return load_model("preset:tiny", accelerator, max_positions=4096)


@pytest.fixture(scope="module")
def m395(accelerator: Device) -> LoadedModel:
    return load_fault_model(FAULT, accelerator)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy tokens of the same weights on the virtual device, without drafts, in float32."""
    return make_engine(draft_tokens=0, max_num_batched_tokens=512).generate(PROMPTS, GREEDY)


def make(loaded: LoadedModel, device: Device, **settings: Any) -> LLMEngine:
    """A small engine on an accelerator."""
    return build_engine(loaded.model, loaded.mtp, EngineSettings(**{**SMALL, **settings}), device)


def runner_of(engine: LLMEngine) -> ModelRunner:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    return runner


def allocated(device: Device) -> int:
    gc.collect()
    device.synchronize()
    return device.memory_stats()["allocated_bytes.all.current"]


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_tokens": 0},
        {"logprobs": True, "dspark": True, "dspark_threshold": 0.002},
        {"graphs": False},
        {"draft_tokens": 1, "max_num_batched_tokens": 40},
        # the pool holds two or three of the requests: the others are put back and computed again
        {"num_kv_blocks": 13},
        {"recurrent_states": "replay", "logprobs": True},
        {"recurrent_states": "replay", "num_kv_blocks": 13},
        *({"copy_protocol": protocol} for protocol in SAFE),
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_the_tokens_are_those_of_the_cpu(
    settings: dict[str, Any], accelerator: Device, tiny: LoadedModel, expected: list[list[int]]
) -> None:
    engine = make(tiny, accelerator, **settings)
    on_gpu = accelerator.properties.kind is not DeviceKind.VIRTUAL
    assert bool(runner_of(engine)._graphs) is (on_gpu and settings.get("graphs", True))
    assert engine.generate(PROMPTS, GREEDY) == expected
    stats = engine.stats()
    assert (stats["preemptions"] > 0) is ("num_kv_blocks" in settings)
    assert (stats["accepted_tokens"] > 0) is (settings.get("draft_tokens") != 0)
    assert stats["used_blocks"] == stats["running"] == 0
    assert runner_of(engine).processor.live_sources() == 0
    engine.close()


def test_graphs_and_protocols_change_no_token_of_a_large_model(
    accelerator: Device, m395: LoadedModel
) -> None:
    """Each of these engines launches the same kernels over the same batches: equal, not close."""
    prompts = random_prompts(8, (40, 130, 300), seed=7)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        "num_kv_blocks": 400,
    }
    found: dict[str, list[list[int]]] = {}
    arms: dict[str, dict[str, Any]] = {
        "graphs": {},
        "eager": {"graphs": False},
        **{protocol.value: {"copy_protocol": protocol} for protocol in SAFE},
    }
    for name, changes in arms.items():
        engine = make(m395, accelerator, **settings, **changes)
        found[name] = engine.generate(prompts, params)
        assert engine.counters.accepted_tokens > 0
        engine.close()
    assert [name for name, tokens in found.items() if tokens != found["graphs"]] == []


def test_drafts_change_a_token_only_where_rounding_can(accelerator: Device) -> None:
    models = load_models(EQUALITY, accelerator)
    rows = {row.arm: row for row in measure_greedy_equality(accelerator, models, EQUALITY)}
    for row in rows.values():
        print(row)
    for row in rows.values():
        assert (row.above_bound > 0) is row.control, row
    # a bound above the margins could not see a fault, and the control shows that it would
    assert rows[MTP].places_above_bound > 0.2
    assert rows[MTP].accepted_tokens > 0


@pytest.fixture(scope="module")
def fault(accelerator: Device, m395: LoadedModel) -> dict[str, Seen]:
    """The arms ``hold`` and ``unpatched`` with the guard as its only net, at one token budget."""
    stream = own_queue_stream(accelerator, PARK_SECONDS)
    arms = {arm.name: arm for arm in ARMS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnpatchedWarning)
        return {
            name: run_fault_arm(accelerator, m395, FAULT, arms[name], BUDGET, stream)
            for name in (REFERENCE, GUARD_ALONE)
        }


def test_hold_never_shows_the_fault(fault: dict[str, Seen]) -> None:
    seen = fault[REFERENCE]
    assert seen.crash is None
    assert seen.failed == {}
    assert seen.statuses > 0
    assert seen.middle_chunks >= FAULT.chunks
    assert (seen.impossible, seen.budget_statuses, seen.stale_payloads) == (0, 0, 0)
    assert seen.largest_bonus <= 3
    assert len(seen.done) == FAULT.requests + 1


def test_unpatched_reads_the_token_budget_as_a_bonus(fault: dict[str, Seen]) -> None:
    seen = fault[GUARD_ALONE]
    assert seen.crash is None
    assert seen.largest_bonus == BUDGET
    assert seen.budget_statuses > 0
    assert seen.status_lines > 0
    assert seen.out_of_bounds_lines > 0
    arms = {arm.name: arm for arm in ARMS}
    row = row_of(FAULT, arms[GUARD_ALONE], BUDGET, seen, fault[REFERENCE])
    assert row.stale_statuses > 0
    assert row.first_wrong_status is not None


def test_the_guard_catches_it_and_the_engine_goes_on(fault: dict[str, Seen]) -> None:
    seen = fault[GUARD_ALONE]
    assert seen.guard_errors > 0
    assert seen.guard_value == BUDGET + 1
    assert any("guard" in error or "causal_conv1d" in error for error in seen.failed.values())
    # the others ran to their end behind it, all of them are accounted for
    assert seen.done
    assert len(seen.done) + len(seen.failed) == FAULT.requests + 1


@pytest.mark.parametrize("protocol", [CopyProtocol.HOLD, CopyProtocol.ZERO_COPY])
def test_a_bad_count_fails_its_request_alone(
    protocol: CopyProtocol, accelerator: Device, tiny: LoadedModel, expected: list[list[int]]
) -> None:
    engine = make(tiny, accelerator, copy_protocol=protocol, status_check=StatusCheck.DEBUG)
    names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    outputs = []
    while engine.counters.decode_steps < 2:
        outputs += engine.step()
    runner = runner_of(engine)
    receive = runner.receive_status

    def once() -> Any:
        status = receive()
        runner.receive_status = receive  # type: ignore[method-assign]
        return type(status)(status.num_rejected, [64, *status.num_bonus[1:]], status.record)

    runner.receive_status = once  # type: ignore[method-assign]
    outputs += run_to_end(engine)
    failed = [output for output in outputs if output.error]
    assert [output.request_id for output in failed] == [names[0]]
    assert "num_accepted_tokens 65" in (failed[0].error or "")
    assert engine.counters.guard_errors == 1
    for index in (1, 2):
        got = [t for o in outputs if o.request_id == names[index] for t in o.new_token_ids]
        assert got == expected[index]
    assert engine.stats()["used_blocks"] == 0
    # the record was acknowledged on the device
    assert engine.generate(PROMPTS[:2], GREEDY) == expected[:2]
    assert engine.counters.guard_errors == 1
    engine.close()


def test_an_abort_ends_one_request_and_leaves_the_rest(
    accelerator: Device, tiny: LoadedModel, expected: list[list[int]]
) -> None:
    engine = make(tiny, accelerator)
    names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs = engine.step() + engine.step() + engine.step()
    assert engine.abort_request(names[1])
    outputs += run_to_end(engine)
    for index, name in enumerate(names):
        got = [t for o in outputs if o.request_id == name for t in o.new_token_ids]
        assert got == (expected[index][: len(got)] if index == 1 else expected[index])
    ends = {output.request_id: output.finish_reason for output in outputs if output.finished}
    assert ends[names[1]] == "abort"
    assert runner_of(engine).processor.live_sources() == 0
    engine.close()


def growth(engine: LLMEngine, device: Device, steps: int) -> int:
    """Bytes that are allocated more between two states of rest that lie ``steps`` apart."""
    runner = runner_of(engine)

    def wave() -> int:
        engine.generate(PROMPTS, GREEDY)
        assert runner.processor.live_sources() == 0
        assert runner.processor.copies_in_flight == 0
        return allocated(device)

    wave()
    first, slots = wave(), len(runner.processor.ring)
    last, until = first, engine.counters.steps + steps
    while engine.counters.steps < until:
        last = wave()
    assert len(runner.processor.ring) <= slots + 2
    return last - first


#: ell of the last few steps is on its way in any state of rest
REST_BYTES = 16 * 512
FIVE_SOURCES: dict[str, Any] = {"logprobs": True, "dspark": True, "dspark_threshold": 0.01}


@pytest.mark.parametrize("protocol", SAFE)
def test_allocated_memory_does_not_grow(
    protocol: CopyProtocol, accelerator: Device, tiny: LoadedModel
) -> None:
    engine = make(tiny, accelerator, copy_protocol=protocol, **FIVE_SOURCES)
    assert growth(engine, accelerator, 200) <= REST_BYTES
    engine.close()
    assert runner_of(engine).processor.live_sources() == 0


def test_the_law_tells_an_engine_that_keeps_its_sources(
    accelerator: Device, tiny: LoadedModel
) -> None:
    engine = make(tiny, accelerator, **FIVE_SOURCES)
    processor, kept = runner_of(engine).processor, []
    send = processor.send_to_cpu_async

    def hoard(*payloads: Any) -> Any:
        kept.append(payloads)
        return send(*payloads)

    processor.send_to_cpu_async = hoard  # type: ignore[method-assign,assignment]
    assert growth(engine, accelerator, 60) > REST_BYTES
    engine.close()


def test_a_shutdown_amid_work_gives_everything_back(
    accelerator: Device, tiny: LoadedModel, expected: list[list[int]]
) -> None:
    left = []
    for _ in range(3):
        engine = make(tiny, accelerator)
        for prompt in PROMPTS:
            engine.add_request(prompt, GREEDY)
        for _ in range(4):
            engine.step()
        assert runner_of(engine).processor.copies_in_flight > 0
        engine.close()
        assert runner_of(engine).processor.live_sources() == 0
        assert not engine.scheduler.stats().used_blocks
        del engine
        accelerator.empty_cache()
        left.append(allocated(accelerator))
    # the first may leave what libraries keep for the process
    assert left[2] == left[1]
    engine = make(tiny, accelerator)
    assert engine.generate(PROMPTS[:2], GREEDY) == expected[:2]
    engine.close()

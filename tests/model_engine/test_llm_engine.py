"""The engine on the virtual device: the same tokens whatever it does; no request left behind."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import GREEDY, make_engine, random_prompts, run_to_end, tiny_model

from atom.config import CopyProtocol, GuardMode, RecurrentStates
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput, DeviceError, StalePayload
from atom.model_engine import model_runner
from atom.model_engine.batch_arrays import metadata_array
from atom.model_engine.engine_builder import build_engine
from atom.model_engine.engine_settings import EngineSettings, StatusCheck
from atom.model_engine.llm_engine import EngineDead
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.scheduler import BatchKind, QueueFull, RequestRefused
from atom.model_engine.sequence import SamplingParams
from atom.model_engine.step_launches import capture_decode, warm_up_prefill
from atom.model_ops.decode_inputs import STATE_SLOTS
from atom.model_ops.guard import GuardCode, report
from atom.transfer.copy_protocol import UnpatchedWarning

PROMPTS = random_prompts(7, (5, 17, 33, 70, 100))
REPLAY = {"recurrent_states": RecurrentStates.REPLAY}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy tokens without drafts, prefix cache or chunks."""
    engine = make_engine(draft_tokens=0, max_num_batched_tokens=512, prefix_caching=False)
    tokens = engine.generate(PROMPTS, GREEDY)
    assert engine.counters.middle_chunks == 0
    engine.close()
    return tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_tokens": 3, "max_num_batched_tokens": 512, "prefix_caching": False},
        {"draft_tokens": 3},
        {"draft_tokens": 1, "max_num_batched_tokens": 40},
        {"draft_tokens": 3, "dspark": True, "dspark_threshold": 0.002},
        {"draft_tokens": 3, "copy_protocol": CopyProtocol.RECORD_STREAM},
        {"draft_tokens": 3, "copy_protocol": CopyProtocol.BLOCKING},
        {"draft_tokens": 3, "copy_protocol": CopyProtocol.ZERO_COPY},
        {"draft_tokens": 3, "epoch_tag": False, "guard": GuardMode.NONE},
        {"draft_tokens": 3, "logprobs": True},
        # the pool holds two or three of the requests: the others are put back and computed again
        {"draft_tokens": 3, "num_kv_blocks": 13},
        {"draft_tokens": 0, "max_num_batched_tokens": 48, "block_size": 8},
        {"draft_tokens": 3, **REPLAY},
        {"dspark": True, "dspark_threshold": 0.002, "draft_tokens": 3, **REPLAY},
        {"draft_tokens": 3, "num_kv_blocks": 13, **REPLAY},
        {"draft_tokens": 0, **REPLAY},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_the_tokens_are_the_same_however_they_are_made(
    settings: dict[str, Any], expected: list[list[int]]
) -> None:
    engine = make_engine(**settings)
    assert engine.generate(PROMPTS, GREEDY) == expected
    stats = engine.stats()
    if settings.get("draft_tokens"):
        # without any accepted draft the comparison would show little
        assert stats["accepted_tokens"] > 0
    if "num_kv_blocks" in settings:
        assert stats["preemptions"] > 0
    assert stats["used_blocks"] == stats["running"] == stats["waiting"] == 0
    assert engine.runner.processor.live_sources() == 0  # type: ignore[attr-defined]
    engine.close()


@pytest.mark.parametrize("settings", [{}, REPLAY], ids=str)
def test_a_second_turn_resumes_from_a_checkpoint(
    settings: dict[str, Any], expected: list[list[int]]
) -> None:
    engine = make_engine(**settings)
    fresh = make_engine(prefix_caching=False)
    first = engine.generate(PROMPTS, GREEDY)
    assert first == expected
    turns = [prompt + tokens + [7] for prompt, tokens in zip(PROMPTS, first, strict=True)]
    assert engine.generate(turns, GREEDY) == fresh.generate(turns, GREEDY)
    assert engine.stats()["hit_tokens"] > 0
    assert fresh.stats()["hit_tokens"] == 0


@pytest.mark.parametrize("order", ["newest", "oldest", "copies last"])
def test_no_schedule_changes_the_tokens_of_a_held_engine(
    order: str, expected: list[list[int]]
) -> None:
    def choose(ready: list[Any]) -> Any:
        if order == "newest":
            return ready[-1]
        if order == "oldest":
            return ready[0]
        kernels = [part for part in ready if " to " not in part.name and part.parts == 1]
        return (kernels or ready)[0]

    device = VirtualDevice("MI355X", mode="schedule", chooser=choose)
    engine = make_engine(device)
    assert engine.generate(PROMPTS[:4], GREEDY) == expected[:4]
    engine.close()


def test_sampled_tokens_depend_on_seed_and_position_alone() -> None:
    params = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)
    plain = make_engine(draft_tokens=0)
    drafted = make_engine(draft_tokens=3)
    alone = [make_engine(draft_tokens=3).generate([prompt], params)[0] for prompt in PROMPTS[:3]]
    assert plain.generate(PROMPTS[:3], params) == drafted.generate(PROMPTS[:3], params) == alone
    other = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.9, seed=12, ignore_eos=True)
    assert drafted.generate(PROMPTS[:3], other) != alone


def test_logprobs_are_those_of_the_model(expected: list[list[int]]) -> None:
    engine = make_engine(logprobs=True)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=True)
    engine.add_request(PROMPTS[0], params, request_id="a")
    outputs = run_to_end(engine)
    tokens = [token for output in outputs for token in output.new_token_ids]
    values = [value for output in outputs for value in output.logprobs or ()]
    assert tokens == expected[0]
    assert len(values) == len(tokens)
    assert all(-20 < value < 0 for value in values)
    again = make_engine(logprobs=True, draft_tokens=0)
    again.add_request(PROMPTS[0], params)
    plain = [value for output in run_to_end(again) for value in output.logprobs or ()]
    torch.testing.assert_close(torch.tensor(values), torch.tensor(plain), rtol=1e-4, atol=1e-4)


def test_a_status_is_not_drained_in_a_middle_chunk() -> None:
    engine = make_engine(prefix_caching=False)
    engine.add_request(PROMPTS[0][:5], GREEDY)
    while engine.counters.decode_steps < 1:
        engine.step()
    engine.add_request([1] * 150, GREEDY)
    before = engine.counters.middle_chunks
    engine.step()
    assert engine.counters.middle_chunks == before + 1
    # the decode step's status still waits: that is the window of the fault
    assert len(engine.runner.processor.spec_status) == 1  # type: ignore[attr-defined]
    engine.step()
    assert engine.counters.decode_steps == 2
    run_to_end(engine)


def test_a_step_is_prepared_in_front_of_the_wait_for_the_status() -> None:
    engine, calls = make_engine(), []
    runner: Any = engine.runner

    def noted(name: str, owner: Any = runner) -> None:
        call = getattr(owner, name)

        def note(*arguments: Any) -> Any:
            calls.append(name)
            return call(*arguments)

        setattr(owner, name, note)

    engine.add_request(PROMPTS[0][:5], GREEDY)
    while engine.counters.decode_steps < 2:
        engine.step()
    for name in ("prepare", "receive_status", "launch", "_fill_sampling", "_table_rows"):
        noted(name)
    noted("queue", runner._staging)
    engine.step()
    early = ["prepare", "_fill_sampling", "_table_rows"]
    assert calls == [*early, "receive_status", "launch", "queue"]


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_states_that_drafts_are_made_of_are_those_of_the_logits(drafts: int) -> None:
    engine: Any = make_engine(draft_tokens=drafts)
    engine.add_request(PROMPTS[0], GREEDY)
    while engine.counters.decode_steps < 2:
        engine.step()
    device, buffers = engine.runner.device, engine.runner.buffers
    device.synchronize()
    found = []
    for source in (buffers.hidden[: 1 + drafts], buffers.logits[: 1 + drafts]):
        found.append(device.pinned(source.shape, source.dtype))
        device.copy(found[-1], source)
    device.synchronize()
    torch.testing.assert_close(tiny_model().model.project(found[0]), found[1])


def test_requests_end_when_they_should() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    tokens = engine.generate(PROMPTS[:2], params)
    assert [len(row) for row in tokens] == [5, 5]
    stop = SamplingParams(
        max_tokens=5, temperature=0.0, ignore_eos=True, stop_token_ids=(tokens[0][2],)
    )
    engine.add_request(PROMPTS[0], stop, request_id="stopped")
    outputs = run_to_end(engine)
    place = tokens[0].index(tokens[0][2])
    assert [t for o in outputs for t in o.new_token_ids] == tokens[0][: place + 1]
    assert outputs[-1].finished
    assert outputs[-1].finish_reason == "stop"
    engine.close()


def test_an_abort_ends_one_request_and_frees_it(expected: list[list[int]]) -> None:
    engine = make_engine()
    names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs = engine.step() + engine.step() + engine.step()
    assert engine.abort_request(names[1])
    assert not engine.abort_request(names[1])
    outputs += run_to_end(engine)
    ends = {output.request_id: output for output in outputs if output.finished}
    assert ends[names[1]].finish_reason == "abort"
    for index, name in enumerate(names):
        if index != 1:
            got = [t for o in outputs if o.request_id == name for t in o.new_token_ids]
            assert got == expected[index]
    assert engine.stats()["used_blocks"] == 0
    engine.close()


def test_what_cannot_be_served_is_refused_and_the_rest_goes_on(expected: list[list[int]]) -> None:
    engine = make_engine(max_waiting=2)
    with pytest.raises(RequestRefused, match="max_model_len 160"):
        engine.add_request([1] * 200, GREEDY)
    with pytest.raises(RequestRefused, match="vocabulary of 512"):
        engine.add_request([1, 512], GREEDY)
    with pytest.raises(BadInput, match="at least one token"):
        engine.add_request([], GREEDY)
    engine.add_request(PROMPTS[0], GREEDY, request_id="a")
    with pytest.raises(RequestRefused, match="'a' is in use"):
        engine.add_request(PROMPTS[1], GREEDY, request_id="a")
    engine.add_request(PROMPTS[1], GREEDY)
    with pytest.raises(QueueFull, match="try again later"):
        engine.add_request(PROMPTS[2], GREEDY)
    outputs = run_to_end(engine)
    assert [t for o in outputs if o.request_id == "a" for t in o.new_token_ids] == expected[0]


def _corrupt_next_status(engine: Any, bonus: int) -> None:
    """Let the host believe that the first row's next status says ``bonus``."""
    receive = engine.runner.receive_status

    def once() -> Any:
        status = receive()
        engine.runner.receive_status = receive
        values = list(status.num_bonus)
        values[0] = bonus
        return type(status)(status.num_rejected, values, status.record)

    engine.runner.receive_status = once


def _decode_two_steps(engine: Any) -> list[str]:
    names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    while engine.counters.decode_steps < 2:
        engine.step()
    return names


def test_an_impossible_status_fails_its_request_alone(expected: list[list[int]]) -> None:
    engine = make_engine()
    names = _decode_two_steps(engine)
    _corrupt_next_status(engine, 64)
    requests = engine._desk.requests.items()
    got = {name: list(request.output_token_ids) for name, request in requests}
    outputs = run_to_end(engine)
    failed = [output for output in outputs if output.error]
    assert [output.request_id for output in failed] == [names[0]]
    assert "num_bonus=64" in (failed[0].error or "")
    # the step that was prepared with the failed row is prepared anew without it
    for output in outputs:
        got[output.request_id] += output.new_token_ids
    assert [got[name] for name in names[1:]] == expected[1:3]
    assert engine.stats()["used_blocks"] == 0
    assert engine.generate(PROMPTS[:1], GREEDY) == expected[:1]


@pytest.mark.parametrize("protocol", [CopyProtocol.HOLD, CopyProtocol.ZERO_COPY])
def test_the_guard_fails_the_request_before_a_token_of_its_step_and_goes_on(
    protocol: CopyProtocol, expected: list[list[int]]
) -> None:
    engine = make_engine(status_check=StatusCheck.DEBUG, copy_protocol=protocol)
    names = _decode_two_steps(engine)
    _corrupt_next_status(engine, 64)
    outputs = run_to_end(engine)
    failed = [output for output in outputs if output.error]
    assert [output.request_id for output in failed] == [names[0]]
    assert f"request {names[0]}" in (failed[0].error or "")
    assert "num_accepted_tokens 65" in (failed[0].error or "")
    assert engine.counters.guard_errors == 1
    # the others are as if nothing had been
    for index in (1, 2):
        got = [t for o in outputs if o.request_id == names[index] for t in o.new_token_ids]
        assert expected[index][-len(got) :] == got
    assert engine.stats()["used_blocks"] == 0
    # the record was acknowledged: the engine serves on, also from its prefix cache
    assert engine.generate(PROMPTS[:2], GREEDY) == expected[:2]
    assert engine.counters.guard_errors == 1


def test_without_a_guard_the_same_status_is_an_illegal_access() -> None:
    engine = make_engine(status_check=StatusCheck.NONE, guard=GuardMode.NONE)
    _decode_two_steps(engine)
    _corrupt_next_status(engine, 16384)
    with pytest.raises(Exception, match="illegal memory access"):
        run_to_end(engine)
    with pytest.raises(EngineDead, match="illegal memory access"):
        engine.add_request(PROMPTS[0], GREEDY)


def test_what_a_faulty_step_published_is_withdrawn() -> None:
    engine = make_engine()
    record = torch.zeros(8, dtype=torch.int32)
    report(record, GuardCode.CONV_COUNT, 0, 0, 99, 0)
    receive = engine.runner.receive_status
    hit = {"done": False}

    def faulty() -> Any:
        status = receive()
        if hit["done"]:
            return status
        hit["done"] = True
        return type(status)(status.num_rejected, status.num_bonus, record.tolist())

    engine.runner.receive_status = faulty  # type: ignore[method-assign]
    engine.add_request(PROMPTS[3], GREEDY)
    assert any(output.error for output in run_to_end(engine))
    stats = engine.stats()
    assert stats["cached_blocks"] == stats["checkpoints"] == 0


def test_unpatched_says_so_and_no_memory_is_over_committed() -> None:
    with pytest.warns(UnpatchedWarning, match="experiments only"):
        make_engine(copy_protocol=CopyProtocol.UNPATCHED).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine().close()
    with pytest.raises(BadInput, match="does not fit"):
        make_engine(num_kv_blocks=2**23)
    with pytest.raises(BadInput, match="MTP layer"):
        build_engine(tiny_model().model, None, EngineSettings(), VirtualDevice("MI355X"))


@pytest.mark.parametrize("settings", [{}, REPLAY], ids=str)
def test_the_first_run_of_the_kernels_changes_nothing(
    settings: dict[str, Any], expected: list[list[int]]
) -> None:
    engine = make_engine(**settings)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    assert engine.generate(PROMPTS[:2], GREEDY) == expected[:2]
    runner.device.synchronize()
    pools = (*runner.buffers.pools, *runner.buffers.rings)
    before = [pool.clone() for pool in pools]
    warm_up_prefill(runner.kernels)
    for pool, then in zip(pools, before, strict=True):
        torch.testing.assert_close(pool, then, rtol=0, atol=0, equal_nan=True)
    assert runner.buffers.record.tolist() == [0] * 8


def test_graphs_of_the_virtual_device_give_the_same_tokens(expected: list[list[int]]) -> None:
    engine = make_engine()
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    runner._graphs = capture_decode(runner.kernels, runner.graph_sizes)
    assert engine.generate(PROMPTS, GREEDY) == expected


def test_a_record_behind_a_lost_status_blames_nobody_of_the_next_batch() -> None:
    engine = make_engine()
    names = _decode_two_steps(engine)
    receive = engine.runner.receive_status
    record = torch.zeros(8, dtype=torch.int32)
    report(record, GuardCode.CONV_COUNT, 0, 0, 99, 0)
    calls = itertools.count()

    def faulty() -> Any:
        status = receive()
        number = next(calls)
        if number == 0:
            raise StalePayload("the status carries another step")
        if number == 1:
            return type(status)(status.num_rejected, status.num_bonus, record.tolist())
        return status

    engine.runner.receive_status = faulty  # type: ignore[method-assign]
    outputs = engine.step()
    late = engine.add_request(PROMPTS[0], GREEDY)
    outputs += run_to_end(engine)
    # the lost status fails its own batch; the record that was lost with it fails no other request
    failed = {output.request_id for output in outputs if output.error}
    assert failed
    assert failed < set(names)
    assert all("was lost" in output.error for output in outputs if output.error)
    assert engine.counters.guard_errors == 1
    assert [o.finish_reason for o in outputs if o.request_id == late and o.finished] == ["length"]


def test_drafts_that_are_lost_on_the_way_to_the_host_cost_nothing(
    expected: list[list[int]],
) -> None:
    engine = make_engine()
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    receive = runner.processor.draft_ids.receive
    calls = itertools.count()

    def lossy() -> Any:
        drafts = receive()
        if next(calls) % 2:
            raise StalePayload("draft ids carry another step")
        return drafts

    runner.processor.draft_ids.receive = lossy  # type: ignore[method-assign]
    assert engine.generate(PROMPTS[:3], GREEDY) == expected[:3]
    assert engine.counters.stale_payloads > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda ids: [10**9, *ids[1:]], "token id 1000000000, and the vocabulary has 512"),
        (lambda ids: [], "0 tokens, and 1 to 4 are possible"),
        (lambda ids: [*ids, 7] if len(ids) < 4 else ids[:-1], "and its status counted"),
    ],
    ids=["no token", "no ids", "another count"],
)
def test_ids_that_no_step_gives_fail_their_request_alone(
    change: Callable[[list[int]], list[int]], text: str, expected: list[list[int]]
) -> None:
    engine = make_engine()
    names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    while engine.counters.decode_steps < 4:
        engine.step()
    receive = engine.runner.receive_output

    def once() -> Any:
        output = receive()
        engine.runner.receive_output = receive  # type: ignore[method-assign]
        rows = [change(list(output.token_ids[0])), *output.token_ids[1:]]
        return type(output)(rows, output.logprobs)

    engine.runner.receive_output = once  # type: ignore[method-assign]
    outputs = run_to_end(engine)
    failed = {output.request_id: output.error for output in outputs if output.error}
    assert list(failed) == names[:1]
    assert text in str(failed[names[0]])
    assert engine.generate(PROMPTS[:2], GREEDY) == expected[:2]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("group", [8, 9, 999, -7])
def test_a_state_group_that_does_not_exist_leads_out_of_no_table(
    drafts: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = itertools.count()

    def wrong(batch: Any, rows: int) -> Any:
        values = metadata_array(batch, rows)
        if batch.kind is BatchKind.DECODE and next(made) == 2:
            values[STATE_SLOTS, 0] = group
        return values

    engine = make_engine(draft_tokens=drafts)
    monkeypatch.setattr(model_runner, "metadata_array", wrong)
    engine.add_request(PROMPTS[0], GREEDY)
    if drafts == 0:
        # no status comes back that could bring the kernels' record: the host checks what it sends
        with pytest.raises(DeviceError, match=f"state group {group}"):
            run_to_end(engine)
        return
    errors = [output.error for output in run_to_end(engine) if output.error]
    assert engine.counters.guard_errors == 1
    assert len(errors) == 1


def test_a_closed_engine_says_so() -> None:
    engine = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(EngineDead, match="it was closed"):
        engine.add_request(PROMPTS[0], GREEDY)


def test_generate_leaves_nothing_behind_when_it_fails(expected: list[list[int]]) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefused):
        engine.generate([PROMPTS[0], [1] * 500], GREEDY)
    run_to_end(engine)
    assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    assert engine.generate(PROMPTS[:1], GREEDY) == expected[:1]


@pytest.mark.parametrize("prompt", ["abc", [1.5], [2**70], [], None])
def test_what_is_no_prompt_is_bad_input(prompt: Any) -> None:
    with pytest.raises(BadInput):
        make_engine().add_request(prompt, GREEDY)


def test_logprobs_that_the_engine_does_not_have_are_refused() -> None:
    with pytest.raises(RequestRefused, match="logprobs"):
        make_engine().add_request(PROMPTS[0], SamplingParams(logprobs=True))
    with pytest.raises(RequestRefused, match="logprobs=5"):
        make_engine(logprobs=True).add_request(PROMPTS[0], SamplingParams(logprobs=5))


def test_made_up_names_avoid_given_ones() -> None:
    engine = make_engine()
    engine.add_request([1], GREEDY, request_id="request-1")
    assert engine.add_request([1], GREEDY) != "request-1"


def test_settings_take_the_names_of_the_command_line() -> None:
    settings = EngineSettings(copy_protocol="zero_copy", guard="trap")  # type: ignore[arg-type]
    assert settings.copy_protocol is CopyProtocol.ZERO_COPY
    assert settings.guard is GuardMode.TRAP
    with pytest.raises(ValueError, match="allowed: unpatched, record_stream, hold"):
        EngineSettings(copy_protocol="held")  # type: ignore[arg-type]

"""The exploration itself: what it covers, what it leaves out, what it reports."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atom.device.interface import Kernel
from atom.errors import DeviceError
from atom.lifetime.explore import (
    Exploration,
    Method,
    NotRepeatable,
    Step,
    ViolationKind,
    explore,
    replay,
)
from atom.lifetime.explore_device import ExploredDevice
from atom.lifetime.explore_trace import HOST


def fill_body(reads: Sequence[Tensor], writes: Sequence[Tensor], value: int) -> None:
    writes[0].fill_(value)


FILL = Kernel("fill", fill_body)
WORDS = 8


def every_way(program: Callable[[ExploredDevice], Hashable]) -> dict[Method, Exploration]:
    return {method: explore(program, method=method) for method in Method}


def returned(found: Exploration) -> set[Any]:
    """What the program returned, over all executions."""
    return {outcome[0] for outcome in cast("set[tuple[Any, Any]]", found.outcomes)}


def one_read(device: ExploredDevice, target: Tensor) -> int:
    device.host_read(target)
    return int(target[0])


def test_streams_that_share_nothing_need_one_schedule() -> None:
    def program(device: ExploredDevice) -> Hashable:
        tensors = [device.empty((WORDS,), torch.int64) for _ in range(2)]
        for tensor, stream in zip(tensors, (device.new_stream(), None), strict=True):
            device.launch(FILL, (), (tensor,), scalars=(1,), stream=stream)
        device.synchronize()
        return None

    found = every_way(program)
    assert found[Method.REDUCED].schedules == 1
    assert found[Method.FULL].schedules > 1
    assert all(each.complete and each.holds for each in found.values())


def test_two_writers_have_two_outcomes() -> None:
    def program(device: ExploredDevice) -> Hashable:
        tensor, host = device.empty((WORDS,), torch.int64), device.pinned((WORDS,), torch.int64)
        for value, stream in ((1, device.new_stream()), (2, device.new_stream())):
            device.launch(FILL, (), (tensor,), scalars=(value,), stream=stream)
        device.synchronize()
        device.copy(host, tensor)
        device.synchronize()
        return one_read(device, host)

    for method, found in every_way(program).items():
        assert returned(found) == {1, 2}, method
    assert explore(program).schedules == 2


def test_a_copy_can_be_torn_by_a_writer() -> None:
    def program(device: ExploredDevice) -> Hashable:
        tensor, host = device.empty((WORDS,), torch.int64), device.pinned((WORDS,), torch.int64)
        device.launch(FILL, (), (tensor,), scalars=(1,))
        device.synchronize()
        device.copy(host, tensor, stream=device.new_stream())
        device.launch(FILL, (), (tensor,), scalars=(2,))
        device.synchronize()
        device.host_read(host)
        return tuple(host.tolist())

    for found in every_way(program).values():
        values = returned(found)
        assert values == {(1,) * 8, (2,) * 8, (1,) * 4 + (2,) * 4}


def test_an_event_orders_and_a_query_tells() -> None:
    def program(device: ExploredDevice) -> Hashable:
        side = device.new_stream()
        tensor, host = device.empty((WORDS,), torch.int64), device.pinned((WORDS,), torch.int64)
        device.launch(FILL, (), (tensor,), scalars=(1,))
        side.wait_event(device.default_stream.record_event())
        device.copy(host, tensor, stream=side)
        done = side.record_event()
        early = done.query()
        done.synchronize()
        return early, one_read(device, host)

    for found in every_way(program).values():
        assert returned(found) == {(False, 1), (True, 1)}


def test_the_allocators_own_question_is_part_of_the_order() -> None:
    """A block told of a side stream comes back when that stream has passed its free, or not yet."""

    def program(device: ExploredDevice) -> Hashable:
        side = device.new_stream()
        tensor = device.empty((WORDS,), torch.int64)
        host = device.pinned((WORDS,), torch.int64)
        address = device.address(tensor)
        device.copy(host, tensor, stream=side)
        device.record_stream(tensor, side)
        del tensor
        again = device.empty((WORDS,), torch.int64)
        device.synchronize()
        return device.address(again) == address

    for method, found in every_way(program).items():
        assert returned(found) == {True, False}, method
    assert explore(program).holds


def dropped_source(hold: bool) -> Callable[[ExploredDevice], Hashable]:
    def program(device: ExploredDevice) -> Hashable:
        side = device.new_stream()
        tensor: Tensor | None = device.empty((WORDS,), torch.int64)
        assert tensor is not None
        host = device.pinned((WORDS,), torch.int64)
        device.launch(FILL, (), (tensor,), scalars=(1,))
        side.wait_stream(device.default_stream)
        device.copy(host, tensor, stream=side)
        done = side.record_event()
        held = tensor if hold else None
        tensor = None
        following = device.empty((WORDS,), torch.int64)
        device.launch(FILL, (), (following,), scalars=(2,))
        done.synchronize()
        value = one_read(device, host)
        if value != 1:
            device.fail(ViolationKind.FOREIGN_BYTES, f"got {value}")
        held = None
        device.synchronize()
        return value, held is None

    return program


def test_a_dropped_source_is_found_and_a_held_one_is_proved() -> None:
    assert explore(dropped_source(hold=True)).holds
    found = explore(dropped_source(hold=False))
    assert set(found.counterexamples) == {ViolationKind.FOREIGN_BYTES, ViolationKind.EARLY_FREE}
    # nothing of the second fill's own stream may be left out, nothing else may be in
    assert found.first is found.counterexamples[ViolationKind.FOREIGN_BYTES]


def test_an_early_free_is_found_though_no_byte_was_lost() -> None:
    """Nothing allocates afterwards; the order alone is at fault."""

    def program(device: ExploredDevice) -> Hashable:
        side = device.new_stream()
        tensor = device.empty((WORDS,), torch.int64)
        device.copy(device.pinned((WORDS,), torch.int64), tensor, stream=side)
        del tensor
        device.synchronize()
        return None

    found = explore(program)
    assert found.schedules == 1
    assert set(found.counterexamples) == {ViolationKind.EARLY_FREE}


def test_the_shortest_schedule_shows_it_and_no_step_of_it_is_spare() -> None:
    example = explore(dropped_source(hold=False)).first
    assert example is not None
    device, _ = replay(dropped_source(hold=False), example.steps)
    places = [v.place for v in device.violations if v.kind == ViolationKind.FOREIGN_BYTES]
    assert places == [len(example.steps) - 1]
    assert [event.label for event in device.events[: len(example.steps)]] == [
        step.label for step in example.steps
    ]
    device_steps = [step.label for step in example.steps if step.process != HOST]
    # the two halves of the copy behind both fills
    assert device_steps == ["fill", "fill", "d2h 64 bytes", "d2h 64 bytes"]


def test_a_schedule_of_another_program_is_refused() -> None:
    with pytest.raises(NotRepeatable, match="cannot run"):
        replay(dropped_source(hold=True), (Step(7, "copy"),))


def test_a_program_that_depends_on_more_than_the_device_is_refused() -> None:
    calls: list[None] = []

    def program(device: ExploredDevice) -> Hashable:
        calls.append(None)
        tensor = device.empty((WORDS,), torch.int64)
        streams = [device.new_stream(), device.new_stream()]
        device.launch(FILL, (), (tensor,), scalars=(1,), stream=streams[0])
        if len(calls) == 1:
            device.launch(FILL, (), (tensor,), scalars=(2,), stream=streams[1])
        device.synchronize()
        return None

    with pytest.raises(NotRepeatable):
        explore(program)


def test_a_wait_outside_the_named_duties_is_a_violation() -> None:
    def program(device: ExploredDevice) -> Hashable:
        device.may_wait = frozenset({"receive"})
        with device.section("receive"):
            device.synchronize()
        with device.section("send"):
            device.synchronize()
        return None

    found = explore(program)
    assert set(found.counterexamples) == {ViolationKind.HOST_BLOCKED}
    assert "send" in found.counterexamples[ViolationKind.HOST_BLOCKED].text


def test_an_error_of_the_code_is_a_violation() -> None:
    def program(device: ExploredDevice) -> Hashable:
        tensor, host = device.empty((WORDS,), torch.int64), device.pinned((WORDS,), torch.int64)
        device.launch(FILL, (), (tensor,), scalars=(1,))
        if not device.default_stream.record_event().query():
            raise DeviceError("late")
        device.copy(host, tensor)
        device.synchronize()
        return None

    found = explore(program)
    assert found.schedules == 2
    assert found.counterexamples[ViolationKind.ERROR].text == "DeviceError: late"


def test_a_dropped_pinned_buffer_is_reached_in_some_order_only() -> None:
    def program(device: ExploredDevice) -> Hashable:
        host = device.pinned((WORDS,), torch.int64)
        device.launch(FILL, (), (device.mapped(host),), scalars=(1,))
        done = device.default_stream.record_event()
        ready = done.query()
        del host
        device.pinned((2,), torch.int64)
        device.synchronize()
        return ready

    results = every_way(program)
    assert {frozenset(found.outcomes) for found in results.values()} == {
        frozenset(results[Method.FULL].outcomes)
    }
    assert ViolationKind.ERROR in results[Method.REDUCED].counterexamples
    assert len(results[Method.REDUCED].outcomes) > 1


# -- the reduction against everything, on programs that nobody chose

CALLS = st.one_of(
    st.tuples(st.just("fill"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("copy"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("record"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("query"), st.just(0), st.integers(0, 1)),
    st.tuples(st.just("synchronize"), st.just(0), st.integers(0, 1)),
    st.tuples(st.just("read"), st.just(0), st.integers(0, 1)),
    st.tuples(st.just("replace"), st.integers(0, 2), st.integers(0, 1)),
)


def random_program(calls: Sequence[tuple[str, int, int]]) -> Callable[[ExploredDevice], Hashable]:
    def program(device: ExploredDevice) -> Hashable:
        streams = [device.default_stream, device.new_stream(), device.new_stream()]
        events = [device.new_event(), device.new_event()]
        tensors = [device.empty((WORDS,), torch.int64) for _ in range(2)]
        targets = [device.pinned((WORDS,), torch.int64) for _ in range(2)]
        heard: list[Hashable] = []
        for place, (call, stream, which) in enumerate(calls):
            if call == "fill":
                device.launch(
                    FILL, (), (tensors[which],), scalars=(place + 1,), stream=streams[stream]
                )
            elif call == "copy":
                device.copy(targets[which], tensors[which], stream=streams[stream])
            elif call == "record":
                events[which].record(streams[stream])
            elif call == "wait":
                events[which].wait(streams[stream])
            elif call == "query":
                heard.append(events[which].query())
            elif call == "synchronize":
                events[which].synchronize()
            elif call == "read":
                device.host_read(targets[which])
                heard.append(tuple(targets[which].tolist()))
            else:
                device.record_stream(tensors[which], streams[stream])
                del tensors[which]
                tensors.insert(which, device.empty((WORDS,), torch.int64))
                heard.append(device.address(tensors[which]))
        device.synchronize()
        for target in targets:
            device.host_read(target)
            heard.append(tuple(target.tolist()))
        return tuple(heard)

    return program


@settings(max_examples=150)
@given(st.lists(CALLS, min_size=2, max_size=8))
def test_the_reduction_loses_no_outcome(calls: list[tuple[str, int, int]]) -> None:
    program = random_program(calls)
    states = explore(program, method=Method.STATES, most_schedules=2000)
    reduced = explore(program)
    assert reduced.complete
    if states.complete:
        assert reduced.outcomes == states.outcomes


@settings(max_examples=40)
@given(st.lists(CALLS, min_size=2, max_size=4))
def test_all_states_are_all_schedules(calls: list[tuple[str, int, int]]) -> None:
    program = random_program(calls)
    full = explore(program, method=Method.FULL, most_schedules=1500)
    if full.complete:
        assert explore(program, method=Method.STATES).outcomes == full.outcomes

"""Order laws of streams, events, hardware queues and copy engines, for any profile and program."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atom.device.interface import CopyPath, Kernel
from atom.device.operations import Part
from atom.device.profiles import (
    PROFILES,
    BarrierScope,
    CopyLane,
    DeviceProfile,
    QueueMapping,
    QueueOrder,
)
from atom.device.virtual import VirtualDevice

MEBIBYTE = 2**20
STREAMS = 3
EVENTS = 2


@dataclass
class Log:
    """Kernels in the order in which they took effect. A module's global: no body holds it."""

    order: list[int]


LOG = Log([])


def _note(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], index: int) -> None:
    LOG.order.append(index)


SMALL = Kernel("note", _note)
LARGE = Kernel("note while filling the machine", _note, occupancy=1.0)

PROFILE = st.builds(
    replace,
    st.sampled_from(list(PROFILES.values())),
    mapping=st.sampled_from(list(QueueMapping)),
    order=st.sampled_from(list(QueueOrder)),
    barrier=st.sampled_from(list(BarrierScope)),
    engine_copy_lane=st.sampled_from(list(CopyLane)),
    small_copy_bytes=st.sampled_from([0, 16384]),
    hardware_queues=st.sampled_from([1, 2, 4, 8]),
    wait_seconds=st.sampled_from([0.0, 1e-6, 5e-5]),
    full_dispatch_seconds=st.sampled_from([0.0, 2e-5]),
    copy_engines=st.sampled_from([1, 2]),
)
STREAM = st.integers(0, STREAMS - 1)
EVENT = st.integers(0, EVENTS - 1)
PROGRAM = st.lists(
    st.one_of(
        st.tuples(st.just("small"), STREAM, st.just(0)),
        st.tuples(st.just("large"), STREAM, st.just(0)),
        st.tuples(st.just("copy"), STREAM, st.just(0)),
        st.tuples(st.just("traffic"), STREAM, st.just(0)),
        st.tuples(st.just("spin"), STREAM, st.just(0)),
        st.tuples(st.just("record"), STREAM, EVENT),
        st.tuples(st.just("wait"), STREAM, EVENT),
        st.tuples(st.just("query"), STREAM, EVENT),
        st.tuples(st.just("synchronize"), STREAM, EVENT),
    ),
    min_size=5,
    max_size=60,
)


def run_program(
    device: VirtualDevice, program: list[tuple[str, int, int]]
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Run it, and return each stream's kernels and the (before, after) pairs of event waits.

    The pairs come from the program alone: a wait takes the latest record at the time of the call.
    """
    LOG.order.clear()
    streams = [device.default_stream, *(device.new_stream() for _ in range(STREAMS - 1))]
    events = [device.new_event() for _ in range(EVENTS)]
    host, block = device.pinned((256,), torch.uint8), device.empty((256,), torch.uint8)
    queued: list[list[int]] = [[] for _ in streams]
    recorded: list[set[int]] = [set() for _ in events]
    waited_for: list[set[int]] = [set() for _ in streams]
    pairs: list[tuple[int, int]] = []
    for index, (action, place, event) in enumerate(program):
        stream = streams[place]
        if action in ("small", "large"):
            kernel, flops = (SMALL, 0.0) if action == "small" else (LARGE, 1e11)
            device.launch(kernel, [], [], scalars=(index,), stream=stream, flops=flops)
            pairs += [(before, index) for before in waited_for[place]]
            queued[place].append(index)
        elif action == "copy":
            device.copy(host, block, stream=stream)
        elif action == "traffic":
            device.traffic(4 * MEBIBYTE, "d2h", stream=stream)
        elif action == "spin":
            device.spin(1e-4, stream=stream)
        elif action == "record":
            events[event].record(stream)
            # what the stream itself waited for is done before the record, too
            recorded[event] = {*queued[place], *waited_for[place]}
        elif action == "wait":
            events[event].wait(stream)
            waited_for[place] |= recorded[event]
        elif action == "query":
            if events[event].query():
                assert recorded[event] <= set(LOG.order)
        else:
            events[event].synchronize()
            assert recorded[event] <= set(LOG.order)
    device.synchronize()
    return queued, pairs


def assert_laws(queued: list[list[int]], pairs: list[tuple[int, int]]) -> None:
    when = {index: place for place, index in enumerate(LOG.order)}
    assert sorted(LOG.order) == sorted(index for stream in queued for index in stream)
    for stream in queued:
        assert [when[index] for index in stream] == sorted(when[index] for index in stream)
    for before, after in pairs:
        assert when[before] < when[after], "an event wait was overtaken"


@settings(max_examples=200, deadline=None)
@given(PROGRAM, PROFILE, st.integers(0, 5))
def test_order_laws_hold_by_the_clock(
    program: list[tuple[str, int, int]], profile: DeviceProfile, seed: int
) -> None:
    device = VirtualDevice(profile, seed=seed)
    assert_laws(*run_program(device, program))


@settings(max_examples=200, deadline=None)
@given(PROGRAM, PROFILE, st.integers(0, 2**31))
def test_order_laws_hold_in_every_schedule(
    program: list[tuple[str, int, int]], profile: DeviceProfile, seed: int
) -> None:
    chance = random.Random(seed)

    def choose(ready: list[Part]) -> Part:
        return chance.choice(ready)

    device = VirtualDevice(profile, mode="schedule", chooser=choose)

    def advance() -> None:
        while chance.random() < 0.4 and (ready := device.ready()):
            device.step(chance.choice(ready))

    device.on_host_call = advance
    assert_laws(*run_program(device, program))


@settings(max_examples=50, deadline=None)
@given(PROGRAM, PROFILE, st.integers(0, 5))
def test_equal_seeds_give_equal_runs(
    program: list[tuple[str, int, int]], profile: DeviceProfile, seed: int
) -> None:
    runs = []
    for _ in range(2):
        device = VirtualDevice(profile, seed=seed)
        device.trace()
        run_program(device, program)
        runs.append((list(LOG.order), device.host_seconds(), device.timeline().work))
    assert runs[0] == runs[1]


@settings(max_examples=100, deadline=None)
@given(PROGRAM, PROFILE)
def test_a_serial_queue_runs_one_at_a_time_in_order(
    program: list[tuple[str, int, int]], profile: DeviceProfile
) -> None:
    profile = replace(profile, order=QueueOrder.SERIAL, barrier=BarrierScope.QUEUE)
    device = VirtualDevice(profile)
    device.trace()
    run_program(device, program)
    work = [record for record in device.timeline().work if record.hardware_queue is not None]
    for queue in {record.hardware_queue for record in work}:
        mine = [record for record in work if record.hardware_queue == queue]
        for ahead, behind in pairwise(mine):
            assert ahead.end_seconds <= behind.start_seconds
            assert ahead.submitted_seconds <= behind.submitted_seconds


@settings(max_examples=100, deadline=None)
@given(PROGRAM, PROFILE)
def test_a_copy_engine_moves_one_copy_at_a_time(
    program: list[tuple[str, int, int]], profile: DeviceProfile
) -> None:
    device = VirtualDevice(replace(profile, copy_engines=1, small_copy_bytes=0))
    device.trace()
    run_program(device, program)
    copies = [r for r in device.timeline().work if r.kind in ("engine_copy", "traffic")]
    for ahead, behind in pairwise(sorted(copies, key=lambda record: record.start_seconds)):
        assert ahead.end_seconds <= behind.start_seconds


def test_kernels_that_fill_the_machine_share_it() -> None:
    profile = replace(PROFILES["MI355X"], mapping=QueueMapping.MODULO, jitter=0.0)
    alone = VirtualDevice(profile)
    alone.trace()
    alone.matmul(4096)
    alone.synchronize()
    record = alone.timeline().work[0]
    seconds = record.end_seconds - record.start_seconds
    assert seconds == pytest.approx(2 * 4096**3 / profile.matmul_flops_per_second + 2e-6)

    device = VirtualDevice(profile, hardware_queues=8)
    device.trace()
    streams = [device.new_stream() for _ in range(4)]
    for stream in streams:
        device.matmul(4096, stream=stream)
    device.synchronize()
    work = device.timeline().work
    # work is conserved: four kernels on a full machine end when they would one by one
    assert max(r.end_seconds for r in work) - min(r.start_seconds for r in work) == pytest.approx(
        4 * seconds, rel=1e-6
    )
    assert all(r.end_seconds - r.start_seconds > 2 * seconds for r in work)


def test_a_bulk_store_takes_its_bytes_time() -> None:
    profile = replace(PROFILES["H200"], jitter=0.0)
    device = VirtualDevice(profile)
    device.traffic(256 * MEBIBYTE, "d2h")
    start = device.host_seconds()
    device.synchronize()
    expected = 256 * MEBIBYTE / 54.9e9
    assert device.host_seconds() - start == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("lane", "small", "behind"),
    [(CopyLane.OWN, 0, False), (CopyLane.QUEUE, 0, True), (CopyLane.OWN, 16384, True)],
)
def test_which_copies_wait_behind_other_streams_kernels(
    lane: CopyLane, small: int, behind: bool
) -> None:
    profile = replace(
        PROFILES["MI355X"], engine_copy_lane=lane, small_copy_bytes=small, hardware_queues=1
    )
    device = VirtualDevice(profile)
    busy, copies = device.new_stream(), device.new_stream()
    host, block = device.pinned((64,), torch.uint8), device.empty((64,), torch.uint8)
    device.spin(1e-2, stream=busy)
    device.copy(host, block, stream=copies)
    copies.synchronize()
    assert busy.query() is behind


@pytest.mark.parametrize("path", list(CopyPath))
def test_a_store_on_another_stream_delays_engine_copies_only(path: CopyPath) -> None:
    device = VirtualDevice(replace(PROFILES["MI355X"], small_copy_bytes=0))
    store, copies = device.new_stream(), device.new_stream()
    host, block = device.pinned((64,), torch.uint8), device.empty((64,), torch.uint8)
    device.traffic(64 * MEBIBYTE, "d2h", stream=store)
    device.copy(host, block, stream=copies, path=path)
    copies.synchronize()
    assert store.query() is (path is CopyPath.ENGINE)


@pytest.mark.parametrize(
    ("barrier", "behind"), [(BarrierScope.QUEUE, True), (BarrierScope.STREAM, False)]
)
def test_what_a_barrier_wait_holds_up(barrier: BarrierScope, behind: bool) -> None:
    profile = replace(PROFILES["MI355X"], barrier=barrier, hardware_queues=2)
    device = VirtualDevice(profile)
    spinning = device.new_stream()
    # index 2 and 4 share queue 0 with the default stream
    waiting, _, other = device.new_stream(), device.new_stream(), device.new_stream()
    assert waiting.hardware_queue == other.hardware_queue != spinning.hardware_queue
    device.spin(1e-2, stream=spinning)
    waiting.wait_stream(spinning)
    device.spin(1e-5, stream=waiting)
    device.spin(1e-5, stream=other)
    other.synchronize()
    assert spinning.query() is behind
    waiting.synchronize()
    assert spinning.query()


@pytest.mark.parametrize(
    ("order", "behind"), [(QueueOrder.SERIAL, True), (QueueOrder.ISSUE, False)]
)
def test_when_the_next_of_a_queue_may_start(order: QueueOrder, behind: bool) -> None:
    device = VirtualDevice(replace(PROFILES["MI355X"], order=order, hardware_queues=1))
    busy, other = device.new_stream(), device.new_stream()
    device.spin(1e-2, stream=busy)
    device.spin(1e-5, stream=other)
    other.synchronize()
    assert busy.query() is behind


def test_an_issue_queue_is_blocked_by_work_that_waits_for_its_own_stream() -> None:
    device = VirtualDevice(replace(PROFILES["H200"], hardware_queues=1))
    busy, other = device.new_stream(), device.new_stream()
    device.spin(1e-2, stream=busy)
    first_done = busy.record_event()
    device.spin(1e-2, stream=busy)
    device.spin(1e-5, stream=other)
    other.synchronize()
    assert first_done.query()
    assert not busy.query()


@pytest.mark.parametrize(
    ("mapping", "queues"),
    [
        (QueueMapping.MODULO, [0, 1, 2, 3, 0, 1]),
        (QueueMapping.LEAST_LOAD, [0, 1, 2, 3, 0, 1]),
        (QueueMapping.OWN_DEFAULT, [0, 1, 2, 3, 1, 2]),
    ],
)
def test_stream_mappings(mapping: QueueMapping, queues: list[int]) -> None:
    device = VirtualDevice(replace(PROFILES["MI355X"], mapping=mapping))
    streams = [device.default_stream, *(device.new_stream() for _ in range(5))]
    assert [stream.hardware_queue for stream in streams] == queues


def test_least_load_counts_streams_at_their_first_use_and_modulo_does_not() -> None:
    found = {}
    for mapping in (QueueMapping.MODULO, QueueMapping.LEAST_LOAD):
        device = VirtualDevice(replace(PROFILES["MI355X"], mapping=mapping))
        streams = [device.new_stream() for _ in range(4)]
        device.spin(1e-6, stream=streams[3])
        found[mapping] = streams[3].hardware_queue
    assert found == {QueueMapping.MODULO: 0, QueueMapping.LEAST_LOAD: 0}
    device = VirtualDevice(replace(PROFILES["MI355X"], mapping=QueueMapping.LEAST_LOAD))
    streams = [device.new_stream() for _ in range(4)]
    device.spin(1e-6)
    device.spin(1e-6, stream=streams[3])
    assert streams[3].hardware_queue == 1


def test_a_random_mapping_is_one_draw_a_seed() -> None:
    profile = replace(PROFILES["MI355X"], mapping=QueueMapping.RANDOM)

    def draw(seed: int) -> tuple[int, ...]:
        device = VirtualDevice(profile, seed=seed)
        return tuple(device.new_stream().hardware_queue for _ in range(8))

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(20)}) > 10


def test_high_priority_streams_have_queues_of_their_own() -> None:
    device = VirtualDevice("MI355X")
    normal, high = device.new_stream(), device.new_stream(priority=-1)
    assert normal.hardware_queue < 4 <= high.hardware_queue
    assert normal.stream_id != high.stream_id


def test_a_schedule_offers_both_halves_of_a_copy() -> None:
    device = VirtualDevice(mode="schedule")
    host, block = device.pinned((4,), torch.int32), device.empty((4,), torch.int32)
    host.fill_(9)
    device.copy(host, block)
    (first,) = device.ready()
    assert (first.part, first.parts, first.stream_id) == (0, 2, 0)
    assert [span.nbytes for span in (*first.reads, *first.writes)] == [16, 16]
    device.step(first)
    assert host[2:].tolist() == [9, 9]
    assert host[:2].tolist() != [9, 9]
    (second,) = device.ready()
    device.step(second)
    assert host[2:].tolist() != [9, 9]
    assert device.ready() == []
